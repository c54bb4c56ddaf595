#include "explain.h"

#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mha/cpu_isa.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "attention/kernel_call.h"
#include "attention/plain_blocks.h"
#include "attention/torch_form.h"
#include "option_values.h"
#include "runtime/attention_path.h"
#include "runtime/cpu_kernels.h"
#include "validators.h"

namespace mha::cli {
namespace {

std::string device_problem(const std::string& text) {
  try {
    const c10::Device device(text);
    return {};
  } catch (const c10::Error&) {
    return c10::str("expected a device of torch such as cpu or cuda:0, found '", text, "'");
  }
}

/// A tensor of any size that takes no memory: one row, seen as many. Rows that lie as the
/// kernels read them are not copied.
at::Tensor sized(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty({sizes.back()}, dtype).expand(sizes);
}

std::string kernel_text(detail::ForwardKernel kernel) {
  const auto tile = std::to_string(detail::cpu_kernels().tile);
  switch (kernel) {
    case detail::ForwardKernel::chunks:
      return "few queries: keys and values are read once, as they are stored, in chunks of " +
             std::to_string(detail::cpu_kernels().decode_chunk) + " keys";
    case detail::ForwardKernel::tiles:
      return "float32, tiles of " + tile + " queries";
    case detail::ForwardKernel::tiles_of_pairs:
      return "bfloat16 multiplied as it is stored (AVX512_BF16), tiles of " + tile + " queries";
    case detail::ForwardKernel::widened_tiles:
      return "float32 copies of keys and values, tiles of " + tile + " queries";
    case detail::ForwardKernel::matrix_tiles:
      return "bfloat16 on matrix tiles (AMX), " + std::to_string(detail::tile_kernels()->tile) +
             " queries each";
  }
  return "unknown";
}

std::string path_text(const detail::PathChoice& choice, const char* fused, const char* plain) {
  return c10::str(choice.path == detail::Path::fused ? fused : plain, ": ", choice.reason);
}

std::string attention_text(const detail::PathChoice& choice) {
  if (choice.path != detail::Path::torch) {
    return path_text(choice, "fused kernels", "composition in ATen calls");
  }
  return c10::str("at::scaled_dot_product_attention: ", choice.reason);
}

}  // namespace

CLI::Option* ExplainOptions::add_to(CLI::App& app) {
  CLI::Option* explain =
      app.add_flag("--explain", wanted_, "Say which way a call of attention takes, and why");
  const auto of_call = [explain](CLI::Option* option) {
    return option->needs(explain)->group("Call (with --explain)");
  };
  const auto size = [&](const char* name, auto& to, const char* text) {
    return of_call(app.add_option(name, to, text)->check(integer_from(1)));
  };
  size("--batch", batch_, "Samples")->capture_default_str();
  size("--num-heads", heads_, "Query heads")->capture_default_str();
  size("--num-kv-heads", kv_heads_, "Key and value heads; default: as many as query heads");
  size("--queries", queries_, "Queries")->capture_default_str();
  size("--keys", keys_, "Keys; default: as many as queries");
  size("--head-dim", head_dim_, "Size of a head")->capture_default_str();
  of_call(one_of(app.add_option("--dtype", dtype_, "dtype of query, key and value"),
                 names_of(floating_dtypes())))
      ->capture_default_str();
  of_call(one_of(app.add_option("--return-weights", weights_, "Which weights it returns"),
                 names_of(returned_weights())))
      ->capture_default_str();
  of_call(app.add_option("--device", device_, "Where the tensors are")
              ->check(CLI::Validator(device_problem, "")))
      ->type_name("DEVICE")
      ->capture_default_str();
  of_call(app.add_flag("--gradient", gradient_, "The call is recorded for a gradient"));
  return explain;
}

std::string ExplainOptions::blocks_text(const c10::Device& device, at::ScalarType dtype,
                                        int64_t kv_heads, int64_t keys) const {
  const auto mask = detail::resolve(Mask(), {{}, batch_, heads_, queries_, keys}, at::kCPU);
  const auto sizes = detail::plain_block_sizes(mask, kv_heads, dtype, device,
                                               value_of(returned_weights(), weights_));
  if (detail::is_one_block(sizes, mask, kv_heads)) return "one, of all queries";
  return c10::str("in blocks of ", sizes.queries, " of ", queries_, " queries, ",
                  sizes.kv_heads * (heads_ / kv_heads), " of ", heads_, " heads and ",
                  sizes.samples, " of ", batch_, " samples");
}

nlohmann::ordered_json ExplainOptions::explanation() const {
  const int64_t keys = keys_.value_or(queries_), kv_heads = kv_heads_.value_or(heads_);
  TORCH_CHECK(heads_ % kv_heads == 0, "--num-kv-heads: expected a divisor of --num-heads ",
              heads_, ", found ", kv_heads);
  const auto count = [&](int64_t heads, int64_t tokens) {
    return static_cast<double>(batch_) * static_cast<double>(heads) *
           static_cast<double>(tokens) * static_cast<double>(head_dim_);
  };
  const double numbers = std::max(count(heads_, queries_), count(kv_heads, keys));
  TORCH_CHECK(numbers < 0x1p62, "--explain: expected sizes of fewer than 2^62 numbers, found ",
              "query (", batch_, ", ", heads_, ", ", queries_, ", ", head_dim_, ") and key (",
              batch_, ", ", kv_heads, ", ", keys, ", ", head_dim_, ")");
  const c10::Device device(device_);
  const auto dtype = value_of(floating_dtypes(), dtype_);
  const std::vector<int64_t> query = {batch_, heads_, queries_, head_dim_};
  const std::vector<int64_t> key = {batch_, kv_heads, keys, head_dim_};
  detail::AttentionCall call{{detail::default_scale(head_dim_)}};
  call.weights = value_of(returned_weights(), weights_);
  const auto mask = detail::resolve(Mask(), {{}, batch_, heads_, queries_, keys}, at::kCPU);
  auto attention = detail::choose_path(device, dtype, head_dim_, head_dim_);
  if (attention.path == detail::Path::torch) {
    // As of the CPU: the device itself may be none of this machine's.
    const auto refusal = detail::has_torch_attention(device)
                             ? detail::torch_form(sized(query, dtype), sized(key, dtype),
                                                  sized(key, dtype), mask, call)
                                   .refusal
                             : detail::no_torch_attention;
    if (refusal) attention = {detail::Path::plain, refusal};
  }
  nlohmann::ordered_json lines;
  lines["attention"] = attention_text(attention);
  if (attention.path == detail::Path::fused) {
    if (gradient_) call.statistics = detail::Statistics::needed;
    // With a gradient, all are widened by a copy that autograd sees, but for matrix tiles.
    const auto given = sized(key, dtype);
    const bool widens = gradient_ && !detail::takes_matrix_tiles(given, given, given, call);
    const auto stored = widens ? sized(key, at::kFloat) : given;
    const auto kernel = detail::choose_forward_kernel(sized(query, stored.scalar_type()),
                                                      stored, stored, mask, call);
    lines["kernel"] = c10::str(cpu_isa(), ", ", kernel_text(kernel));
  }
  if (attention.path == detail::Path::plain) {
    lines["blocks"] = blocks_text(device, dtype, kv_heads, keys);
  }
  const bool on_tiles = dtype == at::kBFloat16 && detail::tile_kernels();
  lines["projections"] = path_text(
      detail::choose_projection_path(device, dtype),
      on_tiles ? "bfloat16 on matrix tiles (AMX), packed weights" : "kernels on packed weights",
      "torch::nn::Linear");
  return lines;
}

}  // namespace mha::cli
