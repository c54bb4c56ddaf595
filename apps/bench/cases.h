#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mha::bench {

/// What is computed.
enum class Kind {
  core_forward,           ///< the function, on heads that are already split
  core_forward_causal,    ///< the same under a causal mask
  core_forward_window,    ///< under a causal window of `window_length` keys
  core_backward,          ///< gradients of query, key and value, the forward pass kept
  module_forward,         ///< the module without weights: projections and attention
  module_forward_causal,  ///< the same under a causal mask
  module_weights,         ///< the module with the weights of every head
  module_train,           ///< forward and backward, gradients of input and parameters
  decode,                 ///< the function, one query over T keys
  projection,             ///< the module's keys and values alone, split (`project_keys`)
  cross_decode,           ///< the module, one query over T keys projected once (`project_keys`)
};

/// Keys that a query of `core_forward_window` sees, itself included.
constexpr int64_t window_length = 256;

/// B samples of T positions, width D, H heads.
struct Shape {
  int64_t batch, length, d_model, heads;
  int64_t head_dim() const { return d_model / heads; }
};

/// One thing to measure.
struct Case {
  Kind kind;
  Shape shape;
  at::ScalarType dtype = at::kFloat;
  int64_t heads_per_kv_head = 1;  ///< of kinds that are given heads
};

/// "module_forward 1x2048x1024x16"; what differs from float32 and one query head a key/value
/// head stands behind it.
std::string name_of(const Case& what);

/// Floating-point operations, of which a multiply and an add are two. Under a mask the allowed
/// pairs alone count; a backward pass counts as the five products that it can't do
/// without (the scores again, and the gradients of weights, value, query and key).
double useful_flops(const Case& what);

/// Whether a case has one query, so that it takes as long as what it reads: keys and values,
/// and in a module W_q and W_o.
bool is_decoding(Kind kind);

/// Bytes that a decoding case reads.
double bytes_read(const Case& what);

/// Bytes of one head-by-query-by-key map, if there were one in memory.
double map_bytes(const Case& what);

/// What `mha bench` measures, in the order of the table: under a minute on one core of a
/// server.
std::vector<Case> short_cases();

/// All kinds on all shapes, most in bfloat16 too, float16, grouped heads and windows.
std::vector<Case> all_cases();

}  // namespace mha::bench
