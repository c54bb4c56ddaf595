#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "weights/dtype.h"

namespace mha::detail {

/// Where one tensor lies in a file. `begin` and `end` count bytes from the end of the header.
struct TensorEntry {
  const DtypeInfo* dtype = nullptr;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;
};

using TensorEntries = std::map<std::string, TensorEntry>;
using Metadata = std::map<std::string, std::string>;

/// A safetensors file open for reading. The constructor checks the whole header, tensors are
/// read one at a time when asked for, so a layer costs its own size and not that of the file.
/// Not for use by two threads at once.
class SafetensorsFile {
 public:
  /// Throws `c10::Error` that starts with the path and says what was expected and found, for a
  /// file that cannot be read and for anything that breaks the format.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  const TensorEntries& entries() const { return entries_; }
  const Metadata& metadata() const { return metadata_; }

  /// The tensor of that name, on the CPU, contiguous. Throws if there is none, if its dtype has
  /// no counterpart in LibTorch, or if the file no longer holds it.
  at::Tensor read(const std::string& name);

 private:
  std::string path_;
  std::ifstream stream_;
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
