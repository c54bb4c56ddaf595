#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "files/tensor_source.h"

namespace mha::detail {

/// A model in several files, opened by its index, `model.safetensors.index.json` and the like:
/// a JSON object whose `weight_map` gives for each tensor the name of the file with it, in the
/// index's own folder. Those files are opened one after the other, and only one at a time is
/// kept open.
///
/// Refused: file names with a folder in them, files that are an index themselves, tensors that
/// are not in the file that should have them. Tensors that the index does not name are passed
/// over.
class ShardedFile : public TensorSource {
 public:
  /// Throws `c10::Error` that starts with the path of the index, or of the file at fault.
  explicit ShardedFile(std::string path);

  const std::string& path() const override { return path_; }
  std::string_view format() const override { return "index of shards"; }
  std::vector<std::string> files() const override;
  const TensorEntries& entries() const override { return entries_; }
  const Metadata& metadata() const override { return metadata_; }
  at::Tensor read(const std::string& name) override;

 private:
  std::string path_of(const std::string& shard) const;
  TensorSource& open(const std::string& shard);

  std::string path_;
  std::map<std::string, std::string> shard_of_;
  TensorEntries entries_;
  const Metadata metadata_;  // always empty
  std::string open_shard_;
  std::unique_ptr<TensorSource> shard_;
};

}  // namespace mha::detail
