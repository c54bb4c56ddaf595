#include <mha/cpu_isa.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <ostream>
#include <string>

#if MHA_X86_KERNELS
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "cpu/kernels.h"
#include "cpu/tile_kernels.h"
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

// CPUID leaf 7, EDX bits 22 and 24: AMX_BF16 and AMX_TILE.
bool cpu_has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0 &&
         (d >> 24 & 1) != 0;
}

// Whether the operating system saves tiles at a switch of threads: XCR0 bits 17 and 18.
bool system_saves_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool can_ask = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 27 & 1) != 0;
  if (!can_ask) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3;
}

// Linux gives a process the tiles' 8 kB a thread once it asks; a child of `fork` has them too.
bool linux_permits_tiles() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

std::string why_no_tiles() {
  if (!cpu_has_amx()) return "";
  if (!system_saves_tiles()) return "the operating system does not save tiles";
  if (!linux_permits_tiles()) return "Linux refused the permission for tile data";
  return "";
}

bool has_amx() {
  return cpu_has_amx() && amx_refusal().empty();
}
#else
#define MHA_IF_X86(function) nullptr
#endif

#if MHA_EMULATED_TILES
#define MHA_IF_EMULATED(function) function
#else
#define MHA_IF_EMULATED(function) nullptr
#endif

const cpu::TileKernels* no_tiles() {
  return nullptr;
}

struct KernelSet {
  CpuIsa isa;
  const char* name;
  bool (*cpu_has_it)();              // null where this build does not contain the kernels
  const cpu::Kernels* (*kernels)();  // likewise
  const cpu::TileKernels* (*tile_kernels)() = no_tiles;
};

// One line an instruction set, narrowest first: the last that can run is taken unasked.
constexpr KernelSet kernel_sets[] = {
    {CpuIsa::generic, "generic", runs_everywhere, cpu::generic_kernels},
    {CpuIsa::avx2, "avx2", MHA_IF_X86(has_avx2), MHA_IF_X86(cpu::avx2_kernels)},
    {CpuIsa::amx_emulated, "amx-emulated", MHA_IF_EMULATED(has_avx512),
     MHA_IF_EMULATED(cpu::avx512_kernels), MHA_IF_EMULATED(cpu::amx_emulated_tile_kernels)},
    {CpuIsa::avx512, "avx512", MHA_IF_X86(has_avx512), MHA_IF_X86(cpu::avx512_kernels)},
    {CpuIsa::amx, "amx", MHA_IF_X86(has_amx), MHA_IF_X86(cpu::avx512_kernels),
     MHA_IF_X86(cpu::amx_tile_kernels)},
};
#undef MHA_IF_X86
#undef MHA_IF_EMULATED

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

std::string amx_refusal() {
#if MHA_X86_KERNELS
  static const std::string reason = why_no_tiles();
  return reason;
#else
  return "";
#endif
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

const cpu::TileKernels* tile_kernels() {
  return kernel_set(cpu_isa())->tile_kernels();
}

bool torch_multiplies_bfloat16() {
#if MHA_X86_KERNELS
  const bool pairs_pay =
      __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");  // see vec_avx512.h
  static const bool has_tiles = cpu_has_amx() && system_saves_tiles();
  return pairs_pay || has_tiles;
#else
  return true;
#endif
}

uint32_t dropout_threshold(double p) {
  constexpr double range = 4294967296.0;  // 2^32
  return static_cast<uint32_t>(std::min(p * range, range - 1));
}

}  // namespace detail
}  // namespace mha
