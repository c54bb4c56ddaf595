#include "mask/mask_parts.h"

#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace mha::detail {
namespace {

struct Range {
  int64_t from, count;
};

// Takes a part of all dimensions that go over `axis`. A size of 1 may stand for all.
void narrow_axis(ResolvedMask& mask, Axis axis, Range part, int64_t whole) {
  for (const MaskList& list : mask_lists) {
    for (size_t i = 0; i < list.axes.size(); ++i) {
      if (list.axes[i] != axis) continue;
      const auto dim = static_cast<int64_t>(i);
      for (auto& tensor : mask.*list.tensors) {
        if (tensor.size(dim) == whole) {
          tensor = tensor.narrow(dim, part.from, part.count);
        } else {
          TORCH_INTERNAL_ASSERT(tensor.size(dim) == 1);
        }
      }
    }
  }
}

// Counts numbers that are places on `axis` from the part's first place.
void shift_places(ResolvedMask& mask, Axis axis, Range part) {
  for (const MaskList& list : mask_lists) {
    if (list.numbers != axis) continue;
    for (auto& places : mask.*list.tensors) places = (places - part.from).clamp(0, part.count);
  }
}

void shift_distances(ResolvedMask& mask, int64_t by) {
  Band& band = mask.band;
  if (band.low != -Band::open) band.low += by;
  if (band.high != Band::open) band.high += by;
  for (const MaskList& list : mask_lists) {
    if (list.numbers != Axis::distance) continue;
    for (auto& distances : mask.*list.tensors) distances = distances + by;
  }
}

// `from` may lie behind the end where there are no distances.
void narrow_distances(ResolvedMask& part, int64_t from, const ResolvedMask& mask) {
  const int64_t whole = count_distances(mask.queries, mask.keys);
  const int64_t count = count_distances(part.queries, part.keys);
  narrow_axis(part, Axis::distance, {std::min(from, whole - count), count}, whole);
}

}  // namespace

ResolvedMask select_head(const ResolvedMask& mask, int64_t head) {
  ResolvedMask part = mask;
  part.heads = 1;
  narrow_axis(part, Axis::head, {head, 1}, mask.heads);
  return part;
}

ResolvedMask select_planes(const ResolvedMask& mask, int64_t first_sample, int64_t samples,
                           int64_t first_head, int64_t heads) {
  ResolvedMask part = mask;
  part.batch = samples;
  part.heads = heads;
  narrow_axis(part, Axis::sample, {first_sample, samples}, mask.batch);
  narrow_axis(part, Axis::head, {first_head, heads}, mask.heads);
  return part;
}

ResolvedMask select_rows(const ResolvedMask& mask, int64_t from, int64_t to) {
  ResolvedMask part = mask;
  part.queries = to - from;
  narrow_axis(part, Axis::query, {from, part.queries}, mask.queries);
  narrow_distances(part, mask.queries - to, mask);
  shift_places(part, Axis::query, {from, part.queries});
  shift_distances(part, from);
  return part;
}

ResolvedMask select_keys(const ResolvedMask& mask, int64_t from, int64_t to) {
  ResolvedMask part = mask;
  const int64_t first = std::min(from, mask.keys);
  part.keys = std::min(to, mask.keys) - first;
  part.extra_keys = to - from - part.keys;
  narrow_axis(part, Axis::key, {first, part.keys}, mask.keys);
  narrow_distances(part, first, mask);
  shift_places(part, Axis::key, {first, part.keys});
  shift_distances(part, -first);
  return part;
}

}  // namespace mha::detail
