#include "mask/mask_views.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

namespace mha::detail {
namespace {

// Leading dimensions of the functional form, given as they are, become the batch.
at::Tensor with_one_batch(const at::Tensor& given, int64_t leading) {
  auto tensor = without_repeats(given, leading);
  const auto once = without_repeats(tensor);
  const bool all_repeated =
      once.numel() > 0 && once.sizes().slice(0, leading) == std::vector<int64_t>(leading, 1);
  return (all_repeated ? once : tensor).flatten(0, leading - 1);
}

bool fits_keys(const at::Tensor& tensor, const AttentionSizes& sizes) {
  return tensor.dim() >= 1 && tensor.dim() <= 2 && tensor.size(-1) == sizes.keys &&
         (tensor.dim() == 1 || tensor.size(0) == sizes.batch);
}

at::Tensor keys_of(const at::Tensor& tensor, const AttentionSizes& sizes) {
  const auto rows = tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor;
  return without_repeats(rows).expand({-1, sizes.keys}).unsqueeze(1).unsqueeze(1);
}

}  // namespace

at::Tensor without_repeats(at::Tensor tensor, int64_t first) {
  if (tensor.requires_grad()) return tensor;
  for (int64_t dim = first; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) == 0) tensor = tensor.narrow(dim, 0, 1);
  }
  return tensor;
}

at::Tensor pair_view(const char* constructor, const at::Tensor& tensor,
                     const AttentionSizes& sizes) {
  const int64_t n = sizes.batch, h = sizes.heads, l = sizes.queries, s = sizes.keys;
  const int64_t dims = tensor.dim();
  const bool last_two_fit = dims >= 2 && tensor.size(-2) == l && tensor.size(-1) == s;
  if (last_two_fit && dims == 2) return without_repeats(tensor.unsqueeze(0).unsqueeze(0));
  if (last_two_fit && dims == 3) {
    if (tensor.size(0) == n) return without_repeats(tensor.unsqueeze(1));
    if (tensor.size(0) == n * h) return without_repeats(tensor.unflatten(0, {n, h}));
  }
  if (last_two_fit && dims == 4) {
    const bool batch_fits = tensor.size(0) == n || tensor.size(0) == 1;
    const bool heads_fit = tensor.size(1) == h || tensor.size(1) == 1;
    if (batch_fits && heads_fit) return without_repeats(tensor);
  }
  const auto leading = static_cast<int64_t>(sizes.leading.size());
  if (last_two_fit && leading > 1 && dims == leading + 3 &&
      tensor.sizes().slice(0, leading) == sizes.leading &&
      (tensor.size(-3) == h || tensor.size(-3) == 1)) {
    return with_one_batch(tensor, leading);
  }
  TORCH_CHECK(false, constructor, ": mask: expected shape (L, S) = (", l, ", ", s,
              "), (N, L, S) = (", n, ", ", l, ", ", s, "), (N*H, L, S) = (", n * h, ", ", l,
              ", ", s, ") or (N or 1, H or 1, L, S) = (", n, " or 1, ", h, " or 1, ", l, ", ",
              s, "), found ", tensor.sizes(),
              "; expand() a mask that should broadcast in other ways, it costs no memory");
}

at::Tensor key_view(const char* constructor, const at::Tensor& tensor,
                    const AttentionSizes& sizes) {
  TORCH_CHECK(fits_keys(tensor, sizes), constructor, ": mask: expected shape (N, S) = (",
              sizes.batch, ", ", sizes.keys, ") or (S) = (", sizes.keys, "), found ",
              tensor.sizes());
  return keys_of(tensor, sizes);
}

at::Tensor added_key_view(const char* constructor, const at::Tensor& tensor,
                          const AttentionSizes& sizes) {
  const bool is_extended = tensor.dim() == 4 && tensor.size(1) == 1 && tensor.size(2) == 1;
  auto keys = is_extended ? tensor.squeeze(2).squeeze(1) : tensor;
  if (is_extended && keys.size(0) == 1) keys = keys.squeeze(0);  // for all samples
  TORCH_CHECK(fits_keys(keys, sizes), constructor, ": mask: expected shape (N, S) = (",
              sizes.batch, ", ", sizes.keys, "), (S) = (", sizes.keys,
              ") or (N or 1, 1, 1, S), found ", tensor.sizes());
  return keys_of(keys, sizes);
}

at::Tensor place_view(const char* constructor, const char* argument, const char* places,
                      const at::Tensor& tensor, int64_t batch, int64_t count) {
  const bool fits = tensor.dim() >= 1 && tensor.dim() <= 2 && tensor.size(-1) == count &&
                    (tensor.dim() == 1 || tensor.size(0) == batch);
  TORCH_CHECK(fits, constructor, ": ", argument, ": expected shape (", places, ") = (", count,
              ") or (N, ", places, ") = (", batch, ", ", count, "), found ", tensor.sizes());
  const auto rows = tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor;
  return without_repeats(rows).expand({-1, count});
}

at::Tensor checked_lengths(const char* constructor, const char* places,
                           const at::Tensor& lengths, int64_t batch, int64_t most) {
  TORCH_CHECK(lengths.dim() == 1 && lengths.size(0) == batch, constructor,
              ": lengths: expected shape (N) = (", batch, "), found ", lengths.sizes());
  if (lengths.numel() > 0 && !lengths.is_meta()) {
    const auto [least, most_found] = at::aminmax(lengths);
    const auto ends = at::stack({least, most_found}).to(at::kCPU, at::kLong);  // one read
    const auto shortest = ends[0].item<int64_t>(), longest = ends[1].item<int64_t>();
    TORCH_CHECK(shortest >= 0 && longest <= most, constructor,
                ": lengths: expected lengths from 0 to ", places, " = ", most, ", found ",
                shortest < 0 ? shortest : longest);
  }
  return lengths.to(at::kLong);  // which may fall below 0 on the way
}

}  // namespace mha::detail
