#include <mha/mask.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <utility>
#include <vector>

namespace mha {
namespace {

using Kind = Mask::Term::Kind;

const char* name(Kind kind) {
  switch (kind) {
    case Kind::keep:
      return "keep";
    case Kind::block:
      return "block";
    case Kind::add:
      return "add";
    case Kind::keep_keys:
      return "keep_keys";
    case Kind::block_keys:
      return "block_keys";
    case Kind::lengths:
      return "lengths";
    case Kind::causal:
      return "causal";
    case Kind::window:
      return "window";
    case Kind::documents:
      return "documents";
    case Kind::document_lengths:
      return "documents_from_lengths";
    case Kind::relative:
      return "relative";
    case Kind::alibi:
      return "alibi";
  }
  return "?";
}

Mask::Term tensor_term(Kind kind, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "Mask::", name(kind),
              ": expected a tensor, found an undefined one");
  return {kind, tensor};
}

void check_integers(Kind kind, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "Mask::", name(kind), ": ", argument,
              ": expected a tensor, found an undefined one");
  TORCH_CHECK(c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false),
              "Mask::", name(kind), ": ", argument, ": expected an integer tensor, found ",
              tensor.scalar_type());
}

void check_floating(Kind kind, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_floating_point(), "Mask::", name(kind),
              ": expected a floating tensor (added to the scores), found ",
              tensor.scalar_type());
}

// The term of a band, whose extents are for the caller to fill in.
Mask::Term offset_term(Kind kind, const at::Tensor& offsets) {
  check_integers(kind, "offsets", offsets);
  return tensor_term(kind, offsets);
}

void check_extents(int64_t left, int64_t right) {
  TORCH_CHECK(left >= -1 && right >= -1,
              "Mask::window: expected extents >= -1 (-1: open), found left = ", left,
              ", right = ", right);
}

}  // namespace

Mask::Mask(Term term) : terms_{std::move(term)} {}

Mask Mask::keep(const at::Tensor& mask) {
  return Mask(tensor_term(Kind::keep, mask));
}

Mask Mask::block(const at::Tensor& mask) {
  Term term = tensor_term(Kind::block, mask);
  TORCH_CHECK(mask.scalar_type() == at::kBool,
              "Mask::block: expected a bool tensor (true blocks), found ", mask.scalar_type(),
              "; for a mask in which 0 blocks use Mask::keep, for an added one Mask::add");
  return Mask(std::move(term));
}

Mask Mask::add(const at::Tensor& mask) {
  Term term = tensor_term(Kind::add, mask);
  TORCH_CHECK(mask.is_floating_point(),
              "Mask::add: expected a floating tensor (added to the scores), found ",
              mask.scalar_type(),
              "; for a mask that allows or blocks use Mask::keep or Mask::block");
  return Mask(std::move(term));
}

Mask Mask::keep_keys(const at::Tensor& mask) {
  return Mask(tensor_term(Kind::keep_keys, mask));
}

Mask Mask::block_keys(const at::Tensor& mask) {
  Term term = tensor_term(Kind::block_keys, mask);
  TORCH_CHECK(mask.scalar_type() == at::kBool,
              "Mask::block_keys: expected a bool tensor (true is padding), found ",
              mask.scalar_type(), "; for a mask in which 0 is padding use Mask::keep_keys");
  return Mask(std::move(term));
}

Mask Mask::lengths(const at::Tensor& lengths) {
  Term term = tensor_term(Kind::lengths, lengths);
  TORCH_CHECK(c10::isIntegralType(lengths.scalar_type(), /*includeBool=*/false),
              "Mask::lengths: expected an integer tensor, found ", lengths.scalar_type());
  return Mask(std::move(term));
}

Mask Mask::causal(Alignment alignment) {
  return Mask(Term{Kind::causal, {}, {}, -1, 0, alignment});
}

Mask Mask::causal(const at::Tensor& offsets) {
  Term term = offset_term(Kind::causal, offsets);
  term.right = 0;
  return Mask(std::move(term));
}

Mask Mask::window(int64_t left, int64_t right, Alignment alignment) {
  check_extents(left, right);
  return Mask(Term{Kind::window, {}, {}, left, right, alignment});
}

Mask Mask::window(int64_t left, int64_t right, const at::Tensor& offsets) {
  check_extents(left, right);
  Term term = offset_term(Kind::window, offsets);
  term.left = left;
  term.right = right;
  return Mask(std::move(term));
}

Mask Mask::documents(const at::Tensor& ids) {
  check_integers(Kind::documents, "ids", ids);
  return Mask(Term{Kind::documents, ids});
}

Mask Mask::documents(const at::Tensor& query_ids, const at::Tensor& key_ids) {
  check_integers(Kind::documents, "query_ids", query_ids);
  check_integers(Kind::documents, "key_ids", key_ids);
  return Mask(Term{Kind::documents, query_ids, key_ids});
}

Mask Mask::documents_from_lengths(const at::Tensor& cumulative) {
  check_integers(Kind::document_lengths, "cumulative", cumulative);
  return Mask(Term{Kind::document_lengths, cumulative});
}

Mask Mask::relative(const at::Tensor& table) {
  Term term = tensor_term(Kind::relative, table);
  check_floating(Kind::relative, table);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  TORCH_CHECK(!table.detach().eq(-infinity).any().item<bool>(),
              "Mask::relative: expected finite entries, found -inf; block pairs by another "
              "mask, such as Mask::window");
  return Mask(std::move(term));
}

Mask Mask::alibi(const at::Tensor& slopes, Alignment alignment) {
  Term term = tensor_term(Kind::alibi, slopes);
  check_floating(Kind::alibi, slopes);
  term.alignment = alignment;
  return Mask(std::move(term));
}

Mask Mask::alibi(const at::Tensor& slopes, const at::Tensor& offsets) {
  Term term = tensor_term(Kind::alibi, slopes);
  check_floating(Kind::alibi, slopes);
  check_integers(Kind::alibi, "offsets", offsets);
  term.second = offsets;
  return Mask(std::move(term));
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
  TORCH_CHECK(num_heads > 0, "alibi_slopes: num_heads: expected a positive number, found ",
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
  return at::tensor(slopes);
}

}  // namespace mha
