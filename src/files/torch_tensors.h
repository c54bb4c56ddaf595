#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "files/dtype.h"
#include "files/zip_archive.h"

namespace mha::detail {

/// A tensor as a view of a storage. Counts elements; all of it lies inside the storage.
struct TensorView {
  const DtypeInfo* dtype = nullptr;
  std::string storage;  // name of the archive's entry
  int64_t offset = 0;
  std::vector<int64_t> sizes, strides;
};

/// The tensors that `pickle_text`, the entry `data.pkl` of an archive, describes. The pickle is
/// a dictionary (a state dict, or a checkpoint with one inside) or a module of C++'s
/// `torch::save`. A tensor's name is its key; that of a tensor in a dictionary or module inside
/// is joined by dots: `state_dict.W_q.weight`. Everything else in the pickle (numbers, lists,
/// keys that are no strings, objects of classes that are not known) is passed over. Of a tensor
/// that is not dense or of another class than torch's own, no more than the name is kept.
///
/// Every storage must be an entry of `root/data/` of the size that the pickle says; a tensor's
/// sizes, strides and offset must stay inside it, and it may not have more elements, so that no
/// more memory is needed than the file's size.
/// Throws `c10::Error` that starts with `path`.
std::map<std::string, TensorView> torch_tensors(const std::string& path,
                                                std::string pickle_text,
                                                const std::string& root,
                                                const std::map<std::string, ZipEntry>& entries);

}  // namespace mha::detail
