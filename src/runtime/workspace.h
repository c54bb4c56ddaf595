#pragma once

#include <cstdint>

namespace mha::detail {

/// At least `size` floats of this thread's scratch memory, 64-byte aligned, contents undefined.
/// Valid until the thread's next call. It is kept from call to call, since fresh pages cost
/// more than what is computed in them; what exceeds 16 MiB is given back at the next smaller
/// call.
float* thread_workspace(int64_t size);

}  // namespace mha::detail
