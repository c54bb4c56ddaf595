#include <mha/kv_cache.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cache/kv_cache_state.h"
#include "runtime/constant.h"
#include "runtime/given_tensor.h"

namespace mha {
namespace {

constexpr int64_t most_samples = int64_t{1} << 24;

// The sizes of new keys and values, checked against each other.
detail::AppendSizes append_sizes(const at::Tensor& key, const at::Tensor& value) {
  for (const auto& [name, tensor] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    detail::given_tensor({"KVCache", name}, *tensor, detail::Numbers::floating,
                         detail::Memory::or_meta);
    TORCH_CHECK(tensor->dim() == 4, "KVCache: ", name, ": expected shape (N, Hk, L, ",
                tensor == &key ? "D" : "Dv", "), found ", tensor->sizes());
  }
  TORCH_CHECK(value.sizes().slice(0, 3) == key.sizes().slice(0, 3),
              "KVCache: value: expected (N, Hk, L) of key, ", key.sizes().slice(0, 3),
              ", found ", value.sizes().slice(0, 3));
  TORCH_CHECK(value.device() == key.device(), "KVCache: value: expected the device of key, ",
              key.device(), ", found ", value.device());
  return {key.size(0), key.size(1), key.size(2), key.size(3), value.size(3)};
}

std::vector<int64_t> checked_indices(const at::Tensor& indices, int64_t batch) {
  const auto given =
      detail::given_tensor({"KVCache::reorder", "indices"}, indices, detail::Numbers::integers);
  TORCH_CHECK(indices.dim() == 1, "KVCache::reorder: indices: expected shape (M), found ",
              indices.sizes());
  TORCH_CHECK(indices.size(0) <= most_samples,
              "KVCache::reorder: indices: expected up to 2^24 samples, found ",
              indices.size(0));
  const auto on_cpu = given.to(at::kCPU, at::kLong).contiguous();
  const int64_t* data = on_cpu.data_ptr<int64_t>();
  std::vector<int64_t> result(data, data + on_cpu.numel());
  TORCH_CHECK(batch > 0 || result.empty(),
              "KVCache::reorder: indices: expected none for a cache without samples, found ",
              result.size());
  for (const int64_t index : result) {
    TORCH_CHECK(index >= 0 && index < batch,
                "KVCache::reorder: indices: expected samples from 0 to ", batch - 1, ", found ",
                index);
  }
  return result;
}

int64_t checked_length(const char* name, int64_t length) {
  TORCH_CHECK(length >= 0, "KVCache::crop: ", name, ": expected at least 0 tokens, found ",
              length);
  return length;
}

}  // namespace

KVCache::KVCache(KVCacheOptions options)
    : state_(std::make_shared<detail::KVCacheState>(std::move(options))) {}

detail::KVCacheState& KVCache::state() const {
  TORCH_CHECK(state_, "KVCache: expected a cache, found one that was moved from");
  return *state_;
}

const KVCacheOptions& KVCache::options() const {
  return state().options;
}

CachedKeys KVCache::append(const at::Tensor& key, const at::Tensor& value) {
  return append(key, value, {});
}

CachedKeys KVCache::append(const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& new_lengths) {
  const auto plan = state().plan(append_sizes(key, value), new_lengths);
  return state().append(key, value, plan, /*extra=*/0);
}

at::Tensor KVCache::key() const {
  return state().held().key;
}

at::Tensor KVCache::value() const {
  return state().held().value;
}

int64_t KVCache::batch_size() const {
  return static_cast<int64_t>(state().lengths.size());
}

at::Tensor KVCache::lengths() const {
  return detail::constant(state().lengths);
}

at::Tensor KVCache::next_positions() const {
  return detail::constant(state().next_positions(batch_size()));
}

void KVCache::crop(int64_t length) {
  state().crop(std::vector<int64_t>(static_cast<size_t>(batch_size()),
                                    checked_length("length", length)));
}

void KVCache::crop(const at::Tensor& lengths) {
  const auto given =
      detail::given_tensor({"KVCache::crop", "lengths"}, lengths, detail::Numbers::integers);
  TORCH_CHECK(lengths.dim() == 1 && lengths.size(0) == batch_size(),
              "KVCache::crop: lengths: expected shape (N) = (", batch_size(), "), found ",
              lengths.sizes());
  const auto on_cpu = given.to(at::kCPU, at::kLong).contiguous();
  const int64_t* data = on_cpu.data_ptr<int64_t>();
  const std::vector<int64_t> each(data, data + on_cpu.numel());
  for (const int64_t length : each) checked_length("lengths", length);
  state().crop(each);
}

void KVCache::reset() {
  state().reset();
}

void KVCache::reorder(const at::Tensor& indices) {
  state().reorder(checked_indices(indices, batch_size()));
}

void KVCache::repeat(int64_t n) {
  const int64_t most = std::max<int64_t>(1, most_samples / std::max<int64_t>(1, batch_size()));
  TORCH_CHECK(n >= 1 && n <= most, "KVCache::repeat: n: expected from 1 to ", most,
              ", so that there are up to 2^24 samples, found ", n);
  std::vector<int64_t> from;
  for (int64_t i = 0; i < batch_size() * n; ++i) from.push_back(i / n);
  state().reorder(from);
}

KVCache KVCache::clone() const {
  KVCache copy;
  *copy.state_ = state();
  copy.state_->layer.reset();
  copy.repeat(1);  // into memory of its own
  return copy;
}

void KVCache::to(at::Device device) {
  state().to(device);
}

int64_t KVCache::nbytes() const {
  return state().keys.defined()
             ? static_cast<int64_t>(state().keys.nbytes() + state().values.nbytes())
             : 0;
}

}  // namespace mha
