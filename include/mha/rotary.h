#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace mha {

/// Which two elements of a head make a pair that turns together, of R rotated ones.
enum class RotaryPairing {
  half_split,   ///< i and i + R / 2, as in GPT-NeoX and LLaMA
  interleaved,  ///< 2 i and 2 i + 1, as in GPT-J and the original paper
};
std::ostream& operator<<(std::ostream& stream, RotaryPairing pairing);

/// Positions are divided by `factor`. Source: Chen et al., "Extending Context Window of Large
/// Language Models via Positional Interpolation", 2023.
struct LinearScaling {
  explicit LinearScaling(double factor) : factor_(factor) {}
  TORCH_ARG(double, factor);
};

/// The base grows to base * factor^(R / (R - 2)), so that the fastest pair keeps its frequency
/// and the slowest has it divided by `factor` ("NTK-aware", bloc97, 2023).
struct NtkScaling {
  explicit NtkScaling(double factor) : factor_(factor) {}
  TORCH_ARG(double, factor);
};

/// Pairs that turn more than `beta_fast` times within `original_max_position` keep their
/// frequency, those that turn less than `beta_slow` times have it divided by `factor`, with a
/// ramp over the pairs between, as in the authors' code.
/// Source: Peng et al., "YaRN: Efficient Context Window Extension of LLMs", 2023.
struct YarnScaling {
  YarnScaling(double factor, int64_t original_max_position)
      : factor_(factor), original_max_position_(original_max_position) {}
  TORCH_ARG(double, factor);
  TORCH_ARG(int64_t, original_max_position);
  TORCH_ARG(double, beta_fast) = 32;
  TORCH_ARG(double, beta_slow) = 1;
  /// Multiplies rotated queries and keys. Default:
  /// (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
  TORCH_ARG(std::optional<double>, attention_factor);
  TORCH_ARG(double, mscale) = 1;
  TORCH_ARG(double, mscale_all_dim) = 0;
  /// Whether the ramp begins and ends at whole pairs (`truncate` in a model's configuration).
  TORCH_ARG(bool, truncate) = true;
};

/// Wavelengths above original_max_position / low_freq_factor are multiplied by `factor`, those
/// below original_max_position / high_freq_factor stay, with a ramp over the frequencies
/// between. Source: LLaMA 3.1's published code and configuration (`rope_type` "llama3").
struct Llama3Scaling {
  Llama3Scaling(double factor, int64_t original_max_position)
      : factor_(factor), original_max_position_(original_max_position) {}
  TORCH_ARG(double, factor);
  TORCH_ARG(int64_t, original_max_position);
  TORCH_ARG(double, low_freq_factor) = 1;
  TORCH_ARG(double, high_freq_factor) = 4;
};

/// The frequency of each of the R / 2 pairs is divided by a number of its own, one above 0 of
/// `long_factor` in calls with a position from `original_max_position` on, and of
/// `short_factor` in others. (So keys in a cache keep what they were rotated by: begin a cache
/// anew, as transformers does, where a sequence grows beyond that.) A call is all its samples
/// and, beside a memory, this too: one of them that is long changes the others' factors.
/// Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024,
/// in the form of Phi-3.
struct LongRopeScaling {
  LongRopeScaling(std::vector<double> short_factor, std::vector<double> long_factor,
                  int64_t original_max_position)
      : short_factor_(std::move(short_factor)),
        long_factor_(std::move(long_factor)),
        original_max_position_(original_max_position) {}
  TORCH_ARG(std::vector<double>, short_factor);
  TORCH_ARG(std::vector<double>, long_factor);
  TORCH_ARG(int64_t, original_max_position);
  /// How many times as long as the original the sequences are that a model is made for, >= 1.
  TORCH_ARG(double, factor) = 1;
  /// Multiplies rotated queries and keys. Default:
  /// sqrt(1 + ln(factor) / ln(original_max_position)).
  TORCH_ARG(std::optional<double>, attention_factor);
};

/// How frequencies are changed for contexts longer than those of the training. Factors are
/// >= 1.
using RotaryScaling = std::variant<std::monostate, LinearScaling, NtkScaling, YarnScaling,
                                   Llama3Scaling, LongRopeScaling>;
std::ostream& operator<<(std::ostream& stream, const RotaryScaling& scaling);

/// Options of `apply_rotary` and of the module's rotary positions.
struct RotaryOptions {
  /// Pair i of R / 2 turns by base^(-2 i / R) radians a position, before scaling.
  TORCH_ARG(double, base) = 10000;
  TORCH_ARG(RotaryPairing, pairing) = RotaryPairing::half_split;
  /// R, the number of a head's elements that turn, from the first on; even. Default: all.
  TORCH_ARG(std::optional<int64_t>, rotary_dim);
  /// Default: none.
  TORCH_ARG(RotaryScaling, scaling);
  /// The frequencies themselves, finite, in radians a position of each of the R / 2 pairs, in
  /// place of those by `base`; `scaling` must then be none. Default: by `base`.
  TORCH_ARG(std::vector<double>, frequencies);
};
/// Every option that has an effect, as `(base=10000, pairing=half_split, ...)`.
std::ostream& operator<<(std::ostream& stream, const RotaryOptions& options);

/// The frequencies of the R / 2 pairs of heads of size `head_dim`, in radians a position, after
/// scaling, by `LongRopeScaling` that of short sequences: (R / 2) float64 on the CPU. Throws
/// `c10::Error` naming the first option that has no sensible meaning.
at::Tensor rotary_frequencies(const RotaryOptions& options, int64_t head_dim);

/// Turns each pair (a, b) of elements by the angle p * frequency, at position p:
///
///     a' = a cos - b sin
///     b' = b cos + a sin
///
/// so that the product of a query and a key depends on the distance of their positions.
///
/// | tensor    | shape                                                                |
/// | --------- | -------------------------------------------------------------------- |
/// | x         | (N, H, T, D), floating, any strides                                   |
/// | positions | (T), or (N, T) with positions of each sample; integers, any value     |
/// | result    | as x, a tensor of its own                                             |
///
/// cos and sin are computed in float64 and rounded to float32 (kept in float64 for a float64
/// x); half types are rotated in float32 and rounded once. Gradients of any order flow into x.
/// Throws `c10::Error` that names the argument, what was expected and what was found.
/// Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& positions,
                        const RotaryOptions& options = {});

}  // namespace mha
