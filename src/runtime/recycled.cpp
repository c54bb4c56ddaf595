#include "runtime/recycled.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <vector>

#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

constexpr size_t smallest_kept = size_t{64} << 10, most_kept = size_t{64} << 20;

// Oldest first.
std::vector<c10::Storage>& kept_storages() {
  static thread_local std::vector<c10::Storage> kept;
  return kept;
}

void keep(const c10::Storage& storage) {
  auto& kept = kept_storages();
  kept.push_back(storage);
  size_t bytes = 0;
  for (const auto& each : kept) bytes += each.nbytes();
  while (bytes > most_kept) {
    bytes -= kept.front().nbytes();
    kept.erase(kept.begin());
  }
}

}  // namespace

at::Tensor recycled(at::IntArrayRef sizes) {
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * sizeof(float);
  if (bytes < smallest_kept || bytes > most_kept) return uncomputed(sizes, at::kFloat);
  auto& kept = kept_storages();
  const auto fits = [&](const c10::Storage& storage) {
    return storage.use_count() == 1 && storage.nbytes() >= bytes &&
           storage.nbytes() <= 2 * bytes;
  };
  const auto found = std::find_if(kept.begin(), kept.end(), fits);
  if (found == kept.end()) {
    auto fresh = uncomputed(sizes, at::kFloat);
    keep(fresh.storage());
    return fresh;
  }
  auto tensor = at::empty({0}, at::kFloat);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(*found);
  impl->set_sizes_contiguous(sizes);
  poison(tensor.data_ptr<float>(), tensor.numel());
  return tensor;
}

at::Tensor allocated(at::IntArrayRef sizes, Lifetime lifetime, at::ScalarType dtype) {
  if (lifetime == Lifetime::kept) return uncomputed(sizes, dtype);
  if (dtype == at::kFloat) return recycled(sizes);
  const int64_t count = c10::multiply_integers(sizes);
  const auto halves = recycled({(count + 1) / 2}).view(at::kBFloat16);
  return halves.narrow(0, 0, count).view(sizes);
}

}  // namespace mha::detail
