#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files/crc32.h"
#include "files/torch_file.h"
#include "support/file_support.h"

// Zip archives and pickles made by hand, the broken ones too, from the formats' specifications.
namespace mha::test {

/// `value` in `size` little-endian bytes.
inline std::string little_endian(uint64_t value, int size) {
  std::string bytes;
  for (int i = 0; i < size; ++i) bytes.push_back(static_cast<char>(value >> 8 * i));
  return bytes;
}

/// One entry; what is not given is as it should be. The local header repeats the directory,
/// save for what begins with `local`.
struct ZipItem {
  ZipItem(std::string item_name, std::string item_data)
      : name(std::move(item_name)), data(std::move(item_data)) {}

  std::string name, data;
  uint16_t method = 0, flags = 0x0800;
  std::optional<uint64_t> crc, size, original_size, offset, local_size;
  std::optional<std::string> local_name, local_signature;
  std::optional<uint16_t> local_method;
  std::string extra, local_extra;
  uint16_t disk = 0;
};

/// What may be wrong at the end.
struct ZipEnd {
  std::optional<uint64_t> count, size, offset;
  uint16_t comment_size = 0, disk = 0;
  bool zip64 = false;
  std::optional<uint64_t> count64, offset64, place64;
  std::string before;  // bytes between the entries and the directory
};

inline std::string zip_bytes(const std::vector<ZipItem>& items, const ZipEnd& end = {}) {
  std::string bytes, directory;
  for (const ZipItem& item : items) {
    const uint64_t offset = item.offset.value_or(bytes.size());
    const uint64_t crc = item.crc.value_or(detail::crc32(item.data.data(), item.data.size()));
    const uint64_t size = item.size.value_or(item.data.size());
    const std::string name = item.local_name.value_or(item.name);
    bytes += item.local_signature.value_or("PK\3\4") + little_endian(0, 2) +
             little_endian(item.flags, 2) +
             little_endian(item.local_method.value_or(item.method), 2) + little_endian(0, 4) +
             little_endian(crc, 4) + little_endian(item.local_size.value_or(size), 4) +
             little_endian(size, 4) + little_endian(name.size(), 2) +
             little_endian(item.local_extra.size(), 2) + name + item.local_extra + item.data;
    directory += "PK\1\2" + little_endian(0, 4) + little_endian(item.flags, 2) +
                 little_endian(item.method, 2) + little_endian(0, 4) + little_endian(crc, 4) +
                 little_endian(size, 4) + little_endian(item.original_size.value_or(size), 4) +
                 little_endian(item.name.size(), 2) + little_endian(item.extra.size(), 2) +
                 little_endian(0, 2) + little_endian(item.disk, 2) + little_endian(0, 6) +
                 little_endian(offset, 4) + item.name + item.extra;
  }
  bytes += end.before;
  const uint64_t count = end.count.value_or(items.size());
  const uint64_t size = end.size.value_or(directory.size());
  const uint64_t offset = end.offset.value_or(bytes.size());
  bytes += directory;
  if (end.zip64) {
    const uint64_t place = end.place64.value_or(bytes.size());
    bytes += "PK\6\6" + little_endian(44, 8) + little_endian(0, 4) +
             little_endian(end.disk, 4) + little_endian(0, 4) +
             little_endian(end.count64.value_or(count), 8) +
             little_endian(end.count64.value_or(count), 8) + little_endian(size, 8) +
             little_endian(end.offset64.value_or(offset), 8);
    bytes += "PK\6\7" + little_endian(0, 4) + little_endian(place, 8) + little_endian(1, 4);
  }
  return bytes + "PK\5\6" + little_endian(end.disk, 2) + little_endian(0, 2) +
         little_endian(count, 2) + little_endian(count, 2) + little_endian(size, 4) +
         little_endian(offset, 4) + little_endian(end.comment_size, 2);
}

// Parts of a pickle. Each leaves one value on the machine's stack.

inline std::string pickled_text(const std::string& text) {
  return "X" + little_endian(text.size(), 4) + text;
}
inline std::string pickled_integer(int64_t value) {
  return "\x8a\x08" + little_endian(static_cast<uint64_t>(value), 8);
}
inline std::string pickled_global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string pickled_tuple(std::initializer_list<std::string> values) {
  std::string tuple = "(";
  for (const std::string& value : values) tuple += value;
  return tuple + "t";
}
inline std::string pickled_integers(std::initializer_list<int64_t> values) {
  std::string tuple = "(";
  for (const int64_t value : values) tuple += pickled_integer(value);
  return tuple + "t";
}
inline std::string pickled_ordered_dict() {
  return pickled_global("collections", "OrderedDict") + ")R";
}

/// A dict of the alternating keys and values.
inline std::string pickled_dict(std::initializer_list<std::string> items) {
  std::string dict = "}(";
  for (const std::string& item : items) dict += item;
  return dict + "u";
}

inline std::string pickled_storage(const std::string& type, const std::string& key,
                                   int64_t count) {
  return pickled_tuple({pickled_text("storage"), pickled_global("torch", type),
                        pickled_text(key), pickled_text("cpu"), pickled_integer(count)}) +
         "Q";
}

/// A call of torch's `_rebuild_tensor_v2`.
inline std::string pickled_tensor(const std::string& storage, int64_t offset,
                                  std::initializer_list<int64_t> sizes,
                                  std::initializer_list<int64_t> strides) {
  return pickled_global("torch._utils", "_rebuild_tensor_v2") +
         pickled_tuple({storage, pickled_integer(offset), pickled_integers(sizes),
                        pickled_integers(strides), "\x89", pickled_ordered_dict()}) +
         "R";
}

inline std::string pickle_of(const std::string& value) {
  return "\x80\x02" + value + ".";
}

/// A file of torch.save with that pickle, and one storage, 0, of six float32: 0 to 5.
inline std::string torch_file_bytes(const std::string& pickle) {
  std::string data;
  for (const uint64_t value :
       {0x00000000, 0x3f800000, 0x40000000, 0x40400000, 0x40800000, 0x40a00000}) {
    data += little_endian(value, 4);
  }
  return zip_bytes({{"a/data.pkl", pickle}, {"a/byteorder", "little"}, {"a/data/0", data}});
}

inline std::string six_floats() {
  return pickled_storage("FloatStorage", "0", 6);
}

/// A dict of one tensor, `x`.
inline std::string good_pickle() {
  return pickle_of(
      pickled_dict({pickled_text("x"), pickled_tensor(six_floats(), 0, {2, 3}, {3, 1})}));
}

/// The bytes of a file, and how the error goes on after the path.
struct BadTorchFile {
  std::string bytes;
  std::string error;
};

inline void expect_refused(const std::vector<BadTorchFile>& files) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("bad.pt");
  for (size_t i = 0; i < files.size(); ++i) {
    write_bytes(path, files[i].bytes);
    const std::string error = error_of([&] {
      detail::TorchFile file(path);
      for (const auto& [name, entry] : file.entries()) file.read(name);
    });
    EXPECT_EQ(error, path + ": " + files[i].error) << "for file " << i;
  }
}

}  // namespace mha::test
