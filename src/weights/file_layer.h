#pragma once

#include <mha/weight_file.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "files/tensor_source.h"

namespace mha::detail {

/// Shapes of a module's parameters by name (`W_q.weight`, ..., `bias_v`).
using ParameterShapes = std::map<std::string, std::vector<int64_t>>;

/// One tensor of a layout as it has to be in a file.
struct FileTensor {
  LayoutTensor held;  // its name is that in the file
  std::vector<int64_t> shape;
  /// Of a tensor for each head: whose row of its parameter it is.
  std::optional<int64_t> head = std::nullopt;
};

/// The tensors that hold a module with these parameters. Throws `c10::Error` that starts with
/// `path` if the layout cannot express them.
std::vector<FileTensor> layout_tensors(const std::string& path, const Layout& layout,
                                       const ParameterShapes& parameters);

/// Whether a module with these parameters has a bias of zeros that the layout has no place for.
bool has_unnamed_bias(const Layout& layout, const ParameterShapes& parameters,
                      const std::string& bias);

/// The layout of the layer at the prefix: the one named in `options`, or the one whose names
/// are there. Throws `c10::Error` that lists what lies there, and the prefixes at which the
/// file does have a layer, if there is not exactly one.
Layout find_layout(const TensorSource& file, const WeightFileOptions& options);

/// The parameters of the layer at `prefix`, as its tensors tell them. A tensor that is missing
/// is taken to be there in the usual shape, so that a comparison with the file finds it.
/// `num_heads`: if known, else that of the metadata. Throws `c10::Error` if the shapes tell no
/// layer.
ParameterShapes parameter_shapes_in(const TensorSource& file, const Layout& layout,
                                    const std::string& prefix,
                                    std::optional<int64_t> num_heads = std::nullopt);

/// A layer of a file, by the names of its input projections.
struct FoundLayer {
  std::string prefix;
  Layout layout;
};

/// The layers of all layouts that names tell, or of one, in the order of their prefixes. Where
/// several have the same names, the one that knows most of what lies there and misses least.
std::vector<FoundLayer> find_layers(const TensorSource& file,
                                    const std::optional<Layout>& wanted);

/// Whether the layout has a place for `name` outside of attention, which readers pass over.
bool is_ignored(const Layout& layout, const std::string& name);

/// `prefix` and `name` joined by a dot; `name` alone if the prefix is empty.
std::string join(const std::string& prefix, const std::string& name);

/// The names in the file that stand at the prefix, without it.
std::vector<std::string> names_at(const TensorSource& file, const std::string& prefix);

}  // namespace mha::detail
