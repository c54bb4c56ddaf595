#pragma once

namespace mha::detail {

/// The built-in layouts, a JSON array of what `Layout::from_file` reads. Those of the same
/// names and as many matches in a file are told by their order here.
extern const char* const kBuiltInLayouts;

}  // namespace mha::detail
