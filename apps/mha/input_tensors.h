#pragma once

#include <ATen/core/Tensor.h>
#include <files/tensor_source.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace mha::cli {

/// A file of tensors that an argument names. Remembers which of them were read.
class InputTensors {
 public:
  explicit InputTensors(const std::string& path) : file_(detail::open_tensors(path)) {}

  const std::string& path() const { return file_->path(); }
  bool has(const std::string& name) const { return file_->has(name); }

  /// Reads the tensor that `option` names.
  at::Tensor tensor(const std::string& name, const std::string& option);

  /// The name of the only tensor that `fits`. `expected` says in the error what that would be.
  std::string only_one(
      const std::function<bool(const std::string&, const detail::TensorEntry&)>& fits,
      const std::string& expected) const;

  /// Names of the tensors that were not read.
  std::vector<std::string> unused() const;

 private:
  std::unique_ptr<detail::TensorSource> file_;
  std::set<std::string> used_;
};

}  // namespace mha::cli
