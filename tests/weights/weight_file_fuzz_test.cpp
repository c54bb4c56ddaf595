// Guards that no change to the bytes of a good weight file crashes a reader or takes it long:
// it is read or refused with a `c10::Error`. The seeds are fixed; MHA_FUZZ_ROUNDS asks for more
// rounds than the few of every day, best under the sanitizers.
#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include <cstdlib>
#include <random>

#include "files/safetensors.h"
#include "files/sharded_file.h"
#include "files/tensor_source.h"
#include "support/cost.h"
#include "support/file_support.h"
#include "support/torch_file_support.h"
#include "support/torch_headers.h"

namespace mha {
namespace {

using test::read_bytes;
using test::TemporaryDirectory;
using test::work_of;
using test::write_bytes;

int rounds() {
  const char* asked = std::getenv("MHA_FUZZ_ROUNDS");
  return asked == nullptr ? 100 : std::atoi(asked);
}

// One to four changes: other bytes, extreme ones, missing, repeated and moved ones.
std::string mutated(std::string bytes, std::mt19937& random) {
  const auto below = [&](size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
  };
  for (size_t changes = 1 + below(4); changes > 0 && !bytes.empty(); --changes) {
    const size_t at = below(bytes.size());
    const size_t size = std::min(1 + below(8), bytes.size() - at);
    switch (below(6)) {
      case 0:
        bytes[at] = static_cast<char>(below(256));
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 2:
        for (size_t i = 0; i < size; ++i) bytes[at + i] = below(2) == 0 ? '\0' : '\xff';
        break;
      case 3:
        bytes.erase(at, size);
        break;
      case 4:
        bytes.insert(below(bytes.size()), bytes.substr(at, size));
        break;
      default:
        bytes.resize(bytes.size() - below(std::min<size_t>(bytes.size(), 32)));
    }
  }
  return bytes;
}

// Writes `file(mutated seed)` again and again and reads all of it.
template <typename File>
void fuzz(const std::string& path, const std::string& seed, File file) {
  std::mt19937 random(20240229);
  int read = 0, refused = 0;
  for (int round = 0; round < rounds(); ++round) {
    write_bytes(path, file(round == 0 ? seed : mutated(seed, random)));
    const double work = work_of([&] {
      try {
        const auto source = detail::open_tensors(path);
        for (const auto& [name, entry] : source->entries()) source->read(name);
        (void)options_from_file(path, 2);
        ++read;
      } catch (const c10::Error&) {
        ++refused;
      }
    });
    EXPECT_LT(work, 10) << "round " << round;
  }
  EXPECT_EQ(read + refused, rounds());
  EXPECT_GT(read, 0);
  EXPECT_GT(refused, rounds() / 4);
}

const auto unchanged = [](const std::string& bytes) { return bytes; };

class WeightFileFuzzTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.file("file");
  const MultiHeadAttention module_{4, 2};
};

TEST_F(WeightFileFuzzTest, Safetensors) {
  save(module_, path_);
  fuzz(path_, read_bytes(path_), unchanged);
}

TEST_F(WeightFileFuzzTest, HeadersOfSafetensors) {
  save(module_, path_);
  const std::string whole = read_bytes(path_);
  const size_t size = static_cast<unsigned char>(whole[0]) +
                      256 * static_cast<size_t>(static_cast<unsigned char>(whole[1]));
  fuzz(path_, whole.substr(8, size), [&](const std::string& header) {
    return test::safetensors_bytes(header, whole.substr(8 + size));
  });
}

TEST_F(WeightFileFuzzTest, ZipArchives) {
  torch::save(module_, path_);
  fuzz(path_, read_bytes(path_), unchanged);
}

// With the checksums right, so that what is wrong is the pickle.
TEST_F(WeightFileFuzzTest, Pickles) {
  std::string dict = "}(";
  for (const char* name : {"W_q", "W_k", "W_v", "W_o"}) {
    dict += test::pickled_text(std::string(name) + ".weight") + "q" + std::string(1, '\0') +
            test::pickled_tensor(test::six_floats(), 1, {2, 2}, {2, 1});
  }
  fuzz(path_, test::pickle_of(dict + "u"), test::torch_file_bytes);
}

TEST_F(WeightFileFuzzTest, IndexesOfShards) {
  save(module_, directory_.file("shard"));
  std::string map;
  for (const auto& parameter : module_->named_parameters()) {
    map += (map.empty() ? "\"" : ",\"") + parameter.key() + "\":\"shard\"";
  }
  fuzz(path_, "{\"weight_map\":{" + map + "}}", unchanged);
}

}  // namespace
}  // namespace mha
