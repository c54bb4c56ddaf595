#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "files/input_file.h"
#include "files/tensor_source.h"

namespace mha::detail {

/// A safetensors file open for reading. The constructor checks the whole header. `begin` and
/// `end` of its entries count bytes from the end of the header.
class SafetensorsFile : public TensorSource {
 public:
  /// Throws `c10::Error` that starts with the path and says what was expected and found, for a
  /// file that cannot be read and for anything that breaks the format.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const override { return file_.path(); }
  std::string_view format() const override { return "safetensors"; }
  const TensorEntries& entries() const override { return entries_; }
  const Metadata& metadata() const override { return metadata_; }
  at::Tensor read(const std::string& name) override;

 private:
  InputFile file_;
  int64_t data_start_ = 0;
  TensorEntries entries_;
  Metadata metadata_;
};

/// The contents of a safetensors file.
struct TensorFile {
  std::map<std::string, at::Tensor> tensors;
  Metadata metadata;
};

/// Reads all tensors of a file.
TensorFile read_safetensors(const std::string& path);

/// Writes `file` to `path`, whole or not at all: a file of another name in the same folder is
/// written first and then renamed. Tensors may have any strides and lie on any device; they are
/// stored in the order of the reference implementation, so that equal contents give equal
/// bytes. Throws `c10::Error` that starts with the path.
void write_safetensors(const std::string& path, const TensorFile& file);

}  // namespace mha::detail
