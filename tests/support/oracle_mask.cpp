#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "support/oracle.h"

namespace mha::test {
namespace {

/// The element of a mask tensor of one of the documented shapes for one query and key.
double element(const at::Tensor& mask, int64_t N, int64_t H, int64_t n, int64_t h, int64_t i,
               int64_t j) {
  switch (mask.dim()) {
    case 2:
      return mask.accessor<double, 2>()[i][j];
    case 3:
      return mask.accessor<double, 3>()[mask.size(0) == N ? n : n * H + h][i][j];
    default:
      return mask
          .accessor<double, 4>()[mask.size(0) == 1 ? 0 : n][mask.size(1) == 1 ? 0 : h][i][j];
  }
}

/// The element of a per-key mask, (N, S) or (S).
double key_element(const at::Tensor& mask, int64_t n, int64_t j) {
  return mask.dim() == 1 ? mask.accessor<double, 1>()[j] : mask.accessor<double, 2>()[n][j];
}

}  // namespace

DenseMask dense_mask(const Mask& mask, int64_t N, int64_t H, int64_t L, int64_t S,
                     int64_t open_keys) {
  using Kind = Mask::Term::Kind;
  DenseMask dense{at::ones({N, H, L, S + open_keys}, at::kDouble),
                  at::zeros({N, H, L, S + open_keys}, at::kDouble)};
  auto allowed = dense.allowed.accessor<double, 4>();
  auto added = dense.added.accessor<double, 4>();
  for (const auto& term : mask.terms()) {
    const auto values = term.tensor.defined() ? as_double(term.tensor) : at::Tensor();
    const int64_t shift = term.alignment == Mask::Alignment::bottom_right ? S - L : 0;
    const auto second = term.second.defined() ? as_double(term.second) : at::Tensor();
    const bool is_band = term.kind == Kind::causal || term.kind == Kind::window;
    const auto offsets = is_band ? values : term.kind == Kind::alibi ? second : at::Tensor();
    for (int64_t n = 0; n < N; ++n)
      for (int64_t h = 0; h < H; ++h)
        for (int64_t i = 0; i < L; ++i)
          for (int64_t j = 0; j < S; ++j) {
            bool allow = true;
            const int64_t position =
                i + (offsets.defined() ? static_cast<int64_t>(offsets.accessor<double, 1>()[n])
                                       : shift);
            switch (term.kind) {
              case Kind::keep:
                allow = element(values, N, H, n, h, i, j) != 0;
                break;
              case Kind::block:
                allow = element(values, N, H, n, h, i, j) == 0;
                break;
              case Kind::add: {
                const double value = element(values, N, H, n, h, i, j);
                allow = value != -std::numeric_limits<double>::infinity();
                if (allow) added[n][h][i][j] += value;
                break;
              }
              case Kind::keep_keys:
                allow = key_element(values, n, j) != 0;
                break;
              case Kind::block_keys:
                allow = key_element(values, n, j) == 0;
                break;
              case Kind::add_keys: {
                const double value =
                    key_element(values.dim() == 4 ? values.flatten(1) : values, n, j);
                allow = value != -std::numeric_limits<double>::infinity();
                if (allow) added[n][h][i][j] += value;
                break;
              }
              case Kind::real_queries:
                allow = key_element(values, n, i) != 0;
                break;
              case Kind::query_lengths:
                allow = static_cast<double>(i) < values.accessor<double, 1>()[n];
                break;
              case Kind::lengths:
                allow = static_cast<double>(j) < values.accessor<double, 1>()[n];
                break;
              case Kind::causal:
                allow = j <= position;
                break;
              case Kind::window:
                allow = (term.left == -1 || j >= position - term.left) &&
                        (term.right == -1 || j <= position + term.right);
                break;
              case Kind::documents:
                allow = key_element(values, n, i) ==
                        key_element(second.defined() ? second : values, n, j);
                break;
              case Kind::document_lengths:
                for (int64_t end = 0; end < values.size(0); ++end) {
                  const double at = values.accessor<double, 1>()[end];
                  if ((static_cast<double>(i) < at) != (static_cast<double>(j) < at)) {
                    allow = false;
                  }
                }
                break;
              case Kind::relative:
                added[n][h][i][j] +=
                    values.accessor<double, 2>()[values.size(0) == 1 ? 0 : h][j - i + L - 1];
                break;
              case Kind::alibi:
                added[n][h][i][j] -= values.accessor<double, 1>()[h] *
                                     std::fabs(static_cast<double>(position - j));
                break;
            }
            if (!allow) allowed[n][h][i][j] = 0;
          }
  }
  return dense;
}

int64_t count_dead_rows(const DenseMask& mask) {
  const auto allowed = mask.allowed.accessor<double, 4>();
  int64_t dead = 0;
  for (int64_t n = 0; n < allowed.size(0); ++n)
    for (int64_t h = 0; h < allowed.size(1); ++h)
      for (int64_t i = 0; i < allowed.size(2); ++i) {
        bool any = false;
        for (int64_t j = 0; j < allowed.size(3); ++j) any = any || allowed[n][h][i][j] != 0;
        if (!any) ++dead;
      }
  return dead;
}

at::Tensor sum_to_mask_shape(const at::Tensor& gradient, const at::Tensor& mask) {
  const auto N = gradient.size(0), H = gradient.size(1), L = gradient.size(2);
  // The mask in four dimensions; where neither N nor H has a dimension of its own it is 1.
  const bool by_batch = mask.dim() == 3 && mask.size(0) == N;
  const auto rows = mask.dim() == 4 ? mask.size(0) : mask.dim() == 3 ? N : 1;
  const auto heads = mask.dim() == 4 ? mask.size(1) : mask.dim() == 3 && !by_batch ? H : 1;
  auto sum = at::zeros({rows, heads, L, mask.size(-1)}, at::kDouble);
  const auto g = gradient.accessor<double, 4>();
  auto s = sum.accessor<double, 4>();
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < L; ++i)
        for (int64_t j = 0; j < mask.size(-1); ++j)
          s[rows == 1 ? 0 : n][heads == 1 ? 0 : h][i][j] += g[n][h][i][j];
  return sum.reshape(mask.sizes());
}

}  // namespace mha::test
