#include "resolved_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace mha::detail {
namespace {

using Kind = Mask::Term::Kind;

// The (N or 1, H or 1, L, S) view of a mask tensor.
at::Tensor pair_view(const char* name, const at::Tensor& tensor, const AttentionSizes& sizes) {
  const int64_t n = sizes.batch, h = sizes.heads, l = sizes.queries, s = sizes.keys;
  const int64_t dims = tensor.dim();
  const bool last_two_fit = dims >= 2 && tensor.size(-2) == l && tensor.size(-1) == s;
  if (last_two_fit && dims == 2) return tensor.view({1, 1, l, s});
  if (last_two_fit && dims == 3) {
    if (tensor.size(0) == n) return tensor.unsqueeze(1);
    if (tensor.size(0) == n * h) return tensor.unflatten(0, {n, h});
  }
  if (last_two_fit && dims == 4) {
    const bool batch_fits = tensor.size(0) == n || tensor.size(0) == 1;
    const bool heads_fit = tensor.size(1) == h || tensor.size(1) == 1;
    if (batch_fits && heads_fit) return tensor;
  }
  // Leading dimensions of the functional form, given as they are.
  const auto leading = static_cast<int64_t>(sizes.leading.size());
  if (last_two_fit && leading > 1 && dims == leading + 3 &&
      tensor.sizes().slice(0, leading) == sizes.leading &&
      (tensor.size(-3) == h || tensor.size(-3) == 1)) {
    return tensor.flatten(0, leading - 1);
  }
  TORCH_CHECK(false, "Mask::", name, ": expected shape (L, S) = (", l, ", ", s,
              "), (N, L, S) = (", n, ", ", l, ", ", s, "), (N*H, L, S) = (", n * h, ", ", l,
              ", ", s, ") or (N or 1, H or 1, L, S) = (", n, " or 1, ", h, " or 1, ", l, ", ",
              s, "), found ", tensor.sizes(),
              "; expand() a mask that should broadcast in other ways, it costs no memory");
}

// The (N or 1, 1, 1, S) view of a key mask.
at::Tensor key_view(const char* name, const at::Tensor& tensor, const AttentionSizes& sizes) {
  const bool fits = tensor.dim() >= 1 && tensor.dim() <= 2 && tensor.size(-1) == sizes.keys &&
                    (tensor.dim() == 1 || tensor.size(0) == sizes.batch);
  TORCH_CHECK(fits, "Mask::", name, ": expected shape (N, S) = (", sizes.batch, ", ",
              sizes.keys, ") or (S) = (", sizes.keys, "), found ", tensor.sizes());
  return tensor.dim() == 1 ? tensor.view({1, 1, 1, sizes.keys})
                           : tensor.unsqueeze(1).unsqueeze(1);
}

at::Tensor checked_lengths(const at::Tensor& lengths, const AttentionSizes& sizes) {
  TORCH_CHECK(lengths.dim() == 1 && lengths.size(0) == sizes.batch,
              "Mask::lengths: expected shape (N) = (", sizes.batch, "), found ",
              lengths.sizes());
  if (lengths.numel() > 0) {
    const auto shortest = lengths.min().item<int64_t>(),
               longest = lengths.max().item<int64_t>();
    TORCH_CHECK(shortest >= 0 && longest <= sizes.keys,
                "Mask::lengths: expected lengths from 0 to S = ", sizes.keys, ", found ",
                shortest < 0 ? shortest : longest);
  }
  return lengths;
}

Band band_of(const Mask::Term& term, const AttentionSizes& sizes) {
  const int64_t shift =
      term.alignment == Mask::Alignment::bottom_right ? sizes.keys - sizes.queries : 0;
  Band band;
  // Extents beyond any sequence are as good as open, and must not overflow.
  if (term.left >= 0) band.low = shift - std::min(term.left, Band::open / 2);
  if (term.right >= 0) band.high = shift + std::min(term.right, Band::open / 2);
  return band;
}

// (N) positions of the first queries. Those beyond any sequence are held where they can't
// overflow.
at::Tensor checked_offsets(const Mask::Term& term, const AttentionSizes& sizes) {
  const at::Tensor& offsets = term.tensor.defined() ? term.tensor : sizes.offsets;
  TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) == sizes.batch,
              "Mask::", term.kind == Kind::causal ? "causal" : "window",
              ": offsets: expected shape (N) = (", sizes.batch, "), found ", offsets.sizes());
  return offsets.to(at::kLong).clamp(-Band::open / 4, Band::open / 4);
}

void add_offset_band(const Mask::Term& term, const AttentionSizes& sizes,
                     ResolvedMask& resolved) {
  const auto offsets = checked_offsets(term, sizes);
  if (term.left >= 0) resolved.lows.push_back(offsets - std::min(term.left, Band::open / 2));
  if (term.right >= 0) resolved.highs.push_back(offsets + std::min(term.right, Band::open / 2));
}

// (N, 1, 1, 1)
at::Tensor of_sample(const at::Tensor& edge) {
  return edge.view({-1, 1, 1, 1});
}

at::Tensor and_if_defined(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() ? a.logical_and(b) : b;
}

}  // namespace

bool ResolvedMask::allows_everything() const {
  const auto lists = tensor_lists(*this);
  return band.is_open() && std::all_of(lists.begin(), lists.end(),
                                       [](const auto* list) { return list->empty(); });
}

ResolvedMask resolve(const Mask& mask, const AttentionSizes& sizes, at::Device device) {
  ResolvedMask resolved;
  resolved.batch = sizes.batch;
  resolved.heads = sizes.heads;
  resolved.queries = sizes.queries;
  resolved.keys = sizes.keys;
  for (const Mask::Term& term : mask.terms()) {
    TORCH_CHECK(!term.tensor.defined() || term.tensor.device() == device,
                "Mask: expected every tensor on the device of query, ", device, ", found ",
                term.tensor.device());
    switch (term.kind) {
      case Kind::keep:
        resolved.keep.push_back(pair_view("keep", term.tensor, sizes));
        break;
      case Kind::block:
        resolved.block.push_back(pair_view("block", term.tensor, sizes));
        break;
      case Kind::add:
        resolved.add.push_back(pair_view("add", term.tensor, sizes));
        break;
      case Kind::keep_keys:
        resolved.keep_keys.push_back(key_view("keep_keys", term.tensor, sizes));
        break;
      case Kind::block_keys:
        resolved.block_keys.push_back(key_view("block_keys", term.tensor, sizes));
        break;
      case Kind::lengths:
        resolved.lengths.push_back(checked_lengths(term.tensor, sizes));
        break;
      case Kind::causal:
      case Kind::window: {
        if (term.tensor.defined() ||
            (sizes.offsets.defined() && term.alignment == Mask::Alignment::bottom_right)) {
          add_offset_band(term, sizes, resolved);
          break;
        }
        const Band band = band_of(term, sizes);
        resolved.band.low = std::max(resolved.band.low, band.low);
        resolved.band.high = std::min(resolved.band.high, band.high);
        break;
      }
    }
  }
  // A band that holds every pair, such as causal for one query, is none.
  if (resolved.band.low <= 1 - sizes.queries && resolved.band.high >= sizes.keys - 1) {
    resolved.band = {};
  }
  return resolved;
}

DenseMask densify(const ResolvedMask& mask, at::ScalarType dtype, at::Device device) {
  at::Tensor allowed, added;
  const auto index_options = at::TensorOptions().dtype(at::kLong).device(device);
  if (!mask.band.is_open() || !mask.lows.empty() || !mask.highs.empty()) {
    const auto distance = (at::arange(mask.keys, index_options).unsqueeze(0) -
                           at::arange(mask.queries, index_options).unsqueeze(1))
                              .view({1, 1, mask.queries, mask.keys});
    allowed = distance.ge(mask.band.low).logical_and(distance.le(mask.band.high));
    for (const auto& low : mask.lows) {
      allowed = allowed.logical_and(distance.ge(of_sample(low)));
    }
    for (const auto& high : mask.highs) {
      allowed = allowed.logical_and(distance.le(of_sample(high)));
    }
  }
  for (const auto& lengths : mask.lengths) {
    const auto index = at::arange(mask.keys, index_options).unsqueeze(0);
    const auto real = index.lt(lengths.unsqueeze(1));
    allowed = and_if_defined(allowed, real.unsqueeze(1).unsqueeze(1));
  }
  for (const auto& keep : mask.keep_keys) allowed = and_if_defined(allowed, keep.ne(0));
  for (const auto& block : mask.block_keys)
    allowed = and_if_defined(allowed, block.logical_not());
  for (const auto& keep : mask.keep) allowed = and_if_defined(allowed, keep.ne(0));
  for (const auto& block : mask.block) allowed = and_if_defined(allowed, block.logical_not());
  for (const auto& term : mask.add) {
    const auto is_block = term.detach().eq(-infinity);
    allowed = and_if_defined(allowed, is_block.logical_not());
    // Clamped, since the lowest value of a wider dtype, or the sum of two, must stay finite.
    const double lowest = dtype == at::kDouble ? std::numeric_limits<double>::lowest()
                                               : std::numeric_limits<float>::lowest();
    auto values = term.masked_fill(is_block, 0);
    if (term.scalar_type() == at::kDouble) values = values.clamp_min(lowest);
    values = values.to(dtype);
    added = added.defined() ? (added + values).clamp_min(lowest) : values;
  }
  if (mask.extra_keys > 0) {
    if (allowed.defined()) allowed = at::constant_pad_nd(allowed, {0, mask.extra_keys}, 1);
    if (added.defined()) added = at::constant_pad_nd(added, {0, mask.extra_keys}, 0);
  }
  return {allowed, added};
}

}  // namespace mha::detail
