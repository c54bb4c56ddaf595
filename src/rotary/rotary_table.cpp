#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>

#include "rotary/rotary.h"

namespace mha::detail {
namespace {

constexpr int64_t largest_table = int64_t{64} << 20;  // bytes
constexpr size_t most_tables = 8;                     // kept, the last used ones

bool same(const RotaryFrequencies& a, const RotaryFrequencies& b) {
  return a.radians == b.radians && a.amplitude == b.amplitude;
}

std::shared_ptr<const RotaryTable> with_rows(const RotaryFrequencies& frequencies,
                                             int64_t count) {
  // Outlives the inference mode that it may be asked for in.
  const c10::InferenceMode normal(false);
  const auto pairs = static_cast<int64_t>(frequencies.radians.size());
  std::vector<int64_t> positions(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) positions[static_cast<size_t>(i)] = i;
  auto rows = at::empty({count, 2, pairs}, at::kFloat);
  fill_rotary_rows(frequencies, positions.data(), count, rows.data_ptr<float>());
  return std::make_shared<const RotaryTable>(RotaryTable{frequencies, std::move(rows)});
}

}  // namespace

void fill_rotary_rows(const RotaryFrequencies& frequencies, const int64_t* positions,
                      int64_t count, float* rows) {
  const auto pairs = static_cast<int64_t>(frequencies.radians.size());
  at::parallel_for(0, count, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = rows + t * 2 * pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const double angle =
            static_cast<double>(positions[t]) * frequencies.radians[static_cast<size_t>(i)];
        row[i] = static_cast<float>(frequencies.amplitude * std::cos(angle));
        row[pairs + i] = static_cast<float>(frequencies.amplitude * std::sin(angle));
      }
    }
  });
}

std::shared_ptr<const RotaryTable> rotary_table(const RotaryFrequencies& frequencies,
                                                int64_t rows) {
  static std::mutex mutex;
  static auto& tables = *new std::vector<std::shared_ptr<const RotaryTable>>();
  const auto row_bytes = static_cast<int64_t>(frequencies.radians.size() * 2 * sizeof(float));
  rows = std::min(rows, std::max<int64_t>(1, largest_table / row_bytes));

  const std::lock_guard<std::mutex> lock(mutex);
  auto found = std::find_if(tables.begin(), tables.end(), [&](const auto& table) {
    return same(table->frequencies, frequencies);
  });
  if (found == tables.end()) {
    if (tables.size() == most_tables) tables.pop_back();
    found = tables.insert(tables.begin(), nullptr);
  }
  std::rotate(tables.begin(), found, found + 1);
  auto& table = tables.front();
  if (!table || table->rows.size(0) < rows) {
    int64_t size = 256;
    while (size < rows) size *= 2;
    table = with_rows(frequencies, size);
  }
  return table;
}

}  // namespace mha::detail
