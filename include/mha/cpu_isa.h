#pragma once

#include <iosfwd>
#include <vector>

namespace mha {

/// The instruction sets that the CPU kernels are built for, narrowest first.
enum class CpuIsa {
  generic,  ///< what every CPU of the architecture has
  avx2,     ///< AVX2, FMA and F16C
  avx512,   ///< AVX-512 F, VL, DQ and BW; AVX512_BF16 too where the CPU has it
};
std::ostream& operator<<(std::ostream& stream, CpuIsa isa);

/// The instruction sets that this build contains and this CPU can run.
std::vector<CpuIsa> available_cpu_isas();

/// The one in use: the widest available, or what the environment variable `MHA_CPU_ISA`
/// (`generic`, `avx2`, `avx512`) names, or what `set_cpu_isa` last set.
/// Throws `c10::Error` if the variable names none, or one that can't run here.
CpuIsa cpu_isa();

/// Uses `isa` from now on, in all threads. Not to be called while another thread computes.
/// Throws `c10::Error` if it can't run here.
void set_cpu_isa(CpuIsa isa);

}  // namespace mha
