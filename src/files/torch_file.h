#pragma once

#include <map>
#include <string>
#include <vector>

#include "files/input_file.h"
#include "files/tensor_source.h"
#include "files/torch_tensors.h"
#include "files/zip_archive.h"

namespace mha::detail {

/// The zip files of Python's `torch.save(state_dict, path)` and of C++'s
/// `torch::save(module, path)`, read without LibTorch's unpickler: nothing in the file is
/// executed. See `torch_tensors` for what becomes a tensor of which name.
///
/// The tensors' own bytes are read when asked for; their checksums are compared then.
class TorchFile : public TensorSource {
 public:
  /// Throws `c10::Error` that starts with the path for anything that is not such a file.
  explicit TorchFile(const std::string& path, Checksums checksums = Checksums::required);

  const std::string& path() const override { return file_.path(); }
  std::string_view format() const override { return "torch.save"; }
  const TensorEntries& entries() const override { return entries_; }
  const Metadata& metadata() const override { return metadata_; }
  at::Tensor read(const std::string& name) override;

 private:
  /// The bytes of a storage. The last one is kept, since tensors often share it.
  const at::Tensor& storage(const std::string& entry);

  InputFile file_;
  ZipArchive archive_;
  std::map<std::string, TensorView> views_;
  TensorEntries entries_;
  const Metadata metadata_;  // always empty
  std::string storage_entry_;
  at::Tensor storage_;
};

}  // namespace mha::detail
