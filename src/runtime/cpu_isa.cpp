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

bool runs_everywhere() {
  return true;
}

#if MHA_X86_KERNELS
#define MHA_IF_X86(function) function

// CPUID leaf 1, ECX bit 29: g++ 12's __builtin_cpu_supports does not know it by name.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#else
#define MHA_IF_X86(function) nullptr
#endif

struct KernelSet {
  CpuIsa isa;
  const char* name;
  bool (*cpu_has_it)();              // null where this build does not contain the kernels
  const cpu::Kernels* (*kernels)();  // likewise
};

// One line an instruction set, narrowest first.
constexpr KernelSet kernel_sets[] = {
    {CpuIsa::generic, "generic", runs_everywhere, cpu::generic_kernels},
    {CpuIsa::avx2, "avx2", MHA_IF_X86(has_avx2), MHA_IF_X86(cpu::avx2_kernels)},
    {CpuIsa::avx512, "avx512", MHA_IF_X86(has_avx512), MHA_IF_X86(cpu::avx512_kernels)},
};
#undef MHA_IF_X86

const KernelSet* kernel_set(CpuIsa isa) {
  for (const KernelSet& set : kernel_sets) {
    if (set.isa == isa) return &set;
  }
  return nullptr;
}

bool can_run(const KernelSet& set) {
  return set.cpu_has_it && set.cpu_has_it();
}

void check_can_run(const char* who, CpuIsa isa) {
  const KernelSet* set = kernel_set(isa);
  TORCH_CHECK(set && can_run(*set), who, ": expected one of ",
              c10::Join(", ", available_cpu_isas()), ", which can run here, found ", isa);
}

CpuIsa initial_isa() {
  const char* wanted = std::getenv("MHA_CPU_ISA");
  if (!wanted || !*wanted) return available_cpu_isas().back();
  std::vector<const char*> names;
  for (const KernelSet& set : kernel_sets) {
    names.push_back(set.name);
    if (std::string(set.name) != wanted) continue;
    check_can_run("MHA_CPU_ISA", set.isa);
    return set.isa;
  }
  TORCH_CHECK(false, "MHA_CPU_ISA: expected one of ", c10::Join(", ", names), ", found ",
              wanted);
}

std::atomic<CpuIsa>& current_isa() {
  static std::atomic<CpuIsa> isa{initial_isa()};
  return isa;
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, CpuIsa isa) {
  const KernelSet* set = kernel_set(isa);
  return stream << (set ? set->name : "?");
}

std::vector<CpuIsa> available_cpu_isas() {
  std::vector<CpuIsa> available;
  for (const KernelSet& set : kernel_sets) {
    if (can_run(set)) available.push_back(set.isa);
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
  return *kernel_set(cpu_isa())->kernels();
}

uint32_t dropout_threshold(double p) {
  constexpr double range = 4294967296.0;  // 2^32
  return static_cast<uint32_t>(std::min(p * range, range - 1));
}

}  // namespace detail
}  // namespace mha
