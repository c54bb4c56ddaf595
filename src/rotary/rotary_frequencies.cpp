#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <ostream>
#include <utility>
#include <variant>
#include <vector>

#include "rotary/rotary.h"
#include "runtime/constant.h"
#include "runtime/enum_check.h"

namespace mha {
namespace {

constexpr double two_pi = 6.283185307179586476925286766559;

void check_factor(const char* scaling, double factor) {
  TORCH_CHECK(std::isfinite(factor) && factor >= 1, scaling,
              ": factor: expected a finite number >= 1, found ", factor);
}

void check_original(const char* scaling, int64_t positions) {
  TORCH_CHECK(positions > 0, scaling,
              ": original_max_position: expected a number above 0, found ", positions);
}

void check_rising(const char* scaling, const char* low_name, double low, const char* high_name,
                  double high) {
  TORCH_CHECK(low > 0 && high > low && std::isfinite(high), scaling, ": ", low_name, " and ",
              high_name, ": expected 0 < ", low_name, " < ", high_name, ", found ", low,
              " and ", high);
}

void check_attention_factor(const char* scaling, const std::optional<double>& factor) {
  TORCH_CHECK(!factor || (std::isfinite(*factor) && *factor > 0), scaling,
              ": attention_factor: expected a finite number above 0, found ",
              factor.value_or(0));
}

// By what YaRN multiplies rotated queries and keys.
double attention_factor_of(const YarnScaling& s) {
  const auto grown = [&](double by) { return 0.1 * by * std::log(s.factor()) + 1; };
  return s.attention_factor().value_or(grown(s.mscale()) / grown(s.mscale_all_dim()));
}
double attention_factor_of(const LongRopeScaling& s) {
  const double original = static_cast<double>(s.original_max_position());
  const double grown =
      s.factor() == 1 ? 1 : std::sqrt(1 + std::log(s.factor()) / std::log(original));
  return s.attention_factor().value_or(grown);
}

// Checks a scaling, and changes frequencies by it.
struct CheckScaling {
  size_t pairs;

  void check_factors(const char* name, const std::vector<double>& factors) const {
    TORCH_CHECK(factors.size() == pairs, "LongRopeScaling: ", name,
                ": expected a factor for each of ", pairs, " pairs, found ", factors.size());
    for (const double factor : factors) {
      TORCH_CHECK(std::isfinite(factor) && factor > 0, "LongRopeScaling: ", name,
                  ": expected finite numbers above 0, found ", factor);
    }
  }

  void operator()(const std::monostate&) const {}
  void operator()(const LinearScaling& s) const { check_factor("LinearScaling", s.factor()); }
  void operator()(const NtkScaling& s) const { check_factor("NtkScaling", s.factor()); }
  void operator()(const YarnScaling& s) const {
    check_factor("YarnScaling", s.factor());
    check_original("YarnScaling", s.original_max_position());
    check_rising("YarnScaling", "beta_slow", s.beta_slow(), "beta_fast", s.beta_fast());
    check_attention_factor("YarnScaling", s.attention_factor());
    for (const auto& [name, scale] :
         {std::pair{"mscale", s.mscale()}, std::pair{"mscale_all_dim", s.mscale_all_dim()}}) {
      TORCH_CHECK(std::isfinite(scale) && scale >= 0, "YarnScaling: ", name,
                  ": expected a finite number of at least 0, found ", scale);
    }
  }
  void operator()(const LongRopeScaling& s) const {
    check_factors("short_factor", s.short_factor());
    check_factors("long_factor", s.long_factor());
    check_factor("LongRopeScaling", s.factor());
    check_original("LongRopeScaling", s.original_max_position());
    TORCH_CHECK(s.original_max_position() > 1 || s.factor() == 1,
                "LongRopeScaling: original_max_position: expected a number above 1 beside a "
                "factor, found 1");
    check_attention_factor("LongRopeScaling", s.attention_factor());
  }
  void operator()(const Llama3Scaling& s) const {
    check_factor("Llama3Scaling", s.factor());
    check_original("Llama3Scaling", s.original_max_position());
    check_rising("Llama3Scaling", "low_freq_factor", s.low_freq_factor(), "high_freq_factor",
                 s.high_freq_factor());
  }
};

struct ApplyScaling {
  double base;
  int64_t longest;
  detail::RotaryFrequencies& result;

  void operator()(const std::monostate&) const {}
  void operator()(const LinearScaling& s) const {
    for (double& radians : result.radians) radians /= s.factor();
  }
  void operator()(const NtkScaling& s) const {
    const double last = static_cast<double>(result.radians.size()) - 1;
    if (last == 0) return;  // the one pair is the fastest
    for (size_t i = 0; i < result.radians.size(); ++i) {
      result.radians[i] *= std::pow(s.factor(), -static_cast<double>(i) / last);
    }
  }
  void operator()(const YarnScaling& s) const {
    const double dim = 2 * static_cast<double>(result.radians.size());
    // The pair, as a real number, that turns so many times within the original context.
    const auto pair_with_turns = [&](double turns) {
      const double original = static_cast<double>(s.original_max_position());
      return dim * std::log(original / (turns * two_pi)) / (2 * std::log(base));
    };
    double low = pair_with_turns(s.beta_fast()), high = pair_with_turns(s.beta_slow());
    if (s.truncate()) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, dim - 1);
    if (low == high) high += 0.001;
    for (size_t i = 0; i < result.radians.size(); ++i) {
      const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      result.radians[i] *= ramp / s.factor() + (1 - ramp);
    }
    result.amplitude = attention_factor_of(s);
  }
  void operator()(const LongRopeScaling& s) const {
    const auto& factors =
        longest >= s.original_max_position() ? s.long_factor() : s.short_factor();
    for (size_t i = 0; i < factors.size(); ++i) result.radians[i] /= factors[i];
    result.amplitude = attention_factor_of(s);
  }
  void operator()(const Llama3Scaling& s) const {
    const double original = static_cast<double>(s.original_max_position());
    const double low = s.low_freq_factor(), high = s.high_freq_factor();
    for (double& radians : result.radians) {
      const double turns = original * radians / two_pi;
      const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
      radians *= (1 - kept) / s.factor() + kept;
    }
  }
};

struct PrintScaling {
  std::ostream& stream;

  void operator()(const std::monostate&) const { stream << "none"; }
  void operator()(const LinearScaling& s) const { stream << "linear(" << s.factor() << ")"; }
  void operator()(const NtkScaling& s) const { stream << "ntk(" << s.factor() << ")"; }
  void operator()(const YarnScaling& s) const {
    stream << "yarn(" << s.factor() << ", original_max_position=" << s.original_max_position()
           << ", beta_fast=" << s.beta_fast() << ", beta_slow=" << s.beta_slow()
           << ", attention_factor=" << attention_factor_of(s)
           << ", truncate=" << (s.truncate() ? "true" : "false") << ")";
  }
  void operator()(const Llama3Scaling& s) const {
    stream << "llama3(" << s.factor() << ", original_max_position=" << s.original_max_position()
           << ", low_freq_factor=" << s.low_freq_factor()
           << ", high_freq_factor=" << s.high_freq_factor() << ")";
  }
  void operator()(const LongRopeScaling& s) const {
    stream << "longrope(" << s.factor()
           << ", original_max_position=" << s.original_max_position()
           << ", attention_factor=" << attention_factor_of(s)
           << ", short_factor=" << at::ArrayRef<double>(s.short_factor())
           << ", long_factor=" << at::ArrayRef<double>(s.long_factor()) << ")";
  }
};

}  // namespace

std::ostream& operator<<(std::ostream& stream, RotaryPairing pairing) {
  return stream << (pairing == RotaryPairing::half_split ? "half_split" : "interleaved");
}

std::ostream& operator<<(std::ostream& stream, const RotaryScaling& scaling) {
  std::visit(PrintScaling{stream}, scaling);
  return stream;
}

std::ostream& operator<<(std::ostream& stream, const RotaryOptions& options) {
  stream << "(";
  if (options.frequencies().empty()) {
    stream << "base=" << options.base();
  } else {
    stream << "frequencies=" << at::ArrayRef<double>(options.frequencies());
  }
  stream << ", pairing=" << options.pairing();
  if (options.rotary_dim()) stream << ", rotary_dim=" << *options.rotary_dim();
  return stream << ", scaling=" << options.scaling() << ")";
}

namespace detail {

void check_rotary(const RotaryOptions& options, int64_t head_dim) {
  TORCH_CHECK(std::isfinite(options.base()) && options.base() > 1,
              "RotaryOptions: base: expected a finite number above 1, found ", options.base());
  const int64_t dim = options.rotary_dim().value_or(head_dim);
  TORCH_CHECK(dim > 0 && dim <= head_dim && dim % 2 == 0,
              "RotaryOptions: rotary_dim: expected an even number from 2 to the head size ",
              head_dim, ", found ", dim,
              options.rotary_dim() ? "" : ", the head size, as it is not set");
  check_enum({"RotaryOptions", "pairing"}, options.pairing(), RotaryPairing::interleaved,
             "half_split or interleaved");
  constexpr int64_t largest = int64_t{1} << 24;
  TORCH_CHECK(dim <= largest, "RotaryOptions: rotary_dim: expected up to 2^24, found ", dim,
              options.rotary_dim() ? "" : ", the head size, as it is not set");
  const auto pairs = static_cast<size_t>(dim / 2);
  std::visit(CheckScaling{pairs}, options.scaling());
  const auto& frequencies = options.frequencies();
  if (frequencies.empty()) return;
  TORCH_CHECK(frequencies.size() == pairs,
              "RotaryOptions: frequencies: expected one for each of ", pairs, " pairs, found ",
              frequencies.size());
  for (const double frequency : frequencies) {
    TORCH_CHECK(std::isfinite(frequency),
                "RotaryOptions: frequencies: expected finite numbers, found ", frequency);
  }
  TORCH_CHECK(std::holds_alternative<std::monostate>(options.scaling()),
              "RotaryOptions: scaling: expected none beside frequencies, found ",
              options.scaling());
}

RotaryFrequencies compute_frequencies(const RotaryOptions& options, int64_t head_dim,
                                      int64_t longest) {
  if (!options.frequencies().empty()) return {options.frequencies(), 1};
  const int64_t dim = options.rotary_dim().value_or(head_dim);
  RotaryFrequencies result{{}, 1};
  for (int64_t i = 0; i < dim; i += 2) {
    result.radians.push_back(
        std::pow(options.base(), -static_cast<double>(i) / static_cast<double>(dim)));
  }
  std::visit(ApplyScaling{options.base(), longest, result}, options.scaling());
  return result;
}

}  // namespace detail

at::Tensor rotary_frequencies(const RotaryOptions& options, int64_t head_dim) {
  TORCH_CHECK(head_dim > 0, "rotary_frequencies: head_dim: expected a size above 0, found ",
              head_dim);
  detail::check_rotary(options, head_dim);
  return detail::constant(detail::compute_frequencies(options, head_dim).radians);
}

}  // namespace mha
