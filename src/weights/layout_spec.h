#pragma once

#include <mha/weight_file.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace mha::detail {

inline constexpr std::array<Layout, 6> kLayouts = {
    Layout::native, Layout::torch, Layout::bert, Layout::gpt2, Layout::vit, Layout::llama};

/// One tensor of a layout: parameters of the module, one below the other along dimension 0, and
/// transposed if the layout's linear layers multiply from the other side.
struct LayoutRow {
  std::string name;
  std::vector<std::string> parameters;
  bool transposed = false;
};

/// How a layout names and shapes a layer. `packed`: the three input projections in one tensor;
/// the torch layout has such a form, and one with the three apart.
struct LayoutSpec {
  std::vector<LayoutRow> rows;
  bool packed = false;
  bool grouped_heads = false;  // whether W_k and W_v may have fewer rows than W_q
  bool free_head_dim = false;  // whether num_heads * head_dim may differ from d_model
  bool free_output_bias = false;  // whether W_o's bias is there whether or not the others are
};

LayoutSpec layout_spec(Layout layout, bool packed);

/// Whether the layout has a place for `name` outside of attention, which readers pass over.
bool is_ignored(Layout layout, std::string_view name);

/// The names of the input projections, which tell a layout. Those of the output projection, the
/// gate and `bias_k` would not: other models have an `out_proj.weight` too.
std::vector<std::string> telling_names(Layout layout);

}  // namespace mha::detail
