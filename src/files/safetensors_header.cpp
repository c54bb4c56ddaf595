#include "files/safetensors_header.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>
#include <vector>

#include "files/excerpt.h"
#include "files/json_text.h"
#include "runtime/message.h"

namespace mha::detail {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int64_t>::max();
constexpr std::string_view kMetadata = "__metadata__";
constexpr size_t kMaxRank = 64;  // at::Tensor's own limit in most operations

// Takes the events of nlohmann's parser. It knows what may stand in each place and refuses the
// rest at once, so that neither depth nor size of a hostile text costs anything, and it sees
// every key, of which a parsed document would keep one out of several equal ones.
class HeaderHandler {
 public:
  HeaderHandler(const std::string& path, int64_t data_size)
      : path_(path), data_size_(data_size) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(size_t /*size*/) {
    if (place_ == Place::file) {
      place_ = Place::tensors;
    } else if (place_ == Place::tensors) {
      place_ = key_ == kMetadata ? Place::metadata : Place::entry;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& text) {
    if (place_ == Place::tensors) {
      key_ = std::move(text);
      const bool seen = key_ == kMetadata ? has_metadata_ : header_.entries.count(key_) != 0;
      if (seen) fail("expected one of that name, found several");
      if (key_ == kMetadata) has_metadata_ = true;
      entry_ = {};
      has_dtype_ = has_shape_ = has_offsets_ = false;
    } else if (place_ == Place::metadata) {
      inner_key_ = std::move(text);
      if (header_.metadata.count(inner_key_) != 0) {
        fail("expected one value, found several");
      }
    } else {
      inner_key_ = std::move(text);
      bool* has = inner_key_ == "dtype"          ? &has_dtype_
                  : inner_key_ == "shape"        ? &has_shape_
                  : inner_key_ == "data_offsets" ? &has_offsets_
                                                 : nullptr;
      if (has == nullptr) fail("expected only dtype, shape and data_offsets");
      if (*has) fail("expected one value, found several");
      *has = true;
    }
    return true;
  }

  bool string(std::string& text) {
    if (place_ == Place::metadata) {
      keep(inner_key_.size() + text.size() + sizeof(Metadata::value_type));
      header_.metadata.emplace(inner_key_, std::move(text));
    } else if (place_ == Place::entry && inner_key_ == "dtype") {
      entry_.dtype = find_dtype(text);
      if (entry_.dtype == nullptr) {
        fail("expected one of " + dtype_names() + ", found " + excerpt(text));
      }
    } else {
      unexpected("the string " + excerpt(text));
    }
    return true;
  }

  bool start_array(size_t /*size*/) {
    if (place_ == Place::entry && inner_key_ == "shape") {
      place_ = Place::shape;
    } else if (place_ == Place::entry && inner_key_ == "data_offsets") {
      place_ = Place::offsets;
      offset_count_ = 0;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool number_unsigned(uint64_t value) {
    if (place_ != Place::shape && place_ != Place::offsets) {
      unexpected(std::to_string(value));
    }
    if (value > static_cast<uint64_t>(kMaxInt)) unexpected(std::to_string(value));
    if (place_ == Place::shape) {
      if (entry_.shape.size() == kMaxRank) {
        fail("expected at most " + std::to_string(kMaxRank) + " dimensions, found more");
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else {
      if (offset_count_ == 2) fail("expected 2 numbers, found more");
      (offset_count_ == 0 ? entry_.begin : entry_.end) = static_cast<int64_t>(value);
      ++offset_count_;
    }
    return true;
  }

  bool end_array() {
    if (place_ == Place::offsets && offset_count_ != 2) {
      fail("expected 2 numbers, found " + std::to_string(offset_count_));
    }
    place_ = Place::entry;
    return true;
  }

  bool end_object() {
    if (place_ == Place::entry) finish_entry();
    place_ = place_ == Place::tensors ? Place::file : Place::tensors;
    return true;
  }

  // What the format has no place for. Numbers that uint64_t cannot hold arrive as floats.
  bool number_integer(int64_t value) { unexpected(value == 0 ? "-0" : std::to_string(value)); }
  bool number_float(double /*value*/, const std::string& text) {
    unexpected("the number " + excerpt(text));
  }
  bool boolean(bool value) { unexpected(value ? "true" : "false"); }
  bool null() { unexpected("null"); }
  bool binary(nlohmann::json::binary_t& /*value*/) { unexpected("binary data"); }

  bool parse_error(size_t position, const std::string& /*last_token*/,
                   const nlohmann::json::exception& error) {
    std::string reason = error.what();  // "[json.exception.parse_error.101] parse error at ..."
    reason.erase(0, reason.find("] ") + 2);
    TORCH_CHECK(false, path_, ": header: expected valid JSON, found at byte ", position, ": ",
                excerpt(reason));
  }

 private:
  enum class Place { file, tensors, metadata, entry, shape, offsets };

  [[noreturn]] void fail(const std::string& problem) const {
    std::string where = "header";
    if (place_ == Place::metadata) {
      where = "metadata " + excerpt(inner_key_);
    } else if (place_ == Place::tensors && key_ == kMetadata) {
      where = kMetadata;
    } else if (place_ != Place::file) {
      where = "tensor " + excerpt(key_);
      if (place_ != Place::tensors && !inner_key_.empty()) {
        where += ": " + excerpt(inner_key_);
      }
    }
    TORCH_CHECK(false, path_, ": ", where, ": ", problem);
  }

  [[noreturn]] void unexpected(const std::string& found) const {
    std::string expected = "an object";
    if (place_ == Place::metadata) {
      expected = "a string";
    } else if (place_ == Place::shape || place_ == Place::offsets) {
      expected = "whole numbers from 0 to " + std::to_string(kMaxInt);
    } else if (place_ == Place::entry) {
      expected = inner_key_ == "dtype" ? "a string" : "an array";
    }
    fail("expected " + expected + ", found " + found);
  }

  // Counts what is kept, with what a node of a map and an allocation cost beside it.
  void keep(size_t bytes) {
    kept_size_ += bytes + 64;
    if (kept_size_ > kMaxKeptSize) {
      TORCH_CHECK(false, path_, ": header: expected names, shapes and metadata of at most ",
                  kMaxKeptSize, " bytes in all, found more");
    }
  }

  void finish_entry() {
    inner_key_.clear();
    if (!has_dtype_) fail("expected a dtype, found none");
    if (!has_shape_) fail("expected a shape, found none");
    if (!has_offsets_) fail("expected data_offsets, found none");
    const auto offsets = [this] {
      return "data_offsets [" + std::to_string(entry_.begin) + ", " +
             std::to_string(entry_.end) + "]";
    };
    if (entry_.begin > entry_.end) fail("expected begin <= end, found " + offsets());
    if (entry_.end > data_size_) {
      fail("expected the " + std::to_string(data_size_) + " bytes of data that the file has, " +
           "found " + offsets());
    }
    const int64_t size = byte_size();
    if (size != entry_.end - entry_.begin) {
      fail("expected " + std::to_string(size) + " bytes for " +
           std::string(entry_.dtype->name) + " " + message(at::IntArrayRef(entry_.shape)) +
           ", found " + std::to_string(entry_.end - entry_.begin) + " in " + offsets());
    }
    keep(key_.size() + sizeof(TensorEntries::value_type) +
         sizeof(int64_t) * entry_.shape.size());
    header_.entries.emplace(std::move(key_), std::move(entry_));
  }

  int64_t byte_size() const {
    // A 0 among the dimensions does not excuse the others: LibTorch's strides would overflow.
    int64_t nonzero_product = 1, count = 1;
    for (const int64_t dimension : entry_.shape) {
      const int64_t factor = std::max<int64_t>(dimension, 1);
      if (nonzero_product > kMaxInt / entry_.dtype->bits / factor) {
        fail("shape: expected fewer than 2^63 bits, found " +
             message(at::IntArrayRef(entry_.shape)));
      }
      nonzero_product *= factor;
      count *= dimension;
    }
    const int64_t bits = count * entry_.dtype->bits;
    if (bits % 8 != 0) {
      fail("shape: expected whole bytes, found " + std::string(entry_.dtype->name) + " " +
           message(at::IntArrayRef(entry_.shape)));
    }
    return bits / 8;
  }

  const std::string& path_;
  const int64_t data_size_;
  SafetensorsHeader header_;
  size_t kept_size_ = 0;
  Place place_ = Place::file;
  std::string key_, inner_key_;  // of the tensor or of all metadata; of the place inside it
  TensorEntry entry_;
  int offset_count_ = 0;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
};

void check_coverage(const std::string& path, const TensorEntries& entries, int64_t data_size) {
  std::vector<const TensorEntries::value_type*> sorted;
  sorted.reserve(entries.size());
  for (const auto& entry : entries) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) {
    return std::tie(a->second.begin, a->second.end) < std::tie(b->second.begin, b->second.end);
  });
  int64_t position = 0;
  for (const auto* entry : sorted) {
    const int64_t begin = entry->second.begin;
    TORCH_CHECK(
        begin == position, path, ": tensor ", excerpt(entry->first), ": expected its data at ",
        position, ", where that of the tensor before it ends, ", "found data_offsets [", begin,
        ", ", entry->second.end, "], which leaves ", begin > position ? "a gap" : "an overlap");
    position = entry->second.end;
  }
  TORCH_CHECK(position == data_size, path,
              ": expected the file to end with the data of its last ", "tensor, found ",
              data_size - position, " bytes after it");
}

}  // namespace

SafetensorsHeader parse_safetensors_header(const std::string& path, std::string_view text,
                                           int64_t data_size) {
  text = text.substr(0, text.find_last_not_of(' ') + 1);  // padding, of any length
  check_json_text(path + ": header", text);
  HeaderHandler handler(path, data_size);
  nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
  SafetensorsHeader header = handler.take();
  check_coverage(path, header.entries, data_size);
  return header;
}

}  // namespace mha::detail
