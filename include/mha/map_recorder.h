#pragma once

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
}

/// Options of `MapRecorder`.
struct MapRecorderOptions {
  /// Most bytes of queries, keys and row statistics to keep (`AttentionMap::nbytes`).
  TORCH_ARG(int64_t, budget_bytes) = int64_t{1} << 30;
};

/// One recorded call.
struct RecordedMap {
  std::string name;  ///< of the module
  AttentionMap map;
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
  /// Bytes kept, and calls that found no room.
  int64_t nbytes() const;
  int64_t dropped() const;

  /// Forgets all records, what was dropped and the order of calls.
  void clear();

 private:
  std::shared_ptr<detail::MapRecording> recording_;
};

}  // namespace mha
