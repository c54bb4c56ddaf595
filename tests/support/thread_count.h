#pragma once

#include <ATen/Parallel.h>

namespace mha::test {

/// LibTorch's number of threads, until the end of the scope.
class ThreadCount {
 public:
  explicit ThreadCount(int count) : before_(at::get_num_threads()) {
    at::set_num_threads(count);
  }
  ~ThreadCount() { at::set_num_threads(before_); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

}  // namespace mha::test
