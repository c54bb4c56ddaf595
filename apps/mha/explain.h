#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace mha::cli {

/// The arguments that describe a call of attention, and what is done with such a call.
class ExplainOptions {
 public:
  /// Adds the options to `app`; returns `--explain`. This object must outlive the parsing.
  CLI::Option* add_to(CLI::App& app);

  /// Whether `--explain` is among the arguments.
  bool wanted() const { return wanted_; }

  /// Which way the call takes and why: names to sentences. Throws `c10::Error` if sizes do not
  /// fit together.
  nlohmann::ordered_json explanation() const;

 private:
  /// What of the call the composition of ATen calls computes at a time.
  std::string blocks_text(const c10::Device& device, at::ScalarType dtype, int64_t kv_heads,
                          int64_t keys) const;

  bool wanted_ = false, gradient_ = false;
  int64_t batch_ = 1, heads_ = 8, queries_ = 512, head_dim_ = 64;
  std::optional<int64_t> keys_, kv_heads_;
  std::string dtype_ = "float32", device_ = "cpu", weights_ = "none";
};

}  // namespace mha::cli
