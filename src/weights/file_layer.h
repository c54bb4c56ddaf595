#pragma once

#include <mha/weight_file.h>

#include <cstdint>
#include <functional>
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

/// The parameters of the layer at the prefix, as its tensors tell them. A tensor that is
/// missing is taken to be there in the usual shape, so that a comparison with the file finds
/// it. `num_heads`: if known, else that of the metadata. Throws `c10::Error` if the shapes tell
/// no layer.
ParameterShapes parameter_shapes_in(const TensorSource& file, const Layout& layout,
                                    const WeightFileOptions& where,
                                    std::optional<int64_t> num_heads = std::nullopt);

/// The tensors of a layout, or those in use where kdim and vdim are not d_model.
const std::vector<LayoutTensor>& tensors_of(const Layout& layout, bool apart);

/// Those of the two of which the layer has more names that the others lack.
const std::vector<LayoutTensor>& tensors_in_file(
    const Layout& layout, const std::function<bool(const std::string& name)>& has);

/// The name of the tensor of one head, of a tensor that has one for each.
std::string name_of_head(const std::string& name, int64_t head);

/// The one that holds a parameter; null if there is no place for it.
const LayoutTensor* tensor_with(const std::vector<LayoutTensor>& tensors,
                                const std::string& parameter);

}  // namespace mha::detail
