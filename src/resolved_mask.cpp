#include "resolved_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/searchsorted.h>
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

// (N, 1, 1, 1)
at::Tensor of_sample(const at::Tensor& edge) {
  return edge.view({-1, 1, 1, 1});
}

// (N) positions of the first queries. Those beyond any sequence are held where they can't
// overflow.
at::Tensor checked_offsets(const char* name, const at::Tensor& offsets,
                           const AttentionSizes& sizes) {
  TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) == sizes.batch, "Mask::", name,
              ": offsets: expected shape (N) = (", sizes.batch, "), found ", offsets.sizes());
  return offsets.to(at::kLong).clamp(-Band::open / 4, Band::open / 4);
}

void add_offset_band(const Mask::Term& term, const AttentionSizes& sizes,
                     ResolvedMask& resolved) {
  const auto offsets =
      checked_offsets(term.kind == Kind::causal ? "causal" : "window",
                      term.tensor.defined() ? term.tensor : sizes.offsets, sizes);
  if (term.left >= 0) resolved.lows.push_back(offsets - std::min(term.left, Band::open / 2));
  if (term.right >= 0) resolved.highs.push_back(offsets + std::min(term.right, Band::open / 2));
}

// (N or 1, T) ids of queries or keys.
at::Tensor document_view(const char* argument, const at::Tensor& ids, int64_t batch,
                         int64_t places) {
  const bool fits = ids.dim() >= 1 && ids.dim() <= 2 && ids.size(-1) == places &&
                    (ids.dim() == 1 || ids.size(0) == batch);
  TORCH_CHECK(fits, "Mask::documents: ", argument, ": expected shape (", places, ") or (N, ",
              places, ") = (", batch, ", ", places, "), found ", ids.sizes());
  return ids.dim() == 1 ? ids.unsqueeze(0) : ids;
}

void check_square(const char* name, const AttentionSizes& sizes) {
  TORCH_CHECK(
      sizes.queries == sizes.keys, "Mask::", name,
      ": expected as many queries as keys, found L = ", sizes.queries, ", S = ", sizes.keys,
      "; give queries and keys ids of their own by Mask::documents(query_ids, key_ids)");
}

// (1, S): the document that each place lies in.
at::Tensor documents_of(const at::Tensor& cumulative, const AttentionSizes& sizes) {
  check_square("documents_from_lengths", sizes);
  TORCH_CHECK(cumulative.dim() == 1 && cumulative.size(0) > 0,
              "Mask::documents_from_lengths: expected shape (documents + 1), found ",
              cumulative.sizes());
  const auto ends = cumulative.to(at::kLong);
  const auto first = ends[0].item<int64_t>(), last = ends[-1].item<int64_t>();
  const bool ascends = ends.slice(0, 1).ge(ends.slice(0, 0, -1)).all().item<bool>();
  TORCH_CHECK(first == 0 && last == sizes.keys && ascends,
              "Mask::documents_from_lengths: expected lengths that ascend from 0 to S = ",
              sizes.keys, ", found ", first, " to ", last, ascends ? "" : ", not ascending");
  const auto place = at::arange(sizes.keys, ends.options());
  return at::searchsorted(ends, place, /*out_int32=*/false, /*right=*/true).unsqueeze(0);
}

void add_documents(const Mask::Term& term, const AttentionSizes& sizes,
                   ResolvedMask& resolved) {
  at::Tensor queries, keys;
  if (term.kind == Kind::document_lengths) {
    queries = keys = documents_of(term.tensor, sizes);
  } else if (term.second.defined()) {
    queries = document_view("query_ids", term.tensor, sizes.batch, sizes.queries);
    keys = document_view("key_ids", term.second, sizes.batch, sizes.keys);
  } else {
    check_square("documents", sizes);
    queries = keys = document_view("ids", term.tensor, sizes.batch, sizes.keys);
  }
  resolved.query_documents.push_back(queries);
  resolved.key_documents.push_back(keys);
}

// Distances key - query from -(L - 1) to S - 1.
int64_t distances(const AttentionSizes& sizes) {
  return std::max<int64_t>(sizes.queries + sizes.keys - 1, 0);
}

at::Tensor relative_view(const at::Tensor& table, const AttentionSizes& sizes) {
  TORCH_CHECK(table.dim() == 2 && (table.size(0) == sizes.heads || table.size(0) == 1) &&
                  table.size(1) == distances(sizes),
              "Mask::relative: expected shape (H or 1, L + S - 1) = (", sizes.heads, " or 1, ",
              distances(sizes), "), found ", table.sizes());
  if (!sizes.offsets.defined()) return table.unsqueeze(1).unsqueeze(0);
  // Where query i of a sample stands at key offset + i in place of S - L + i, its table begins
  // so many entries later. Only padding, which no one reads, would look beyond the ends.
  const auto place = at::arange(distances(sizes), sizes.offsets.options()) +
                     (sizes.keys - sizes.queries) -
                     checked_offsets("relative", sizes.offsets, sizes).unsqueeze(1);
  const auto index = place.clamp(0, std::max<int64_t>(distances(sizes) - 1, 0));
  return table.index_select(1, index.flatten())
      .view({table.size(0), sizes.batch, 1, distances(sizes)})
      .transpose(0, 1);
}

// Whether slope * distance is one rounding of the exact product in float32, too: then a
// decoding step need not form and round a table of float64.
bool fits_float(const at::Tensor& slopes, const at::Tensor& distance,
                const AttentionSizes& sizes) {
  if (sizes.dtype == at::kDouble || slopes.scalar_type() == at::kDouble) return false;
  if (!slopes.device().is_cpu() || distance.numel() == 0) return false;
  // Gradients sum over the distances.
  if (at::GradMode::is_enabled() && slopes.requires_grad()) return false;
  const double furthest = distance.max().item<double>();
  const double steepest = slopes.detach().abs().max().item<double>();
  return furthest <= 0x1p24 && steepest * furthest <= std::numeric_limits<float>::max();
}

// In float64 but where float32 is as good, since neither the slopes' dtype nor that of the
// scores may hold a long distance.
at::Tensor alibi_table(const Mask::Term& term, const AttentionSizes& sizes) {
  const at::Tensor& slopes = term.tensor;
  TORCH_CHECK(slopes.dim() == 1 && slopes.size(0) == sizes.heads,
              "Mask::alibi: slopes: expected shape (H) = (", sizes.heads, "), found ",
              slopes.sizes());
  auto distance = at::arange(distances(sizes), slopes.options().dtype(at::kDouble)) -
                  static_cast<double>(sizes.queries - 1);
  distance = distance.view({1, 1, 1, -1});
  const bool is_last = term.alignment == Mask::Alignment::bottom_right;
  const auto& offsets = term.second.defined() ? term.second
                        : is_last             ? sizes.offsets
                                              : term.second;
  if (offsets.defined()) {
    distance = distance - of_sample(checked_offsets("alibi", offsets, sizes));
  } else if (is_last) {
    distance = distance - static_cast<double>(sizes.keys - sizes.queries);
  }
  distance = distance.abs();
  const auto dtype = fits_float(slopes, distance, sizes) ? at::kFloat : at::kDouble;
  return slopes.to(dtype).view({1, -1, 1, 1}).neg() * distance.to(dtype);
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

std::vector<at::Tensor> added_terms(const ResolvedMask& mask) {
  std::vector<at::Tensor> terms;
  for (const auto* list : added_lists(mask)) {
    terms.insert(terms.end(), list->begin(), list->end());
  }
  return terms;
}

ResolvedMask resolve(const Mask& mask, const AttentionSizes& sizes, at::Device device) {
  ResolvedMask resolved;
  resolved.batch = sizes.batch;
  resolved.heads = sizes.heads;
  resolved.queries = sizes.queries;
  resolved.keys = sizes.keys;
  resolved.offsets = sizes.offsets;
  for (const Mask::Term& term : mask.terms()) {
    for (const auto& tensor : {term.tensor, term.second}) {
      TORCH_CHECK(!tensor.defined() || tensor.device() == device,
                  "Mask: expected every tensor on the device of query, ", device, ", found ",
                  tensor.device());
    }
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
      case Kind::documents:
      case Kind::document_lengths:
        add_documents(term, sizes, resolved);
        break;
      case Kind::relative:
        resolved.relative.push_back(relative_view(term.tensor, sizes));
        break;
      case Kind::alibi:
        resolved.relative.push_back(alibi_table(term, sizes));
        break;
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
  for (size_t i = 0; i < mask.key_documents.size(); ++i) {
    const auto together =
        mask.query_documents[i].unsqueeze(2).eq(mask.key_documents[i].unsqueeze(1));
    allowed = and_if_defined(allowed, together.unsqueeze(1));
  }
  // Clamped, since the lowest value of a wider dtype, or the sum of two, must stay finite.
  const double lowest = dtype == at::kDouble ? std::numeric_limits<double>::lowest()
                                             : std::numeric_limits<float>::lowest();
  const auto add_values = [&, dtype](at::Tensor values) {
    if (values.scalar_type() == at::kDouble) values = values.clamp(lowest, -lowest);
    values = values.to(dtype);
    added = added.defined() ? (added + values).clamp(lowest, -lowest) : values;
  };
  for (const auto& term : mask.add) {
    const auto is_block = term.detach().eq(-infinity);
    allowed = and_if_defined(allowed, is_block.logical_not());
    add_values(term.masked_fill(is_block, 0));
  }
  for (const auto& term : mask.relative) {
    if (mask.queries == 0 || mask.keys == 0) break;
    // Row L - 1 - i of the unfolded table is that of query i.
    add_values(term.unfold(3, mask.keys, 1).squeeze(2).flip(2));
  }
  if (mask.extra_keys > 0) {
    if (allowed.defined()) allowed = at::constant_pad_nd(allowed, {0, mask.extra_keys}, 1);
    if (added.defined()) added = at::constant_pad_nd(added, {0, mask.extra_keys}, 0);
  }
  return {allowed, added};
}

}  // namespace mha::detail
