#include <fmt/format.h>
#include <mha/draw.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "colour_map.h"
#include "label.h"
#include "page.h"
#include "picture.h"

namespace mha::draw {
namespace {

using detail::Axis;
using detail::Panel;
using detail::Picture;
using nlohmann::json;

// Two bytes each: a page of 11 MB at most. 16 heads of 512 tokens are not pooled.
constexpr double kMostValues = 1 << 22;
constexpr int64_t kMostCells = 1024;  // of an axis

std::string base64(const std::vector<uint8_t>& bytes) {
  constexpr std::string_view digits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const auto byte = [&](size_t at) { return at < bytes.size() ? uint32_t{bytes[at]} : 0u; };
    const uint32_t bits = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    text += digits[bits >> 18];
    text += digits[bits >> 12 & 63];
    text += i + 1 < bytes.size() ? digits[bits >> 6 & 63] : '=';
    text += i + 2 < bytes.size() ? digits[bits & 63] : '=';
  }
  return text;
}

/// The square root of each weight's part of `largest` in 16 bits, little endian, so that small
/// weights keep as many digits as large ones; 0 is a blank. page/model.js reads it.
std::string packed(const Picture& picture, double largest) {
  constexpr double kSteps = 65534;
  std::vector<uint8_t> bytes;
  for (const Panel& panel : picture.panels) {
    for (const float value : panel.values) {
      const auto code =
          value < 0
              ? 0u
              : 1u + static_cast<uint32_t>(std::lround(std::sqrt(value / largest) * kSteps));
      bytes.push_back(static_cast<uint8_t>(code & 0xFF));
      bytes.push_back(static_cast<uint8_t>(code >> 8));
    }
  }
  return base64(bytes);
}

json axis_json(const Axis& axis) {
  json result = {{"size", axis.size}, {"cells", axis.cells}};
  if (!axis.labels.empty()) result["labels"] = axis.labels;
  return result;
}

std::string summary(const Picture& picture) {
  const auto heads = picture.panels.size();
  return fmt::format("{}{} queries \u00d7 {} keys",
                     heads > 1 ? fmt::format("{} heads \u00b7 ", heads) : "",
                     picture.queries.size, picture.keys.size);
}

json data_of(const Picture& picture) {
  float largest = 0;
  for (const Panel& panel : picture.panels) {
    largest = std::max(largest, *std::max_element(panel.values.begin(), panel.values.end()));
  }
  const double packed_largest = largest > 0 ? largest : 1;
  constexpr const char* names[] = {"dusk", "ink", "grey"};
  json data = {
      {"title", picture.title.empty() ? "Attention weights" : picture.title},
      {"summary", summary(picture)},
      {"queries", axis_json(picture.queries)},
      {"keys", axis_json(picture.keys)},
      {"largest", picture.largest},
      {"packed_largest", packed_largest},
      {"scale", picture.scale == Scale::linear ? "linear" : "square_root"},
      {"colours", names[static_cast<size_t>(picture.colours)]},
      {"values", packed(picture, packed_largest)},
  };
  for (const ColourMap map : {ColourMap::dusk, ColourMap::ink, ColourMap::grey}) {
    std::vector<uint8_t> bytes;
    for (const detail::Rgb colour : detail::colour_table(map)) {
      bytes.insert(bytes.end(), {colour.red, colour.green, colour.blue});
    }
    data["colour_maps"][names[static_cast<size_t>(map)]] = base64(bytes);
  }
  std::string notes;
  for (const std::string& sentence : picture.notes())
    notes += (notes.empty() ? "" : " ") + sentence;
  data["notes"] = notes;
  data["names"] = json::array();
  for (const Panel& panel : picture.panels) data["names"].push_back(panel.name);
  data["ticks"] = json::array();
  for (const double tick : detail::bar_ticks(picture, 0.14)) {
    data["ticks"].push_back({{"value", tick}, {"text", detail::number_text(tick)}});
  }
  return data;
}

/// JSON that may stand in a script element: no '<' that could end it or open a comment.
std::string script_safe(const json& data) {
  std::string text;
  for (const char c : data.dump(-1, ' ', /*ensure_ascii=*/true)) {
    if (c == '<') {
      text += "\\u003c";
    } else {
      text += c;
    }
  }
  return text;
}

/// Puts the values into the page's places, in one pass: what a value holds is never a place.
std::string filled(std::string_view page,
                   const std::vector<std::pair<std::string_view, std::string_view>>& values) {
  std::string result;
  for (const auto& [place, value] : values) {
    const size_t at = page.find(place);
    result.append(page.substr(0, at)).append(value);
    page.remove_prefix(at + place.size());
  }
  return result.append(page);
}

}  // namespace

std::string html(const Maps& maps, const Options& options) {
  const auto heads = static_cast<double>(std::max<int64_t>(detail::heads_of(maps), 1));
  const int64_t most =
      std::clamp(static_cast<int64_t>(std::sqrt(kMostValues / heads)), int64_t{1}, kMostCells);
  const Picture picture = detail::picture_of(maps, options, most, most);
  const std::string data = script_safe(data_of(picture));
  const std::string title =
      detail::xml_escaped(picture.title.empty() ? "Attention weights" : picture.title);
  return filled(detail::kPageHtml, {{"@TITLE@", title},
                                    {"@STYLE@", detail::kPageStyle},
                                    {"@DATA@", data},
                                    {"@SCRIPT@", detail::kPageScript}});
}

}  // namespace mha::draw
