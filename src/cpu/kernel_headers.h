#pragma once

// What the kernels take from outside. All other headers of theirs are included inside the
// namespace of one instruction set (see vec.h).

#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "kernels.h"
