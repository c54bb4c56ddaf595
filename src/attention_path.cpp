#include "attention_path.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

namespace mha::detail {

bool plain_is_forced() {
  static const bool forced = [] {
    const char* wanted = std::getenv("MHA_PATH");
    if (!wanted || !*wanted || std::strcmp(wanted, "auto") == 0) return false;
    TORCH_CHECK(std::strcmp(wanted, "plain") == 0, "MHA_PATH: expected plain or auto, found ",
                wanted);
    return true;
  }();
  return forced;
}

PathChoice choose_path(const at::Tensor& query, const at::Tensor& value) {
  constexpr int64_t largest_head = 256;
  if (plain_is_forced()) return {Path::plain, "MHA_PATH=plain is set"};
  if (!query.device().is_cpu()) return {Path::plain, "the kernels are for the CPU"};
  if (query.scalar_type() == at::kDouble)
    return {Path::plain, "the kernels compute in float32"};
  if (query.size(-1) > largest_head || value.size(-1) > largest_head) {
    return {Path::plain, "the kernels are for head sizes up to 256"};
  }
  return {Path::fused, "nothing speaks against the kernels"};
}

}  // namespace mha::detail
