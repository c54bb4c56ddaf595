#include "rotary/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/TracerMode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <variant>

#include "runtime/attention_path.h"
#include "runtime/constant.h"
#include "runtime/cpu_kernels.h"
#include "runtime/finite.h"
#include "runtime/given_tensor.h"
#include "runtime/kernel_rows.h"
#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The frequencies as a tensor at `place`, chosen without that a number is read.
at::Tensor radians_at(at::Device place, const RotaryOptions& options, int64_t head_dim,
                      const at::Tensor& positions, const at::Tensor& longest) {
  const auto at_length = [&](int64_t length) {
    return constant(compute_frequencies(options, head_dim, length).radians).to(place);
  };
  const auto* scaling = std::get_if<LongRopeScaling>(&options.scaling());
  if (!scaling || (!longest.defined() && positions.numel() == 0)) return at_length(0);
  const int64_t original = scaling->original_max_position();
  const auto is_long = (longest.defined() ? longest : positions.max()).ge(original).to(place);
  return at::where(is_long, at_length(original), at_length(0));
}

// The composition of ATen calls: other devices, float64, MHA_PATH=plain, traces.
at::Tensor rotate_plain(const at::Tensor& x, const at::Tensor& positions,
                        const RotaryOptions& options, const at::Tensor& longest) {
  const auto [radians, amplitude] = compute_frequencies(options, x.size(3));
  const auto pairs = static_cast<int64_t>(radians.size());
  const auto compute = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  // In float64, which long positions need: on the CPU if the device has none.
  const bool is_wide = widest_dtype(x.device()) == at::kDouble;
  const auto place = is_wide ? x.device() : at::Device(at::kCPU);
  const auto angles = positions.to(place, at::kDouble).unsqueeze(-1) *
                      radians_at(place, options, x.size(3), positions, longest);
  // (T, pairs) or (N, 1, T, pairs)
  const auto over_heads = [](const at::Tensor& t) { return t.dim() == 3 ? t.unsqueeze(1) : t; };
  const auto cosine = over_heads((angles.cos() * amplitude).to(x.device(), compute));
  const auto sine = over_heads((angles.sin() * amplitude).to(x.device(), compute));

  const auto turning = x.narrow(3, 0, 2 * pairs).to(compute);
  const bool interleaved = options.pairing() == RotaryPairing::interleaved;
  const auto pairs_apart = turning.unflatten(
      3, interleaved ? at::IntArrayRef({pairs, 2}) : at::IntArrayRef({2, pairs}));
  const int64_t across = interleaved ? 4 : 3;
  const auto a = pairs_apart.select(across, 0), b = pairs_apart.select(across, 1);
  const auto turned = at::stack({a * cosine - b * sine, b * cosine + a * sine}, across)
                          .flatten(3)
                          .to(x.scalar_type());
  if (2 * pairs == x.size(3)) return turned;
  return at::cat({turned, x.narrow(3, 2 * pairs, x.size(3) - 2 * pairs)}, 3);
}

bool takes_rotary_kernel(const at::Tensor& x) {
  return !kernels_are_off() && x.device().is_cpu() && x.scalar_type() != at::kDouble &&
         !is_followed(x);
}

// cos and sin by index, and the index of every token.
struct TableRows {
  at::Tensor indices;  // (T) or (N, T)
  at::Tensor rows;     // (rows, 2, pairs)
};

TableRows table_rows(const at::Tensor& positions, const RotaryOptions& options,
                     int64_t head_dim, const at::Tensor& longest) {
  auto indices = without_lazy_bits(positions).to(at::kCPU, at::kLong).contiguous();
  const int64_t* first = indices.data_ptr<int64_t>();
  const auto [low, high] = std::minmax_element(first, first + indices.numel());
  const auto frequencies = compute_frequencies(
      options, head_dim, longest.defined() ? longest.item<int64_t>() : *high);
  const auto table = rotary_table(frequencies, *low < 0 ? 1 : *high + 1);
  if (*low >= 0 && *high < table->rows.size(0)) return {indices, table->rows};
  // Beyond what is kept: a table of this call's tokens.
  auto rows = at::empty({indices.numel(), 2, table->rows.size(2)}, at::kFloat);
  fill_rotary_rows(table->frequencies, first, indices.numel(), rows.data_ptr<float>());
  return {at::arange(indices.numel()).view(indices.sizes()), rows};
}

// Back: as the gradient goes.
enum class Turn { forward, back };

void rotate_by_kernel(const at::Tensor& x, const TableRows& table, const RotaryOptions& options,
                      Turn turn, const at::Tensor& output) {
  const cpu::Kernels& kernels = cpu_kernels();
  cpu::RotaryArgs args{};
  args.batch = x.size(0);
  args.heads = x.size(1);
  args.tokens = x.size(2);
  args.head_dim = x.size(3);
  args.pairs = table.rows.size(2);
  args.interleaved = options.pairing() == RotaryPairing::interleaved;
  args.back = turn == Turn::back;
  args.storage = storage_of(x);
  args.input = {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
  args.output = output.data_ptr();
  args.output_n = output.stride(0);
  args.output_h = output.stride(1);
  args.output_t = output.stride(2);
  args.table = table.rows.data_ptr<float>();
  args.positions = table.indices.data_ptr<int64_t>();
  args.positions_n = table.indices.dim() == 2 ? args.tokens : 0;
  const int64_t chunks = (args.tokens + kernels.rotary_tokens - 1) / kernels.rotary_tokens;
  run_tasks(args.batch * chunks, 1, [&](int64_t i, float*) { kernels.rotate(args, i); });
}

// Into new memory in the order of x.
at::Tensor rotated(const at::Tensor& x, const TableRows& table, const RotaryOptions& options,
                   Turn turn) {
  const auto rows = kernel_view(x);
  auto output = uncomputed_like(rows, at::MemoryFormat::Preserve);
  if (output.stride(3) != 1) output = uncomputed_like(rows, at::MemoryFormat::Contiguous);
  rotate_by_kernel(rows, table, options, turn, output);
  return output;
}

// A rotation is linear, and its gradient is the rotation back.
class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const TableRows& table, const RotaryOptions& options, Turn turn) {
    auto kept = c10::make_intrusive<Kept>();
    kept->table = table;
    // The caller may write other positions before the backward.
    kept->table.indices = table.indices.clone();
    kept->options = options;
    kept->turn = turn;
    context->saved_data["kept"] = c10::IValue::make_capsule(std::move(kept));
    return rotated(x, table, options, turn);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const auto kept =
        c10::static_intrusive_pointer_cast<Kept>(context->saved_data["kept"].toCapsule());
    const auto& grad = grad_outputs[0];
    if (!grad.defined()) return variable_list(4);
    const Turn turn = kept->turn == Turn::forward ? Turn::back : Turn::forward;
    return {RotaryFunction::apply(grad, kept->table, kept->options, turn), {}, {}, {}};
  }

 private:
  struct Kept : torch::CustomClassHolder {
    TableRows table;
    RotaryOptions options;
    Turn turn = Turn::forward;
  };
};

}  // namespace

void check_positions(const char* name, const at::Tensor& positions, int64_t batch,
                     int64_t tokens, at::Device device) {
  given_tensor({name}, positions, Numbers::integers, memory_on(device));
  const bool fits =
      (positions.dim() == 1 && positions.size(0) == tokens) ||
      (positions.dim() == 2 && positions.size(0) == batch && positions.size(1) == tokens);
  TORCH_CHECK(fits, name, ": expected shape (T) or (N, T) with T = ", tokens,
              " and N = ", batch, ", found ", positions.sizes());
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& positions,
                  const RotaryOptions& options, const at::Tensor& longest) {
  if (x.numel() == 0 || !takes_rotary_kernel(x)) {
    return rotate_plain(x, positions, options, longest);
  }
  const auto table = table_rows(positions, options, x.size(3), longest);
  if (at::GradMode::is_enabled() && x.requires_grad()) {
    return RotaryFunction::apply(x, table, options, Turn::forward);
  }
  return rotated(x, table, options, Turn::forward);
}

void rotate_in_place(const at::Tensor& x, const at::Tensor& positions,
                     const RotaryOptions& options, const at::Tensor& longest) {
  if (x.numel() == 0) return;
  rotate_by_kernel(x, table_rows(positions, options, x.size(3), longest), options,
                   Turn::forward, x);
}

}  // namespace mha::detail

namespace mha {

at::Tensor apply_rotary(const at::Tensor& given, const at::Tensor& positions,
                        const RotaryOptions& options) {
  const auto x = detail::given_tensor({"apply_rotary", "x"}, given, detail::Numbers::floating,
                                      detail::Memory::or_meta);
  TORCH_CHECK(x.dim() == 4 && x.size(3) > 0,
              "apply_rotary: x: expected shape (N, H, T, D) with D > 0, found ", x.sizes());
  detail::check_rotary(options, x.size(3));
  detail::check_positions("apply_rotary: positions", positions, x.size(0), x.size(2),
                          x.device());
  TORCH_CHECK(!x.is_meta() || positions.is_meta(),
              "apply_rotary: positions: expected them on meta, where x is, found ",
              positions.device());
  return detail::rotate(x, positions, options);
}

}  // namespace mha
