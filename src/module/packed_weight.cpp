#include "module/packed_weight.h"

#include <cstring>

#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

template <size_t N, typename Bits>
void sample(const at::Tensor& weight, std::array<uint32_t, N>& values) {
  const int64_t columns = weight.size(1), count = weight.numel();
  const auto* data = static_cast<const Bits*>(weight.data_ptr());
  // An odd step visits all columns as it goes down the rows.
  const int64_t step = std::max<int64_t>(1, count / static_cast<int64_t>(N) - 1) | 1;
  for (size_t i = 0; i < N; ++i) {
    const int64_t at = static_cast<int64_t>(i) * step % count;
    values[i] = data[at / columns * weight.stride(0) + at % columns * weight.stride(1)];
  }
}

template <size_t N>
std::array<uint32_t, N> sample(const at::Tensor& weight) {
  std::array<uint32_t, N> values{};
  if (weight.element_size() == 4) {
    sample<N, uint32_t>(weight, values);
  } else {
    sample<N, uint16_t>(weight, values);
  }
  return values;
}

at::Tensor pack(const at::Tensor& given, const cpu::Kernels& kernels) {
  const at::Tensor wide = given.to(at::kFloat);
  const at::Tensor weight = wide.stride(1) == 1 ? wide : wide.contiguous();
  const int64_t columns = weight.size(0), inner = weight.size(1);
  auto packed = uncomputed({kernels.packed_size(inner, columns)}, weight.options());
  const int64_t panels = (columns + kernels.tile - 1) / kernels.tile;
  const float* from = weight.data_ptr<float>();
  float* to = packed.data_ptr<float>();
  run_tasks(panels, 1, [&](int64_t panel, float*) {
    const int64_t first = panel * kernels.tile;
    kernels.pack_weight(from + first * weight.stride(0), weight.stride(0), inner,
                        std::min(kernels.tile, columns - first), to + first * inner);
  });
  return packed;
}

at::Tensor pack(const at::Tensor& given, const cpu::TileKernels& kernels) {
  constexpr int64_t block_edge = 32;
  const at::Tensor weight = given.stride(1) == 1 ? given : given.contiguous();
  const int64_t columns = weight.size(0), inner = weight.size(1);
  cpu::TileSide side;
  side.matrix = {static_cast<const cpu::BFloat16*>(weight.data_ptr()),
                 columns,
                 inner,
                 columns,
                 0,
                 weight.stride(0),
                 inner,
                 inner};
  auto packed = uncomputed({kernels.side_size(columns, inner)}, weight.options());
  auto* to = static_cast<cpu::BFloat16*>(packed.data_ptr());
  run_tasks((columns + block_edge - 1) / block_edge, 1,
            [&](int64_t block, float*) { kernels.pack_side(side, block, to); });
  return packed;
}

}  // namespace

std::shared_ptr<const at::Tensor> PackedWeights::get(size_t slot, const at::Tensor& weight,
                                                     const cpu::TileKernels& kernels) {
  return find(slot, weight, kernels, /*pack_new=*/true);
}

std::shared_ptr<const at::Tensor> PackedWeights::get(size_t slot, const at::Tensor& weight,
                                                     const cpu::Kernels& kernels) {
  return find(slot, weight, kernels, /*pack_new=*/true);
}

std::shared_ptr<const at::Tensor> PackedWeights::get_if_steady(size_t slot,
                                                               const at::Tensor& weight,
                                                               const cpu::Kernels& kernels) {
  return find(slot, weight, kernels, /*pack_new=*/false);
}

template <typename KernelsOfSet>
std::shared_ptr<const at::Tensor> PackedWeights::find(size_t slot, const at::Tensor& weight,
                                                      const KernelsOfSet& kernels,
                                                      bool pack_new) {
  const auto packed = [&] {
    return std::make_shared<const at::Tensor>(pack(weight.detach(), kernels));
  };
  if (weight.is_inference()) return packed();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.size() <= slot) entries_.resize(slot + 1);
  Entry& entry = entries_[slot];
  const auto sampled = sample<samples>(weight);
  const auto* storage = weight.storage().unsafeGetStorageImpl();
  const bool seen = entry.storage && entry.storage->_unsafe_get_target() == storage &&
                    entry.data == weight.data_ptr() && entry.version == weight._version() &&
                    entry.kernels == &kernels && weight.sizes() == entry.sizes &&
                    weight.strides() == entry.strides &&
                    std::memcmp(&sampled, &entry.sampled, sizeof sampled) == 0;
  if (!seen) {
    entry = {weight.storage().getWeakStorageImpl(),
             weight.data_ptr(),
             weight._version(),
             &kernels,
             weight.sizes().vec(),
             weight.strides().vec(),
             sampled,
             nullptr};
  }
  if (!entry.packed && (seen || pack_new)) entry.packed = packed();
  return entry.packed;
}

}  // namespace mha::detail
