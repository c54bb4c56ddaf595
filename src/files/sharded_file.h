#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "files/tensor_source.h"

namespace mha::detail {

/// A model in several files, opened by its index, `model.safetensors.index.json` and the like:
/// a JSON object whose `weight_map` gives for each tensor the name of the file with it, in the
/// index's own folder. A file is opened when one of its tensors is asked for, and only one at a
/// time is kept open: those that nobody asks for need not be there.
///
/// Refused: file names with a folder in them. Refused when it is asked for: a file that is
/// missing or an index itself, and a tensor that is not in the file that should have it, as
/// where an index names a tensor that shares another's memory. Tensors that the index does not
/// name are passed over.
class ShardedFile : public TensorSource {
 public:
  /// Throws `c10::Error` that starts with the path of the index, or of the file at fault.
  explicit ShardedFile(std::string path, Checksums checksums = Checksums::required);
  ShardedFile(const ShardedFile&) = delete;
  ShardedFile& operator=(const ShardedFile&) = delete;

  const std::string& path() const override { return path_; }
  std::string_view format() const override { return "index of shards"; }
  std::vector<std::string> files() const override;
  const TensorEntries& entries() const override;
  const Metadata& metadata() const override { return metadata_; }
  size_t size() const override { return shard_of_.size(); }
  bool has(const std::string& name) const override { return shard_of_.count(name) != 0; }
  void visit_names(const std::string& start,
                   const std::function<bool(const std::string& name)>& visit) const override;
  const TensorEntry* find(const std::string& name) const override;
  at::Tensor read(const std::string& name) override;

 private:
  std::string path_of(const std::string& shard) const;
  TensorSource& open(const std::string& shard) const;
  // Opens the file, of which the tensor `wanted` is needed, and notes what it says of all.
  void describe(const std::string& shard, const std::string& wanted) const;

  std::string path_;
  const Checksums checksums_;
  std::map<std::string, std::string> shard_of_;
  // By the name of a file: the names of its tensors, which lie in the map above, until it has
  // been described.
  mutable std::map<std::string, std::vector<const std::string*>> undescribed_;
  mutable TensorEntries entries_;  // of the files that were described
  const Metadata metadata_;        // always empty
  mutable std::string open_shard_;
  mutable std::unique_ptr<TensorSource> shard_;
};

}  // namespace mha::detail
