#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "files/checksums.h"
#include "files/input_file.h"

namespace mha::detail {

/// One entry of a zip archive.
struct ZipEntry {
  int64_t begin = 0, size = 0;  // where its bytes lie in the file
  uint32_t crc = 0;
  bool stored = true;  // as it is, not compressed
};

/// The directory of a zip archive whose entries are stored as they are, as torch.save writes
/// them. Sizes come from the central directory; every entry is compared with its local header,
/// lies inside the file and overlaps no other. Compressed entries may be there, but cannot be
/// read.
///
/// Refused: several disks, encryption, a comment or other bytes at the end or between the
/// entries and the directory, names that occur twice, more than `kMaxZipEntries` entries.
/// Source of the format: PKWARE, "APPNOTE.TXT - .ZIP File Format Specification", 6.3.10.
class ZipArchive {
 public:
  /// Throws `c10::Error` that starts with the path of `file`, which has to outlive this.
  explicit ZipArchive(InputFile& file, Checksums checksums = Checksums::required);

  const std::map<std::string, ZipEntry>& entries() const { return entries_; }

  /// Reads an entry's `entry.size` bytes. Throws if it is compressed or its checksum is wrong,
  /// unless it has none and need not.
  void read(const std::string& name, const ZipEntry& entry, void* to);
  std::string read(const std::string& name, const ZipEntry& entry);

 private:
  InputFile& file_;
  const Checksums checksums_;
  std::map<std::string, ZipEntry> entries_;
};

inline constexpr int64_t kMaxZipEntries = 20'000;

}  // namespace mha::detail
