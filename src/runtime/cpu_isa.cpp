#include <mha/cpu_isa.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <ostream>
#include <string>

#if MHA_X86_KERNELS
#include <cpuid.h>
#endif

#include "cpu/kernels.h"
#include "runtime/cpu_kernels.h"

namespace mha {
namespace {

#if MHA_X86_KERNELS
// CPUID leaf 1, ECX bit 29: g++ 12's __builtin_cpu_supports does not know it by name.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
}
#endif

bool can_run(CpuIsa isa) {
#if MHA_X86_KERNELS
  if (isa == CpuIsa::avx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (isa == CpuIsa::avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  }
#endif
  return isa == CpuIsa::generic;
}

void check_can_run(const char* who, CpuIsa isa) {
  const auto available = available_cpu_isas();
  TORCH_CHECK(can_run(isa), who, ": expected one of ", c10::Join(", ", available),
              ", which can run here, found ", isa);
}

CpuIsa initial_isa() {
  const char* wanted = std::getenv("MHA_CPU_ISA");
  if (!wanted || !*wanted) return available_cpu_isas().back();
  for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512}) {
    if (c10::str(isa) != wanted) continue;
    check_can_run("MHA_CPU_ISA", isa);
    return isa;
  }
  TORCH_CHECK(false, "MHA_CPU_ISA: expected generic, avx2 or avx512, found ", wanted);
}

std::atomic<CpuIsa>& current_isa() {
  static std::atomic<CpuIsa> isa{initial_isa()};
  return isa;
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, CpuIsa isa) {
  switch (isa) {
    case CpuIsa::generic:
      return stream << "generic";
    case CpuIsa::avx2:
      return stream << "avx2";
    case CpuIsa::avx512:
      return stream << "avx512";
  }
  return stream << "?";
}

std::vector<CpuIsa> available_cpu_isas() {
  std::vector<CpuIsa> available;
  for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512}) {
    if (can_run(isa)) available.push_back(isa);
  }
  return available;
}

CpuIsa cpu_isa() {
  return current_isa();
}

void set_cpu_isa(CpuIsa isa) {
  check_can_run("set_cpu_isa", isa);
  current_isa() = isa;
}

namespace detail {

const cpu::Kernels& cpu_kernels() {
  switch (cpu_isa()) {
#if MHA_X86_KERNELS
    case CpuIsa::avx2:
      return *cpu::avx2_kernels();
    case CpuIsa::avx512:
      return *cpu::avx512_kernels();
#endif
    default:
      return *cpu::generic_kernels();
  }
}

uint32_t dropout_threshold(double p) {
  constexpr double range = 4294967296.0;  // 2^32
  return static_cast<uint32_t>(std::min(p * range, range - 1));
}

}  // namespace detail
}  // namespace mha
