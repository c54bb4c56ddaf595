#include "mask_options.h"

#include <c10/util/Exception.h>

#include "option_values.h"
#include "validators.h"

namespace mha::cli {
namespace {

constexpr const char* kBottomRight = "bottom-right";
constexpr const char* kTopLeft = "top-left";

/// "LEFT,RIGHT" or "LEFT,RIGHT,ALIGNMENT".
Mask window(const std::string& text) {
  const std::vector<std::string> parts = CLI::detail::split(text, ',');
  int64_t left = 0, right = 0;
  const bool numbers = (parts.size() == 2 || parts.size() == 3) &&
                       read_integer(parts[0], left) && read_integer(parts[1], right);
  const std::string aligned = parts.size() == 3 ? parts[2] : kBottomRight;
  TORCH_CHECK(numbers && (aligned == kBottomRight || aligned == kTopLeft),
              "--window: expected LEFT,RIGHT or LEFT,RIGHT,top-left, found '", text, "'");
  return Mask::window(left, right, value_of(alignments(), aligned));
}

}  // namespace

void MaskOptions::add_to(CLI::App& app) {
  one_of(app.add_option_function<std::string>(
             "--causal",
             [this](const std::string& text) { causal_ = given_value("--causal", text); },
             "A query sees no key after its own position"),
         names_of(alignments()))
      ->expected(0, 1)
      ->default_str(kBottomRight)
      ->group("Mask");
  const auto add = [&app](const char* name, std::vector<std::string>& values, const char* what,
                          const char* type = "TENSOR") {
    app.add_option(name, values, what)->allow_extra_args(false)->type_name(type)->group("Mask");
  };
  add("--window", windows_, "Keys this far to either side; -1 is open",
      "LEFT,RIGHT[,top-left]");
  add("--keep", keep_, "0 blocks, everything else may attend");
  add("--block", block_, "true blocks");
  add("--add", add_, "Added to the scaled scores; -inf blocks");
  add("--keep-keys", keep_keys_, "One element a key: 0 is padding");
  add("--block-keys", block_keys_, "One element a key: true is padding");
  add("--lengths", lengths_, "Real keys of each sample");
}

std::set<std::string> MaskOptions::tensor_names() const {
  std::set<std::string> names;
  for (const auto* list : {&keep_, &block_, &add_, &keep_keys_, &block_keys_, &lengths_}) {
    names.insert(list->begin(), list->end());
  }
  return names;
}

Mask MaskOptions::mask(
    const std::function<at::Tensor(const std::string&, const std::string&)>& tensor) const {
  Mask all;
  const auto add = [&](const std::vector<std::string>& names, const char* option,
                       Mask (*constructor)(const at::Tensor&)) {
    for (const std::string& name : names) all = all & constructor(tensor(name, option));
  };
  add(keep_, "--keep", Mask::keep);
  add(block_, "--block", Mask::block);
  add(add_, "--add", Mask::add);
  add(keep_keys_, "--keep-keys", Mask::keep_keys);
  add(block_keys_, "--block-keys", Mask::block_keys);
  add(lengths_, "--lengths", Mask::lengths);
  if (!causal_.empty()) all = all & Mask::causal(value_of(alignments(), causal_));
  for (const std::string& text : windows_) all = all & window(text);
  return all;
}

}  // namespace mha::cli
