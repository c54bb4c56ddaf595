#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "runtime/uncomputed.h"
#include "runtime/workspace.h"

namespace mha::detail {

/// Runs task(i, scratch) for i in [0, count) on all of ATen's threads, each with `scratch_size`
/// floats of scratch. Tasks differ in cost (causal masks, padding), so threads take them one by
/// one; who computes a task must make no difference to it.
template <typename Task>
void run_tasks(int64_t count, int64_t scratch_size, const Task& task) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    float* scratch = thread_workspace(scratch_size);
    for (int64_t i = next++; i < count; i = next++) {
      poison(scratch, scratch_size);
      task(i, scratch);
    }
  });
}

}  // namespace mha::detail
