#pragma once

#include <mha/attention_attribution.h>
#include <mha/attention_map.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace mha {

namespace detail {
struct MapRecording;
struct RecordedGradient;
}  // namespace detail

/// Options of `MapRecorder`.
struct MapRecorderOptions {
  /// Most bytes of queries, keys and row statistics to keep (`AttentionMap::nbytes`), and with
  /// `gradients` of values and of the gradient at the heads' output.
  TORCH_ARG(int64_t, budget_bytes) = int64_t{1} << 30;
  /// Collect in each backward what `AttentionAttribution` needs, of calls whose heads' output
  /// requires a gradient: some parameter or input does, and the gradient mode is on.
  TORCH_ARG(bool, gradients) = false;
};

/// One recorded call.
struct RecordedMap {
  std::string name;  ///< of the module
  AttentionMap map;
  std::shared_ptr<detail::RecordedGradient> gradient = nullptr;  ///< for the library

  /// Whether a backward has reached the call.
  bool has_gradient() const;
  /// The gradient with respect to the call's weights: the sum over the backwards so far, as
  /// `grad()` of a tensor is. A later one changes no object that was returned. Throws
  /// `c10::Error` that names the module if no backward has reached the call.
  AttentionAttribution attribution() const;
};

/// Records the map of every `MultiHeadAttention` that is called in this thread while the
/// recorder lives, without a change to who calls it:
///
///     mha::MapRecorder recorder(*model);
///     model->forward(tokens);
///     auto entropy = recorder.maps("encoder.layers.3.attention").at(0).entropy();
///
/// A call that throws records nothing. Outputs are what they are without a recorder, bit for
/// bit. Several recorders may live at once, and each records; calls in other threads are not
/// recorded. A call in training mode or with gradients keeps its graph, as `trace` does; under
/// `torch::NoGradGuard` none is kept.
///
/// With `MapRecorderOptions::gradients` a backward is seen as well, also one in another thread:
///
///     mha::MapRecorder recorder(*model, mha::MapRecorderOptions().gradients(true));
///     model->forward(tokens)[0][label].backward();
///     auto relevance = recorder.attributions("encoder.layers.3.attention").at(0).mean(
///         mha::Attribution::positive_relevance);
///
/// Outputs and gradients are what they are without a recorder, bit for bit. The graph holds
/// nothing of the recorder: once its records are gone, a backward leaves nothing.
///
/// Calls whose map would exceed the budget are dropped: `dropped()` counts them, and the first
/// one raises a warning by `TORCH_WARN`. Smaller maps that come later may still be kept.
///
/// Without a recorder a call looks at one thread-local variable.
class MapRecorder {
 public:
  /// Modules are named by their place in the order of recorded and dropped calls: "0", "1", ...
  explicit MapRecorder(const MapRecorderOptions& options = {});
  /// Modules below `root`, or `root` itself, have the names of `root.named_modules()`, so that
  /// of `root` is empty. Others are named as without a root. Modules are known by their
  /// address: they must outlive the recorder.
  explicit MapRecorder(const torch::nn::Module& root, const MapRecorderOptions& options = {});
  ~MapRecorder();
  MapRecorder(const MapRecorder&) = delete;
  MapRecorder& operator=(const MapRecorder&) = delete;

  /// In the order of the calls. Valid until the next call of a module, or `clear`.
  const std::vector<RecordedMap>& records() const;
  /// The maps of one module, in the order of its calls; none if it was not called.
  std::vector<AttentionMap> maps(const std::string& name) const;
  /// Their attributions, in the same order. Throws as `RecordedMap::attribution` if one of the
  /// calls has no gradient.
  std::vector<AttentionAttribution> attributions(const std::string& name) const;
  /// Forgets the gradients that were collected, so that the next backward stands alone.
  void zero_grad();
  /// Bytes kept (those of a gradient from the call on), and calls that found no room.
  int64_t nbytes() const;
  int64_t dropped() const;

  /// Forgets all records, what was dropped and the order of calls.
  void clear();

 private:
  std::shared_ptr<detail::MapRecording> recording_;
};

}  // namespace mha
