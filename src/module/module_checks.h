#pragma once

#include <mha/multi_head_attention.h>
#include <mha/relative_position_bias.h>

namespace mha::detail {

/// Throws `c10::Error` naming the first option that has no sensible meaning.
void check_options(const MultiHeadAttentionOptions& options);

/// The same of the learned bias.
void check_bias_options(const RelativePositionBiasOptions& options);

/// Throws `c10::Error` unless the options, which anybody may change, still have a meaning and
/// fit the parameters.
void check_module(const MultiHeadAttentionImpl& module);

struct InputSizes {
  int64_t batch, queries, keys;
};

/// Checks the query alone. Without keys.
InputSizes check_query(const MultiHeadAttentionImpl& module, const at::Tensor& query);

/// Checks key and value alone.
void check_keys(const MultiHeadAttentionImpl& module, const at::Tensor& key,
                const at::Tensor& value);

/// Checks the three inputs of a module against its options, its parameters and
/// each other.
InputSizes check_inputs(const MultiHeadAttentionImpl& module, const at::Tensor& query,
                        const at::Tensor& key, const at::Tensor& value);

}  // namespace mha::detail
