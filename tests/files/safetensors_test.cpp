// Guards the reader and writer of safetensors files: what keeps the format comes back bit by
// bit, what cannot be stored is refused, and a file appears whole or not at all. Everything
// here is exact. What breaks the format is in safetensors_error_test.cpp.
#include "files/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>

#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::detail {
namespace {

using test::error_of;
using test::is_bit_equal;
using test::read_bytes;
using test::safetensors_bytes;
using test::TemporaryDirectory;
using test::write_bytes;

TEST(SafetensorsTest, AGoodFileMadeByHandIsRead) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("good.safetensors");
  // Stored in another order than named, white space in the header, padding behind it.
  write_bytes(path, safetensors_bytes(
                        "{ \"b\" :\n{\"shape\":[2], \"data_offsets\":[4,6],\"dtype\":\"I8\"},"
                        "\t\"__metadata__\":{\"k\":\"v\"},"
                        R"("\u00e9":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                        R"("none":{"dtype":"F64","shape":[3,0],"data_offsets":[4,4]}})"
                        "       ",
                        std::string("\x00\x00\xc0\x3f\xff\x02", 6)));
  SafetensorsFile file(path);
  EXPECT_EQ(file.metadata(), (Metadata{{"k", "v"}}));
  EXPECT_EQ(file.entries().size(), 3u);
  EXPECT_TRUE(is_bit_equal(file.read("b"), torch::tensor({-1, 2}, at::kChar)));
  EXPECT_TRUE(is_bit_equal(file.read("\xc3\xa9"), torch::tensor(1.5f)));
  EXPECT_TRUE(is_bit_equal(file.read("none"), torch::empty({3, 0}, at::kDouble)));
  EXPECT_EQ(error_of([&] { file.read("a"); }), path + ": tensor 'a': not in the file");
}

TEST(SafetensorsTest, AFileWithoutTensorsIsRead) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("empty.safetensors");
  write_bytes(path, safetensors_bytes("{}"));
  EXPECT_TRUE(read_safetensors(path).tensors.empty());
}

TEST(SafetensorsTest, ADtypeWithoutCounterpartHindersOnlyTheTensorThatHasIt) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("fp8.safetensors");
  write_bytes(path,
              safetensors_bytes(R"({"q":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[0,3]},)"
                                R"("w":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})",
                                "abcd"));
  SafetensorsFile file(path);
  EXPECT_TRUE(is_bit_equal(file.read("w"), torch::tensor({100}, at::kByte)));
  EXPECT_EQ(error_of([&] { file.read("q"); }),
            path + ": tensor 'q': expected a dtype that can be read, found F8_E4M3");
}

TEST(SafetensorsTest, ABoolThatIsNeitherTrueNorFalseIsRefused) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("bool.safetensors");
  write_bytes(path,
              safetensors_bytes(R"({"m":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})",
                                std::string("\x00\x01\x02", 3)));
  SafetensorsFile file(path);
  EXPECT_EQ(error_of([&] { file.read("m"); }),
            path + ": tensor 'm': expected bytes 0 and 1 for BOOL, found 2 at 2");
}

TEST(SafetensorsTest, AFileThatIsCutAfterItWasOpenedGivesAnError) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("cut.safetensors");
  // More than the stream may have buffered with the header.
  write_safetensors(path, {{{"a", torch::ones({100000})}}, {}});
  SafetensorsFile file(path);
  std::filesystem::resize_file(path, 200000);
  const std::string error = error_of([&] { file.read("a"); });
  EXPECT_EQ(error.find(path + ": tensor 'a': expected 400000 bytes, found 199"), 0u) << error;
  EXPECT_NE(error.find("the file was cut after it was opened"), std::string::npos) << error;
}

TensorFile contents_of_every_dtype() {
  TensorFile file;
  for (const at::ScalarType type :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kBool}) {
    const std::string name = c10::toString(type);
    file.tensors[name] =
        torch::tensor({0.0, 1.0, 2.0, 77.0, 100.0, 127.0}).view({2, 3}).to(type);
    file.tensors[name + " scalar"] = torch::ones({}, type);
    file.tensors[name + " empty"] = torch::empty({2, 0, 3}, type);
  }
  file.metadata = {{"format", "pt"}, {"quote \" and \\", "line\nbreak \x01 \xc3\xa9"}};
  return file;
}

TEST(SafetensorsTest, EveryDtypeComesBackBitByBit) {
  const TemporaryDirectory directory;
  TensorFile written = contents_of_every_dtype();
  written.tensors["specials"] = torch::tensor({NAN, INFINITY, -INFINITY, -0.0f, 1e-45f});
  write_safetensors(directory.file("all.safetensors"), written);
  const TensorFile read = read_safetensors(directory.file("all.safetensors"));
  EXPECT_EQ(read.metadata, written.metadata);
  ASSERT_EQ(read.tensors.size(), written.tensors.size());
  for (const auto& [name, tensor] : written.tensors) {
    EXPECT_TRUE(is_bit_equal(read.tensors.at(name), tensor)) << name;
  }
}

TEST(SafetensorsTest, TheBytesAreThoseOfTheSpecification) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("bytes.safetensors");
  write_safetensors(path, {{{"b", torch::tensor({1, 2}, at::kByte)},
                            {"a", torch::tensor({3}, at::kByte)},
                            {"wide", torch::tensor({1}, at::kLong)}},
                           {{"format", "pt"}}});
  // The widest dtype first, then by name; the data begins at a multiple of 8.
  const std::string header = R"({"__metadata__":{"format":"pt"},)"
                             R"("wide":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
                             R"("a":{"dtype":"U8","shape":[1],"data_offsets":[8,9]},)"
                             R"("b":{"dtype":"U8","shape":[2],"data_offsets":[9,11]}})";
  const std::string padding((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(read_bytes(path),
            safetensors_bytes(header + padding, std::string("\1\0\0\0\0\0\0\0\3\1\2", 11)));
}

TEST(SafetensorsTest, MetadataAloneAndNothingAtAllCanBeWritten) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("few.safetensors");
  write_safetensors(path, {});
  EXPECT_EQ(read_bytes(path), safetensors_bytes("{}      "));
  write_safetensors(path, {{}, {{"a", "1"}, {"b", "2"}}});
  EXPECT_EQ(read_bytes(path), safetensors_bytes(R"({"__metadata__":{"a":"1","b":"2"}})"
                                                "      "));
  EXPECT_EQ(read_safetensors(path).metadata, (Metadata{{"a", "1"}, {"b", "2"}}));
}

TEST(SafetensorsTest, TensorsOfAnyStridesAreStoredContiguous) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("strides.safetensors");
  const auto base = torch::arange(12.0).view({3, 4});
  const std::map<std::string, at::Tensor> tensors = {{"transposed", base.t()},
                                                     {"sliced", base.slice(1, 1, 3)},
                                                     {"expanded", base[0].expand({5, 4})},
                                                     {"leaf", base.clone().requires_grad_()}};
  write_safetensors(path, {tensors, {}});
  SafetensorsFile file(path);
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(is_bit_equal(file.read(name), tensor.detach())) << name;
    EXPECT_TRUE(file.read(name).is_contiguous()) << name;
  }
}

TEST(SafetensorsTest, WhatCannotBeStoredIsRefusedBeforeAFileAppears) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("out.safetensors");
  const auto error = [&](const TensorFile& file) {
    return error_of([&] { write_safetensors(path, file); });
  };
  const auto one = torch::ones({1});
  EXPECT_EQ(error({{{"a", at::Tensor()}}, {}}), path + ": tensor 'a': it is undefined");
  EXPECT_EQ(
      error({{{"a", one.to(at::kComplexFloat)}}, {}}),
      path +
          ": tensor 'a': expected a dense tensor of a real dtype, found CPUComplexFloatType");
  EXPECT_EQ(
      error({{{"a", one.to_sparse()}}, {}}),
      path + ": tensor 'a': expected a dense tensor of a real dtype, found SparseCPUFloatType");
  EXPECT_EQ(error({{{"a", one.to(at::kMeta)}}, {}}),
            path + ": tensor 'a': expected a tensor with memory, found one on meta");
  EXPECT_EQ(error({{{"a", at::_efficientzerotensor({1}, one.options())}}, {}}),
            path +
                ": tensor 'a': expected a tensor with memory, found zeros without, of shape "
                "[1]");
  EXPECT_EQ(error({{{"__metadata__", one}}, {}}),
            path + ": tensor '__metadata__': the name is reserved");
  EXPECT_EQ(error({{{"\xff", one}}, {}}), path + ": '\\xff': expected UTF-8");
  EXPECT_EQ(error({{}, {{"k", "\xff"}}}), path + ": '\\xff': expected UTF-8");
  EXPECT_EQ(directory.count(), 0);
}

TEST(SafetensorsTest, AFailedWriteLeavesTheOldFileAndNothingElse) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("out.safetensors");
  const TensorFile small = {{{"a", torch::ones({4})}}, {}};
  write_safetensors(path, small);
  const std::string before = read_bytes(path);

  // A limit on the size of files stands in for a full disk.
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const rlimit low{100000, old.rlim_max};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &low);
  const std::string error = error_of([&] {
    write_safetensors(path, {{{"a", torch::ones({1 << 20})}}, {}});
  });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, old_handler);

  EXPECT_EQ(error, path + ": cannot be written: File too large");
  EXPECT_EQ(read_bytes(path), before);
  EXPECT_EQ(directory.count(), 1);
}

TEST(SafetensorsTest, WhereNoFileCanBeIsSaid) {
  const TemporaryDirectory directory;
  const TensorFile file = {{{"a", torch::ones({4})}}, {}};
  const auto error = [&](const std::string& path) {
    return error_of([&] { write_safetensors(path, file); });
  };
  const std::string nowhere = directory.file("no/such/folder/x.safetensors");
  EXPECT_EQ(error(nowhere), nowhere + ": cannot be written: No such file or directory");
  std::filesystem::create_directory(directory.file("folder"));
  EXPECT_EQ(error(directory.file("folder")),
            directory.file("folder") + ": expected a regular file, found a directory");
  // Renaming a file over a device would replace it.
  EXPECT_EQ(error("/dev/null"),
            "/dev/null: expected a regular file, found a device, pipe or socket");
  EXPECT_EQ(directory.count(), 1);
}

TEST(SafetensorsTest, WritingThroughALinkReplacesTheFileAndKeepsTheLink) {
  const TemporaryDirectory directory;
  const std::string link = directory.file("link"), target = directory.file("target");
  write_bytes(target, "old");
  std::filesystem::create_symlink("target", link);
  write_safetensors(link, {});
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(read_bytes(target), safetensors_bytes("{}      "));
}

TEST(SafetensorsTest, ANameAsLongAsNamesCanBeIsWritten) {
  const TemporaryDirectory directory;
  const std::string path = directory.file(std::string(255, 'n'));
  write_safetensors(path, {});
  EXPECT_EQ(directory.count(), 1);
  EXPECT_TRUE(read_safetensors(path).tensors.empty());
}

}  // namespace
}  // namespace mha::detail
