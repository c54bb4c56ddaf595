#include "files/safetensors.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "files/excerpt.h"
#include "files/safetensors_header.h"
#include "files/whole_file.h"
#include "runtime/given_tensor.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are little-endian: reading and writing needs byte swaps here"
#endif

namespace mha::detail {
namespace {

constexpr size_t kLengthSize = 8;  // the header's length, in front of it

/// Tensors in the order in which they are stored.
using OrderedTensors = std::vector<std::pair<std::string, at::Tensor>>;

OrderedTensors in_file_order(const std::string& path, const TensorFile& file) {
  OrderedTensors ordered(file.tensors.begin(), file.tensors.end());
  for (const auto& [name, tensor] : ordered) {
    TORCH_CHECK(name != "__metadata__", path, ": tensor '__metadata__': the name is reserved");
    TORCH_CHECK(tensor.defined(), path, ": tensor ", excerpt(name), ": it is undefined");
    TORCH_CHECK(tensor.layout() == at::kStrided && find_dtype(tensor.scalar_type()) != nullptr,
                path, ": tensor ", excerpt(name),
                ": expected a dense tensor of a real dtype, found ", tensor.toString());
    check_memory({path.c_str(), ("tensor " + excerpt(name)).c_str()}, tensor);
  }
  // Stable: names of one dtype stay in the order of the map.
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
    return find_dtype(a.second.scalar_type()) > find_dtype(b.second.scalar_type());
  });
  return ordered;
}

// Strings with their escapes, as JSON writes them.
std::string json_string(const std::string& path, const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    TORCH_CHECK(false, path, ": ", excerpt(text), ": expected UTF-8");
  }
}

std::string header_text(const std::string& path, const Metadata& metadata,
                        const OrderedTensors& tensors) {
  std::string text;
  for (const auto& [key, value] : metadata) {
    text += (text.empty() ? "{\"__metadata__\":{" : ",") + json_string(path, key) + ":" +
            json_string(path, value);
  }
  text += text.empty() ? "{" : tensors.empty() ? "}" : "},";
  int64_t position = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t end = position + static_cast<int64_t>(tensor.numel() * tensor.element_size());
    text += json_string(path, name) + ":{\"dtype\":\"";
    text += find_dtype(tensor.scalar_type())->name;
    text += "\",\"shape\":" + nlohmann::json(tensor.sizes().vec()).dump() +
            ",\"data_offsets\":" + nlohmann::json({position, end}).dump() + "},";
    position = end;
  }
  if (text.back() == ',') text.pop_back();
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');  // the data is aligned for its widest type
  TORCH_CHECK(static_cast<int64_t>(text.size()) <= kMaxHeaderSize, path,
              ": header: expected at most ", kMaxHeaderSize, " bytes, found ", text.size());
  return text;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const int64_t file_size = file_.size();
  TORCH_CHECK(file_size >= static_cast<int64_t>(kLengthSize), path,
              ": expected the header's length in 8 bytes, found a file of ", file_size,
              " bytes");
  std::array<unsigned char, kLengthSize> bytes{};
  file_.read(0, bytes.data(), kLengthSize, "header");
  uint64_t header_size = 0;
  for (size_t i = kLengthSize; i-- > 0;) header_size = header_size << 8 | bytes[i];
  TORCH_CHECK(header_size <= static_cast<uint64_t>(kMaxHeaderSize), path,
              ": header: expected a length of at most ", kMaxHeaderSize, " bytes, found ",
              header_size);
  data_start_ = static_cast<int64_t>(kLengthSize + header_size);
  TORCH_CHECK(data_start_ <= file_size, path, ": header: expected ", header_size,
              " bytes, found ", file_size - static_cast<int64_t>(kLengthSize), " in the file");
  const std::string text = file_.read(kLengthSize, static_cast<int64_t>(header_size), "header");
  SafetensorsHeader header = parse_safetensors_header(path, text, file_size - data_start_);
  entries_ = std::move(header.entries);
  metadata_ = std::move(header.metadata);
}

at::Tensor SafetensorsFile::read(const std::string& name) {
  const TensorEntry& entry = readable(name);
  at::Tensor tensor =
      at::empty(entry.shape, at::TensorOptions().dtype(*entry.dtype->type).device(at::kCPU));
  const int64_t size = entry.end - entry.begin;
  if (size == 0) return tensor;
  file_.read(data_start_ + entry.begin, tensor.data_ptr(), size, "tensor " + excerpt(name));
  if (entry.dtype->type == at::kBool) check_bools(name, tensor);
  return tensor;
}

TensorFile read_safetensors(const std::string& path) {
  SafetensorsFile file(path);
  TensorFile contents;
  contents.metadata = file.metadata();
  for (const auto& [name, entry] : file.entries()) contents.tensors[name] = file.read(name);
  return contents;
}

void write_safetensors(const std::string& path, const TensorFile& file) {
  const OrderedTensors tensors = in_file_order(path, file);
  const std::string header = header_text(path, file.metadata, tensors);
  std::array<unsigned char, kLengthSize> length{};
  for (size_t i = 0; i < kLengthSize; ++i) {
    length[i] = static_cast<unsigned char>(header.size() >> 8 * i);
  }

  WholeFile out(path);
  out.write(length.data(), length.size());
  out.write(header.data(), header.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor data = tensor.detach().resolve_neg().cpu().contiguous();
    if (data.numel() > 0) out.write(data.data_ptr(), data.nbytes());
  }
  out.finish();
}

}  // namespace mha::detail
