#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace mha {

/// The instruction sets that the CPU kernels are built for, narrowest first.
enum class CpuIsa {
  generic,       ///< what every CPU of the architecture has
  avx2,          ///< AVX2, FMA and F16C
  amx_emulated,  ///< what `amx` does, in AVX-512: slow, for tests, in builds with them only
  avx512,        ///< AVX-512 F, VL, DQ and BW; AVX512_BF16 too where it is faster
  amx,           ///< the same, and bfloat16 on matrix tiles: AMX_TILE and AMX_BF16
};
std::ostream& operator<<(std::ostream& stream, CpuIsa isa);

/// The instruction sets that this build contains and this CPU can run.
std::vector<CpuIsa> available_cpu_isas();

/// Why `amx` is not among them on a CPU that has it: the operating system keeps the tiles from
/// this process. Empty: it does not.
std::string amx_refusal();

/// The one in use: the widest available, or what the environment variable `MHA_CPU_ISA`
/// (`generic`, `avx2`, `avx512`, `amx`) names, or what `set_cpu_isa` last set.
/// Throws `c10::Error` if the variable names none, or one that can't run here.
CpuIsa cpu_isa();

/// Uses `isa` from now on, in all threads. Not to be called while another thread computes.
/// Throws `c10::Error` if it can't run here.
void set_cpu_isa(CpuIsa isa);

}  // namespace mha
