// Guards that an error says the same in every locale: the program's may group digits and put a
// comma for the point. Messages are compared whole with those of C's locale.
#include <mha/kv_cache.h>
#include <mha/map_recorder.h>
#include <mha/multi_head_attention.h>

#include <functional>
#include <locale>
#include <sstream>
#include <string>
#include <vector>

#include "support/expect.h"

namespace mha {
namespace {

// 1.234.567,5
class Grouping : public std::numpunct<char> {
 protected:
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

class LocaleTest : public ::testing::Test {
 protected:
  void SetUp() override { std::locale::global({std::locale::classic(), new Grouping}); }
  void TearDown() override { std::locale::global(before_); }

 private:
  const std::locale before_;
};

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST_F(LocaleTest, AnErrorGroupsNoDigits) {
  const auto x = at::zeros({1, 1, 1024, 4});
  EXPECT_EQ(message_of([&] {
              scaled_dot_product_attention(x, x, x, Mask::keep(at::ones({2048, 1024})));
            }),
            "Mask::keep: mask: expected shape (L, S) = (1024, 1024), (N, L, S) = (1, 1024, "
            "1024), (N*H, L, S) = (1, 1024, 1024) or (N or 1, H or 1, L, S) = (1 or 1, 1 or 1, "
            "1024, 1024), found [2048, 1024]; expand() a mask that should broadcast in other "
            "ways, it costs no memory");
  EXPECT_EQ(message_of([] { MultiHeadAttention(MultiHeadAttentionOptions(4096, 1000)); }),
            "MultiHeadAttentionOptions: num_heads: expected a divisor of d_model = 4096, found "
            "1000; set head_dim to choose the head size freely");
  EXPECT_EQ(message_of([] { KVCache(KVCacheOptions().capacity(-12345)); }),
            "KVCacheOptions: capacity: expected from 1 to 2^40 tokens, found -12345");
}

TEST_F(LocaleTest, AnErrorKeepsThePointOfAFraction) {
  EXPECT_EQ(
      message_of([] { MultiHeadAttention(MultiHeadAttentionOptions(4, 2).dropout(1.5)); }),
      "MultiHeadAttentionOptions: dropout: expected a probability in [0, 1], found 1.5");
  EXPECT_EQ(message_of([] {
              Mask::keep(torch::tensor({1.0, -1234.5}));
            }).substr(0, 62),
            "Mask::keep: mask: expected flags, 0 or above, found -1234.5; f");
}

TEST_F(LocaleTest, TheUsersStreamKeepsTheUsersLocale) {
  const Mask mask = Mask::keep(at::ones({2048, 1024}));
  std::ostringstream theirs, classic;
  classic.imbue(std::locale::classic());
  theirs << mask;
  classic << mask;
  EXPECT_EQ(theirs.str(), "keep(Float [2.048, 1.024])");
  EXPECT_EQ(classic.str(), "keep(Float [2048, 1024])");
}

}  // namespace
}  // namespace mha
