#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

namespace mha {

/// How the rows of several parameters lie in one tensor of a file.
enum class Packing {
  rows,    ///< one whole parameter below the other: all queries, all keys, all values
  groups,  ///< for each key/value head its query heads, its key, its value
  heads,   ///< for each query head its rows of each parameter
};
std::ostream& operator<<(std::ostream& stream, Packing packing);

/// One tensor of a layout.
struct LayoutTensor {
  /// Its name behind the layer's prefix and a dot. With `{}` in it, of gains and biases of a
  /// norm per head, a tensor for each head, whose number stands there.
  std::string name;
  /// The module's parameters in it, one below the other along dimension 0: `W_q.weight` ...
  /// `W_o.bias`, `W_g.weight`, `W_g.bias`, `q_norm`, `k_norm`, `q_norm_bias`, `k_norm_bias`,
  /// `sinks`, `bias_k`, `bias_v`.
  std::vector<std::string> parameters;
  /// Whether it is the transposed of that, as where `Conv1D` multiplies from the other side.
  bool transposed = false;
  Packing packing = Packing::rows;
  /// With `rows`: how often the order repeats, each time with an equal share of every
  /// parameter (4 in CodeGen).
  int64_t repeats = 1;
  /// The parameter is the number in the file plus this: 1 where a model multiplies by 1 + gain.
  double plus = 0;
};

/// How a model names and shapes the tensors of an attention layer.
struct LayoutDescription {
  std::string name;
  /// W_q, W_k, W_v and W_o have their weight in these; what else a layer may have, and lacks in
  /// a file where the module lacks it, has a tensor too. A bias that has none, where the one of
  /// W_q has, is zero.
  std::vector<LayoutTensor> tensors;
  /// In place of the above where kdim and vdim are not d_model. Empty: the same. In a file they
  /// are told by the names that only these have.
  std::vector<LayoutTensor> tensors_apart = {};
  /// Names that readers pass over; with a `*` at its end, all that begin so.
  std::vector<std::string> ignored = {};
  /// Whether W_k and W_v may have fewer rows than W_q.
  bool grouped_heads = true;
  /// Whether num_heads * head_dim may differ from d_model.
  bool free_head_dim = true;
  /// Whether W_o may have a bias where the others have none, and the other way round.
  bool free_output_bias = true;
  /// Whether a file's names may tell it. Otherwise it is one only where it is asked for: the
  /// names are those of another layout, and the numbers mean something else.
  bool told_by_names = true;
};

/// How the tensors of one attention layer are named and shaped in a weight file: one that is
/// built in, or one of your own.
///
/// | layout   | tensors, each with a `.weight`, and a `.bias` where the layer has one       |
/// | -------- | --------------------------------------------------------------------------- |
/// | `native` | `W_q`, `W_k`, `W_v`, `W_o`, `W_g`; `bias_k`, `bias_v`, `sinks`, `q_norm`,   |
/// |          | `k_norm`, `q_norm_bias`, `k_norm_bias`                                      |
/// | `torch`  | `in_proj_weight` or `q_proj_weight`, `k_proj_weight`, `v_proj_weight`;      |
/// |          | `in_proj_bias`, `out_proj`, `bias_k`, `bias_v`                              |
/// | `bert`   | `self.query`, `self.key`, `self.value`, `output.dense`                      |
/// | `gpt2`   | `c_attn.weight` (E, 3 E), transposed and packed, `c_proj`, transposed       |
/// | `vit`    | `qkv` (3 E, E), packed, `proj`; `q_norm`, `k_norm` (timm)                   |
/// | `llama`  | `q_proj`, `k_proj`, `v_proj`, `o_proj`; `sinks` (gpt-oss); `q_norm.weight`, |
/// |          | `k_norm.weight` (Qwen3)                                                     |
///
/// `Layout::built_in()` has the others, each a description such as one of your own:
/// `src/weights/layouts.cpp`.
class Layout {
 public:
  static const Layout native, torch, bert, gpt2, vit, llama;

  /// All that are built in.
  static const std::vector<Layout>& built_in();
  /// The built-in one of that name. Throws `c10::Error` that lists them if there is none.
  static Layout named(const std::string& name);

  /// One of your own. Throws `c10::Error` that names what is wrong with it: a name that is
  /// empty or a built-in one's, a projection without a place, a parameter that is unknown or
  /// has two places, a tensor's name twice.
  explicit Layout(LayoutDescription description);
  /// One of your own from a file with a JSON object:
  ///
  ///     {"name": "mine",
  ///      "tensors": [{"name": "qkv", "holds": ["W_q", "W_k", "W_v"], "packing": "groups"},
  ///                  {"name": "out", "holds": "W_o"},
  ///                  {"name": "q_gain", "holds": "q_norm", "plus": 1},
  ///                  {"name": "k_gain", "holds": "k_norm", "plus": 1}],
  ///      "ignored": ["rotary.*"]}
  ///
  /// with the members of `LayoutDescription` and `LayoutTensor`, where `holds` is `parameters`.
  /// A tensor that holds projections (`W_q`) stands for two, `.weight` and `.bias`; with
  /// `"bias": false` for the first. Throws `c10::Error` that starts with the path.
  static Layout from_file(const std::string& path);

  const std::string& name() const { return description().name; }
  const LayoutDescription& description() const;

  friend bool operator==(const Layout& a, const Layout& b) { return a.name() == b.name(); }
  friend bool operator!=(const Layout& a, const Layout& b) { return !(a == b); }

 private:
  // Constant, so that it can be used before main.
  constexpr explicit Layout(const char* built_in) : built_in_(built_in) {}

  const char* built_in_ = nullptr;
  std::shared_ptr<const LayoutDescription> own_;
};
std::ostream& operator<<(std::ostream& stream, const Layout& layout);

}  // namespace mha
