// Guards that zip archives which are broken, or are not what they say they are, are refused as
// weight files with an error that says where and why. They are made by hand from the format's
// specification; whole messages are compared.
#include <gtest/gtest.h>

#include <functional>

#include "files/torch_file.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_file_support.h"
#include "support/torch_headers.h"

namespace mha::detail {
namespace {

using test::error_of;
using test::expect_refused;
using test::good_pickle;
using test::is_bit_equal;
using test::little_endian;
using test::TemporaryDirectory;
using test::torch_file_bytes;
using test::write_bytes;
using test::zip_bytes;
using test::ZipEnd;
using test::ZipItem;

TEST(ZipArchiveErrorTest, TheFilesMadeByHandAreGoodWhereTheyAreNotBroken) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("good.pt");
  const auto expected = torch::arange(6, at::kFloat).view({2, 3});
  write_bytes(path, torch_file_bytes(good_pickle()));
  EXPECT_TRUE(is_bit_equal(TorchFile(path).read("x"), expected));

  // With zip64 records, and the sizes of the storage only in them.
  const std::string data(static_cast<const char*>(expected.data_ptr()), 24);
  ZipItem item{"a/data/0", data};
  item.size = item.offset = 0xffffffff;
  const std::string pickle = good_pickle();
  const uint64_t begin = 30 + 10 + pickle.size();
  item.extra = little_endian(7, 2) + little_endian(1, 2) + "?" + little_endian(1, 2) +
               little_endian(24, 2) + little_endian(24, 8) + little_endian(24, 8) +
               little_endian(begin, 8);
  ZipEnd end;
  end.zip64 = true;
  write_bytes(path, zip_bytes({{"a/data.pkl", pickle}, item}, end));
  EXPECT_TRUE(is_bit_equal(TorchFile(path).read("x"), expected));
}

// As torch.serialization.set_crc32_options(False) leaves them.
TEST(ZipArchiveErrorTest, ChecksumsThatWereNotComputedAreMissedOnlyWhereThatIsAllowed) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x.pt");
  const auto expected = torch::arange(6, at::kFloat).view({2, 3});
  ZipItem pickle{"a/data.pkl", good_pickle()};
  ZipItem data{"a/data/0", std::string(static_cast<const char*>(expected.data_ptr()), 24)};
  pickle.crc = data.crc = 0;
  write_bytes(path, zip_bytes({pickle, data}));
  const std::string error = error_of([&] { TorchFile file(path); });
  EXPECT_NE(error.find("expected the checksum 0, found "), std::string::npos) << error;
  EXPECT_NE(error.find("or was saved without checksums, which missing_checksums(true) would "
                       "accept"),
            std::string::npos)
      << error;
  EXPECT_TRUE(is_bit_equal(TorchFile(path, Checksums::optional).read("x"), expected));
  data.crc = 7;
  write_bytes(path, zip_bytes({pickle, data}));
  EXPECT_NE(error_of([&] {
              TorchFile(path, Checksums::optional).read("x");
            }).find("expected the checksum 7"),
            std::string::npos);
}

TEST(ZipArchiveErrorTest, AnArchiveWithoutAWholeEndIsRefused) {
  const std::string good = torch_file_bytes(good_pickle());
  const auto end = [&](const ZipEnd& wrong) { return zip_bytes({{"a/data.pkl", "x"}}, wrong); };
  ZipEnd comment, disk, count, size, offset, place, count64, before, fewer, more;
  comment.comment_size = 3;
  disk.disk = 1;
  count.count = 20001;
  size.size = 9 << 20;
  offset.offset = 7;
  place.zip64 = count64.zip64 = true;
  place.place64 = 3;
  count64.count64 = 2;
  before.before = "hidden";
  fewer.count = 0;
  more.count = 2;
  expect_refused({
      {"PK\3\4", "zip: expected an end record of 22 bytes, found a file of 4"},
      {good.substr(0, good.size() - 1),
       "zip: expected an end record in the last 22 bytes, found none: the file is cut, or "
       "something was appended to it"},
      {good + "x",
       "zip: expected an end record in the last 22 bytes, found none: the file is cut, or "
       "something was appended to it"},
      {end(comment), "zip: expected no comment, found one of 3 bytes"},
      {end(disk), "zip: expected an archive on one disk, found several"},
      {end(count), "zip: expected at most 20000 entries, found 20001"},
      {end(size), "zip: expected a directory of at most 8388608 bytes, found 9437184"},
      {end(offset), "zip: expected the directory to end at 97, found 56 bytes at 7"},
      {end(place), "zip: zip64 end record: expected it at 97, found 3"},
      {end(count64),
       "zip: expected equal end records, found 1 entries in 56 bytes at 41 and 2 in 56 at 41"},
      {end(fewer), "zip: directory: expected 0 entries, found 56 more bytes after them"},
      {end(more), "zip: directory: expected entry 1 at byte 56, found none"},
      {zip_bytes({}),
       "expected a file of torch.save, found a zip archive without an entry "
       ".../data.pkl"},
  });
  const TemporaryDirectory directory;  // what lies between is no entry, and read by nobody
  write_bytes(directory.file("x"), end(before));
  EXPECT_NE(error_of([&] { TorchFile file(directory.file("x")); }).find("protocol"),
            std::string::npos);
}

TEST(ZipArchiveErrorTest, AnEntryThatIsNotWhatTheDirectorySaysIsRefused) {
  const auto with = [](const std::function<void(ZipItem&)>& change) {
    ZipItem item{"a/data.pkl", good_pickle()};
    change(item);
    return zip_bytes({item, {"a/data/0", std::string(24, 'x')}});
  };
  const std::string entry = "zip: entry 'a/data.pkl': ";
  const std::string size = std::to_string(good_pickle().size());
  const std::string end = std::to_string(30 + 10 + good_pickle().size() + 30 + 8 + 24);
  expect_refused({
      {with([](ZipItem& item) { item.method = 8; }),
       entry + "expected stored bytes, found compressed ones, which torch.save never writes"},
      {with([](ZipItem& item) { item.flags |= 1; }),
       entry + "expected no encryption, found some"},
      {with([](ZipItem& item) { item.disk = 1; }),
       entry + "expected it on the archive's one disk"},
      {with([](ZipItem& item) { item.crc = 7; }),
       entry + "expected the checksum 7, found " +
           std::to_string(crc32(good_pickle().data(), good_pickle().size())) +
           ": the file is damaged"},
      {with([](ZipItem& item) { item.original_size = 3; }),
       entry + "expected one size for stored bytes, found " + size + " and 3"},
      {with([](ZipItem& item) { item.size = 1000; }),
       entry + "expected its bytes between 40 and " + end + ", found 1000"},
      {with([](ZipItem& item) { item.size = 0xffffffff; }),
       entry + "expected a zip64 field for its sizes, found none"},
      {with([](ZipItem& item) {
         item.size = 0xffffffff;
         item.extra = little_endian(1, 2) + little_endian(8, 2) + std::string(8, '\x7f');
       }),
       entry + "expected 8 bytes for each size in its zip64 field"},
      {with([](ZipItem& item) {
         item.size = 0xffffffff;
         item.extra = little_endian(1, 2) + little_endian(16, 2) + std::string(16, '\x7f');
       }),
       entry + "expected its bytes between 40 and " + end + ", found 9187201950435737471"},
      {with([](ZipItem& item) { item.offset = 5000; }),
       entry + "expected a local header before " + end + ", found it at 5000"},
      {with([](ZipItem& item) { item.offset = 1; }),
       entry + "expected a local header at 1, found none"},
      {with([](ZipItem& item) { item.local_signature = "PK\1\2"; }),
       entry + "expected a local header at 0, found none"},
      {with([](ZipItem& item) { item.local_name = "a/data.pkx"; }),
       entry + "expected that name in its local header, found another"},
      {with([](ZipItem& item) { item.local_name = "a"; }),
       entry + "expected that name in its local header, found another"},
      {with([](ZipItem& item) { item.local_method = 8; }),
       entry +
           "expected the method 0 and the flags 2048 in its local header, found 8 and 2048"},
      {with([](ZipItem& item) { item.local_size = 3; }),
       entry + "expected its checksum and size in its local header, found others"},
      {with([](ZipItem& item) { item.name = std::string(1025, 'n'); }),
       "zip: entry '" + std::string(200, 'n') +
           "...': expected a name of at most 1024 bytes, found 1025"},
  });
}

TEST(ZipArchiveErrorTest, EntriesMayNotOverlapOrRepeat) {
  const ZipItem pickle{"a/data.pkl", good_pickle()};
  // The second entry's local header lies inside the first one's bytes.
  ZipItem outer{"a/outer", zip_bytes({{"a/inner", "x"}}).substr(0, 38)}, inner{"a/inner", "x"};
  const uint64_t inner_at = 30 + 7;
  inner.offset = inner_at;
  ZipItem again = pickle;
  again.offset = 0;
  expect_refused({
      {zip_bytes({outer, inner}),
       "zip: entry 'a/inner': expected it after 'a/outer', which ends at 75, found it at 37, "
       "an "
       "overlap"},
      {zip_bytes({pickle, again}),
       "zip: entry 'a/data.pkl': expected one of that name, found several"},
      {zip_bytes({pickle, {"b/data.pkl", good_pickle()}}),
       "zip: expected one entry .../data.pkl, found several"},
      {zip_bytes({pickle, {"a/byteorder", "big"}}),
       "'a/byteorder': expected 'little', found 'big'"},
      {zip_bytes({pickle, {"a/byteorder", std::string(17, 'x')}}),
       "'a/byteorder': expected 'little', found 17 bytes"},
  });
}

}  // namespace
}  // namespace mha::detail
