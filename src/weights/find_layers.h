#pragma once

#include <mha/weight_file.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "files/tensor_source.h"

namespace mha::detail {

/// The file with the weights, opened as `where` says. Throws what `open_tensors` throws, and if
/// a name to ignore is empty.
std::unique_ptr<TensorSource> open_weights(const std::string& path,
                                           const WeightFileOptions& where);

/// The layout of the layer at the prefix: the one named in `options`, or the one whose names
/// are there. Throws `c10::Error` that lists what lies there, and the prefixes at which the
/// file does have a layer, if there is not exactly one.
Layout find_layout(const TensorSource& file, const WeightFileOptions& options);

/// A layer of a file, by the names of its input projections.
struct FoundLayer {
  std::string prefix;
  Layout layout;
};

/// The layers of all layouts that names tell, or of one, in the order of their prefixes. Where
/// several have the same names, the one that knows most of what lies there and misses least.
std::vector<FoundLayer> find_layers(const TensorSource& file,
                                    const std::optional<Layout>& wanted);

/// Whether `name` is one of the patterns, or begins as one that has a `*` at its end.
bool is_among(const std::vector<std::string>& patterns, const std::string& name);

/// What the file says of a tensor of the layer, by its name behind the prefix; null if it has
/// none, or one to ignore.
const TensorEntry* entry_at(const TensorSource& file, const WeightFileOptions& where,
                            const std::string& name);

/// `prefix` and `name` joined by a dot; `name` alone if the prefix is empty.
std::string join(const std::string& prefix, const std::string& name);

/// The names in the file that stand at the prefix, without it.
std::vector<std::string> names_at(const TensorSource& file, const std::string& prefix);

}  // namespace mha::detail
