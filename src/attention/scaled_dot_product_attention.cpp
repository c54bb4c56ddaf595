#include <mha/scaled_dot_product_attention.h>

#include <ostream>

#include "attention/attention.h"
#include "attention/split_heads.h"

namespace mha {

std::ostream& operator<<(std::ostream& stream, Weights weights) {
  switch (weights) {
    case Weights::none:
      return stream << "none";
    case Weights::averaged:
      return stream << "averaged";
    case Weights::per_head:
      return stream << "per_head";
  }
  return stream << "?";
}

AttentionOutput scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value, const Mask& mask,
                                             const AttentionOptions& options) {
  const auto heads = detail::split_heads(query, key, value, mask, options);
  const auto result = detail::attention(heads.query, heads.key, heads.value, heads.mask,
                                        detail::call_of(heads.options, heads.query));
  return {detail::with_leading(result.output, heads.leading),
          detail::with_leading(result.weights, heads.leading)};
}

}  // namespace mha
