#pragma once

#include <mha/rotary.h>

#include <memory>
#include <vector>

namespace mha::detail {

/// Throws `c10::Error` naming the first option that has no sensible meaning for such heads.
void check_rotary(const RotaryOptions& options, int64_t head_dim);

/// What the options say, in numbers.
struct RotaryFrequencies {
  std::vector<double> radians;  // a position, of each pair
  double amplitude;             // multiplies cos and sin
};
/// `longest`: the largest position of the call, by which `LongRopeScaling` chooses.
RotaryFrequencies compute_frequencies(const RotaryOptions& options, int64_t head_dim,
                                      int64_t longest = 0);

/// cos and sin at the positions from 0 on, float32 (rows, 2, pairs).
struct RotaryTable {
  RotaryFrequencies frequencies;
  at::Tensor rows;
};

/// The table of these frequencies, with a row for every position below `rows` or, where these
/// are very many, fewer rows. It is kept and shared by all that ask for the same.
std::shared_ptr<const RotaryTable> rotary_table(const RotaryFrequencies& frequencies,
                                                int64_t rows);

/// Writes cos and sin at `count` positions to rows (count, 2, pairs).
void fill_rotary_rows(const RotaryFrequencies& frequencies, const int64_t* positions,
                      int64_t count, float* rows);

/// Throws unless `positions` are integers (T) or (N, T) for a call on `device`; `name` is what
/// the caller calls them, with what it belongs to.
void check_positions(const char* name, const at::Tensor& positions, int64_t batch,
                     int64_t tokens, at::Device device);

/// `apply_rotary` of checked arguments. `longest`: the largest position of the whole call, a
/// tensor of one element, if it is not that of `positions`.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& positions,
                  const RotaryOptions& options, const at::Tensor& longest = {});
/// The same into `x` itself, float32 on the CPU with rows of stride 1; without gradients.
void rotate_in_place(const at::Tensor& x, const at::Tensor& positions,
                     const RotaryOptions& options, const at::Tensor& longest = {});

}  // namespace mha::detail
