#include "option_values.h"

#include <algorithm>

#include "text.h"

namespace mha::cli {

const OptionValues<Weights>& returned_weights() {
  static const OptionValues<Weights> values = {{"none", Weights::none},
                                               {"averaged", Weights::averaged},
                                               {"per-head", Weights::per_head}};
  return values;
}

const OptionValues<Mask::Alignment>& alignments() {
  static const OptionValues<Mask::Alignment> values = {
      {"bottom-right", Mask::Alignment::bottom_right}, {"top-left", Mask::Alignment::top_left}};
  return values;
}

const OptionValues<Layout>& layouts() {
  static const OptionValues<Layout> values = [] {
    OptionValues<Layout> all;
    for (const Layout& layout : Layout::built_in()) {
      std::string name = layout.name();
      std::replace(name.begin(), name.end(), '_', '-');
      all.emplace_back(name, layout);
    }
    return all;
  }();
  return values;
}

const OptionValues<at::ScalarType>& floating_dtypes() {
  static const OptionValues<at::ScalarType> values = [] {
    OptionValues<at::ScalarType> all;
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      all.emplace_back(dtype_text(dtype), dtype);
    }
    return all;
  }();
  return values;
}

}  // namespace mha::cli
