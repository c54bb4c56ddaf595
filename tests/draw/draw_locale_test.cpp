// Guards that pictures and files hold numbers as their formats write them, whichever way the
// host program has them written for people: bytes are equal to those in the classic locale.
#include <gtest/gtest.h>
#include <mha/draw.h>
#include <mha/multi_head_attention.h>
#include <mha/weight_file.h>

#include <sstream>
#include <string>

#include "support/file_support.h"
#include "support/grouping_locale.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::draw {
namespace {

/// What `call` returns while the host's locale groups digits.
template <typename Call>
auto in_grouped_locale(const Call& call) {
  const test::GroupingLocale grouping;
  return call();
}

// Long enough for indices of four digits, with labels at them and a pooled map.
Maps long_maps() {
  test::Random random(4);
  Maps maps;
  maps.weights = random.normal({2, 1500, 1200}).softmax(-1);
  maps.title = "Long";
  return maps;
}

TEST(DrawLocaleTest, APictureIsTheSameInEveryLocaleOfTheHost) {
  ASSERT_EQ(in_grouped_locale([] {
              std::ostringstream stream;
              stream << 1234567;
              return stream.str();
            }),
            "1.234.567");
  const Maps maps = long_maps();
  const Options options = Options().largest(0.0125);
  EXPECT_EQ(in_grouped_locale([&] { return svg(maps, options); }), svg(maps, options));
  EXPECT_EQ(in_grouped_locale([&] { return html(maps, options); }), html(maps, options));
  EXPECT_EQ(in_grouped_locale([&] { return png(maps, options); }), png(maps, options));
  EXPECT_EQ(in_grouped_locale([&] { return text(maps, Terminal{}, options); }),
            text(maps, Terminal{}, options));
}

TEST(DrawLocaleTest, AWeightFileIsTheSameInEveryLocaleOfTheHostAndIsReadInEach) {
  const test::TemporaryDirectory directory;
  const auto options = MultiHeadAttentionOptions(1200, 4)
                           .num_kv_heads(2)
                           .dropout(0.125)
                           .scale(1234.5)
                           .softcap(5000)
                           .rotary(RotaryOptions().base(500000).rotary_dim(100).scaling(
                               YarnScaling(32.5, 1048576)));
  const MultiHeadAttention module(options);
  const std::string classic = directory.file("classic"), grouped = directory.file("grouped");
  save(module, classic);
  const bool loaded = in_grouped_locale([&] {
    save(module, grouped);
    return load(grouped)->options.rotary()->base() == 500000 &&
           load(grouped)->options.scale() == 1234.5;
  });
  EXPECT_TRUE(loaded);
  EXPECT_EQ(test::read_bytes(grouped), test::read_bytes(classic));
}

}  // namespace
}  // namespace mha::draw
