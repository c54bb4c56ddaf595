#include "processor_loops.h"

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

constexpr int64_t flops_per_round(int bytes) {
  return kChains * 2 * bytes / int64_t{sizeof(float)};
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
#endif

ProcessorLoops widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    return {"avx512", multiply_add_avx512, flops_per_round(64), sum_avx512};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {"avx2", multiply_add_avx2, flops_per_round(32), sum_avx2};
  }
#endif
  return {"generic", multiply_add_generic, flops_per_round(16), sum_generic};
}

}  // namespace

const ProcessorLoops& processor_loops() {
  static const ProcessorLoops loops = widest();
  return loops;
}

}  // namespace mha::bench
