#include <mha/version.h>
#include <torch/version.h>

namespace mha {

std::string version() {
  return MHA_VERSION;
}

std::string torch_version() {
  return TORCH_VERSION;
}

}  // namespace mha
