#include "picture.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "label.h"
#include "runtime/enum_check.h"
#include "runtime/given_tensor.h"

namespace mha::draw::detail {
namespace {

// More is no label, and more maps than this are no picture.
constexpr int64_t kLongestLabel = 200, kLongestTitle = 400;
constexpr int64_t kMostMaps = 256;

int64_t ceil_divide(int64_t a, int64_t b) {
  return (a - 1) / b + 1;
}

Axis axis_of(const char* name, int64_t size, const std::vector<std::string>& labels,
             int64_t most_cells) {
  TORCH_CHECK(labels.empty() || static_cast<int64_t>(labels.size()) == size, name,
              ": expected ", size, " labels as in weights, or none, found ", labels.size());
  Axis axis;
  axis.size = size;
  // As many cells as hold the same number each, where that number divides the size.
  axis.cells = ceil_divide(size, ceil_divide(size, std::max<int64_t>(most_cells, 1)));
  for (const std::string& label : labels) {
    axis.labels.push_back(fitted(printable(label), kLongestLabel, true));
  }
  return axis;
}

void check_heads(int64_t heads) {
  TORCH_CHECK(heads <= kMostMaps, "weights: expected at most ", kMostMaps,
              " heads in a picture, found ", heads);
}

/// (H, L, S), float32, contiguous, on the CPU.
at::Tensor checked_weights(const at::Tensor& weights) {
  TORCH_CHECK(weights.defined(), "weights: expected a tensor, found none");
  const at::Tensor given =
      mha::detail::given_tensor({"weights"}, weights, mha::detail::Numbers::floating);
  TORCH_CHECK(given.dim() == 2 || given.dim() == 3,
              "weights: expected (heads, queries, keys) or (queries, keys), found ",
              given.sizes());
  TORCH_CHECK(given.numel() > 0, "weights: expected at least one head, query and key, found ",
              given.sizes());
  check_heads(given.dim() == 2 ? 1 : given.size(0));
  const at::Tensor result = given.detach().to(at::kCPU, at::kFloat).contiguous();
  return given.dim() == 2 ? result.unsqueeze(0) : result;
}

void check_options(const Options& options) {
  mha::detail::check_enum({"colours"}, options.colours(), ColourMap::grey, "dusk, ink or grey");
  mha::detail::check_enum({"scale"}, options.scale(), Scale::linear, "square_root or linear");
  const double largest = options.largest().value_or(1);
  TORCH_CHECK(std::isfinite(largest) && largest > 0, "largest: expected a number > 0, found ",
              largest);
}

void check_weight(float weight, int64_t head, int64_t query, int64_t key) {
  TORCH_CHECK(std::isfinite(weight) && weight >= 0,
              "weights: expected finite numbers >= 0, found ", weight, " at head ", head,
              ", query ", query, ", key ", key);
}

/// One head's cells: the mean over a cell's queries of the sum over its keys. `weights` points
/// to the head's first row.
std::vector<float> pooled(const float* weights, int64_t head, const Axis& queries,
                          const Axis& keys, bool causal) {
  const int64_t ahead = keys.size - queries.size;  // a query's own position among the keys
  std::vector<float> values;
  std::vector<double> sums(static_cast<size_t>(keys.cells));
  for (int64_t row = 0; row < queries.cells; ++row) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t i = queries.first(row); i < queries.first(row + 1); ++i) {
      for (int64_t column = 0; column < keys.cells; ++column) {
        const int64_t end =
            std::min(keys.first(column + 1), causal ? i + ahead + 1 : keys.size);
        for (int64_t j = keys.first(column); j < end; ++j) {
          const float weight = weights[i * keys.size + j];
          check_weight(weight, head, i, j);
          sums[static_cast<size_t>(column)] += weight;
        }
      }
    }
    const auto count = static_cast<double>(queries.first(row + 1) - queries.first(row));
    for (const double sum : sums) {
      values.push_back(sum > 0 ? static_cast<float>(sum / count) : Picture::kBlank);
    }
  }
  return values;
}

/// What the cells come from.
struct Source {
  int64_t heads, queries, keys;
  at::Tensor weights;               // (H, L, S), float32, contiguous, on the CPU; or undefined
  std::optional<AttentionMap> map;  // then this one
  int64_t sample;

  /// Of each head, row after row.
  std::vector<std::vector<float>> cells(const Axis& rows, const Axis& columns,
                                        bool causal) const {
    std::vector<std::vector<float>> found;
    if (!map) {
      for (int64_t head = 0; head < heads; ++head) {
        const float* first = weights.data_ptr<float>() + head * queries * keys;
        found.push_back(pooled(first, head, rows, columns, causal));
      }
      return found;
    }
    const auto all = map->pooled(rows.cells, columns.cells).to(at::kCPU, at::kFloat);
    const auto own = all.reshape({-1, heads, rows.cells, columns.cells});
    TORCH_CHECK(sample >= 0 && sample < own.size(0), "sample: expected 0 <= sample < ",
                own.size(0), ", found ", sample);
    const auto drawn = own[sample].contiguous();
    const float* next = drawn.data_ptr<float>();
    for (int64_t head = 0; head < heads; ++head) {
      auto& values = found.emplace_back();
      for (int64_t i = 0; i < rows.cells * columns.cells; ++i, ++next) {
        check_weight(*next, head, rows.first(i / columns.cells),
                     columns.first(i % columns.cells));
        values.push_back(*next > 0 ? *next : Picture::kBlank);
      }
    }
    return found;
  }
};

Source source_of(const Maps& maps, const Options& options) {
  TORCH_CHECK(!maps.map || !maps.weights.defined(),
              "map: expected either weights or map, found both");
  if (!maps.map) {
    const at::Tensor weights = checked_weights(maps.weights);
    return {weights.size(0), weights.size(1), weights.size(2), weights, std::nullopt, 0};
  }
  const AttentionMap& map = *maps.map;
  check_heads(map.num_heads());
  TORCH_CHECK(map.num_heads() > 0 && map.num_queries() > 0 && map.num_keys() > 0,
              "map: expected at least one head, query and key, found ", map.num_heads(), ", ",
              map.num_queries(), " and ", map.num_keys());
  TORCH_CHECK(!options.causal(),
              "causal: expected false with map, which shows its own mask, found true");
  return {map.num_heads(), map.num_queries(), map.num_keys(), {}, map, maps.sample};
}

std::string name_of_panel(const Maps& maps, int64_t heads, int64_t head) {
  if (!maps.names.empty())
    return fitted(printable(maps.names[static_cast<size_t>(head)]), kLongestLabel, true);
  return heads > 1 ? fmt::format("head {}", head) : "";
}

}  // namespace

int64_t heads_of(const Maps& maps) {
  if (maps.map) return maps.map->num_heads();
  return maps.weights.defined() && maps.weights.dim() == 3 ? maps.weights.size(0) : 1;
}

std::string Axis::label(int64_t cell, bool every_one_shown) const {
  if (!labels.empty() && every_one_shown && !is_pooled()) {
    return labels[static_cast<size_t>(cell)];
  }
  return fmt::format("{}", first(cell));
}

double Picture::position(double value) const {
  if (value < 0) return -1;
  const double part = std::min(value / largest, 1.0);
  return scale == Scale::linear ? part : std::sqrt(part);
}

std::vector<std::string> Picture::notes() const {
  std::vector<std::string> sentences = {"Rows are queries, columns are keys."};
  if (has_blank) {
    sentences.push_back(is_causal ? "Blank: later than the query, or exactly 0."
                                  : "Blank: exactly 0.");
  }
  if (is_clipped) {
    sentences.push_back(
        fmt::format("Weights above {} have the last colour.", number_text(largest)));
  }
  if (is_pooled()) {
    // "3 keys", or "2 or 3 keys" where they cannot be shared out evenly.
    const auto counted = [](const Axis& axis, const char* one, const char* more) {
      const int64_t least = axis.size / axis.cells, most = ceil_divide(axis.size, axis.cells);
      const std::string number =
          least == most ? fmt::format("{}", least) : fmt::format("{} or {}", least, most);
      return number + ' ' + (most == 1 ? one : more);
    };
    sentences.push_back(
        fmt::format("Pooled from {} x {}: a cell is what {} give {} together{}.", queries.size,
                    keys.size, counted(queries, "query", "queries"),
                    counted(keys, "key", "keys"), queries.is_pooled() ? ", on average" : ""));
  }
  return sentences;
}

Axes axes_of(const Maps& maps, const Options& options) {
  const c10::NoGradGuard no_grad;
  const Source source = source_of(maps, options);
  return {axis_of("queries", source.queries, maps.queries, source.queries),
          axis_of("keys", source.keys, maps.keys, source.keys)};
}

Picture picture_of(const Maps& maps, const Options& options, int64_t most_rows,
                   int64_t most_columns) {
  const c10::NoGradGuard no_grad;
  const Source source = source_of(maps, options);
  const int64_t heads = source.heads;
  TORCH_CHECK(maps.names.empty() || static_cast<int64_t>(maps.names.size()) == heads,
              "names: expected ", heads, ", one for each head, or none, found ",
              maps.names.size());
  check_options(options);

  Picture picture;
  picture.title = fitted(printable(maps.title), kLongestTitle, true);
  picture.queries = axis_of("queries", source.queries, maps.queries, most_rows);
  picture.keys = axis_of("keys", source.keys, maps.keys, most_columns);
  picture.is_causal = options.causal();
  picture.scale = options.scale();
  picture.colours = options.colours();
  auto cells = source.cells(picture.queries, picture.keys, options.causal());
  float largest = 0;
  for (int64_t head = 0; head < heads; ++head) {
    Panel panel;
    panel.name = name_of_panel(maps, heads, head);
    panel.values = std::move(cells[static_cast<size_t>(head)]);
    for (const float value : panel.values) {
      largest = std::max(largest, value);
      picture.has_blank = picture.has_blank || value < 0;
    }
    picture.panels.push_back(std::move(panel));
  }
  picture.largest = options.largest().value_or(largest > 0 ? largest : 1);
  picture.is_clipped = largest > picture.largest;
  return picture;
}

std::string number_text(double number) {
  return fmt::format("{:.3g}", number);
}

std::vector<double> bar_ticks(const Picture& picture, double gap) {
  // From the round numbers of each step, the finest that leave room, from the largest down.
  std::vector<double> ticks = {picture.largest};
  const double decade = std::pow(10, std::floor(std::log10(picture.largest)));
  double below = 1;  // the position of the last one taken
  const auto take = [&](double value) {
    const double position = picture.position(value);
    if (value >= picture.largest || below - position < gap || position < gap) return;
    ticks.push_back(value);
    below = position;
  };
  if (picture.scale == Scale::linear) {
    const double step = picture.largest / decade < 2   ? decade / 5
                        : picture.largest / decade < 5 ? decade / 2
                                                       : decade;
    for (int i = 10; i > 0; --i) take(i * step);
  } else {
    for (double unit = decade; unit > picture.largest / 1e4; unit /= 10) {
      for (const double factor : {5, 2, 1}) take(factor * unit);
    }
  }
  ticks.push_back(0);
  std::reverse(ticks.begin(), ticks.end());
  return ticks;
}

}  // namespace mha::draw::detail
