#include <mha/mask.h>

#include <c10/util/Exception.h>

#include <ostream>
#include <utility>

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
  }
  return "?";
}

Mask::Term tensor_term(Kind kind, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "Mask::", name(kind),
              ": expected a tensor, found an undefined one");
  return {kind, tensor};
}

// The term of a band, whose extents are for the caller to fill in.
Mask::Term offset_term(Kind kind, const at::Tensor& offsets) {
  Mask::Term term = tensor_term(kind, offsets);
  TORCH_CHECK(c10::isIntegralType(offsets.scalar_type(), /*includeBool=*/false),
              "Mask::", name(kind), ": offsets: expected an integer tensor, found ",
              offsets.scalar_type());
  return term;
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
  return Mask(Term{Kind::causal, {}, -1, 0, alignment});
}

Mask Mask::causal(const at::Tensor& offsets) {
  Term term = offset_term(Kind::causal, offsets);
  term.right = 0;
  return Mask(std::move(term));
}

Mask Mask::window(int64_t left, int64_t right, Alignment alignment) {
  check_extents(left, right);
  return Mask(Term{Kind::window, {}, left, right, alignment});
}

Mask Mask::window(int64_t left, int64_t right, const at::Tensor& offsets) {
  check_extents(left, right);
  Term term = offset_term(Kind::window, offsets);
  term.left = left;
  term.right = right;
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
    if (term.tensor.defined()) {
      stream << term.tensor.scalar_type() << ' ' << term.tensor.sizes();
    } else {
      stream << (term.alignment == Mask::Alignment::bottom_right ? "bottom_right" : "top_left");
    }
    stream << ')';
    separator = " & ";
  }
  return stream;
}

}  // namespace mha
