#include "files/zip_archive.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

#include "files/crc32.h"
#include "files/excerpt.h"

namespace mha::detail {
namespace {

constexpr int64_t kEndSize = 22, kLocatorSize = 20, kEnd64Size = 56;
constexpr int64_t kCentralSize = 46, kLocalSize = 30;
constexpr int64_t kMaxDirectorySize = 8 << 20;
constexpr int64_t kMaxZipNameSize = 1024;
constexpr uint64_t kNarrow16 = 0xffff, kNarrow32 = 0xffffffff;  // "see the zip64 field"

// The little-endian number of `size` bytes at `offset`, which are there.
uint64_t little_endian(std::string_view bytes, int64_t offset, int size) {
  uint64_t value = 0;
  for (int i = size; i-- > 0;) {
    value = value << 8 | static_cast<unsigned char>(bytes[static_cast<size_t>(offset + i)]);
  }
  return value;
}

bool has_signature(std::string_view bytes, const char* signature) {
  return bytes.substr(0, 4) == std::string_view(signature, 4);
}

struct Directory {
  uint64_t count, size, offset;
  int64_t end;  // where the records after it begin
};

// Reads the end records, both of them where there is a zip64 one.
Directory find_directory(InputFile& file) {
  const auto fail = [&](const auto&... what) {
    TORCH_CHECK(false, file.path(), ": zip: ", what...);
  };
  if (file.size() < kEndSize) {
    fail("expected an end record of ", kEndSize, " bytes, found a file of ", file.size());
  }
  const int64_t end_at = file.size() - kEndSize;
  const std::string end = file.read(end_at, kEndSize, "zip: end record");
  if (!has_signature(end, "PK\5\6")) {
    fail("expected an end record in the last ", kEndSize,
         " bytes, found none: the file is cut, or something was appended to it");
  }
  if (little_endian(end, 20, 2) != 0) {
    fail("expected no comment, found one of ", little_endian(end, 20, 2), " bytes");
  }
  Directory directory{little_endian(end, 10, 2), little_endian(end, 12, 4),
                      little_endian(end, 16, 4), end_at};
  bool one_disk = little_endian(end, 4, 2) == 0 && little_endian(end, 6, 2) == 0 &&
                  little_endian(end, 8, 2) == directory.count;

  const int64_t locator_at = end_at - kLocatorSize;
  std::string locator;
  if (locator_at >= kEnd64Size) locator = file.read(locator_at, kLocatorSize, "zip: locator");
  if (has_signature(locator, "PK\6\7")) {
    const uint64_t end64_at = little_endian(locator, 8, 8);
    if (end64_at != static_cast<uint64_t>(locator_at - kEnd64Size)) {
      fail("zip64 end record: expected it at ", locator_at - kEnd64Size, ", found ", end64_at);
    }
    const std::string end64 =
        file.read(locator_at - kEnd64Size, kEnd64Size, "zip64 end record");
    if (!has_signature(end64, "PK\6\6") ||
        little_endian(end64, 4, 8) != static_cast<uint64_t>(kEnd64Size - 12)) {
      fail("zip64 end record: expected one of ", kEnd64Size, " bytes, found another record");
    }
    const Directory wide{little_endian(end64, 32, 8), little_endian(end64, 40, 8),
                         little_endian(end64, 48, 8), locator_at - kEnd64Size};
    const auto agrees = [](uint64_t narrow, uint64_t exact, uint64_t see_other) {
      return narrow == exact || narrow == see_other;
    };
    if (!agrees(directory.count, wide.count, kNarrow16) ||
        !agrees(directory.size, wide.size, kNarrow32) ||
        !agrees(directory.offset, wide.offset, kNarrow32)) {
      fail("expected equal end records, found ", directory.count, " entries in ",
           directory.size, " bytes at ", directory.offset, " and ", wide.count, " in ",
           wide.size, " at ", wide.offset);
    }
    one_disk = little_endian(end64, 16, 4) == 0 && little_endian(end64, 20, 4) == 0 &&
               little_endian(end64, 24, 8) == wide.count && little_endian(locator, 4, 4) == 0;
    directory = wide;
  }
  if (!one_disk) fail("expected an archive on one disk, found several");
  if (directory.count > static_cast<uint64_t>(kMaxZipEntries)) {
    fail("expected at most ", kMaxZipEntries, " entries, found ", directory.count);
  }
  if (directory.size > static_cast<uint64_t>(kMaxDirectorySize)) {
    fail("expected a directory of at most ", kMaxDirectorySize, " bytes, found ",
         directory.size);
  }
  const auto limit = static_cast<uint64_t>(directory.end);
  if (directory.offset > limit || directory.size != limit - directory.offset) {
    fail("expected the directory to end at ", directory.end, ", found ", directory.size,
         " bytes at ", directory.offset);
  }
  return directory;
}

// Where an entry lies from its local header to its last byte.
struct Extent {
  int64_t begin, end;
  const std::string* name;
};

class DirectoryReader {
 public:
  explicit DirectoryReader(InputFile& file) : file_(file) {}

  std::map<std::string, ZipEntry> read() {
    const Directory directory = find_directory(file_);
    data_end_ = static_cast<int64_t>(directory.offset);
    text_ = file_.read(data_end_, static_cast<int64_t>(directory.size), "zip: directory");
    for (uint64_t i = 0; i < directory.count; ++i) read_entry();
    TORCH_CHECK(position_ == text_.size(), file_.path(), ": zip: directory: expected ",
                directory.count, " entries, found ", text_.size() - position_,
                " more bytes after them");
    check_overlaps();
    return std::move(entries_);
  }

 private:
  template <typename... What>
  [[noreturn]] void fail(const What&... what) const {
    TORCH_CHECK(false, file_.path(), ": zip: entry ", excerpt(name_), ": ", what...);
  }

  void read_entry() {
    const std::string_view rest = std::string_view(text_).substr(position_);
    const auto complete = static_cast<size_t>(kCentralSize);
    TORCH_CHECK(rest.size() >= complete && has_signature(rest, "PK\1\2"), file_.path(),
                ": zip: directory: expected entry ", entries_.size(), " at byte ", position_,
                ", found none");
    const auto name_size = static_cast<int64_t>(little_endian(rest, 28, 2));
    const auto extra_size = static_cast<int64_t>(little_endian(rest, 30, 2));
    const auto comment_size = static_cast<int64_t>(little_endian(rest, 32, 2));
    const auto size = static_cast<size_t>(kCentralSize + name_size + extra_size + comment_size);
    TORCH_CHECK(rest.size() >= size, file_.path(), ": zip: directory: entry ", entries_.size(),
                ": expected ", size, " bytes, found ", rest.size());
    name_ = rest.substr(complete, static_cast<size_t>(name_size));
    if (name_size > kMaxZipNameSize) {
      fail("expected a name of at most ", kMaxZipNameSize, " bytes, found ", name_size);
    }
    flags_ = little_endian(rest, 8, 2);
    method_ = little_endian(rest, 10, 2);
    if ((flags_ & 0x2041) != 0) fail("expected no encryption, found some");
    if (little_endian(rest, 34, 2) != 0) fail("expected it on the archive's one disk");

    compressed_ = little_endian(rest, 20, 4);
    uint64_t uncompressed = little_endian(rest, 24, 4), offset = little_endian(rest, 42, 4);
    const std::string_view extra =
        rest.substr(complete + static_cast<size_t>(name_size), static_cast<size_t>(extra_size));
    widen(extra, {&uncompressed, &compressed_, &offset});
    const auto limit = static_cast<uint64_t>(data_end_);
    if (offset > limit || limit - offset < static_cast<uint64_t>(kLocalSize)) {
      fail("expected a local header before ", data_end_, ", found it at ", offset);
    }
    if (method_ == 0 && compressed_ != uncompressed) {
      fail("expected one size for stored bytes, found ", compressed_, " and ", uncompressed);
    }
    ZipEntry entry;
    entry.crc = static_cast<uint32_t>(little_endian(rest, 16, 4));
    entry.stored = method_ == 0;
    entry.begin = data_begin(static_cast<int64_t>(offset), entry.crc);
    if (compressed_ > static_cast<uint64_t>(data_end_ - entry.begin)) {
      fail("expected its bytes between ", entry.begin, " and ", data_end_, ", found ",
           compressed_);
    }
    entry.size = static_cast<int64_t>(compressed_);
    const auto [at, inserted] = entries_.emplace(std::string(name_), entry);
    if (!inserted) fail("expected one of that name, found several");
    extents_.push_back({static_cast<int64_t>(offset), entry.begin + entry.size, &at->first});
    position_ += size;
  }

  // Replaces the values that say so by those of the zip64 field, which has just these.
  void widen(std::string_view extra, const std::vector<uint64_t*>& values) const {
    const auto is_narrow = [](const uint64_t* value) { return *value == kNarrow32; };
    if (std::none_of(values.begin(), values.end(), is_narrow)) return;
    while (extra.size() >= 4) {
      const uint64_t id = little_endian(extra, 0, 2);
      const auto size = static_cast<size_t>(little_endian(extra, 2, 2));
      if (size > extra.size() - 4) break;
      if (id == 1) {
        std::string_view field = extra.substr(4, size);
        for (uint64_t* value : values) {
          if (!is_narrow(value)) continue;
          if (field.size() < 8) fail("expected 8 bytes for each size in its zip64 field");
          *value = little_endian(field, 0, 8);
          field.remove_prefix(8);
        }
        return;
      }
      extra.remove_prefix(4 + size);
    }
    fail("expected a zip64 field for its sizes, found none");
  }

  // Where the entry's bytes begin, after the local header at `offset`, which has to agree.
  int64_t data_begin(int64_t offset, uint32_t crc) {
    const std::string header = file_.read(offset, kLocalSize, "zip: local header");
    if (!has_signature(header, "PK\3\4")) {
      fail("expected a local header at ", offset, ", found none");
    }
    const auto name_size = static_cast<int64_t>(little_endian(header, 26, 2));
    const auto extra_size = static_cast<int64_t>(little_endian(header, 28, 2));
    if (name_size + extra_size > data_end_ - offset - kLocalSize) {
      fail("expected its local header to end before ", data_end_, ", found ", name_size,
           " bytes of name and ", extra_size, " of extra fields at ", offset);
    }
    const std::string name =
        name_size == static_cast<int64_t>(name_.size())
            ? file_.read(offset + kLocalSize, name_size, "zip: local header")
            : std::string();
    if (name != name_) fail("expected that name in its local header, found another");
    if (little_endian(header, 8, 2) != method_ || little_endian(header, 6, 2) != flags_) {
      fail("expected the method ", method_, " and the flags ", flags_,
           " in its local header, found ", little_endian(header, 8, 2), " and ",
           little_endian(header, 6, 2));
    }
    // Bit 3: checksum and sizes come after the bytes, which is where streams write them.
    const uint64_t local_size = little_endian(header, 18, 4);
    const bool later = (flags_ & 8) != 0;
    if (!later && (little_endian(header, 14, 4) != crc ||
                   (local_size != kNarrow32 && local_size != compressed_))) {
      fail("expected its checksum and size in its local header, found others");
    }
    return offset + kLocalSize + name_size + extra_size;
  }

  void check_overlaps() {
    std::sort(extents_.begin(), extents_.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < extents_.size(); ++i) {
      name_ = *extents_[i].name;
      if (extents_[i].begin < extents_[i - 1].end) {
        fail("expected it after ", excerpt(*extents_[i - 1].name), ", which ends at ",
             extents_[i - 1].end, ", found it at ", extents_[i].begin, ", an overlap");
      }
    }
  }

  InputFile& file_;
  std::string text_;
  size_t position_ = 0;
  int64_t data_end_ = 0;
  std::map<std::string, ZipEntry> entries_;
  std::vector<Extent> extents_;
  // Of the entry that is read.
  std::string_view name_;
  uint64_t flags_ = 0, method_ = 0, compressed_ = 0;
};

}  // namespace

ZipArchive::ZipArchive(InputFile& file, Checksums checksums)
    : file_(file), checksums_(checksums), entries_(DirectoryReader(file).read()) {}

void ZipArchive::read(const std::string& name, const ZipEntry& entry, void* to) {
  TORCH_CHECK(entry.stored, file_.path(), ": zip: entry ", excerpt(name),
              ": expected stored bytes, found compressed ones, which torch.save never writes");
  file_.read(entry.begin, to, entry.size, "zip: entry " + excerpt(name));
  if (entry.crc == 0 && checksums_ == Checksums::optional) return;
  const uint32_t found = crc32(to, static_cast<size_t>(entry.size));
  TORCH_CHECK(found == entry.crc, file_.path(), ": zip: entry ", excerpt(name),
              ": expected the checksum ", entry.crc, ", found ", found, ": the file is damaged",
              entry.crc == 0 ? ", or was saved without checksums, which "
                               "missing_checksums(true) would accept"
                             : "");
}

std::string ZipArchive::read(const std::string& name, const ZipEntry& entry) {
  std::string bytes(static_cast<size_t>(entry.size), '\0');
  read(name, entry, bytes.data());
  return bytes;
}

}  // namespace mha::detail
