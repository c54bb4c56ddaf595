#include "processor_loops.h"

#if defined(__x86_64__)
#include <cpuid.h>
// Linux alone lends tiles as below, and assemblers know them about as long as these compilers.
#if defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define MHA_BENCH_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace mha::bench {
namespace {

// Twelve chains hide the latency of any fused multiply-add so far, and leave a register each
// for the factor and the term even where there are sixteen.
constexpr int kChains = 12;

template <int Bytes>
struct VectorOf {
  // May alias float, as what is loaded from floats must.
  typedef float type __attribute__((vector_size(Bytes), may_alias));
};

// These two are compiled for each instruction set by being inlined into a function for it.

template <int Bytes>
[[gnu::always_inline]] inline float multiply_add(int64_t rounds) {
  using Vec = typename VectorOf<Bytes>::type;
  Vec chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = Vec{} + static_cast<float>(i);
  // Not known to the compiler, which would compute a chain that stays as it is in advance.
  const Vec factor = Vec{} + 0.5F, term = Vec{} + static_cast<float>(rounds);
  for (int64_t round = 0; round < rounds; ++round) {
    for (Vec& chain : chains) chain = chain * factor + term;
  }
  float result = 0;
  for (const Vec& chain : chains) result += chain[0];
  return result;
}

template <int Bytes>
[[gnu::always_inline]] inline float sum(const float* data, int64_t count) {
  using Vec = typename VectorOf<Bytes>::type;
  constexpr int kSums = 8;
  constexpr int64_t lanes = sizeof(Vec) / sizeof(float);
  const auto* vectors = reinterpret_cast<const Vec*>(data);
  Vec sums[kSums] = {};
  for (int64_t i = 0; i < count / lanes; i += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += vectors[i + j];
  }
  float result = 0;
  for (const Vec& vector : sums) {
    for (int64_t lane = 0; lane < lanes; ++lane) result += vector[lane];
  }
  return result;
}

constexpr ProductLoop vector_loop(float (*run)(int64_t rounds), int bytes) {
  return {run, kChains * 2 * bytes / int64_t{sizeof(float)}};
}

float multiply_add_generic(int64_t rounds) {
  return multiply_add<16>(rounds);
}
float sum_generic(const float* data, int64_t count) {
  return sum<16>(data, count);
}

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] float multiply_add_avx2(int64_t rounds) {
  return multiply_add<32>(rounds);
}
[[gnu::target("avx2,fma")]] float sum_avx2(const float* data, int64_t count) {
  return sum<32>(data, count);
}

[[gnu::target("avx512f")]] float multiply_add_avx512(int64_t rounds) {
  return multiply_add<64>(rounds);
}
[[gnu::target("avx512f")]] float sum_avx512(const float* data, int64_t count) {
  return sum<64>(data, count);
}

// The products of bfloat16 are assembly, as compilers that know the instructions by name are
// newer than those that this is built with. They are given ones and twos: zeros can take less
// power, and a processor that is short of it then runs faster than any product of numbers.
constexpr uint16_t kOne = 0x3F80, kTwo = 0x4000;

[[gnu::target("avx512f")]] float bfloat16_pairs(int64_t rounds) {
  using Vec = VectorOf<64>::type;
  typedef uint16_t Halves __attribute__((vector_size(64)));
  const Halves ones = Halves{} + kOne, twos = Halves{} + kTwo;
  Vec chains[kChains];  // of different numbers, or one chain would do for all
  for (int i = 0; i < kChains; ++i) chains[i] = Vec{} + static_cast<float>(i);
  for (int64_t round = 0; round < rounds; ++round) {
    for (Vec& chain : chains) {
      __asm__("vdpbf16ps %2, %1, %0" : "+v"(chain) : "v"(ones), "v"(twos));
    }
  }
  float result = 0;
  for (const Vec& chain : chains) result += chain[0];
  return result;
}

// Sixteen lanes of two products and their sums.
constexpr ProductLoop kBFloat16Pairs = {bfloat16_pairs, int64_t{16 * 2 * 2} * kChains};

#if defined(MHA_BENCH_TILES)
constexpr int kTileRows = 16, kTileRowBytes = 64;

// What LDTILECFG reads: eight tiles of the largest size.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = kTileRowBytes;
      rows[tile] = kTileRows;
    }
  }
};
static_assert(sizeof(TileConfig) == 64);

// tmm0 to tmm3 += tmm4 * tmm5: a product takes 16 cycles and its result is there after 52, so
// with four sums none waits. In one piece, so that the compiler, which knows nothing of tiles,
// does nothing amid it.
float bfloat16_tiles(int64_t rounds) {
  const TileConfig config;
  alignas(64) uint16_t ones[kTileRows][kTileRowBytes / 2], twos[kTileRows][kTileRowBytes / 2];
  alignas(64) float sums[kTileRows][kTileRowBytes / 4];
  for (auto& row : ones) {
    for (uint16_t& number : row) number = kOne;
  }
  for (auto& row : twos) {
    for (uint16_t& number : row) number = kTwo;
  }
  const int64_t stride = kTileRowBytes;
  __asm__ volatile(
      "ldtilecfg (%[config])\n\t"  // zeroes the tiles
      "tileloadd (%[ones],%[stride]), %%tmm4\n\t"
      "tileloadd (%[twos],%[stride]), %%tmm5\n"
      "1:\n\t"
      "tdpbf16ps %%tmm5, %%tmm4, %%tmm0\n\t"
      "tdpbf16ps %%tmm5, %%tmm4, %%tmm1\n\t"
      "tdpbf16ps %%tmm5, %%tmm4, %%tmm2\n\t"
      "tdpbf16ps %%tmm5, %%tmm4, %%tmm3\n\t"
      "dec %[rounds]\n\t"
      "jnz 1b\n\t"
      "tilestored %%tmm3, (%[sums],%[stride])\n\t"
      "tilerelease"
      : [rounds] "+r"(rounds)
      : [config] "r"(&config), [ones] "r"(ones), [twos] "r"(twos), [sums] "r"(sums),
        [stride] "r"(stride)
      : "cc", "memory");
  return sums[0][0];
}

constexpr ProductLoop kBFloat16Tiles = {bfloat16_tiles, int64_t{16 * 16 * 32 * 2} * 4};

// The processor has tiles of bfloat16 and the system saves them when threads change (bits 17
// and 18 of XCR0). Linux must be asked besides, once for all threads of the process.
bool has_bfloat16_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx >> 27 & 1) == 0) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx >> 22 & 1) == 0 || (edx >> 24 & 1) == 0) return false;
  __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  constexpr unsigned tile_state = 3U << 17;
  if ((eax & tile_state) != tile_state) return false;
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

// Of a processor that has the vectors which they read.
void add_bfloat16(ProcessorLoops& loops) {
  if (__builtin_cpu_supports("avx512bf16")) loops.bfloat16_pairs = kBFloat16Pairs;
#if defined(MHA_BENCH_TILES)
  if (has_bfloat16_tiles()) loops.bfloat16_tiles = kBFloat16Tiles;
#endif
}
#endif

ProcessorLoops widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    ProcessorLoops loops = {"avx512", vector_loop(multiply_add_avx512, 64), {}, {}, sum_avx512};
    add_bfloat16(loops);
    return loops;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {"avx2", vector_loop(multiply_add_avx2, 32), {}, {}, sum_avx2};
  }
#endif
  return {"generic", vector_loop(multiply_add_generic, 16), {}, {}, sum_generic};
}

}  // namespace

const ProcessorLoops& processor_loops() {
  static const ProcessorLoops loops = widest();
  return loops;
}

}  // namespace mha::bench
