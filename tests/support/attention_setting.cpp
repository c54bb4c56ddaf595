#include "support/attention_setting.h"

#include <mha/cpu_isa.h>

#include <cmath>
#include <ostream>
#include <random>
#include <vector>

#include "support/torch_headers.h"

namespace mha::detail {

std::ostream& operator<<(std::ostream& stream, const AttentionSetting& s) {
  return stream << "N=" << s.batch << " H=" << s.heads << " Hk=" << s.kv_heads
                << " L=" << s.queries << " S=" << s.keys << "+" << s.extra
                << " D=" << s.head_dim << " Dv=" << s.value_dim << " mask " << s.mask
                << " softcap " << s.call.scoring.softcap
                << (s.call.scoring.sinks.defined() ? " sinks" : "") << " dropout "
                << s.call.dropout << " weights " << s.call.weights << " " << cpu_isa();
}

AttentionCall call_for(int64_t head_dim) {
  return {{1 / std::sqrt(static_cast<double>(head_dim))}};
}

AttentionSetting draw_setting(int64_t seed) {
  std::mt19937 generator(static_cast<uint32_t>(seed));
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
  };
  const auto chance = [&](int64_t in) { return pick(1, in) == 1; };
  torch::manual_seed(seed);
  const int64_t longest = chance(5) ? 300 : 60, kv_heads = pick(1, 3);
  AttentionSetting s{pick(1, 3),
                     kv_heads * pick(1, 3),
                     kv_heads,
                     pick(1, longest),
                     pick(1, longest),
                     0,
                     0,
                     0,
                     {},
                     {}};
  if (chance(4)) {
    s.queries = pick(1, 4);
    s.keys = pick(200, 1500);
  }
  s.extra = chance(4) ? pick(1, 2) : 0;
  s.head_dim = chance(2) ? 64 : pick(1, 80);
  s.value_dim = chance(2) ? s.head_dim : pick(1, 80);
  const int64_t n = s.batch, h = s.heads, l = s.queries, k = s.keys;
  const auto plane = [&] {
    return std::vector<int64_t>{chance(2) ? n : 1, chance(2) ? h : 1, l, k};
  };
  if (chance(3)) {
    s.mask = s.mask & Mask::causal(chance(2) ? Mask::Alignment::bottom_right
                                             : Mask::Alignment::top_left);
  }
  if (chance(4)) s.mask = s.mask & Mask::window(pick(-1, 40), pick(-1, 40));
  if (chance(4)) s.mask = s.mask & Mask::lengths(torch::randint(0, k + 1, {n}));
  if (chance(4)) s.mask = s.mask & Mask::keep_keys(torch::rand({n, k}) > 0.3);
  if (chance(4)) s.mask = s.mask & Mask::keep(torch::rand(plane()) > 0.4);
  if (chance(4)) s.mask = s.mask & Mask::block(torch::rand({l, k}) > 0.7);
  if (chance(4)) {
    auto added = torch::randn(plane());
    if (chance(2)) added.masked_fill_(added > 0.5, -INFINITY);
    s.mask = s.mask & Mask::add(added);
  }
  if (chance(5)) s.mask = s.mask & Mask::causal(torch::randint(-9, k + 9, {n}));
  if (chance(8)) {
    s.mask = s.mask & Mask::window(pick(-1, 40), pick(-1, 40), torch::randint(-9, k, {n}));
  }
  if (chance(5)) {  // some in runs, as packed sequences are
    const auto ids = [&](int64_t places) {
      const auto drawn = torch::randint(0, pick(1, 6), {n, places});
      return chance(2) ? std::get<0>(drawn.sort(1)) : drawn;
    };
    s.mask = s.mask & Mask::documents(ids(l), ids(k));
  }
  if (chance(5)) s.mask = s.mask & Mask::relative(torch::randn({chance(2) ? h : 1, l + k - 1}));
  if (chance(8)) s.mask = s.mask & Mask::alibi(torch::rand({h}), torch::randint(-9, k, {n}));
  s.call = call_for(s.head_dim);
  s.call.weights = static_cast<Weights>(pick(0, 2));
  s.call.weights_after_dropout = chance(2);
  if (chance(3)) {
    s.call.dropout = 0.3;
    s.call.dropout_seed = static_cast<uint64_t>(seed);
  }
  // From nearly all scores at the cap to hardly any.
  if (chance(3)) s.call.scoring.softcap = std::vector<double>{0.5, 3, 50}[pick(0, 2)];
  if (chance(3)) s.call.scoring.sinks = 2 * torch::randn({h});
  return s;
}

ResolvedMask resolved_mask(const AttentionSetting& s) {
  auto mask = resolve(s.mask, {{}, s.batch, s.heads, s.queries, s.keys}, at::kCPU);
  mask.extra_keys = s.extra;
  return mask;
}

}  // namespace mha::detail
