#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/tile_kernels.h"

namespace mha::detail {

/// Weights of linear layers as the kernels of one instruction set want them.
///
/// A weight is packed again whenever it may have changed: another storage, which is held weakly
/// so that none at the same address is mistaken for it, another version counter, another value
/// at one of a few hundred sampled places (which notices what went past the version counter,
/// like an optimiser that writes through `data()`), or other kernels. Tensors made in inference
/// mode have no version counter and are packed for every call. Safe to use from several
/// threads.
class PackedWeights {
 public:
  /// The packed form of `weight` (columns, inner), float32. `slot` tells the layers apart.
  std::shared_ptr<const at::Tensor> get(size_t slot, const at::Tensor& weight,
                                        const cpu::Kernels& kernels);

  /// The same of a bfloat16 weight, as the right side of products on tiles.
  std::shared_ptr<const at::Tensor> get(size_t slot, const at::Tensor& weight,
                                        const cpu::TileKernels& kernels);

  /// As the first, or null for a weight that is not as the call before saw it: one that changes
  /// with every step of an optimizer is best packed where it is used, as it will be used once.
  std::shared_ptr<const at::Tensor> get_if_steady(size_t slot, const at::Tensor& weight,
                                                  const cpu::Kernels& kernels);

 private:
  static constexpr size_t samples = 256;
  struct Entry {
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
    const void* data = nullptr;
    int64_t version = 0;
    const void* kernels = nullptr;  // of which set
    std::vector<int64_t> sizes, strides;
    std::array<uint32_t, samples> sampled{};   // bits
    std::shared_ptr<const at::Tensor> packed;  // null: seen, not packed
  };
  template <typename KernelsOfSet>
  std::shared_ptr<const at::Tensor> find(size_t slot, const at::Tensor& weight,
                                         const KernelsOfSet& kernels, bool pack_new);
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace mha::detail
