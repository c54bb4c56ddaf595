#include "cases.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <files/dtype.h>

#include <algorithm>

namespace mha::bench {
namespace {

constexpr Kind kSelfAttention[] = {Kind::core_forward,          Kind::core_forward_causal,
                                   Kind::core_backward,         Kind::module_forward,
                                   Kind::module_forward_causal, Kind::module_weights,
                                   Kind::module_train};
constexpr Kind kBFloat16[] = {
    Kind::core_forward,   Kind::core_forward_causal,   Kind::core_backward, Kind::projection,
    Kind::module_forward, Kind::module_forward_causal, Kind::module_train};
constexpr Kind kFloat16[] = {Kind::core_forward, Kind::module_forward};
constexpr Shape kShapes[] = {
    {4, 20, 512, 8}, {8, 128, 768, 12}, {1, 512, 768, 12}, {1, 2048, 1024, 16}};
constexpr Shape kLong = {1, 8192, 1024, 16};
// The heads of a language model of seven billion parameters.
constexpr Shape kDecoding = {1, 4096, 4096, 32};
constexpr Shape kDecodingBatch = {8, 4096, 4096, 32};
constexpr Shape kPrefill = {1, 2048, 4096, 32};
// The cross-attention of small and large speech models over half a minute.
constexpr Shape kSpeech = {1, 1500, 512, 8};
constexpr Shape kLargeSpeech = {1, 1500, 1280, 20};

const char* text(Kind kind) {
  switch (kind) {
    case Kind::core_forward:
      return "core_forward";
    case Kind::core_forward_causal:
      return "core_forward_causal";
    case Kind::core_forward_window:
      return "core_forward_window";
    case Kind::core_backward:
      return "core_backward";
    case Kind::module_forward:
      return "module_forward";
    case Kind::module_forward_causal:
      return "module_forward_causal";
    case Kind::module_weights:
      return "module_weights";
    case Kind::module_train:
      return "module_train";
    case Kind::decode:
      return "decode";
    case Kind::projection:
      return "projection";
    case Kind::cross_decode:
      return "cross_decode";
  }
  TORCH_INTERNAL_ASSERT(false, "no such kind: ", static_cast<int>(kind));
}

/// These kinds on the four shapes.
template <size_t N>
void add(std::vector<Case>& cases, const Kind (&kinds)[N], at::ScalarType dtype) {
  for (const Kind kind : kinds) {
    for (const Shape& shape : kShapes) cases.push_back({kind, shape, dtype});
  }
}

}  // namespace

std::string name_of(const Case& what) {
  const Shape& shape = what.shape;
  std::string name = c10::str(text(what.kind), ' ', shape.batch, 'x', shape.length, 'x',
                              shape.d_model, 'x', shape.heads);
  if (what.heads_per_kv_head > 1) {
    name += c10::str(' ', shape.heads / what.heads_per_kv_head, "kv");
  }
  if (what.dtype != at::kFloat)
    name += c10::str(' ', detail::find_dtype(what.dtype)->torch_name);
  return name;
}

double useful_flops(const Case& what) {
  const auto [batch, length, d_model, heads] = what.shape;
  const auto positions = static_cast<double>(batch * length);
  const auto width = static_cast<double>(d_model);
  const auto keys = static_cast<double>(length);
  const double product = 2 * positions * keys * width;  // one of a map with all heads
  const double causal_share = (keys + 1) / (2 * keys);
  const double projections = 4 * 2 * positions * width * width;
  switch (what.kind) {
    case Kind::core_forward:
      return 2 * product;
    case Kind::core_forward_causal:
      return 2 * product * causal_share;
    case Kind::core_forward_window: {
      const double window = std::min(keys, static_cast<double>(window_length));
      const double pairs = keys * window - window * (window - 1) / 2;
      return 2 * product * pairs / (keys * keys);
    }
    case Kind::core_backward:
      return 5 * product;
    case Kind::module_forward:
    case Kind::module_weights:
      return projections + 2 * product;
    case Kind::module_forward_causal:
      return projections + 2 * product * causal_share;
    case Kind::module_train:
      return 3 * projections + 7 * product;
    case Kind::decode:
      return 2 * product / keys;
    case Kind::projection:
      return projections / 2;
    case Kind::cross_decode:
      return (projections / 2 + 2 * product) / keys;
  }
  TORCH_INTERNAL_ASSERT(false, "no such kind: ", static_cast<int>(what.kind));
}

bool is_decoding(Kind kind) {
  return kind == Kind::decode || kind == Kind::cross_decode;
}

double bytes_read(const Case& what) {
  const auto [batch, length, d_model, heads] = what.shape;
  const int64_t cache = 2 * batch * length * d_model / what.heads_per_kv_head;
  const int64_t weights = what.kind == Kind::cross_decode ? 2 * d_model * d_model : 0;
  return static_cast<double>(cache + weights) *
         static_cast<double>(c10::elementSize(what.dtype));
}

double map_bytes(const Case& what) {
  const auto [batch, length, d_model, heads] = what.shape;
  const int64_t queries = is_decoding(what.kind) ? 1 : length;
  return static_cast<double>(batch * heads * queries * length) *
         static_cast<double>(c10::elementSize(what.dtype));
}

std::vector<Case> short_cases() {
  std::vector<Case> cases;
  add(cases, kSelfAttention, at::kFloat);
  cases.push_back({Kind::decode, kDecoding});
  cases.push_back({Kind::cross_decode, kSpeech});
  return cases;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Kind kind : kSelfAttention) {
    for (const Shape& shape : kShapes) cases.push_back({kind, shape});
    cases.push_back({kind, kLong});
  }
  add(cases, {Kind::projection}, at::kFloat);
  add(cases, kBFloat16, at::kBFloat16);
  add(cases, kFloat16, at::kHalf);
  for (const Shape& shape : {Shape{4, 4096, 512, 8}, Shape{1, 4096, 768, 12},
                             Shape{8, 4096, 768, 12}, Shape{1, 4096, 1024, 16}}) {
    cases.push_back({Kind::decode, shape});
  }
  for (const Shape& shape : {kSpeech, kLargeSpeech}) {
    cases.push_back({Kind::cross_decode, shape});
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t heads_per_kv_head : {1, 4}) {
      cases.push_back({Kind::decode, kDecoding, dtype, heads_per_kv_head});
    }
    cases.push_back({Kind::decode, kDecodingBatch, dtype, 4});
    cases.push_back({Kind::core_forward_window, kPrefill, dtype, 4});
  }
  return cases;
}

}  // namespace mha::bench
