#include "weights/layout_spec.h"

#include <ostream>

#include "runtime/enum_check.h"

namespace mha {

std::ostream& operator<<(std::ostream& stream, Layout layout) {
  switch (layout) {
    case Layout::native:
      return stream << "native";
    case Layout::torch:
      return stream << "torch";
    case Layout::bert:
      return stream << "bert";
    case Layout::gpt2:
      return stream << "gpt2";
    case Layout::vit:
      return stream << "vit";
    case Layout::llama:
      return stream << "llama";
  }
  return stream << "Layout(" << static_cast<int>(layout) << ")";
}

namespace detail {
namespace {

const std::vector<std::string> kInputWeights = {"W_q.weight", "W_k.weight", "W_v.weight"};
const std::vector<std::string> kInputBiases = {"W_q.bias", "W_k.bias", "W_v.bias"};

// Four linear layers of these names.
std::vector<LayoutRow> four_layers(const std::array<std::string, 4>& names) {
  const std::array<std::string, 4> ours = {"W_q", "W_k", "W_v", "W_o"};
  std::vector<LayoutRow> rows;
  for (const std::string kind : {".weight", ".bias"}) {
    for (size_t i = 0; i < 4; ++i) rows.push_back({names[i] + kind, {ours[i] + kind}});
  }
  return rows;
}

// One linear layer for the three inputs and one for the output.
std::vector<LayoutRow> two_layers(const std::string& inputs, const std::string& output,
                                  bool transposed) {
  return {{inputs + ".weight", kInputWeights, transposed},
          {inputs + ".bias", kInputBiases},
          {output + ".weight", {"W_o.weight"}, transposed},
          {output + ".bias", {"W_o.bias"}}};
}

}  // namespace

LayoutSpec layout_spec(Layout layout, bool packed) {
  check_enum({"WeightFileOptions", "layout"}, layout, Layout::llama,
             "native, torch, bert, gpt2, vit or llama");
  LayoutSpec spec;
  switch (layout) {
    case Layout::native:
      spec.rows = four_layers({"W_q", "W_k", "W_v", "W_o"});
      spec.rows.push_back({"bias_k", {"bias_k"}});
      spec.rows.push_back({"bias_v", {"bias_v"}});
      spec.rows.push_back({"sinks", {"sinks"}});
      for (const std::string name :
           {"q_norm", "k_norm", "q_norm_bias", "k_norm_bias", "W_g.weight", "W_g.bias"}) {
        spec.rows.push_back({name, {name}});
      }
      spec.grouped_heads = spec.free_head_dim = spec.free_output_bias = true;
      break;
    case Layout::torch:
      if (packed) {
        spec.rows = {{"in_proj_weight", kInputWeights}};
      } else {
        spec.rows = {{"q_proj_weight", {"W_q.weight"}},
                     {"k_proj_weight", {"W_k.weight"}},
                     {"v_proj_weight", {"W_v.weight"}}};
      }
      for (const LayoutRow& row :
           {LayoutRow{"in_proj_bias", kInputBiases}, LayoutRow{"bias_k", {"bias_k"}},
            LayoutRow{"bias_v", {"bias_v"}}, LayoutRow{"out_proj.weight", {"W_o.weight"}},
            LayoutRow{"out_proj.bias", {"W_o.bias"}}}) {
        spec.rows.push_back(row);
      }
      spec.packed = packed;
      break;
    case Layout::bert:
      spec.rows = four_layers({"self.query", "self.key", "self.value", "output.dense"});
      spec.free_head_dim = true;
      break;
    case Layout::gpt2:
      spec.rows = two_layers("c_attn", "c_proj", /*transposed=*/true);
      spec.packed = true;
      break;
    case Layout::vit:
      spec.rows = two_layers("qkv", "proj", /*transposed=*/false);
      for (const std::string name : {"q_norm", "k_norm"}) {
        spec.rows.push_back({name + ".weight", {name}});
        spec.rows.push_back({name + ".bias", {name + "_bias"}});
      }
      spec.packed = spec.free_output_bias = true;
      break;
    case Layout::llama:
      spec.rows = four_layers({"q_proj", "k_proj", "v_proj", "o_proj"});
      spec.rows.push_back({"sinks", {"sinks"}});  // gpt-oss
      spec.rows.push_back({"q_norm.weight", {"q_norm"}});
      spec.rows.push_back({"k_norm.weight", {"k_norm"}});
      spec.grouped_heads = spec.free_head_dim = spec.free_output_bias = true;
      break;
  }
  return spec;
}

bool is_ignored(Layout layout, std::string_view name) {
  switch (layout) {
    case Layout::bert:
      return name.substr(0, 17) == "output.LayerNorm.";
    case Layout::gpt2:  // its causal mask, and what blocked scores are
      return name == "bias" || name == "masked_bias";
    case Layout::llama:  // the frequencies of its rotary positions
      return name == "rotary_emb.inv_freq";
    default:
      return false;
  }
}

std::vector<std::string> telling_names(Layout layout) {
  std::vector<std::string> names;
  for (const bool packed : {true, false}) {
    for (const LayoutRow& row : layout_spec(layout, packed).rows) {
      const std::string& first = row.parameters[0];
      if (first[0] == 'W' && first[2] != 'o' && first[2] != 'g') names.push_back(row.name);
    }
  }
  return names;
}

}  // namespace detail
}  // namespace mha
