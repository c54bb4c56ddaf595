#include <mha/kv_cache.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cache/kv_cache_state.h"
#include "files/safetensors.h"

namespace mha {
namespace {

// An entry of a cache's file, checked before its numbers are read.
const std::vector<int64_t>& checked_shape(const detail::SafetensorsFile& file,
                                          const std::string& name, size_t dims) {
  const auto found = file.entries().find(name);
  TORCH_CHECK(found != file.entries().end(), file.path(),
              ": expected the tensors key, value, lengths and next_positions of a KVCache, "
              "found no tensor ",
              name);
  const auto type = found->second.dtype->type;
  const bool fits = dims == 1 ? type == at::kLong
                              : type == at::kFloat || type == at::kDouble ||
                                    type == at::kBFloat16 || type == at::kHalf;
  TORCH_CHECK(fits, file.path(), ": tensor ", name, ": expected ",
              dims == 1 ? "I64" : "F32, F64, BF16 or F16", ", found ",
              std::string(found->second.dtype->name));
  TORCH_CHECK(found->second.shape.size() == dims, file.path(), ": tensor ", name, ": expected ",
              dims, " dimensions, found ", at::IntArrayRef(found->second.shape));
  return found->second.shape;
}

std::vector<int64_t> read_counts(detail::SafetensorsFile& file, const std::string& name) {
  const auto tensor = file.read(name);
  const int64_t* data = tensor.data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

}  // namespace

void KVCache::save(const std::string& path) const {
  TORCH_CHECK(state().keys.defined(), "KVCache::save: expected a cache that holds tokens, ",
              "found an empty one");
  const auto contents = state().held();
  detail::write_safetensors(path, {{{"key", contents.key},
                                    {"value", contents.value},
                                    {"lengths", lengths()},
                                    {"next_positions", next_positions()}},
                                   {{"format", "pt"}}});
}

KVCache KVCache::load(const std::string& path, const KVCacheOptions& options) {
  KVCache cache(options);
  detail::SafetensorsFile file(path);
  const auto &key = checked_shape(file, "key", 4), &value = checked_shape(file, "value", 4);
  TORCH_CHECK(std::equal(key.begin(), key.begin() + 3, value.begin()), path,
              ": tensor value: expected (N, Hk, S) of key, ", at::IntArrayRef(key), ", found ",
              at::IntArrayRef(value));
  for (const char* name : {"lengths", "next_positions"}) {
    const auto& shape = checked_shape(file, name, 1);
    TORCH_CHECK(shape[0] == key[0], path, ": tensor ", name, ": expected shape (N) = (", key[0],
                "), found ", at::IntArrayRef(shape));
  }
  TORCH_CHECK(key[2] <= options.capacity().value_or(key[2]), path,
              ": capacity: expected room for the file's ", key[2], " tokens, found ",
              options.capacity().value_or(0));
  auto lengths = read_counts(file, "lengths");
  const auto positions = read_counts(file, "next_positions");
  constexpr int64_t largest_position = int64_t{1} << 60;
  for (size_t i = 0; i < lengths.size(); ++i) {
    TORCH_CHECK(lengths[i] >= 0 && lengths[i] <= key[2], path,
                ": tensor lengths: expected lengths from 0 to S = ", key[2], ", found ",
                lengths[i]);
    TORCH_CHECK(positions[i] >= lengths[i] && positions[i] <= largest_position, path,
                ": tensor next_positions: expected from the sample's length, ", lengths[i],
                ", to 2^60, found ", positions[i]);
    const int64_t wanted =
        options.window() ? std::min(positions[i], *options.window() - 1) : positions[i];
    TORCH_CHECK(lengths[i] >= wanted, path, ": window: expected at most ", lengths[i] + 1,
                ", since the file lacks earlier tokens of sample ", i, ", found ",
                options.window() ? std::to_string(*options.window()) : "none");
  }
  cache.state_->restore({file.read("key"), file.read("value")}, std::move(lengths), positions);
  return cache;
}

}  // namespace mha
