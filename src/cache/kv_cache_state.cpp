#include "cache/kv_cache_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/attention_path.h"
#include "runtime/given_tensor.h"
#include "runtime/huge_pages.h"

namespace mha::detail {
namespace {

constexpr int64_t smallest_room = 64;

int64_t largest(const std::vector<int64_t>& numbers) {
  return numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end());
}

bool all_equal(const std::vector<int64_t>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(),
                     [&](int64_t number) { return number == numbers.front(); });
}

void check_options(const KVCacheOptions& options) {
  constexpr int64_t most_tokens = int64_t{1} << 40;  // twice it stays within int64_t
  TORCH_CHECK(
      options.capacity().value_or(1) >= 1 && options.capacity().value_or(1) <= most_tokens,
      "KVCacheOptions: capacity: expected from 1 to 2^40 tokens, found ",
      options.capacity().value_or(1));
  TORCH_CHECK(options.window().value_or(1) >= 1 && options.window().value_or(1) <= most_tokens,
              "KVCacheOptions: window: expected from 1 to 2^40 keys, found ",
              options.window().value_or(1));
  TORCH_CHECK(
      !options.capacity() || !options.window(),
      "KVCacheOptions: capacity: expected none beside a window, which limits the memory "
      "itself, found ",
      options.capacity().value_or(0), " beside window ", options.window().value_or(0));
  TORCH_CHECK(!options.dtype() || is_floating_dtype(*options.dtype()),
              "KVCacheOptions: dtype: expected float32, float64, bfloat16 or float16, found ",
              options.dtype().value_or(at::kFloat));
}

std::vector<int64_t> checked_new_lengths(const at::Tensor& lengths, const AppendSizes& sizes) {
  if (!lengths.defined()) {
    return std::vector<int64_t>(static_cast<size_t>(sizes.batch), sizes.tokens);
  }
  const auto given = given_tensor({"KVCache", "new_lengths"}, lengths, Numbers::integers);
  TORCH_CHECK(lengths.dim() == 1 && lengths.size(0) == sizes.batch,
              "KVCache: new_lengths: expected shape (N) = (", sizes.batch, "), found ",
              lengths.sizes());
  const auto on_cpu = given.to(at::kCPU, at::kLong).contiguous();
  const int64_t* data = on_cpu.data_ptr<int64_t>();
  const std::vector<int64_t> result(data, data + sizes.batch);
  for (const int64_t length : result) {
    TORCH_CHECK(length >= 0 && length <= sizes.tokens,
                "KVCache: new_lengths: expected lengths from 0 to L = ", sizes.tokens,
                ", found ", length);
  }
  return result;
}

// Zeros, since memory after a shorter sample's tokens is read along with longer ones; no NaN
// may lie there. Never an inference tensor, so that any mode may write it. On huge pages, since
// a decoding step is one read of it all: a quarter to a half faster than on small ones.
at::Tensor new_buffer(int64_t batch, int64_t heads, int64_t room, int64_t dim,
                      const at::TensorOptions& options) {
  constexpr double address_space = 0x1p47;
  const double bytes = static_cast<double>(batch) * static_cast<double>(heads) *
                       static_cast<double>(room) * static_cast<double>(dim) *
                       static_cast<double>(options.dtype().itemsize());
  TORCH_CHECK(bytes <= address_space,
              "KVCache: capacity: expected memory of up to 2^47 bytes, found room for ", room,
              " tokens of ", batch, " samples with ", heads, " heads of size ", dim);
  const c10::InferenceMode normal(false);
  const auto buffer = at::empty({batch, heads, room, dim}, options);
  if (buffer.is_cpu()) prefer_huge_pages(buffer.data_ptr(), buffer.nbytes());
  return buffer.zero_();
}

}  // namespace

KVCacheState::KVCacheState(KVCacheOptions options_) : options(std::move(options_)) {
  check_options(options);
}

int64_t KVCacheState::needed(int64_t length) const {
  return options.window() ? std::min(length, *options.window() - 1) : length;
}

int64_t KVCacheState::retained(int64_t length) const {
  return options.window() ? std::min(length, *options.window() - 1 + *options.window() / 2)
                          : length;
}

int64_t KVCacheState::longest() const {
  return largest(lengths);
}

std::vector<int64_t> KVCacheState::next_positions(int64_t n) const {
  std::vector<int64_t> next(static_cast<size_t>(n), 0);
  for (size_t i = 0; i < std::min(next.size(), lengths.size()); ++i) {
    next[i] = dropped[i] + lengths[i];
  }
  return next;
}

void KVCacheState::check_layer(const LayerToken& other) const {
  const auto same = [](const LayerToken& a, const LayerToken& b) {
    return !a.owner_before(b) && !b.owner_before(a);
  };
  TORCH_CHECK(longest() + largest(dropped) == 0 || same(layer, {}) || same(layer, other),
              "MultiHeadAttention: cache: expected a cache of this layer's own, found one that "
              "holds ",
              longest(),
              " tokens of another layer; copies of a KVCache share one cache, so make "
              "one for each layer");
}

AppendPlan KVCacheState::plan(const AppendSizes& sizes, const at::Tensor& new_lengths) const {
  if (longest() + largest(dropped) > 0) {
    TORCH_CHECK(sizes.batch == keys.size(0), "KVCache: key: expected the batch size of the ",
                "cache, ", keys.size(0), ", found ", sizes.batch);
    TORCH_CHECK(sizes.kv_heads == keys.size(1),
                "KVCache: key: expected the heads of the cache, ", keys.size(1), ", found ",
                sizes.kv_heads);
    TORCH_CHECK(sizes.head_dim == keys.size(3) && sizes.value_dim == values.size(3),
                "KVCache: key and value: expected the head sizes of the cache, ", keys.size(3),
                " and ", values.size(3), ", found ", sizes.head_dim, " and ", sizes.value_dim);
  }
  AppendPlan plan;
  plan.added = checked_new_lengths(new_lengths, sizes);
  const size_t n = plan.added.size();
  std::vector<int64_t> begin = lengths;
  begin.resize(n, 0);
  int64_t end = 0;
  for (size_t i = 0; i < n; ++i) end = std::max(end, begin[i] + plan.added[i]);
  TORCH_CHECK(!options.capacity() || end <= *options.capacity(),
              "KVCache: capacity: expected room for the new tokens, found ", end,
              " tokens in a cache of ", options.capacity().value_or(0));
  plan.drops = options.window() && end > std::max(room(), 2 * *options.window()) &&
               std::any_of(begin.begin(), begin.end(),
                           [this](int64_t length) { return length > retained(length); });
  int64_t unneeded = end;
  for (size_t i = 0; i < n; ++i) {
    const int64_t kept = needed(begin[i]);
    if (plan.drops) begin[i] = retained(begin[i]);
    unneeded = std::min(unneeded, begin[i] - kept);
  }
  plan.first = unneeded;
  for (size_t i = 0; i < n; ++i) {
    plan.offsets.push_back(begin[i] - plan.first);
    plan.keys = std::max(plan.keys, plan.offsets[i] + plan.added[i]);
  }
  plan.aligned = n == 0 || (all_equal(plan.offsets) && all_equal(plan.added) &&
                            plan.added[0] == sizes.tokens);
  return plan;
}

CachedKeys KVCacheState::append(const at::Tensor& key, const at::Tensor& value,
                                const AppendPlan& plan, int64_t extra) {
  for (const auto* tensor : {&key, &value}) {
    const char* name = tensor == &key ? "key" : "value";
    TORCH_CHECK(!at::GradMode::is_enabled() || !tensor->requires_grad(), "KVCache: ", name,
                ": expected a tensor that asks for no gradient, since a cache is written in "
                "place, found one that does; cached calls belong under at::NoGradGuard");
    TORCH_CHECK(
        !is_followed(*tensor), "KVCache: ", name,
        ": expected a call outside of traces and forward-mode derivatives, which do not "
        "see what a cache holds, found one within");
    TORCH_CHECK(!keys.defined() || longest() == 0 || tensor->device() == keys.device(),
                "KVCache: ", name, ": expected the device of the cache, ",
                keys.defined() ? keys.device() : key.device(), ", found ", tensor->device());
  }
  CacheRollback rollback(this);
  const auto n = static_cast<int64_t>(plan.added.size());
  const bool fits =
      keys.defined() && keys.size(0) == n && keys.size(1) == key.size(1) &&
      keys.size(3) == key.size(3) && values.size(3) == value.size(3) &&
      keys.device() == key.device() &&
      keys.scalar_type() ==
          options.dtype().value_or(longest() > 0 ? keys.scalar_type() : key.scalar_type());
  const int64_t end = plan.first + plan.keys + extra;
  const auto more = [&](int64_t room_now) {
    if (options.capacity()) return *options.capacity() + extra;
    const int64_t doubled = std::max({end, 2 * room_now, smallest_room});
    return options.window() ? std::max(end, std::min(doubled, 2 * *options.window())) : doubled;
  };
  if (!fits) {
    const auto tensors =
        key.options().dtype(options.dtype().value_or(key.scalar_type())).requires_grad(false);
    const auto fresh_keys = new_buffer(n, key.size(1), more(0), key.size(3), tensors);
    values = new_buffer(n, key.size(1), more(0), value.size(3), tensors);
    keys = fresh_keys;
    written_ = 0;
  }
  lengths.resize(plan.added.size(), 0);
  dropped.resize(plan.added.size(), 0);
  if (plan.drops) {
    drop(more(room()));
  } else if (end > room()) {
    relocate(lengths, more(room()));
  }

  if (plan.aligned && n > 0) {
    write(lengths[0], key, value, 0, std::nullopt, plan.added[0]);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<size_t>(i);
      write(lengths[at], key, value, 0, i, plan.added[at]);
    }
  }
  write(plan.first + plan.keys, key, value, key.size(2) - extra, std::nullopt, extra);
  for (size_t i = 0; i < plan.added.size(); ++i) lengths[i] += plan.added[i];
  written_ = std::max(written_, end);
  const CachedKeys result{keys.narrow(2, plan.first, plan.keys + extra),
                          values.narrow(2, plan.first, plan.keys + extra)};

  // What a long chunk took beside the window's memory goes with the chunk.
  if (options.window() && room() > 2 * *options.window() + extra) {
    drop(2 * *options.window());
  }
  rollback.keep();
  return result;
}

void KVCacheState::drop(int64_t new_room) {
  auto counts = lengths;
  for (auto& count : counts) count = retained(count);
  relocate(std::move(counts), new_room);
}

void KVCacheState::relocate(std::vector<int64_t> counts, int64_t new_room) {
  const int64_t n = keys.size(0);
  const auto moved = [&](const at::Tensor& from) {
    const auto to = new_buffer(n, from.size(1), new_room, from.size(3), from.options());
    for (int64_t i = 0; i < n; ++i) {
      const int64_t count = counts[static_cast<size_t>(i)];
      const int64_t skipped = lengths[static_cast<size_t>(i)] - count;
      to[i].narrow(1, 0, count).copy_(from[i].narrow(1, skipped, count));
    }
    return to;
  };
  const auto moved_keys = moved(keys);
  values = moved(values);
  keys = moved_keys;
  for (size_t i = 0; i < counts.size(); ++i) dropped[i] += lengths[i] - counts[i];
  lengths = std::move(counts);
  written_ = 0;
}

void KVCacheState::write(int64_t at_token, const at::Tensor& key, const at::Tensor& value,
                         int64_t from, std::optional<int64_t> sample, int64_t count) {
  if (count == 0) return;
  const at::NoGradGuard no_grad;
  const auto part = [&](const at::Tensor& tensor, int64_t first) {
    const auto tokens = tensor.narrow(2, first, count);
    return sample ? tokens.select(0, *sample) : tokens;
  };
  // Memory that nobody has seen is written past the version counter, so that what was given out
  // before counts as unmodified.
  const bool unseen = at_token >= written_;
  part(unseen ? keys.variable_data() : keys, at_token).copy_(part(key, from));
  part(unseen ? values.variable_data() : values, at_token).copy_(part(value, from));
}

CachedKeys KVCacheState::held() const {
  if (!keys.defined()) return {};
  return {keys.narrow(2, 0, longest()), values.narrow(2, 0, longest())};
}

void KVCacheState::crop(const std::vector<int64_t>& to) {
  for (size_t i = 0; i < lengths.size(); ++i) {
    TORCH_CHECK(
        dropped[i] + lengths[i] <= to[i] || dropped[i] <= to[i] - needed(to[i]),
        "KVCache::crop: length: expected a position whose window the cache still holds, "
        "which begins at token ",
        dropped[i], " of sample ", i, ", found ", to[i], " with window ",
        options.window().value_or(0));
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    lengths[i] = std::min(lengths[i], to[i] - dropped[i]);
  }
}

void KVCacheState::reset() {
  lengths.assign(lengths.size(), 0);
  dropped.assign(dropped.size(), 0);
}

void KVCacheState::to(at::Device device) {
  if (!keys.defined()) return;
  TORCH_CHECK(!keys.is_meta() || device.is_meta(),
              "KVCache::to: device: expected meta, where the cache is, which holds no numbers, "
              "found ",
              device);
  const auto moved = keys.to(device);
  values = values.to(device);
  keys = moved;
}

void KVCacheState::restore(const CachedKeys& contents, std::vector<int64_t> new_lengths,
                           const std::vector<int64_t>& next_positions) {
  const auto dtype = options.dtype().value_or(contents.key.scalar_type());
  keys = contents.key.to(dtype);
  values = contents.value.to(dtype);
  lengths = std::move(new_lengths);
  dropped = next_positions;
  for (size_t i = 0; i < dropped.size(); ++i) dropped[i] -= lengths[i];
  written_ = 0;
}

void KVCacheState::reorder(const std::vector<int64_t>& from) {
  if (!keys.defined()) return;
  const auto picked = [&](const at::Tensor& tensor) {
    const auto to = new_buffer(static_cast<int64_t>(from.size()), tensor.size(1), room(),
                               tensor.size(3), tensor.options());
    for (size_t i = 0; i < from.size(); ++i) {
      const int64_t count = lengths[static_cast<size_t>(from[i])];
      to[static_cast<int64_t>(i)]
          .narrow(1, 0, count)
          .copy_(tensor[from[i]].narrow(1, 0, count));
    }
    return to;
  };
  std::vector<int64_t> new_lengths, new_dropped;
  for (const int64_t i : from) {
    new_lengths.push_back(lengths[static_cast<size_t>(i)]);
    new_dropped.push_back(dropped[static_cast<size_t>(i)]);
  }
  const auto picked_keys = picked(keys);
  values = picked(values);
  keys = picked_keys;
  lengths = std::move(new_lengths);
  dropped = std::move(new_dropped);
  written_ = 0;
}

}  // namespace mha::detail
