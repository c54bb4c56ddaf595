#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "files/checksums.h"
#include "files/dtype.h"

namespace mha::detail {

/// What a file says about one tensor.
struct TensorEntry {
  const DtypeInfo* dtype = nullptr;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // where its bytes lie, in the terms of the file's format
};

using TensorEntries = std::map<std::string, TensorEntry>;
using Metadata = std::map<std::string, std::string>;

/// A file of named tensors, open for reading, in whichever format. What it says is checked when
/// it is opened; tensors are read one at a time when asked for, so a layer costs its own size
/// and not that of the file. Not for use by two threads at once.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  virtual const std::string& path() const = 0;
  /// The format, for a person: "safetensors", "torch.save".
  virtual std::string_view format() const = 0;
  /// Every file that it consists of: of an index, this and the files that it names.
  virtual std::vector<std::string> files() const { return {path()}; }
  /// What it says of every tensor. Of an index, each of the files has to be there for that.
  virtual const TensorEntries& entries() const = 0;
  virtual const Metadata& metadata() const = 0;

  /// How many tensors there are, whether one has that name, and their names from `start` on, in
  /// order, until `visit` returns false. Of an index, by its own word: no other file is opened.
  virtual size_t size() const { return entries().size(); }
  virtual bool has(const std::string& name) const { return entries().count(name) != 0; }
  virtual void visit_names(const std::string& start,
                           const std::function<bool(const std::string& name)>& visit) const;
  /// What it says of one tensor; null if it has none of that name. Of an index, the file with
  /// the tensor is opened, and throws if it is not there or lacks the tensor.
  virtual const TensorEntry* find(const std::string& name) const;

  /// The tensor of that name, on the CPU, contiguous, not shared with any other. Throws
  /// `c10::Error` if there is none, if its dtype has no counterpart in LibTorch, or if the file
  /// no longer holds it.
  virtual at::Tensor read(const std::string& name) = 0;

 protected:
  TensorSource() = default;
  TensorSource(TensorSource&&) = default;

  /// The entry of that name, whose dtype can be read; throws if there is none.
  const TensorEntry& readable(const std::string& name) const;
  /// Throws unless all bytes are 0 or 1: any other in a bool is undefined behaviour.
  void check_bools(const std::string& name, const at::Tensor& bytes) const;
};

/// Whether a file may be the index of others.
enum class Shards { allowed, refused };

/// Opens a weight file; its first bytes tell the format, not its name. Throws `c10::Error` that
/// starts with the path and names the format of files that cannot be read. Only archives of
/// torch.save have checksums.
std::unique_ptr<TensorSource> open_tensors(const std::string& path,
                                           Checksums checksums = Checksums::required,
                                           Shards shards = Shards::allowed);

}  // namespace mha::detail
