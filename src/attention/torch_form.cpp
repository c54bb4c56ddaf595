#include "attention/torch_form.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "attention/plain_blocks.h"
#include "mask/dense_mask.h"
#include "runtime/torch_compat.h"
#include "runtime/wants_gradient.h"

namespace mha::detail {
namespace {

using Pairs = TorchForm::Pairs;

TorchForm refused(const char* because) {
  TorchForm form;
  form.refusal = because;
  return form;
}

bool has_lists(const ResolvedMask& mask) {
  const auto lists = tensor_lists(mask);
  return std::any_of(lists.begin(), lists.end(),
                     [](const auto* list) { return !list->empty(); });
}

// A band without a lower edge that cuts, as a causal square of some keys. Query i sees the keys
// up to i + high.
TorchForm banded(const ResolvedMask& mask) {
  const int64_t high = mask.band.high;
  TorchForm form;
  form.keys = mask.keys;
  if (high >= mask.keys - 1) return form;
  form.pairs = Pairs::causal;
  form.dead_queries = std::min(std::max<int64_t>(-high, 0), mask.queries);
  form.padding = std::max<int64_t>(high, 0);
  form.keys = std::min(mask.keys, mask.queries - form.dead_queries + form.padding);
  return form;
}

// With fewer queries at a time keys and values are read too often: their block is one of all
// samples and heads.
constexpr int64_t fewest_queries = 64;

// How many queries a tensor of the mask may be formed for; 0: all.
int64_t block_queries(const ResolvedMask& mask, at::ScalarType dtype, at::Device device) {
  const auto sizes = pair_sizes(mask);
  if (sizes[2] == 1) return 0;  // fewer numbers than keys have
  double of_query = static_cast<double>(c10::elementSize(dtype));
  // LibTorch's wants a number for every key.
  for (const int64_t size : {sizes[0], sizes[1], mask.keys + mask.extra_keys}) {
    of_query *= static_cast<double>(size);
  }
  const double fitting = static_cast<double>(plain_block_bytes(device)) / of_query;
  if (fitting >= static_cast<double>(sizes[2])) return 0;
  return std::max<int64_t>(static_cast<int64_t>(fitting), 1);
}

// Without LibTorch's word on it.
TorchForm wanted_form(const ResolvedMask& mask, at::ScalarType dtype, at::Device device) {
  const bool cuts_below = mask.band.low > 1 - mask.queries;
  if (!has_lists(mask) && !cuts_below && mask.extra_keys == 0) {
    const auto form = banded(mask);
    // Else most of the queries would be padding.
    if (form.padding <= mask.queries) return form;
  }
  const bool adds = !added_terms(mask).empty();
  if (adds && dtype != at::kFloat && dtype != at::kDouble) {
    return refused("LibTorch's would round the added terms to a half type");
  }
  TorchForm form;
  form.pairs = mask.allows_everything() && !adds ? Pairs::all : Pairs::masked;
  form.keys = mask.keys + mask.extra_keys;
  form.block_queries = block_queries(mask, dtype, device);
  if (form.block_queries > 0 && form.block_queries < fewest_queries) {
    return refused(
        "LibTorch's wants a tensor of the mask that is too large even for few queries");
  }
  return form;
}

const char* refusal_of(const at::Tensor& query, const ResolvedMask& mask,
                       const AttentionCall& call) {
  if (!has_torch_attention(query.device())) return no_torch_attention;
  if (call.weights != Weights::none) return "weights are returned";
  if (call.scoring.softcap > 0) return "LibTorch's has no soft cap";
  if (call.scoring.sinks.defined()) return "LibTorch's has no sinks";
  if (call.dropout > 0) return "LibTorch's drops other weights than are returned";
  if (at::GradMode::is_enabled() && any_requires_grad(added_terms(mask))) {
    return "an added term of the mask asks for its gradient";
  }
  return nullptr;
}

}  // namespace

bool has_torch_attention(at::Device device) {
  return device.is_cpu() || device.is_cuda() || device.type() == at::kXPU;
}

TorchForm torch_form(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const ResolvedMask& mask, const AttentionCall& call) {
  if (const char* refusal = refusal_of(query, mask, call)) return refused(refusal);
  for (const auto& stored : {key, value}) {
    if (c10::promoteTypes(query.scalar_type(), stored.scalar_type()) != query.scalar_type()) {
      return refused("keys or values would be rounded to the query's dtype");
    }
  }
  const int64_t n = query.size(0), h = query.size(1), l = query.size(2), s = key.size(2);
  if (n * h * l * s * query.size(3) * value.size(3) == 0) return refused("a size is 0");
  const auto form = wanted_form(mask, query.scalar_type(), query.device());
  if (form.refusal || form.keys == 0) return form.refusal ? form : refused("no key is seen");
  // Sizes are what it goes by; one number stands for all.
  const int64_t d = std::max(query.size(3), value.size(3));
  const auto sized = [&](int64_t heads, int64_t tokens) {
    return at::empty({d}, query.options()).expand({n, heads, tokens, d});
  };
  const auto column = form.pairs == Pairs::masked
                          ? at::empty({1}, query.options()).expand({1, 1, l, s})
                          : at::Tensor();
  const auto keys = sized(key.size(1), form.keys);
  if (!torch_compat::has_fused_attention(sized(h, form.pairs == Pairs::causal ? form.keys : l),
                                         keys, keys, column, form.pairs == Pairs::causal,
                                         call.scoring.scale)) {
    return refused("LibTorch has no fused attention for these sizes");
  }
  return form;
}

}  // namespace mha::detail
