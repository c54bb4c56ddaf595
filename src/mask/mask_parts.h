#pragma once

#include <cstdint>

#include "mask/resolved_mask.h"

namespace mha::detail {

// The parts of a mask: views of its terms, but for a few numbers that shift. `offsets` stay
// those of the whole.

ResolvedMask select_head(const ResolvedMask& mask, int64_t head);

/// Some samples and heads.
ResolvedMask select_planes(const ResolvedMask& mask, int64_t first_sample, int64_t samples,
                           int64_t first_head, int64_t heads);

/// Queries [from, to).
ResolvedMask select_rows(const ResolvedMask& mask, int64_t from, int64_t to);

/// Keys [from, to) of the given ones and, after them, the extra ones: those of these that lie
/// in the part are its extra keys.
ResolvedMask select_keys(const ResolvedMask& mask, int64_t from, int64_t to);

}  // namespace mha::detail
