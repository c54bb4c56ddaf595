#include "runtime/workspace.h"

#include <cstdlib>
#include <memory>
#include <new>

namespace mha::detail {
namespace {

struct Free {
  void operator()(float* p) const { std::free(p); }
};

struct Workspace {
  std::unique_ptr<float, Free> memory;
  int64_t size = 0;
};

}  // namespace

float* thread_workspace(int64_t size) {
  constexpr int64_t kept = int64_t{16} << 20 >> 2, granule = int64_t{64} << 10;
  static thread_local Workspace workspace;
  const bool too_large = workspace.size > kept && size <= kept;
  if (size > workspace.size || too_large || !workspace.memory) {
    const int64_t rounded = (size + granule - 1) / granule * granule;
    workspace.memory.reset();
    workspace.size = 0;
    void* fresh = std::aligned_alloc(4096, static_cast<size_t>(rounded) * sizeof(float));
    if (!fresh) throw std::bad_alloc();
    workspace.memory.reset(static_cast<float*>(fresh));
    workspace.size = rounded;
  }
  return workspace.memory.get();
}

}  // namespace mha::detail
