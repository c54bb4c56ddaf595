#include "files/tensor_source.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

#include "files/excerpt.h"
#include "files/input_file.h"
#include "files/json_text.h"
#include "files/safetensors.h"
#include "files/sharded_file.h"
#include "files/torch_file.h"

namespace mha::detail {
namespace {

struct KnownFormat {
  std::string_view begin, name, advice;
};

constexpr std::string_view kSaveAgain =
    "in Python, torch.save(torch.load(path, map_location='cpu', weights_only=True), "
    "other_path) "
    "writes one that can be read";
constexpr std::string_view kSaveSafetensors =
    "in Python, safetensors.torch.save_file(state_dict, other_path) writes one that can be "
    "read";

constexpr KnownFormat kKnownFormats[] = {
    {"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
     "a torch.save file of the old form, before PyTorch 1.6", kSaveAgain},
    {"\x80\x02", "a bare pickle", kSaveAgain},
    {"\x80\x03", "a bare pickle", kSaveAgain},
    {"\x80\x04", "a bare pickle", kSaveAgain},
    {"\x80\x05", "a bare pickle", kSaveAgain},
    {"\x89HDF\r\n", "an HDF5 file", kSaveSafetensors},
    {"GGUF", "a GGUF file", kSaveSafetensors},
    {"\x93NUMPY", "a NumPy array", kSaveSafetensors},
};

}  // namespace

void TensorSource::visit_names(
    const std::string& start, const std::function<bool(const std::string& name)>& visit) const {
  const TensorEntries& all = entries();
  for (auto at = all.lower_bound(start); at != all.end() && visit(at->first);) ++at;
}

const TensorEntry* TensorSource::find(const std::string& name) const {
  const auto found = entries().find(name);
  return found == entries().end() ? nullptr : &found->second;
}

const TensorEntry& TensorSource::readable(const std::string& name) const {
  const TensorEntry* found = find(name);
  TORCH_CHECK(found != nullptr, path(), ": tensor ", excerpt(name), ": not in the file");
  TORCH_CHECK(found->dtype->type.has_value(), path(), ": tensor ", excerpt(name),
              ": expected a dtype that can be read, found ", found->dtype->name);
  return *found;
}

void TensorSource::check_bools(const std::string& name, const at::Tensor& bytes) const {
  const auto* begin = static_cast<const unsigned char*>(bytes.data_ptr());
  const auto* end = begin + bytes.nbytes();
  const auto* bad = std::find_if(begin, end, [](unsigned char byte) { return byte > 1; });
  TORCH_CHECK(bad == end, path(), ": tensor ", excerpt(name),
              ": expected bytes 0 and 1 for BOOL, found ", static_cast<int>(*bad), " at ",
              bad - begin);
}

std::unique_ptr<TensorSource> open_tensors(const std::string& path, Checksums checksums,
                                           Shards shards) {
  std::string begin;
  bool has_header = false;  // as safetensors files have, whose length comes first
  {
    InputFile file(path);
    begin = file.read(0, std::min<int64_t>(file.size(), 16), "beginning");
    uint64_t length = 0;
    for (size_t i = std::min<size_t>(begin.size(), 8); i-- > 0;) {
      length = length << 8 | static_cast<unsigned char>(begin[i]);
    }
    has_header = begin.size() >= 8 && length <= static_cast<uint64_t>(file.size());
  }
  const auto starts_with = [&](std::string_view text) {
    return std::string_view(begin).substr(0, text.size()) == text;
  };
  // Whole and empty archives. Read as the length of a safetensors header, both are too long.
  if (starts_with({"PK\3\4", 4}) || starts_with({"PK\5\6", 4})) {
    return std::make_unique<TorchFile>(path, checksums);
  }
  if (!has_header && without_leading_space(begin).substr(0, 1) == "{") {
    TORCH_CHECK(shards == Shards::allowed, path,
                ": expected a file with tensors, found another index");
    return std::make_unique<ShardedFile>(path, checksums);
  }
  for (const KnownFormat& known : kKnownFormats) {
    TORCH_CHECK(has_header || !starts_with(known.begin), path,
                ": expected a safetensors or torch.save file, ", "found ", known.name, ": ",
                known.advice);
  }
  return std::make_unique<SafetensorsFile>(path);
}

}  // namespace mha::detail
