#include <mha/mask.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <utility>
#include <vector>

#include "mask/mask_views.h"
#include "runtime/constant.h"
#include "runtime/enum_check.h"
#include "runtime/given_tensor.h"

namespace mha {
namespace {

using detail::Numbers;
using Kind = Mask::Term::Kind;

// As the messages begin.
const char* constructor(Kind kind) {
  switch (kind) {
    case Kind::keep:
      return "Mask::keep";
    case Kind::block:
      return "Mask::block";
    case Kind::add:
      return "Mask::add";
    case Kind::keep_keys:
      return "Mask::keep_keys";
    case Kind::block_keys:
      return "Mask::block_keys";
    case Kind::add_keys:
      return "Mask::add_keys";
    case Kind::lengths:
      return "Mask::lengths";
    case Kind::real_queries:
      return "Mask::real_queries";
    case Kind::query_lengths:
      return "Mask::query_lengths";
    case Kind::causal:
      return "Mask::causal";
    case Kind::window:
      return "Mask::window";
    case Kind::documents:
      return "Mask::documents";
    case Kind::document_lengths:
      return "Mask::documents_from_lengths";
    case Kind::relative:
      return "Mask::relative";
    case Kind::alibi:
      return "Mask::alibi";
  }
  return "Mask::?";
}

// As a mask is written.
const char* name(Kind kind) {
  return constructor(kind) + std::strlen("Mask::");
}

// A mask has no call yet, so that shapes alone will do. `hint` ends a message about the dtype.
at::Tensor given(Kind kind, const char* argument, const at::Tensor& tensor, Numbers numbers,
                 const char* hint = "") {
  return detail::given_tensor({constructor(kind), argument, hint}, tensor, numbers,
                              detail::Memory::or_meta);
}

// Flags of what may attend, 0 for what may not. A mask of 0 and -inf is meant to be added, and
// would be read reversed.
at::Tensor given_flags(Kind kind, const at::Tensor& mask, const char* added) {
  auto flags = given(kind, "mask", mask, Numbers::flags);
  const auto dtype = flags.scalar_type();
  const bool may_be_negative = dtype != at::kBool && dtype != at::kByte && !flags.is_complex();
  if (!may_be_negative || flags.is_meta() || flags.numel() == 0) return flags;
  const auto least = detail::without_repeats(flags.detach()).min().item<double>();  // or NaN
  TORCH_CHECK(least >= 0, constructor(kind), ": mask: expected flags, 0 or above, found ",
              least, added);
  return flags;
}

void check_alignment(Kind kind, Mask::Alignment alignment) {
  detail::check_enum({constructor(kind), "alignment"}, alignment, Mask::Alignment::top_left,
                     "bottom_right or top_left");
}

void check_extents(int64_t left, int64_t right) {
  TORCH_CHECK(left >= -1 && right >= -1,
              "Mask::window: left and right: expected extents >= -1 (-1: open), found left = ",
              left, ", right = ", right);
}

}  // namespace

Mask::Mask(Term term) : terms_{std::move(term)} {}

Mask Mask::keep(const at::Tensor& mask) {
  return Mask(Term{Kind::keep, given_flags(Kind::keep, mask,
                                           "; for a mask that is added, in which -inf blocks, "
                                           "use Mask::add")});
}

Mask Mask::block(const at::Tensor& mask) {
  return Mask(
      Term{Kind::block, given(Kind::block, "mask", mask, Numbers::bools,
                              "; for a mask in which 0 blocks use Mask::keep, for an added one "
                              "Mask::add")});
}

Mask Mask::add(const at::Tensor& mask) {
  return Mask(Term{Kind::add, given(Kind::add, "mask", mask, Numbers::floating,
                                    "; for a mask that allows or blocks use Mask::keep or "
                                    "Mask::block")});
}

Mask Mask::keep_keys(const at::Tensor& mask) {
  return Mask(
      Term{Kind::keep_keys, given_flags(Kind::keep_keys, mask,
                                        "; for a mask that is added, in which -inf blocks, use "
                                        "Mask::add_keys")});
}

Mask Mask::block_keys(const at::Tensor& mask) {
  return Mask(
      Term{Kind::block_keys, given(Kind::block_keys, "mask", mask, Numbers::bools,
                                   "; for a mask in which 0 is padding use Mask::keep_keys")});
}

Mask Mask::add_keys(const at::Tensor& mask) {
  return Mask(
      Term{Kind::add_keys, given(Kind::add_keys, "mask", mask, Numbers::floating,
                                 "; for a mask in which 0 is padding use Mask::keep_keys")});
}

Mask Mask::lengths(const at::Tensor& lengths) {
  return Mask(Term{Kind::lengths, given(Kind::lengths, "lengths", lengths, Numbers::integers)});
}

Mask Mask::real_queries(const at::Tensor& mask) {
  return Mask(Term{Kind::real_queries, given_flags(Kind::real_queries, mask, "")});
}

Mask Mask::query_lengths(const at::Tensor& lengths) {
  return Mask(Term{Kind::query_lengths,
                   given(Kind::query_lengths, "lengths", lengths, Numbers::integers)});
}

Mask Mask::causal(Alignment alignment) {
  check_alignment(Kind::causal, alignment);
  return Mask(Term{Kind::causal, {}, {}, -1, 0, alignment});
}

Mask Mask::causal(const at::Tensor& offsets) {
  return Mask(Term{
      Kind::causal, given(Kind::causal, "offsets", offsets, Numbers::integers), {}, -1, 0});
}

Mask Mask::window(int64_t left, int64_t right, Alignment alignment) {
  check_alignment(Kind::window, alignment);
  check_extents(left, right);
  return Mask(Term{Kind::window, {}, {}, left, right, alignment});
}

Mask Mask::window(int64_t left, int64_t right, const at::Tensor& offsets) {
  check_extents(left, right);
  return Mask(Term{Kind::window,
                   given(Kind::window, "offsets", offsets, Numbers::integers),
                   {},
                   left,
                   right});
}

Mask Mask::documents(const at::Tensor& ids) {
  return Mask(Term{Kind::documents, given(Kind::documents, "ids", ids, Numbers::integers)});
}

Mask Mask::documents(const at::Tensor& query_ids, const at::Tensor& key_ids) {
  return Mask(Term{Kind::documents,
                   given(Kind::documents, "query_ids", query_ids, Numbers::integers),
                   given(Kind::documents, "key_ids", key_ids, Numbers::integers)});
}

Mask Mask::documents_from_lengths(const at::Tensor& cumulative) {
  return Mask(Term{Kind::document_lengths,
                   given(Kind::document_lengths, "cumulative", cumulative, Numbers::integers)});
}

Mask Mask::relative(const at::Tensor& table) {
  const auto found = given(Kind::relative, "table", table, Numbers::floating);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto entries = detail::without_repeats(found.detach());
  TORCH_CHECK(found.is_meta() || !entries.eq(-infinity).any().item<bool>(),
              "Mask::relative: table: expected finite entries, found -inf; block pairs by "
              "another mask, such as Mask::window");
  return Mask(Term{Kind::relative, found});
}

Mask Mask::alibi(const at::Tensor& slopes, Alignment alignment) {
  check_alignment(Kind::alibi, alignment);
  return Mask(Term{Kind::alibi,
                   given(Kind::alibi, "slopes", slopes, Numbers::floating),
                   {},
                   -1,
                   -1,
                   alignment});
}

Mask Mask::alibi(const at::Tensor& slopes, const at::Tensor& offsets) {
  return Mask(Term{Kind::alibi, given(Kind::alibi, "slopes", slopes, Numbers::floating),
                   given(Kind::alibi, "offsets", offsets, Numbers::integers)});
}

Mask Mask::to(at::Device device) const {
  Mask moved = *this;
  for (Term& term : moved.terms_) {
    for (auto* tensor : {&term.tensor, &term.second}) {
      if (tensor->defined()) *tensor = tensor->to(device);
    }
  }
  return moved;
}

Mask operator&(const Mask& a, const Mask& b) {
  Mask both = a;
  both.terms_.insert(both.terms_.end(), b.terms_.begin(), b.terms_.end());
  return both;
}

std::ostream& operator<<(std::ostream& stream, const Mask& mask) {
  if (mask.allows_everything()) return stream << "none";
  const char* separator = "";
  for (const Mask::Term& term : mask.terms()) {
    stream << separator << name(term.kind) << '(';
    if (term.kind == Kind::window) stream << term.left << ", " << term.right << ", ";
    const bool is_placed = term.kind == Kind::causal || term.kind == Kind::window ||
                           (term.kind == Kind::alibi && !term.second.defined());
    if (term.tensor.defined()) {
      stream << term.tensor.scalar_type() << ' ' << term.tensor.sizes();
    }
    if (term.second.defined()) {
      stream << ", " << term.second.scalar_type() << ' ' << term.second.sizes();
    }
    if (is_placed && !(term.kind != Kind::alibi && term.tensor.defined())) {
      stream << (term.kind == Kind::alibi ? ", " : "")
             << (term.alignment == Mask::Alignment::bottom_right ? "bottom_right" : "top_left");
    }
    stream << ')';
    separator = " & ";
  }
  return stream;
}

at::Tensor alibi_slopes(int64_t num_heads) {
  constexpr int64_t most = int64_t{1} << 20;
  TORCH_CHECK(num_heads > 0 && num_heads <= most,
              "alibi_slopes: num_heads: expected a positive number up to 2^20, found ",
              num_heads);
  int64_t below = 1;  // the largest power of two that is not above num_heads
  while (below <= num_heads / 2) below *= 2;
  std::vector<float> slopes;
  const auto slope = [](int64_t place, int64_t of) {
    return static_cast<float>(
        std::exp2(-8.0 * static_cast<double>(place) / static_cast<double>(of)));
  };
  for (int64_t h = 1; h <= below; ++h) slopes.push_back(slope(h, below));
  for (int64_t h = 0; h < num_heads - below; ++h) slopes.push_back(slope(2 * h + 1, 2 * below));
  return detail::constant(slopes);
}

}  // namespace mha
