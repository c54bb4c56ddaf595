#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <mha/mask.h>
#include <mha/scaled_dot_product_attention.h>
#include <mha/weight_file.h>

#include <string>
#include <utility>
#include <vector>

namespace mha::cli {

/// What an option may be, under the names that the command line gives it: words joined by
/// hyphens, as in the names of options.
template <typename Value>
using OptionValues = std::vector<std::pair<std::string, Value>>;

const OptionValues<Weights>& returned_weights();
const OptionValues<Mask::Alignment>& alignments();
const OptionValues<Layout>& layouts();
/// The dtypes of weights and inputs.
const OptionValues<at::ScalarType>& floating_dtypes();

/// The names alone, for `one_of`.
template <typename Value>
std::vector<std::string> names_of(const OptionValues<Value>& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

/// The value of that name; the parser has let only such names through.
template <typename Value>
Value value_of(const OptionValues<Value>& values, const std::string& name) {
  for (const auto& [known, value] : values) {
    if (name == known) return value;
  }
  TORCH_INTERNAL_ASSERT(false, "no value is called ", name);
}

}  // namespace mha::cli
