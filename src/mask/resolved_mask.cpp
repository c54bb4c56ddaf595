#include "mask/resolved_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "mask/mask_views.h"
#include "runtime/finite.h"

namespace mha::detail {
namespace {

using Kind = Mask::Term::Kind;

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

void check_square(const char* name, const AttentionSizes& sizes) {
  TORCH_CHECK(
      sizes.queries == sizes.keys, "Mask::", name,
      ": expected as many queries as keys, found L = ", sizes.queries, ", S = ", sizes.keys,
      "; give queries and keys ids of their own by Mask::documents(query_ids, key_ids)");
}

// That lengths (documents + 1) int64 ascend from 0 to S. Reads them once.
void check_cumulative(const at::Tensor& lengths, const AttentionSizes& sizes) {
  const auto ends = lengths.to(at::kCPU);
  const auto first = ends[0].item<int64_t>(), last = ends[-1].item<int64_t>();
  TORCH_CHECK(first == 0 && last == sizes.keys,
              "Mask::documents_from_lengths: cumulative: expected lengths from 0 to S = ",
              sizes.keys, ", found ", first, " to ", last);
  const auto falls = ends.slice(0, 1).lt(ends.slice(0, 0, -1));
  TORCH_CHECK(
      !falls.any().item<bool>(),
      "Mask::documents_from_lengths: cumulative: expected lengths that ascend from 0 to "
      "S = ",
      sizes.keys, ", found one below that before it");
}

// (1, S): the document that each place lies in.
at::Tensor documents_of(const at::Tensor& cumulative, const AttentionSizes& sizes) {
  check_square("documents_from_lengths", sizes);
  TORCH_CHECK(
      cumulative.dim() == 1 && cumulative.size(0) > 0,
      "Mask::documents_from_lengths: cumulative: expected shape (documents + 1), found ",
      cumulative.sizes());
  const auto ends = cumulative.to(at::kLong);
  const auto place = at::arange(sizes.keys, ends.options());
  if (ends.is_meta()) return place.unsqueeze(0);
  check_cumulative(ends, sizes);
  return at::searchsorted(ends, place, /*out_int32=*/false, /*right=*/true).unsqueeze(0);
}

void add_documents(const Mask::Term& term, const AttentionSizes& sizes,
                   ResolvedMask& resolved) {
  at::Tensor queries, keys;
  if (term.kind == Kind::document_lengths) {
    queries = keys = documents_of(term.tensor, sizes);
  } else if (term.second.defined()) {
    queries = place_view("Mask::documents", "query_ids", "L", term.tensor, sizes.batch,
                         sizes.queries);
    keys = place_view("Mask::documents", "key_ids", "S", term.second, sizes.batch, sizes.keys);
  } else {
    check_square("documents", sizes);
    queries = keys =
        place_view("Mask::documents", "ids", "S", term.tensor, sizes.batch, sizes.keys);
  }
  resolved.query_documents.push_back(queries);
  resolved.key_documents.push_back(keys);
}

// `real` (N or 1, L) bool: the other queries are of a document without keys.
void add_real_queries(const at::Tensor& real, const AttentionSizes& sizes,
                      ResolvedMask& resolved) {
  resolved.query_documents.push_back(real.to(at::kLong));
  resolved.key_documents.push_back(at::ones({1, sizes.keys}, real.options().dtype(at::kLong)));
}

// (N, L): the queries before each sample's length.
at::Tensor before_lengths(const at::Tensor& given, const AttentionSizes& sizes) {
  const auto lengths =
      checked_lengths("Mask::query_lengths", "L", given, sizes.batch, sizes.queries);
  return at::arange(sizes.queries, given.options().dtype(at::kLong)).lt(lengths.unsqueeze(1));
}

// Sorts flags of pairs by what they really speak of: those that all queries share are flags of
// keys, and those that all keys share are flags of queries.
enum class Flag { keeps, blocks };
void add_flags(const at::Tensor& flags, Flag meaning, const AttentionSizes& sizes,
               ResolvedMask& resolved) {
  const bool blocks = meaning == Flag::blocks;
  const bool one_head = flags.size(1) == 1;
  if (one_head && flags.size(2) == 1) {
    auto& keys = blocks ? resolved.block_keys : resolved.keep_keys;
    keys.push_back(flags.expand({-1, -1, -1, sizes.keys}));
  } else if (one_head && flags.size(3) == 1 && sizes.keys > 1) {
    const auto rows = flags.squeeze(3).squeeze(1);
    add_real_queries(blocks ? rows.eq(0) : rows.ne(0), sizes, resolved);
  } else {
    (blocks ? resolved.block : resolved.keep).push_back(flags);
  }
}

at::Tensor relative_view(const at::Tensor& table, const AttentionSizes& sizes) {
  const int64_t distances = count_distances(sizes.queries, sizes.keys);
  TORCH_CHECK(table.dim() == 2 && (table.size(0) == sizes.heads || table.size(0) == 1) &&
                  table.size(1) == distances,
              "Mask::relative: expected shape (H or 1, L + S - 1) = (", sizes.heads, " or 1, ",
              distances, "), found ", table.sizes());
  if (!sizes.offsets.defined()) return table.unsqueeze(1).unsqueeze(0);
  // Where query i of a sample stands at key offset + i in place of S - L + i, its table begins
  // so many entries later. Only padding, which no one reads, would look beyond the ends.
  const auto place = at::arange(distances, sizes.offsets.options()) +
                     (sizes.keys - sizes.queries) -
                     checked_offsets("relative", sizes.offsets, sizes).unsqueeze(1);
  const auto index = place.clamp(0, std::max<int64_t>(distances - 1, 0));
  return table.index_select(1, index.flatten())
      .view({table.size(0), sizes.batch, 1, distances})
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
  const auto wide = widest_dtype(slopes.device());
  auto distance =
      at::arange(count_distances(sizes.queries, sizes.keys), slopes.options().dtype(wide)) -
      static_cast<double>(sizes.queries - 1);
  distance = distance.view({1, 1, 1, -1});
  const bool is_last = term.alignment == Mask::Alignment::bottom_right;
  const auto& offsets = term.second.defined() ? term.second
                        : is_last             ? sizes.offsets
                                              : term.second;
  if (offsets.defined()) {
    distance = distance - checked_offsets("alibi", offsets, sizes).view({-1, 1, 1, 1});
  } else if (is_last) {
    distance = distance - static_cast<double>(sizes.keys - sizes.queries);
  }
  distance = at::maximum(distance, -distance);
  const auto dtype = fits_float(slopes, distance, sizes) ? at::kFloat : wide;
  return slopes.to(dtype).view({1, -1, 1, 1}).neg() * distance.to(dtype);
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
        add_flags(pair_view("Mask::keep", term.tensor, sizes), Flag::keeps, sizes, resolved);
        break;
      case Kind::block:
        add_flags(pair_view("Mask::block", term.tensor, sizes), Flag::blocks, sizes, resolved);
        break;
      case Kind::add: {
        const auto pairs = pair_view("Mask::add", term.tensor, sizes);
        const bool of_keys = pairs.size(2) == 1 && pairs.size(3) == sizes.keys;
        (of_keys ? resolved.add_keys : resolved.add).push_back(pairs);
        break;
      }
      case Kind::add_keys:
        resolved.add_keys.push_back(added_key_view("Mask::add_keys", term.tensor, sizes));
        break;
      case Kind::keep_keys:
        resolved.keep_keys.push_back(key_view("Mask::keep_keys", term.tensor, sizes));
        break;
      case Kind::block_keys:
        resolved.block_keys.push_back(key_view("Mask::block_keys", term.tensor, sizes));
        break;
      case Kind::lengths:
        resolved.lengths.push_back(
            checked_lengths("Mask::lengths", "S", term.tensor, sizes.batch, sizes.keys));
        break;
      case Kind::real_queries: {
        const auto flags = place_view("Mask::real_queries", "mask", "L", term.tensor,
                                      sizes.batch, sizes.queries);
        add_real_queries(flags.ne(0), sizes, resolved);
        break;
      }
      case Kind::query_lengths:
        add_real_queries(before_lengths(term.tensor, sizes), sizes, resolved);
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

}  // namespace mha::detail
