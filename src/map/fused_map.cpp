#include "map/fused_map.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "attention/packed_scores.h"
#include "runtime/cpu_kernels.h"
#include "runtime/huge_pages.h"
#include "runtime/kernel_rows.h"
#include "runtime/run_tasks.h"
#include "runtime/uncomputed.h"

namespace mha::detail {
namespace {

constexpr double ln4 = 1.38629436111989062;

cpu::MapNumbers kernel_numbers(Attribution attribution) {
  switch (attribution) {
    case Attribution::gradient:
      return cpu::MapNumbers::gradient;
    case Attribution::relevance:
      return cpu::MapNumbers::product;
    case Attribution::positive_relevance:
      break;
  }
  return cpu::MapNumbers::positive_product;
}

// A view in the form the kernels read, and the memory that it points to.
struct PackedSource {
  explicit PackedSource(const MapView& view)
      : scores(pack_scores(view.query, view.key, view.mask, view.scoring, cpu_kernels())) {
    static_cast<cpu::FloatScoreArgs&>(source) = scores.args;
    source.key = kernel_rows<const float>(scores.key);
    source.row_maximum = kernel_rows<const float>(view.statistics.maximum);
    source.row_factor = kernel_rows<const float>(view.statistics.factor);
    if (!view.attribution) return;
    source.numbers = kernel_numbers(*view.attribution);
    value = kernel_view(view.value);
    grad_output = kernel_view(view.grad_output);
    source.value = kernel_rows<const float>(value);
    source.grad_output = kernel_rows<const float>(grad_output);
    source.value_dim = value.size(3);
  }

  PackedScores scores;
  at::Tensor value, grad_output;
  cpu::MapSource source{};
};

at::Tensor empty_result(const MapView& view, at::IntArrayRef sizes) {
  return uncomputed(sizes, view.query.options());
}

int64_t tiles(const cpu::MapSource& source) {
  return (source.queries + cpu_kernels().tile - 1) / cpu_kernels().tile;
}

// Queries of one task, and how many tasks a head has: up to 16, so that few heads keep many
// threads busy, and a partial result for each stays cheap.
struct Chunks {
  int64_t size, count;
};

Chunks query_chunks(const cpu::MapSource& source) {
  constexpr int64_t most = 16;
  const int64_t size = std::max<int64_t>((tiles(source) + most - 1) / most, 1);
  return {size * cpu_kernels().tile, (tiles(source) + size - 1) / size};
}

// (N, H, chunks, S) -> (N, H, S), in the chunks' order.
at::Tensor sum_of_chunks(const at::Tensor& shares) {
  auto total = at::zeros({shares.size(0), shares.size(1), shares.size(3)}, shares.options());
  for (int64_t c = 0; c < shares.size(2); ++c) total += shares.select(2, c);
  return total;
}

void run_rows(const PackedSource& packed, const cpu::MapRows& wanted) {
  const auto& source = packed.source;
  const int64_t heads = wanted.averaged ? 1 : source.heads;
  run_tasks(
      source.batch * heads * tiles(source), cpu_kernels().map_scratch(source),
      [&](int64_t i, float* scratch) { cpu_kernels().map_rows(source, wanted, i, scratch); });
}

}  // namespace

at::Tensor fused_numbers(const MapView& view) {
  const PackedSource packed(view);
  const auto& s = packed.source;
  const auto numbers = empty_result(view, {s.batch, s.heads, s.queries, s.keys});
  prefer_huge_pages(numbers.data_ptr(), numbers.nbytes());
  run_rows(packed, {kernel_rows<float>(numbers), false});
  return numbers;
}

at::Tensor fused_mean(const MapView& view) {
  const PackedSource packed(view);
  const auto& s = packed.source;
  const auto mean = empty_result(view, {s.batch, s.queries, s.keys});
  prefer_huge_pages(mean.data_ptr(), mean.nbytes());
  run_rows(packed, {{mean.data_ptr<float>(), s.queries * s.keys, 0, s.keys}, true});
  return mean;
}

SummaryParts fused_summary(const MapView& view) {
  const PackedSource packed(view);
  const auto& s = packed.source;
  const auto chunks = query_chunks(s);
  const auto factor = view.statistics.factor.contiguous();
  const auto log4_factor = at::log2(factor.masked_fill(factor.eq(0), 1)) * 0.5;
  const at::IntArrayRef rows = factor.sizes();
  const auto entropy = empty_result(view, rows), distance = empty_result(view, rows);
  const auto placed = empty_result(view, rows);
  const auto received = empty_result(view, {s.batch, s.heads, chunks.count, s.keys});
  const auto shifts = first_positions(view).to(at::kLong).expand({s.batch}).contiguous();
  const cpu::MapSummary wanted{log4_factor.data_ptr<float>(), shifts.data_ptr<int64_t>(),
                               entropy.data_ptr<float>(),     distance.data_ptr<float>(),
                               placed.data_ptr<float>(),      chunks.size,
                               received.data_ptr<float>()};
  run_tasks(
      s.batch * s.heads * chunks.count, cpu_kernels().map_scratch(s),
      [&](int64_t i, float* scratch) { cpu_kernels().map_summary(s, wanted, i, scratch); });
  return {entropy, distance, placed, sum_of_chunks(received)};
}

SumParts fused_sums(const MapView& view) {
  const PackedSource packed(view);
  const auto& s = packed.source;
  const auto chunks = query_chunks(s);
  const auto by_query = empty_result(view, {s.batch, s.heads, s.queries});
  const auto by_key = empty_result(view, {s.batch, s.heads, chunks.count, s.keys});
  const cpu::MapSums wanted{by_query.data_ptr<float>(), chunks.size, by_key.data_ptr<float>()};
  run_tasks(s.batch * s.heads * chunks.count, cpu_kernels().map_scratch(s),
            [&](int64_t i, float* scratch) { cpu_kernels().map_sums(s, wanted, i, scratch); });
  return {by_query, sum_of_chunks(by_key)};
}

TopKeys fused_top(const MapView& view, int64_t count) {
  const PackedSource packed(view);
  const auto& s = packed.source;
  const auto values = empty_result(view, {s.batch, s.heads, s.queries, count});
  const auto keys = uncomputed(values.sizes(), values.options().dtype(at::kLong));
  const cpu::MapTop wanted{count, values.data_ptr<float>(), keys.data_ptr<int64_t>()};
  run_tasks(s.batch * s.heads * tiles(s), cpu_kernels().map_scratch(s),
            [&](int64_t i, float* scratch) { cpu_kernels().map_top(s, wanted, i, scratch); });
  return {values, keys};
}

at::Tensor fused_pool(const MapView& view, int64_t rows, int64_t columns) {
  const PackedSource packed(view);
  const auto& s = packed.source;
  const auto chunks = query_chunks(s);
  const auto cell_of = [&](int64_t query) { return ((query + 1) * rows - 1) / s.queries; };
  const int64_t chunk_rows = std::min(rows, chunks.size * rows / s.queries + 2);
  const auto sums = empty_result(view, {s.batch, s.heads, chunks.count, chunk_rows, columns});
  const cpu::MapPool wanted{rows, columns, chunks.size, chunk_rows, sums.data_ptr<float>()};
  run_tasks(s.batch * s.heads * chunks.count, cpu_kernels().map_pool_scratch(s, wanted),
            [&](int64_t i, float* scratch) { cpu_kernels().map_pool(s, wanted, i, scratch); });
  const auto cells = at::zeros({s.batch, s.heads, rows, columns}, view.query.options());
  for (int64_t c = 0; c < chunks.count; ++c) {
    const int64_t first = cell_of(c * chunks.size);
    const int64_t last = cell_of(std::min((c + 1) * chunks.size, s.queries) - 1);
    cells.narrow(2, first, last - first + 1) +=
        sums.select(2, c).narrow(2, 0, last - first + 1);
  }
  return cells;
}

at::Tensor fused_log_sum_exp(const MapView& view) {
  const auto &maximum = view.statistics.maximum, &factor = view.statistics.factor;
  constexpr double highest = std::numeric_limits<float>::max();
  const auto sum = ((maximum - at::log2(factor) * 0.5) * ln4).clamp(-highest, highest);
  const auto found = sum.masked_fill(factor.eq(0), -std::numeric_limits<double>::infinity());
  // A sink is seen by queries without keys, too.
  const auto& sinks = view.scoring.sinks;
  return sinks.defined() ? at::where(sinks.isnan().squeeze(-1), sinks.squeeze(-1), found)
                         : found;
}

}  // namespace mha::detail
