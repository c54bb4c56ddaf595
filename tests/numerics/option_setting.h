#pragma once

#include <mha/multi_head_attention.h>

#include <cstdint>
#include <optional>
#include <string>

namespace mha::test {

/// A layer of today's models, a mask and what else a call of it is given.
struct OptionSetting {
  uint64_t seed = 0;
  MultiHeadAttentionOptions options{1, 1};
  int64_t batch = 0, length = 0;
  std::optional<int64_t> window;  // keys that a query sees, itself included
  at::Tensor slopes;
  // Whether the mask says nothing that depends on the length of the whole sequence, so that the
  // tokens may come bit by bit.
  bool cacheable = false;
  CallOptions call;
};

/// Depends on the seed alone.
OptionSetting draw_option_setting(uint64_t seed);

/// The terms of its mask that mean the same when the tokens come bit by bit.
Mask running_mask(const OptionSetting& s);

/// With the seed to run it alone.
std::string describe(const OptionSetting& s);

}  // namespace mha::test
