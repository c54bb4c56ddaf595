#include "weights/find_layers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "files/excerpt.h"
#include "weights/file_layer.h"

namespace mha::detail {
namespace {

constexpr size_t kMaxListed = 8;

// 'a', 'b' and 7 more
template <typename Strings>
std::string list(const Strings& strings) {
  std::string text;
  size_t listed = 0;
  for (const auto& string : strings) {
    if (listed == kMaxListed) {
      return text + " and " + std::to_string(strings.size() - listed) + " more";
    }
    text += (text.empty() ? "" : ", ") + excerpt(string);
    ++listed;
  }
  return text;
}

[[noreturn]] void fail_without_layer(const TensorSource& file, const WeightFileOptions& options,
                                     const std::vector<std::string>& names) {
  std::set<std::string> prefixes;
  for (const auto& layer : find_layers(file, options.layout())) prefixes.insert(layer.prefix);
  std::ostringstream text;
  text << "expected an attention layer";
  if (options.layout()) text << " in the " << *options.layout() << " layout";
  text << " at prefix " << excerpt(options.prefix()) << ", found ";
  text << (names.empty() ? "no name that begins with it" : "the names " + list(names));
  text << (prefixes.empty() ? "; the file has none at any prefix"
                            : "; the file has one at " + list(prefixes));
  TORCH_CHECK(false, file.path(), ": ", text.str());
}

// The names of the input projections, which tell a layout. Those of the output projection, the
// gate and `bias_k` would not: other models have an `out_proj.weight` too.
std::set<std::string> telling_names(const Layout& layout) {
  std::set<std::string> names;
  for (const bool apart : {false, true}) {
    for (const LayoutTensor& tensor : tensors_of(layout, apart)) {
      const std::string& first = tensor.parameters[0];
      if (first[0] == 'W' && first[2] != 'o' && first[2] != 'g') names.insert(tensor.name);
    }
  }
  return names;
}

const LayoutTensor* key_bias_of(const Layout& layout) {
  return tensor_with(tensors_of(layout, false), "W_k.bias");
}

// How well a layout goes with the names at a prefix.
struct Match {
  Layout layout;
  std::set<std::string> told;  // its telling names that are there
  size_t known = 0, missing = 0;
  bool has_output = false;
};

Match match(const TensorSource& file, const std::string& prefix, const Layout& layout) {
  Match match{layout, {}};
  const auto has = [&](const std::string& name) {
    return file.has(join(prefix, name_of_head(name, 0)));
  };
  for (const std::string& name : telling_names(layout)) {
    if (has(name)) match.told.insert(name);
  }
  const auto& tensors = tensors_in_file(layout, has);
  const LayoutTensor* query_bias = tensor_with(tensors, "W_q.bias");
  const bool has_biases = query_bias != nullptr && has(query_bias->name);
  for (const LayoutTensor& tensor : tensors) {
    const std::string& first = tensor.parameters[0];
    const bool is_there = has(tensor.name);
    if (is_there) ++match.known;
    const bool expected = first[0] == 'W' && first[2] != 'g' &&
                          (first.back() == 't' || (has_biases && first[2] != 'o'));
    if (!is_there && expected) ++match.missing;
    if (is_there && first == "W_o.weight") match.has_output = true;
  }
  return match;
}

// Those that the names do not tell apart: one, unless each has names that others lack.
std::vector<Match> best(const std::vector<Match>& matches) {
  std::vector<Match> left;
  for (const Match& a : matches) {
    const bool is_less = std::any_of(matches.begin(), matches.end(), [&](const Match& b) {
      return b.told.size() > a.told.size() &&
             std::includes(b.told.begin(), b.told.end(), a.told.begin(), a.told.end());
    });
    if (is_less) continue;
    const auto same = std::find_if(left.begin(), left.end(),
                                   [&](const Match& b) { return a.told == b.told; });
    if (same == left.end()) {
      left.push_back(a);
    } else if (a.known > same->known || (a.known == same->known && a.missing < same->missing)) {
      *same = a;
    }
  }
  return left;
}

// Which of the layouts, by index, each prefix has a telling name of.
using Candidates = std::map<std::string, std::set<size_t>>;

Candidates candidates_in(const TensorSource& file, const std::vector<Layout>& layouts) {
  std::map<std::string, std::vector<size_t>> told_by;  // a telling name: whose
  size_t max_parts = 0;
  for (size_t i = 0; i < layouts.size(); ++i) {
    for (const std::string& name : telling_names(layouts[i])) {
      told_by[name].push_back(i);
      max_parts = std::max(max_parts, size_t(std::count(name.begin(), name.end(), '.')) + 1);
    }
  }
  Candidates candidates;
  file.visit_names("", [&](const std::string& name) {
    // The ends of the name that begin behind a dot, and the name itself.
    size_t start = name.size();
    for (size_t part = 0; part < max_parts && start != 0; ++part) {
      const size_t dot = start < 2 ? std::string::npos : name.rfind('.', start - 2);
      start = dot == std::string::npos ? 0 : dot + 1;
      const auto told = told_by.find(name.substr(start));
      if (told == told_by.end() || start == 1) continue;
      candidates[name.substr(0, start == 0 ? 0 : start - 1)].insert(told->second.begin(),
                                                                    told->second.end());
    }
    return true;
  });
  return candidates;
}

// Where a layer's neighbours lie: the same attention of other layers, as encoder.layers.#.attn,
// and the other attentions of its layer, as encoder.layers.3.
std::array<std::string, 2> neighbourhoods(const std::string& prefix) {
  std::string numbered;
  for (const char c : prefix) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit) numbered += c;
    if (is_digit && (numbered.empty() || numbered.back() != '#')) numbered += '#';
  }
  const size_t dot = prefix.rfind('.');
  return {numbered, dot == std::string::npos ? "" : prefix.substr(0, dot + 1)};
}

// Whisper's layers have BART's names and no bias of keys. A layer without one is Whisper's,
// unless one beside it has it: then it was lost.
std::set<std::string> neighbours_with_key_bias(const TensorSource& file,
                                               const Candidates& candidates,
                                               const std::vector<Layout>& layouts) {
  std::set<std::string> with_bias;
  for (const auto& [prefix, indices] : candidates) {
    const bool has_bias =
        std::any_of(indices.begin(), indices.end(), [&, &prefix = prefix](size_t i) {
          const LayoutTensor* bias = key_bias_of(layouts[i]);
          return bias != nullptr && file.has(join(prefix, bias->name));
        });
    if (!has_bias) continue;
    for (std::string& place : neighbourhoods(prefix)) with_bias.insert(std::move(place));
  }
  return with_bias;
}

// Without the layouts that have no place for a bias of keys, where one beside it has it.
std::vector<Match> without_lost_key_bias(const std::string& prefix,
                                         const std::vector<Match>& matches,
                                         const std::set<std::string>& with_bias) {
  const auto places = neighbourhoods(prefix);
  if (std::none_of(places.begin(), places.end(),
                   [&](const std::string& place) { return with_bias.count(place) != 0; })) {
    return matches;
  }
  std::vector<Match> left;
  for (const Match& a : matches) {
    const bool is_replaced = key_bias_of(a.layout) == nullptr &&
                             std::any_of(matches.begin(), matches.end(), [&](const Match& b) {
                               return b.told == a.told && key_bias_of(b.layout) != nullptr;
                             });
    if (!is_replaced) left.push_back(a);
  }
  return left;
}

}  // namespace

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

std::vector<std::string> names_at(const TensorSource& file, const std::string& prefix) {
  std::vector<std::string> names;
  const std::string start = join(prefix, "");
  file.visit_names(start, [&](const std::string& name) {
    if (name.compare(0, start.size(), start) != 0) return false;
    names.push_back(name.substr(start.size()));
    return true;
  });
  return names;
}

bool is_among(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    if (pattern.empty() || pattern.back() != '*') return name == pattern;
    const size_t size = pattern.size() - 1;
    return name.compare(0, size, pattern, 0, size) == 0;
  });
}

const TensorEntry* entry_at(const TensorSource& file, const WeightFileOptions& where,
                            const std::string& name) {
  return is_among(where.ignored(), name) ? nullptr : file.find(join(where.prefix(), name));
}

std::unique_ptr<TensorSource> open_weights(const std::string& path,
                                           const WeightFileOptions& where) {
  for (const std::string& pattern : where.ignored()) {
    TORCH_CHECK(!pattern.empty(), path, ": ignored: expected names, found ''");
  }
  return open_tensors(path,
                      where.missing_checksums() ? Checksums::optional : Checksums::required);
}

std::vector<FoundLayer> find_layers(const TensorSource& file,
                                    const std::optional<Layout>& wanted) {
  std::vector<Layout> layouts;
  if (wanted) {
    layouts.push_back(*wanted);
  } else {
    for (const Layout& layout : Layout::built_in()) {
      if (layout.description().told_by_names) layouts.push_back(layout);
    }
  }
  const Candidates candidates = candidates_in(file, layouts);
  const std::set<std::string> with_key_bias =
      neighbours_with_key_bias(file, candidates, layouts);
  std::vector<std::pair<std::string, Match>> found;
  std::set<std::string> claimed;  // tensors of whole layers
  for (const auto& [prefix, indices] : candidates) {
    std::vector<Match> matches;
    for (const size_t i : indices) matches.push_back(match(file, prefix, layouts[i]));
    for (const Match& match : best(without_lost_key_bias(prefix, matches, with_key_bias))) {
      found.emplace_back(prefix, match);
      if (!match.has_output) continue;
      for (const std::string& name : match.told) claimed.insert(join(prefix, name));
    }
  }
  std::vector<FoundLayer> layers;
  for (const auto& [prefix, match] : found) {
    // `self.query` of a layer in the bert layout is no layer of its own at `self`.
    const bool is_part =
        !match.has_output && std::any_of(match.told.begin(), match.told.end(),
                                         [&, &prefix = prefix](const std::string& name) {
                                           return claimed.count(join(prefix, name)) != 0;
                                         });
    if (!is_part) layers.push_back({prefix, match.layout});
  }
  return layers;
}

Layout find_layout(const TensorSource& file, const WeightFileOptions& options) {
  std::vector<Layout> found;
  for (const FoundLayer& layer : find_layers(file, options.layout())) {
    if (layer.prefix == options.prefix()) found.push_back(layer.layout);
  }
  const std::vector<std::string> names = names_at(file, options.prefix());
  if (found.empty()) fail_without_layer(file, options, names);
  TORCH_CHECK(found.size() == 1, file.path(), ": expected the names of one layout at prefix ",
              excerpt(options.prefix()), ", found those of ", found[0], " and ", found[1], ": ",
              list(names), "; name the layout");
  return found[0];
}

}  // namespace mha::detail
