// Guards that the reader refuses what breaks the format of safetensors files: with an error
// that says where and why, and before it costs time or memory. The files are made by hand from
// the format's specification. Whole messages are compared, up to where the JSON parser's begin.
#include <gtest/gtest.h>

#include <algorithm>

#include "files/safetensors.h"
#include "support/cost.h"
#include "support/file_support.h"
#include "support/torch_headers.h"

namespace mha::detail {
namespace {

using test::error_of;
using test::safetensors_bytes;
using test::TemporaryDirectory;
using test::write_bytes;

/// The bytes of a file, and how the error goes on after the path.
struct BadFile {
  std::string bytes;
  std::string error;
};

void expect_refused(const std::vector<BadFile>& files) {
  const TemporaryDirectory directory;
  for (const BadFile& bad : files) {
    const std::string path = directory.file("bad.safetensors");
    write_bytes(path, bad.bytes);
    const std::string error = error_of([&] { SafetensorsFile file(path); });
    EXPECT_EQ(error.substr(0, path.size() + 2 + bad.error.size()), path + ": " + bad.error)
        << error << "\nfor the header "
        << bad.bytes.substr(std::min<size_t>(8, bad.bytes.size()), 200);
  }
}

std::string zeros(size_t count) {
  return std::string(count, '\0');
}

// A file with one tensor `a`, whose entry is given, and 8 bytes of data.
std::string with_entry(const std::string& entry) {
  return safetensors_bytes("{\"a\":" + entry + "}", zeros(8));
}

// The same with one of the three fields given, and good ones for the others.
std::string with_dtype(const std::string& dtype) {
  return with_entry("{\"dtype\":" + dtype + R"(,"shape":[2],"data_offsets":[0,8]})");
}
std::string with_shape(const std::string& shape) {
  return with_entry(R"({"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,8]})");
}
std::string with_offsets(const std::string& offsets) {
  return with_entry(R"({"dtype":"F32","shape":[2],"data_offsets":)" + offsets + "}");
}

std::string u8_entry(int64_t begin, int64_t end) {
  return R"({"dtype":"U8","shape":[)" + std::to_string(end - begin) + R"(],"data_offsets":[)" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

TEST(SafetensorsErrorTest, AFileWithoutAWholeHeaderIsRefused) {
  const std::string huge = "\xff\xff\xff\xff\xff\xff\xff\xff";
  expect_refused({
      {"", "expected the header's length in 8 bytes, found a file of 0 bytes"},
      {"\x02", "expected the header's length in 8 bytes, found a file of 1 bytes"},
      {zeros(7), "expected the header's length in 8 bytes, found a file of 7 bytes"},
      {zeros(8), "header: expected it to begin with '{', found ''"},
      {huge + "{}",
       "header: expected a length of at most 16777216 bytes, found 18446744073709551615"},
      {std::string("\1\0\0\1\0\0\0\0", 8) + "{}",
       "header: expected a length of at most 16777216 bytes, found 16777217"},
      {std::string("\0\0\0\1\0\0\0\0", 8) + "{}",
       "header: expected 16777216 bytes, found 2 in the file"},
      {std::string("\x03\0\0\0\0\0\0\0", 8) + "{}",
       "header: expected 3 bytes, found 2 in the file"},
  });
}

TEST(SafetensorsErrorTest, AHeaderThatIsNoJsonObjectIsRefusedWithItsPlace) {
  const std::string json = "header: expected valid JSON, found at byte ";
  expect_refused({
      {safetensors_bytes(""), "header: expected it to begin with '{', found ''"},
      {safetensors_bytes("    "), "header: expected it to begin with '{', found ''"},
      {safetensors_bytes(" {}"), "header: expected it to begin with '{', found ' '"},
      {safetensors_bytes("\xef\xbb\xbf{}"),
       "header: expected it to begin with '{', found '\\xef'"},
      {safetensors_bytes("[]"), "header: expected it to begin with '{', found '['"},
      {safetensors_bytes("null"), "header: expected it to begin with '{', found 'n'"},
      {safetensors_bytes("{"), json + "2: "},
      {safetensors_bytes("{}}"), json + "3: "},
      {safetensors_bytes("{} {}"), json + "4: "},
      {safetensors_bytes("{a:1}"), json + "2: "},
      {safetensors_bytes("{\"a\":" + u8_entry(0, 0) + ",}"), json},
      {safetensors_bytes("{/* none */}"), json + "2: "},
      {safetensors_bytes("{\"\xff\":1}"), json + "3: "},          // no UTF-8
      {safetensors_bytes("{\"\xc0\xaf\":1}"), json + "3: "},      // an overlong '/'
      {safetensors_bytes("{\"\xed\xa0\x80\":1}"), json + "4: "},  // a surrogate in UTF-8
      {safetensors_bytes("{\"\\ud800\":1}"), json},               // half of a pair
      {safetensors_bytes("{\"a\nb\":1}"), json + "4: "},
      {safetensors_bytes("{}" + zeros(1)),
       "header: expected text, found a zero byte at byte 2"},
      {safetensors_bytes("{}" + zeros(1) + "{{"),
       "header: expected text, found a zero byte at byte 2"},
      {with_shape("[1e999]"), json},
  });
}

TEST(SafetensorsErrorTest, AnEntryOfTheWrongFormIsRefusedByTheNameOfItsTensor) {
  const std::string a = "tensor 'a': ";
  const std::string dtype = a + "'dtype': ", shape = a + "'shape': ",
                    offsets = a + "'data_offsets': ";
  const std::string whole = "expected whole numbers from 0 to 9223372036854775807, found ";
  expect_refused({
      {with_entry("1"), a + "expected an object, found 1"},
      {with_entry("null"), a + "expected an object, found null"},
      {with_entry("[]"), a + "expected an object, found an array"},
      {with_entry("\"F32\""), a + "expected an object, found the string 'F32'"},
      {with_entry("{}"), a + "expected a dtype, found none"},
      {with_entry(R"({"dtype":"F32","data_offsets":[0,8]})"),
       a + "expected a shape, found none"},
      {with_entry(R"({"dtype":"F32","shape":[2]})"), a + "expected data_offsets, found none"},
      {with_entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"strides":[1]})"),
       a + "'strides': expected only dtype, shape and data_offsets"},
      {with_entry(R"({"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})"),
       dtype + "expected one value, found several"},
      {with_entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"shape":[2]})"),
       shape + "expected one value, found several"},
      {with_dtype("32"), dtype + "expected a string, found 32"},
      {with_dtype("[]"), dtype + "expected a string, found an array"},
      {with_dtype("\"F31\""),
       dtype + "expected one of BOOL, F4, F6_E2M3, F6_E3M2, U8, I8, F8_E5M2, F8_E4M3, F8_E8M0, "
               "F8_E4M3FNUZ, F8_E5M2FNUZ, I16, U16, F16, BF16, I32, U32, F32, C64, F64, I64, "
               "U64, found 'F31'"},
      {with_dtype("\"f32\""), dtype + "expected one of BOOL"},
      {with_shape("2"), shape + "expected an array, found 2"},
      {with_shape("{}"), shape + "expected an array, found an object"},
      {with_shape("[-2]"), shape + whole + "-2"},
      {with_shape("[-0]"), shape + whole + "-0"},
      {with_shape("[2.0]"), shape + whole + "the number '2.0'"},
      {with_shape("[2e0]"), shape + whole + "the number '2e0'"},
      {with_shape("[true]"), shape + whole + "true"},
      {with_shape("[\"2\"]"), shape + whole + "the string '2'"},
      {with_shape("[[2]]"), shape + whole + "an array"},
      {with_shape("[9223372036854775808]"), shape + whole + "9223372036854775808"},
      {with_shape("[18446744073709551618]"),
       shape + whole + "the number '18446744073709551618'"},
      {with_offsets("[]"), offsets + "expected 2 numbers, found 0"},
      {with_offsets("[8]"), offsets + "expected 2 numbers, found 1"},
      {with_offsets("[0,8,8]"), offsets + "expected 2 numbers, found more"},
      {with_offsets("[-8,0]"), offsets + whole + "-8"},
      {with_offsets("\"0,8\""), offsets + "expected an array, found the string '0,8'"},
  });
}

TEST(SafetensorsErrorTest, ATensorWhoseSizeIsNotThatOfItsDataIsRefused) {
  const std::string a = "tensor 'a': ";
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  expect_refused({
      {with_shape("[3]"), a + "expected 12 bytes for F32 [3], found 8 in data_offsets [0, 8]"},
      {with_shape("[]"), a + "expected 4 bytes for F32 [], found 8 in data_offsets [0, 8]"},
      {with_shape("[0]"), a + "expected 0 bytes for F32 [0], found 8 in data_offsets [0, 8]"},
      {with_dtype("\"F64\""),
       a + "expected 16 bytes for F64 [2], found 8 in data_offsets [0, 8]"},
      {with_dtype("\"F8_E4M3\""), a + "expected 2 bytes for F8_E4M3 [2], found 8"},
      {with_dtype("\"F4\""), a + "expected 1 bytes for F4 [2], found 8"},
      {with_dtype("\"F6_E2M3\""), a + "shape: expected whole bytes, found F6_E2M3 [2]"},
      // 2^62 + 2 elements of 4 bytes are 8 bytes modulo 2^64.
      {with_shape("[4611686018427387906]"),
       a + "shape: expected fewer than 2^63 bits, found [4611686018427387906]"},
      {with_shape("[4294967296,4294967296]"),
       a + "shape: expected fewer than 2^63 bits, found"},
      {with_shape("[0,4294967296,4294967296]"),
       a + "shape: expected fewer than 2^63 bits, found"},
      {with_shape("[1000000000,1000000]"), a + "expected 4000000000000000 bytes for F32"},
      {with_shape(ones + "]"), a + "'shape': expected at most 64 dimensions, found more"},
      {with_offsets("[8,0]"), a + "expected begin <= end, found data_offsets [8, 0]"},
      {with_offsets("[0,16]"),
       a + "expected the 8 bytes of data that the file has, found data_offsets [0, 16]"},
      {with_offsets("[9223372036854775800,9223372036854775807]"),
       a + "expected the 8 bytes of data that the file has, found data_offsets"},
  });
}

TEST(SafetensorsErrorTest, TensorsHaveToCoverTheDataExactlyOnce) {
  const auto two = [](const std::string& a, const std::string& b, size_t data) {
    return safetensors_bytes("{\"a\":" + a + ",\"b\":" + b + "}", zeros(data));
  };
  const std::string before = ", where that of the tensor before it ends, found data_offsets ";
  expect_refused({
      {two(u8_entry(0, 4), u8_entry(5, 8), 8),
       "tensor 'b': expected its data at 4" + before + "[5, 8], which leaves a gap"},
      {two(u8_entry(0, 4), u8_entry(3, 8), 8),
       "tensor 'b': expected its data at 4" + before + "[3, 8], which leaves an overlap"},
      {two(u8_entry(0, 8), u8_entry(0, 8), 8),
       "tensor 'b': expected its data at 8" + before + "[0, 8], which leaves an overlap"},
      {two(u8_entry(4, 8), u8_entry(1, 4), 8),
       "tensor 'b': expected its data at 0" + before + "[1, 4], which leaves a gap"},
      {two(u8_entry(0, 8), u8_entry(4, 4), 8),
       "tensor 'b': expected its data at 8" + before + "[4, 4], which leaves an overlap"},
      {two(u8_entry(0, 4), u8_entry(4, 8), 9),
       "expected the file to end with the data of its last tensor, found 1 bytes after it"},
      {two(u8_entry(0, 4), u8_entry(4, 8), 7),
       "tensor 'b': expected the 7 bytes of data that the file has, found data_offsets [4, 8]"},
      {safetensors_bytes("{}", "x"),
       "expected the file to end with the data of its last tensor, found 1 bytes after it"},
  });
}

TEST(SafetensorsErrorTest, AKeyThatIsThereTwiceIsRefused) {
  const std::string entry = u8_entry(0, 0);
  expect_refused({
      {safetensors_bytes("{\"a\":" + entry + ",\"a\":" + entry + "}"),
       "tensor 'a': expected one of that name, found several"},
      {safetensors_bytes("{\"a\":" + entry + ",\"b\":" + entry + ",\"\\u0061\":" + entry + "}"),
       "tensor 'a': expected one of that name, found several"},
      {safetensors_bytes(R"({"__metadata__":{},"__metadata__":{}})"),
       "__metadata__: expected one of that name, found several"},
      {safetensors_bytes(R"({"__metadata__":{"k":"1","k":"1"}})"),
       "metadata 'k': expected one value, found several"},
  });
}

TEST(SafetensorsErrorTest, MetadataThatIsNotFromStringToStringIsRefused) {
  expect_refused({
      {safetensors_bytes(R"({"__metadata__":"pt"})"),
       "__metadata__: expected an object, found the string 'pt'"},
      {safetensors_bytes(R"({"__metadata__":null})"),
       "__metadata__: expected an object, found null"},
      {safetensors_bytes(R"({"__metadata__":{"k":1}})"),
       "metadata 'k': expected a string, found 1"},
      {safetensors_bytes(R"({"__metadata__":{"k":{}}})"),
       "metadata 'k': expected a string, found an object"},
      {safetensors_bytes(R"({"__metadata__":{"k":["v"]}})"),
       "metadata 'k': expected a string, found an array"},
      {safetensors_bytes(R"({"__metadata__":{"k":null}})"),
       "metadata 'k': expected a string, found null"},
  });
}

TEST(SafetensorsErrorTest, AnErrorShowsNoControlCharactersAndNoEndlessNames) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("bad.safetensors");
  write_bytes(path, safetensors_bytes("{\"\\u001b[2J" + std::string(100000, 'x') + "\":1}"));
  const std::string error = error_of([&] { SafetensorsFile file(path); });
  EXPECT_NE(error.find("tensor '\\x1b[2Jxxx"), std::string::npos) << error;
  EXPECT_EQ(error.find('\x1b'), std::string::npos);
  EXPECT_LT(error.size(), path.size() + 400);
}

TEST(SafetensorsErrorTest, WhatIsNoRegularFileIsRefused) {
  const TemporaryDirectory directory;
  const std::string missing = directory.file("none.safetensors");
  EXPECT_EQ(error_of([&] { SafetensorsFile file(missing); }),
            missing + ": cannot be opened: No such file or directory");
  EXPECT_EQ(error_of([&] { SafetensorsFile file(directory.file("")); }),
            directory.file("") + ": expected a regular file, found a directory");
  EXPECT_EQ(error_of([&] { SafetensorsFile file("/dev/zero"); }),
            "/dev/zero: expected a regular file, found a device, pipe or socket");
}

TEST(SafetensorsErrorTest, AHostileFileCostsLittleWorkAnd16MiBBeyondItsSize) {
  struct Hostile {
    const char* what;
    std::string header;
    std::string error;
  };
  const size_t much = 4 << 20;
  std::string entries = "{";
  for (int i = 0; i < 20000; ++i)
    entries += "\"" + std::to_string(i) + "\":" + u8_entry(0, 0) + ",";
  std::string too_many = "{", long_metadata = "{\"__metadata__\":{";
  for (int i = 0; too_many.size() < 16'000'000; ++i)
    too_many += "\"" + std::to_string(i) + "\":" + u8_entry(0, 0) + ",";
  for (int i = 0; i < 15; ++i)
    long_metadata += "\"" + std::to_string(i) + "\":\"" + std::string(1'000'000, 'x') + "\",";
  std::string nested;
  for (int i = 0; i < 1000000; ++i) nested += "{\"a\":";
  const Hostile files[] = {
      {"nested arrays", "{\"a\":" + std::string(1000000, '['), "an array"},
      {"nested objects", nested, "'a': expected only dtype"},
      {"a string", "{\"" + std::string(much, 'x') + "\":1}", "quotation mark"},
      {"spaces", "{" + std::string(much, ' ') + "}", "quotation mark"},
      {"digits", "{\"a\":" + std::string(much, '1') + "}", "quotation mark"},
      {"escapes", "{\"" + std::string(much, '\\'), "quotation mark"},
      {"a dimension list", "{\"a\":{\"shape\":[1" + std::string(1 << 19, ',') + "]}}", "JSON"},
      {"tensors of a size that only a promise gives",
       R"({"a":{"dtype":"F64","shape":[1000000000],"data_offsets":[0,8000000000]}})",
       "of data"},
      {"many tensors and one fault", entries + "\"x\":1}", "tensor 'x'"},
      {"zero bytes", "{" + zeros(15 << 20), "zero byte"},
      {"too many tensors", too_many + "\"x\":1}", "at most 10485760 bytes in all"},
      {"metadata without end", long_metadata + "\"x\":1}}", "at most 10485760 bytes in all"},
  };
  const TemporaryDirectory directory;
  const std::string path = directory.file("hostile.safetensors");
  error_of([&] { SafetensorsFile file(path); });  // what only the first error costs
  test::check_that_memory_is_measured();
  for (const Hostile& hostile : files) {
    SCOPED_TRACE(hostile.what);
    write_bytes(path, safetensors_bytes(hostile.header));
    std::string error;
    const test::Cost cost =
        test::cost_of([&] { error = error_of([&] { SafetensorsFile file(path); }); });
    EXPECT_NE(error.find(hostile.error), std::string::npos) << error;
    EXPECT_LT(cost.work, 10);
    EXPECT_LT(cost.memory, static_cast<int64_t>(hostile.header.size()) + (16 << 20));
  }
}

}  // namespace
}  // namespace mha::detail
