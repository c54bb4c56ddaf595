#include <mha/relative_position_bias.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include "module/archive.h"
#include "module/module_checks.h"
#include "module/registered_members.h"
#include "runtime/enum_check.h"
#include "runtime/given_tensor.h"
#include "runtime/message.h"

namespace mha {

using detail::check_bias_options;

namespace {

// Buckets of one direction, and how many of them hold one distance each.
int64_t buckets_of_side(const RelativePositionBiasOptions& options) {
  return options.bidirectional() ? options.num_buckets() / 2 : options.num_buckets();
}
int64_t exact_buckets(const RelativePositionBiasOptions& options) {
  return buckets_of_side(options) / 2;
}

}  // namespace

void detail::check_bias_options(const RelativePositionBiasOptions& options) {
  TORCH_CHECK(options.num_heads() > 0,
              "RelativePositionBiasOptions: num_heads: expected a positive number, found ",
              options.num_heads());
  constexpr int64_t most = int64_t{1} << 32;
  TORCH_CHECK(
      options.num_heads() <= most && options.num_buckets() <= most / options.num_heads(),
      "RelativePositionBiasOptions: num_buckets: expected num_buckets * num_heads up to "
      "2^32, found ",
      options.num_buckets(), " * ", options.num_heads());
  const int64_t least = options.bidirectional() ? 4 : 2;
  TORCH_CHECK(options.num_buckets() >= least &&
                  (!options.bidirectional() || options.num_buckets() % 2 == 0),
              "RelativePositionBiasOptions: num_buckets: expected ",
              options.bidirectional() ? "an even number" : "a number", " >= ", least,
              ", found ", options.num_buckets());
  TORCH_CHECK(options.max_distance() > exact_buckets(options),
              "RelativePositionBiasOptions: max_distance: expected more than the ",
              exact_buckets(options), " exact buckets of a side, found ",
              options.max_distance());
}

namespace {

// Options are public, and so is the table.
void check_bias_module(const RelativePositionBiasImpl& module) {
  const auto& options = module.options;
  check_bias_options(options);
  const at::Tensor& table = module.weight;
  TORCH_CHECK(table.defined() && table.dim() == 2 && table.size(0) == options.num_buckets() &&
                  table.size(1) == options.num_heads(),
              "RelativePositionBias: weight: expected shape (num_buckets, H) = (",
              options.num_buckets(), ", ", options.num_heads(), "), found ",
              table.defined() ? detail::message(table.sizes()) : "none");
  detail::check_registered("RelativePositionBias", module, "weight", table);
}

}  // namespace

RelativePositionBiasImpl::RelativePositionBiasImpl(const RelativePositionBiasOptions& options_)
    : options(options_) {
  check_bias_options(options);
  reset();
}

void RelativePositionBiasImpl::reset() {
  weight =
      register_parameter("weight", at::empty({options.num_buckets(), options.num_heads()}));
  reset_parameters();
}

void RelativePositionBiasImpl::reset_parameters() {
  check_bias_module(*this);
  const at::NoGradGuard no_grad;
  weight.normal_();
}

std::shared_ptr<torch::nn::Module> RelativePositionBiasImpl::clone(
    const std::optional<at::Device>& device) const {
  check_bias_module(*this);
  return Cloneable::clone(device);
}

void RelativePositionBiasImpl::save(torch::serialize::OutputArchive& archive) const {
  check_bias_module(*this);
  torch::nn::Module::save(archive);
}

void RelativePositionBiasImpl::load(torch::serialize::InputArchive& archive) {
  check_bias_module(*this);
  detail::load_archive(*this, archive);
}

void RelativePositionBiasImpl::pretty_print(std::ostream& stream) const {
  stream << "mha::RelativePositionBias(num_heads=" << options.num_heads()
         << ", num_buckets=" << options.num_buckets()
         << ", max_distance=" << options.max_distance()
         << ", bidirectional=" << (options.bidirectional() ? "true" : "false") << ")";
}

// In float32, step by step as the published code, so that a distance at the edge of two buckets
// falls into the same one.
at::Tensor RelativePositionBiasImpl::buckets(const at::Tensor& relative_positions) const {
  const auto given = detail::given_tensor({"RelativePositionBias", "relative_positions"},
                                          relative_positions, detail::Numbers::integers);
  constexpr int64_t most = int64_t{1} << 40;
  TORCH_CHECK(given.numel() <= most,
              "RelativePositionBias: relative_positions: expected up to 2^40, found ",
              given.numel(), " in ", given.sizes());
  const int64_t side = buckets_of_side(options), exact = exact_buckets(options);
  const auto position = given.to(at::kLong);
  const auto distance = options.bidirectional() ? position.abs() : position.clamp_max(0).neg();
  const double scale =
      std::log(static_cast<double>(options.max_distance()) / static_cast<double>(exact));
  // Distances below are not looked up here; 1 keeps their logarithm finite.
  const auto ratio = distance.clamp_min(1).to(at::kFloat) / static_cast<double>(exact);
  const auto steps = at::log(ratio) / scale * static_cast<double>(side - exact);
  const auto shared = (exact + steps.to(at::kLong)).clamp_max(side - 1);
  const auto bucket = at::where(distance.lt(exact), distance, shared);
  return options.bidirectional() ? bucket + position.gt(0).to(at::kLong) * side : bucket;
}

Mask RelativePositionBiasImpl::forward(int64_t queries, int64_t keys,
                                       Mask::Alignment alignment) const {
  check_bias_module(*this);
  constexpr int64_t most = int64_t{1} << 32;
  TORCH_CHECK(queries >= 0 && keys >= 0 && queries <= most && keys <= most,
              "RelativePositionBias: queries and keys: expected sizes from 0 to 2^32, found ",
              queries, " and ", keys);
  detail::check_enum({"RelativePositionBias", "alignment"}, alignment,
                     Mask::Alignment::top_left, "bottom_right or top_left");
  const int64_t shift = alignment == Mask::Alignment::bottom_right ? keys - queries : 0;
  const int64_t count = std::max<int64_t>(queries + keys - 1, 0);
  // On the CPU, so that the logarithms of every device choose the same buckets.
  const auto bucket = buckets(at::arange(count) - (queries - 1 + shift)).to(weight.device());
  return Mask::relative(weight.index_select(0, bucket).t());
}

}  // namespace mha
