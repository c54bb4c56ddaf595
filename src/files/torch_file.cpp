#include "files/torch_file.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "files/excerpt.h"

namespace mha::detail {
namespace {

constexpr int64_t kMaxPickleSize = 64 << 20;
constexpr int64_t kMaxByteOrderSize = 16;

// The folder that all entries of an archive lie in: that of "archive/data.pkl".
std::string archive_root(const std::string& path,
                         const std::map<std::string, ZipEntry>& entries) {
  constexpr std::string_view end = "/data.pkl";
  std::optional<std::string> root;
  for (const auto& [name, entry] : entries) {
    const size_t slash = name.find('/');
    if (slash == std::string::npos || name.substr(slash) != end) continue;
    TORCH_CHECK(!root, path, ": zip: expected one entry .../data.pkl, found several");
    root = name.substr(0, slash);
  }
  TORCH_CHECK(root.has_value(), path,
              ": expected a file of torch.save, found a zip archive without an entry "
              ".../data.pkl");
  return *root;
}

}  // namespace

TorchFile::TorchFile(const std::string& path, Checksums checksums)
    : file_(path), archive_(file_, checksums) {
  const auto& entries = archive_.entries();
  const std::string root = archive_root(path, entries);
  const auto byte_order = entries.find(root + "/byteorder");
  if (byte_order != entries.end()) {
    TORCH_CHECK(byte_order->second.size <= kMaxByteOrderSize, path, ": ",
                excerpt(byte_order->first), ": expected 'little', found ",
                byte_order->second.size, " bytes");
    const std::string order = archive_.read(byte_order->first, byte_order->second);
    TORCH_CHECK(order == "little", path, ": ", excerpt(byte_order->first),
                ": expected 'little', found ", excerpt(order));
  }
  const auto pickle = entries.find(root + "/data.pkl");
  TORCH_CHECK(pickle->second.size <= kMaxPickleSize, path, ": ", excerpt(pickle->first),
              ": expected at most ", kMaxPickleSize, " bytes, found ", pickle->second.size);
  views_ = torch_tensors(path, archive_.read(pickle->first, pickle->second), root, entries);
  for (const auto& [name, view] : views_) {
    TensorEntry& entry = entries_[name];
    entry.dtype = view.dtype;
    entry.shape = view.sizes;
  }
}

const at::Tensor& TorchFile::storage(const std::string& entry) {
  if (storage_entry_ == entry) return storage_;
  storage_entry_.clear();
  storage_ = at::Tensor();
  const ZipEntry& at = archive_.entries().at(entry);
  at::Tensor bytes = at::empty({at.size}, at::TensorOptions().dtype(at::kByte));
  archive_.read(entry, at, bytes.data_ptr());
  storage_ = std::move(bytes);
  storage_entry_ = entry;
  return storage_;
}

at::Tensor TorchFile::read(const std::string& name) {
  const at::ScalarType dtype = *readable(name).dtype->type;
  const TensorView& view = views_.at(name);
  const at::Tensor& bytes = storage(view.storage);
  if (dtype == at::kBool) check_bools(name, bytes);
  return at::as_strided(bytes.view(dtype), view.sizes, view.strides, view.offset)
      .clone(at::MemoryFormat::Contiguous);
}

}  // namespace mha::detail
