#pragma once

#include <ATen/core/Tensor.h>
#include <mha/mask.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>

namespace mha {

/// Options of `RelativePositionBias`, with T5's defaults.
struct RelativePositionBiasOptions {
  explicit RelativePositionBiasOptions(int64_t num_heads) : num_heads_(num_heads) {}

  TORCH_ARG(int64_t, num_heads);
  /// Rows of the table. Even where bidirectional; at least 2, and 4 where bidirectional.
  TORCH_ARG(int64_t, num_buckets) = 32;
  /// From this distance on, all keys share a bucket. Above the number of exact buckets.
  TORCH_ARG(int64_t, max_distance) = 128;
  /// Whether keys after the query have buckets of their own, as in T5's encoder. Otherwise they
  /// all have the bucket of distance 0, and are for `Mask::causal` to block, as in its decoder.
  TORCH_ARG(bool, bidirectional) = true;
};

/// T5's learned bias by relative position: added to the scores of head h is weight[b][h], where
/// b is the bucket of key - query. Half of the buckets of one side hold one distance each, the
/// others share the distances up to `max_distance` evenly on a logarithmic scale.
///
///     mha::RelativePositionBias bias(mha::RelativePositionBiasOptions(num_heads));
///     attention->forward(x, x, x, bias->forward(x.size(1), x.size(1)));
///
/// The parameter `weight` is (num_buckets, H): registered as `relative_attention_bias`, the
/// module takes T5's own `relative_attention_bias.weight`. T5 doesn't scale its scores; set the
/// attention's `scale(1.0)`.
///
/// Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
/// Text-to-Text Transformer", 2020.
class RelativePositionBiasImpl : public torch::nn::Cloneable<RelativePositionBiasImpl> {
 public:
  /// Throws `c10::Error` if an option is out of range.
  explicit RelativePositionBiasImpl(const RelativePositionBiasOptions& options_);

  void reset() override;
  /// Draws `weight` from N(0, 1), as `torch::nn::Embedding` does.
  void reset_parameters();
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// All or nothing, see `MultiHeadAttentionImpl::load`.
  void load(torch::serialize::InputArchive& archive) override;
  void pretty_print(std::ostream& stream) const override;

  /// The bias of `queries` over `keys` as `Mask::relative`; combine it with others by `&`.
  /// Gradients flow into `weight`. With `bottom_right` the last query stands at the last key,
  /// which is right with a cache as well, whatever its samples' lengths: `keys` is then S.
  /// Throws if a size is negative.
  Mask forward(int64_t queries, int64_t keys,
               Mask::Alignment alignment = Mask::Alignment::bottom_right) const;

  /// The bucket of each relative position key - query, integers of any shape, as int64.
  at::Tensor buckets(const at::Tensor& relative_positions) const;

  RelativePositionBiasOptions options;
  at::Tensor weight;  ///< (num_buckets, H)
};

/// Holder of a `RelativePositionBiasImpl`, used like any module of `torch::nn`.
TORCH_MODULE(RelativePositionBias);

}  // namespace mha
