#pragma once

#include <mha/multi_head_attention.h>

#include <functional>
#include <string>
#include <vector>

#include "support/torch_headers.h"

namespace mha::test {

/// A place where the library takes a tensor from its caller.
struct TensorEntry {
  std::string name;  ///< "function: argument"
  at::Tensor right;  ///< what may be given there
  /// Gives it a tensor; what the call returns, and what it leaves in a cache.
  std::function<std::vector<at::Tensor>(const at::Tensor&)> call;
};

/// What the entries share and no wrong call may change: a module, caches, the other arguments.
class EntrySetting {
 public:
  EntrySetting();

  /// Every argument of every function that takes a tensor, but for files and pictures.
  const std::vector<TensorEntry>& entries() const { return entries_; }
  /// Parameters, options, contents of the caches and the other arguments, copied.
  std::vector<at::Tensor> state() const;

  MultiHeadAttention module, rotating;
  KVCache cache, memory;  ///< of `module`, which holds tokens; of `rotating`

 private:
  void add(const std::string& name, const at::Tensor& right,
           std::function<std::vector<at::Tensor>(const at::Tensor&)> call);
  void add_functional();
  void add_masks();
  void add_module();
  void add_cache();
  void add_rotary();

  std::vector<TensorEntry> entries_;
  at::Tensor query_, key_, value_, sinks_;  // of the functional form
  at::Tensor tokens_, other_tokens_;        // of the modules
  at::Tensor new_key_, new_value_;          // of the cache
};

}  // namespace mha::test
