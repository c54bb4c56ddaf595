#pragma once

#include <ATen/core/Tensor.h>
#include <mha/mask.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace mha::cli {

/// The command line's mask arguments, named like the constructors of `Mask`.
class MaskOptions {
 public:
  /// Adds the options to `app`. This object must outlive the parsing.
  void add_to(CLI::App& app);

  /// Whether causal, with any alignment or that; whether there is any other mask.
  bool is_causal() const { return !causal_.empty(); }
  bool is_top_left() const { return causal_ == "top-left"; }
  bool has_others() const { return !windows_.empty() || !tensor_names().empty(); }

  /// Names of the tensors that the arguments refer to.
  std::set<std::string> tensor_names() const;

  /// The mask of all arguments together. `tensor(name, option)` gives a named tensor.
  Mask mask(const std::function<at::Tensor(const std::string& name, const std::string& option)>&
                tensor) const;

 private:
  std::vector<std::string> keep_, block_, add_, keep_keys_, block_keys_, lengths_;
  std::vector<std::string> windows_;
  std::string causal_;  // an alignment; empty: not causal
};

}  // namespace mha::cli
