// Guards that the files are those of Python's safetensors: read here what it wrote, read there
// what is written here, and byte for byte the same file for the same contents. Exact
// throughout.
#include <gtest/gtest.h>

#include <cstdlib>

#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::detail {
namespace {

using test::is_bit_equal;
using test::read_bytes;
using test::TemporaryDirectory;

// The contents, which python/safetensors_roundtrip.py states anew.
TensorFile contents() {
  const std::pair<const char*, at::ScalarType> dtypes[] = {
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},  {"BF16", at::kBFloat16},
      {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort}, {"I8", at::kChar},
      {"U8", at::kByte},    {"BOOL", at::kBool}};
  const auto values = torch::tensor({0.0, 1.0, 2.0, 77.0, 100.0, 127.0}, at::kDouble);
  TensorFile file;
  for (const auto& [name, dtype] : dtypes) {
    file.tensors[std::string(name) + ".matrix"] = values.view({2, 3}).to(dtype);
    file.tensors[std::string(name) + ".scalar"] = torch::ones({}, dtype);
    file.tensors[std::string(name) + ".empty"] = torch::empty({2, 0, 3}, dtype);
  }
  file.tensors["\"name\"\\\n\xc3\xa9"] = torch::tensor({INFINITY, -0.0f, 1e-45f});
  file.metadata = {{"format", "pt \"quoted\" \\ and\n\x01\x7f\xc3\xa9\xe2\x82\xac"}};
  return file;
}

class SafetensorsRoundtripTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(MHA_TEST_PYTHON).empty()) {
      GTEST_SKIP()
          << "no Python with torch, numpy and safetensors was found at configure time; "
             "`bash cmake/bootstrap.sh test` installs them";
    }
  }

  // The script's exit status.
  static int run_python(const std::string& command, const std::string& path) {
    const std::string line = "\"" MHA_TEST_PYTHON "\" \"" MHA_PYTHON_SOURCE_DIR
                             "/safetensors_roundtrip.py\" " +
                             command + " \"" + path + "\"";
    return std::system(line.c_str());
  }

  const TemporaryDirectory directory_;
  const std::string path_ = directory_.file("roundtrip.safetensors");
};

TEST_F(SafetensorsRoundtripTest, WhatPythonWroteIsReadBitByBit) {
  ASSERT_EQ(run_python("write", path_), 0);
  const TensorFile found = read_safetensors(path_), expected = contents();
  EXPECT_EQ(found.metadata, expected.metadata);
  ASSERT_EQ(found.tensors.size(), expected.tensors.size());
  for (const auto& [name, tensor] : expected.tensors) {
    EXPECT_TRUE(is_bit_equal(found.tensors.at(name), tensor)) << name;
  }
}

TEST_F(SafetensorsRoundtripTest, PythonReadsWhatIsWrittenHereBitByBit) {
  write_safetensors(path_, contents());
  EXPECT_EQ(run_python("check", path_), 0);
}

TEST_F(SafetensorsRoundtripTest, EqualContentsAreEqualBytes) {
  ASSERT_EQ(run_python("write", path_), 0);
  const std::string ours = directory_.file("ours.safetensors");
  write_safetensors(ours, contents());
  EXPECT_EQ(read_bytes(ours), read_bytes(path_));
}

}  // namespace
}  // namespace mha::detail
