// Guards that an error says the same in every locale: the program's may group digits and put a
// comma for the point. Messages are compared whole with those of C's locale.
#include <mha/kv_cache.h>
#include <mha/map_recorder.h>
#include <mha/multi_head_attention.h>

#include <locale>
#include <sstream>
#include <string>
#include <vector>

#include "support/expect.h"
#include "support/file_support.h"
#include "support/grouping_locale.h"

namespace mha {
namespace {

using test::error_of;

class LocaleTest : public ::testing::Test {
 private:
  const test::GroupingLocale grouping_;
};

TEST_F(LocaleTest, AnErrorGroupsNoDigits) {
  const auto x = at::zeros({1, 1, 1024, 4});
  EXPECT_EQ(error_of([&] {
              scaled_dot_product_attention(x, x, x, Mask::keep(at::ones({2048, 1024})));
            }),
            "Mask::keep: mask: expected shape (L, S) = (1024, 1024), (N, L, S) = (1, 1024, "
            "1024), (N*H, L, S) = (1, 1024, 1024) or (N or 1, H or 1, L, S) = (1 or 1, 1 or 1, "
            "1024, 1024), found [2048, 1024]; expand() a mask that should broadcast in other "
            "ways, it costs no memory");
  EXPECT_EQ(error_of([] { MultiHeadAttention(MultiHeadAttentionOptions(4096, 1000)); }),
            "MultiHeadAttentionOptions: num_heads: expected a divisor of d_model = 4096, found "
            "1000; set head_dim to choose the head size freely");
  EXPECT_EQ(error_of([] { KVCache(KVCacheOptions().capacity(-12345)); }),
            "KVCacheOptions: capacity: expected from 1 to 2^40 tokens, found -12345");
}

TEST_F(LocaleTest, AnErrorKeepsThePointOfAFraction) {
  EXPECT_EQ(error_of([] { MultiHeadAttention(MultiHeadAttentionOptions(4, 2).dropout(1.5)); }),
            "MultiHeadAttentionOptions: dropout: expected a probability in [0, 1], found 1.5");
  EXPECT_EQ(error_of([] {
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
