// Guards that what cannot be drawn is an error that names the field, what was expected and what
// was found, whichever format is asked for.
#include <gtest/gtest.h>
#include <mha/draw.h>

#include <climits>
#include <functional>
#include <string>
#include <vector>

#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/values.h"

namespace mha::draw {
namespace {

using test::error_of;

Maps maps_of(const at::Tensor& weights) {
  Maps maps;
  maps.weights = weights;
  return maps;
}

// Every format refuses it, with an error that begins with `text`.
void expect_error(const Maps& maps, const Options& options, const std::string& text) {
  const std::vector<std::function<void()>> formats = {
      [&] { png(maps, options); }, [&] { svg(maps, options); }, [&] { html(maps, options); },
      [&] { draw::text(maps, Terminal{}, options); }};
  for (const auto& format : formats) {
    const std::string error = error_of(format);
    EXPECT_EQ(error.rfind(text, 0), 0u) << "expected: " << text << "\nfound: " << error;
  }
}

TEST(DrawErrorTest, ANumberThatIsNoEnumeratorIsRefused) {
  const Maps maps = maps_of(at::full({2, 2}, 0.5));
  for (const int number : {3, 9, -1, INT_MAX, INT_MIN}) {
    const std::string found = std::to_string(number);
    expect_error(maps, Options().colours(static_cast<ColourMap>(number)),
                 "colours: expected dusk, ink or grey, found " + found);
    expect_error(maps, Options().scale(static_cast<Scale>(number)),
                 "scale: expected square_root or linear, found " + found);
    Terminal terminal;
    terminal.colours = static_cast<Colours>(number);
    EXPECT_EQ(error_of([&] { text(maps, terminal); }),
              "terminal.colours: expected none, palette_256 or rgb, found " + found);
  }
}

TEST(DrawErrorTest, ATerminalHasColumns) {
  const Maps maps = maps_of(at::full({2, 2}, 0.5));
  for (const int columns : {0, -1, INT_MIN}) {
    Terminal terminal;
    terminal.columns = columns;
    EXPECT_EQ(error_of([&] { text(maps, terminal); }),
              "terminal.columns: expected a number > 0, found " + std::to_string(columns));
  }
  Terminal widest;
  widest.columns = INT_MAX;
  EXPECT_NE(text(maps, widest), "");
}

TEST(DrawErrorTest, ATerminalIsThatOfAStream) {
  EXPECT_EQ(error_of([] { terminal_of(nullptr); }),
            "stream: expected an open stream, found a null pointer");
}

TEST(DrawErrorTest, WeightsAreADenseTensorOfOneOfFourDtypes) {
  const at::Tensor weights = at::full({2, 2}, 0.5);
  const auto refused = [](const at::Tensor& tensor) {
    expect_error(maps_of(tensor), {}, "weights: expected ");
  };
  refused(weights.to_sparse());
  if (at::hasMKLDNN()) refused(weights.to_mkldnn());
  refused(at::_efficientzerotensor({2, 2}));
  refused(at::empty({2, 2}, at::kMeta));
  refused(weights.to(at::kComplexFloat));
  refused(weights.to(at::kLong));
  refused(weights.to(at::kBool));
  refused(weights.to(at::kFloat8_e4m3fn));
  refused(weights.to(at::kFloat8_e5m2));
  refused(at::quantize_per_tensor(weights, 0.1, 0, at::kQInt8));
  refused(test::with_freed_memory(weights));
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    EXPECT_EQ(svg(maps_of(weights.to(dtype))), svg(maps_of(weights)));
  }
}

TEST(DrawErrorTest, ANegativeViewIsDrawnAsWhatItSays) {
  const at::Tensor numbers = at::complex(at::zeros({2, 2}), at::full({2, 2}, -0.25F));
  const at::Tensor view = at::imag(numbers.conj());  // 0.25, in memory -0.25
  ASSERT_TRUE(view.is_neg());
  EXPECT_EQ(svg(maps_of(view)), svg(maps_of(at::full({2, 2}, 0.25F))));
}

TEST(DrawErrorTest, AViewOfAnyStridesIsDrawnAsItsCopy) {
  test::Random random(3);
  const at::Tensor weights = random.normal({2, 4, 6}).softmax(-1);
  const at::Tensor wide = random.normal({2, 4, 12}).softmax(-1);
  for (const at::Tensor& view :
       {weights.transpose(1, 2), wide.slice(2, 0, 12, 2), weights[0].expand({3, 4, 6})}) {
    EXPECT_EQ(svg(maps_of(view)), svg(maps_of(view.clone())));
  }
}

}  // namespace
}  // namespace mha::draw
