#pragma once

#include <ATen/core/Tensor.h>
#include <files/tensor_source.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace mha::cli {

/// The file that `mha run` takes its input from. Remembers which tensors were read.
class LayerInput {
 public:
  /// Names of tensors in the file; `key` and `value` may be empty, for self-attention.
  struct Sequences {
    std::string query, key, value;
  };

  explicit LayerInput(const std::string& path) : file_(detail::open_tensors(path)) {}

  /// `query` with or without `key` and `value`, or `x`, or the file's only tensor that is not
  /// in `other_names`.
  Sequences sequences(const std::set<std::string>& other_names) const;

  /// Reads a sequence, which must have the dtype of the weights; undefined for an empty name.
  at::Tensor sequence(const std::string& name, at::ScalarType dtype);

  /// Reads the tensor that `option` names.
  at::Tensor tensor(const std::string& name, const std::string& option);

  /// Names of the tensors that were not read.
  std::vector<std::string> unused() const;

 private:
  std::unique_ptr<detail::TensorSource> file_;
  std::set<std::string> used_;
};

}  // namespace mha::cli
