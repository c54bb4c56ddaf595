#pragma once

#include "cpu/kernels.h"
#include "cpu/tile_kernels.h"

namespace mha::detail {

/// The kernels of the instruction set in use (see mha/cpu_isa.h).
const cpu::Kernels& cpu_kernels();

/// Its kernels on matrix tiles. Null: it has none.
const cpu::TileKernels* tile_kernels();

/// Whether LibTorch multiplies matrices of bfloat16 faster than the kernels do those of float32:
/// where the CPU does so itself, and faster. Elsewhere they take several times as long.
bool torch_multiplies_bfloat16();

/// The threshold below which random bits drop a weight with probability `p`.
uint32_t dropout_threshold(double p);

}  // namespace mha::detail
