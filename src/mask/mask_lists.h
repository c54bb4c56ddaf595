#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <vector>

// What a resolved mask is made of: lists of tensors, one for each kind of condition or term.
// The parts of a mask, what a backward keeps and where gradients go follow from the table
// below.
namespace mha::detail {

/// A tensor is a term. In four dimensions a size of 1 stands for all.
struct MaskLists {
  std::vector<at::Tensor> lows;             // (N) int64, the lower edge of a sample's band
  std::vector<at::Tensor> highs;            // (N) int64, the upper edge
  std::vector<at::Tensor> lengths;          // (N) int64
  std::vector<at::Tensor> keep_keys;        // (N or 1, 1, 1, S), 0 blocks
  std::vector<at::Tensor> block_keys;       // (N or 1, 1, 1, S), true blocks
  std::vector<at::Tensor> keep;             // (N or 1, H or 1, L or 1, S or 1), 0 blocks
  std::vector<at::Tensor> block;            // (N or 1, H or 1, L or 1, S or 1), true blocks
  std::vector<at::Tensor> query_documents;  // (N or 1, L) ids, and
  std::vector<at::Tensor> key_documents;    // (N or 1, S) those of the same term
  std::vector<at::Tensor> add;              // (N or 1, H or 1, L or 1, S or 1), -inf blocks
  std::vector<at::Tensor> add_keys;         // (N or 1, H or 1, 1, S), -inf blocks
  std::vector<at::Tensor> relative;  // (N or 1, H or 1, 1, L + S - 1), by key - query + L - 1
};

/// What a dimension goes over, or what numbers count.
enum class Axis { none, sample, head, query, key, distance };

/// What a term says of a query and a key.
enum class Meaning {
  keep,            // 0 blocks
  block,           // true blocks
  add,             // added to the score; -inf blocks
  add_finite,      // added to the score; blocks nothing
  low_edge,        // open where key - query is at least this
  high_edge,       // open where key - query is at most this
  length,          // open to the keys before this
  query_document,  // open where equal to that of the key
  key_document,
};

struct MaskList {
  std::vector<at::Tensor> MaskLists::*tensors;
  Meaning meaning;
  std::array<Axis, 4> axes;   // of each dimension; none: its size is 1, or it is not there
  Axis numbers = Axis::none;  // that the numbers are places on, so that they shift with parts

  constexpr bool has(Axis axis) const {
    return axes[0] == axis || axes[1] == axis || axes[2] == axis || axes[3] == axis;
  }
  constexpr bool is_added() const {
    return meaning == Meaning::add || meaning == Meaning::add_finite;
  }
};

/// All lists, always in this order.
constexpr MaskList mask_lists[] = {
    {&MaskLists::lows, Meaning::low_edge, {Axis::sample}, Axis::distance},
    {&MaskLists::highs, Meaning::high_edge, {Axis::sample}, Axis::distance},
    {&MaskLists::lengths, Meaning::length, {Axis::sample}, Axis::key},
    {&MaskLists::keep_keys, Meaning::keep, {Axis::sample, Axis::none, Axis::none, Axis::key}},
    {&MaskLists::block_keys, Meaning::block, {Axis::sample, Axis::none, Axis::none, Axis::key}},
    {&MaskLists::keep, Meaning::keep, {Axis::sample, Axis::head, Axis::query, Axis::key}},
    {&MaskLists::block, Meaning::block, {Axis::sample, Axis::head, Axis::query, Axis::key}},
    {&MaskLists::query_documents, Meaning::query_document, {Axis::sample, Axis::query}},
    {&MaskLists::key_documents, Meaning::key_document, {Axis::sample, Axis::key}},
    {&MaskLists::add, Meaning::add, {Axis::sample, Axis::head, Axis::query, Axis::key}},
    {&MaskLists::add_keys, Meaning::add, {Axis::sample, Axis::head, Axis::none, Axis::key}},
    {&MaskLists::relative,
     Meaning::add_finite,
     {Axis::sample, Axis::head, Axis::none, Axis::distance}},
};

constexpr size_t count_rows(std::vector<at::Tensor> MaskLists::*tensors) {
  size_t count = 0;
  for (const MaskList& list : mask_lists) count += list.tensors == tensors ? 1 : 0;
  return count;
}

constexpr bool rows_differ() {
  for (const MaskList& list : mask_lists) {
    if (count_rows(list.tensors) != 1) return false;
  }
  return true;
}

static_assert(sizeof(MaskLists) == std::size(mask_lists) * sizeof(std::vector<at::Tensor>) &&
                  rows_differ(),
              "mask_lists: expected one row for each member of MaskLists");

constexpr size_t count_added() {
  size_t count = 0;
  for (const MaskList& list : mask_lists) count += list.is_added() ? 1 : 0;
  return count;
}

/// The lists of a mask, or of a constant one.
template <typename Mask>
using ListOf = std::conditional_t<std::is_const_v<Mask>, const std::vector<at::Tensor>,
                                  std::vector<at::Tensor>>;

/// All lists of tensors of a mask.
template <typename Mask>
auto tensor_lists(Mask& mask) {
  std::array<ListOf<Mask>*, std::size(mask_lists)> lists{};
  size_t next = 0;
  for (const MaskList& list : mask_lists) lists[next++] = &(mask.*list.tensors);
  return lists;
}

/// Those that are added to the scores, into which gradients may flow.
template <typename Mask>
auto added_lists(Mask& mask) {
  std::array<ListOf<Mask>*, count_added()> lists{};
  size_t next = 0;
  for (const MaskList& list : mask_lists) {
    if (list.is_added()) lists[next++] = &(mask.*list.tensors);
  }
  return lists;
}

}  // namespace mha::detail
