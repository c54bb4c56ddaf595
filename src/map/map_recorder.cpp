#include "map/map_recorder.h"

#include <c10/util/Exception.h>
#include <mha/map_recorder.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "map/attribution_state.h"
#include "runtime/message.h"

namespace mha {

namespace detail {

/// What the backwards of one recorded call leave.
struct RecordedGradient {
  RecordedGradient(std::shared_ptr<const MapState> map_, const at::Tensor& value)
      : map(std::move(map_)), value_(value.detach()), value_version_(version_of(value)) {}

  const std::shared_ptr<const MapState> map;

  // Throws if the values were modified since the call.
  const at::Tensor& value() const {
    check_version("MapRecorder", "value", value_, value_version_);
    return value_;
  }
  void add(const at::Tensor& grad) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = grad.detach();
    // Not in place, since what was returned keeps its sum.
    sum_ = sum_.defined() ? sum_ + found : found;
  }
  void forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    sum_ = at::Tensor();
  }
  at::Tensor sum() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return sum_;
  }

 private:
  const at::Tensor value_;  // without its graph
  const int64_t value_version_;
  mutable std::mutex mutex_;  // a backward may run in any thread
  at::Tensor sum_;
};

struct MapRecording {
  std::unordered_map<const torch::nn::Module*, std::string> names;
  MapRecorderOptions options;
  std::vector<RecordedMap> records;
  int64_t bytes = 0, calls = 0, dropped = 0;

  void add(const torch::nn::Module& module, const std::shared_ptr<const MapState>& state,
           const at::Tensor& value, const at::Tensor& output) {
    const int64_t call = calls++;
    const AttentionMap map(state);
    const bool has_backward = options.gradients() && output.requires_grad();
    int64_t needed = map.nbytes();
    if (has_backward) needed += static_cast<int64_t>(value.nbytes() + output.nbytes());
    if (needed > options.budget_bytes() - bytes) {
      if (dropped++ == 0) {
        TORCH_WARN(message("MapRecorder: a map of ", needed, " bytes beside ", bytes,
                           " kept ones exceeds the budget of ", options.budget_bytes(),
                           " and is dropped; see dropped() and "
                           "MapRecorderOptions::budget_bytes"));
      }
      return;
    }
    const auto name = names.find(&module);
    records.push_back({name != names.end() ? name->second : std::to_string(call), map,
                       has_backward ? follow(state, value, output) : nullptr});
    bytes += needed;
  }

 private:
  // The hook knows the record weakly, so that the graph neither keeps it nor is kept by it.
  static std::shared_ptr<RecordedGradient> follow(const std::shared_ptr<const MapState>& state,
                                                  const at::Tensor& value,
                                                  const at::Tensor& output) {
    auto gradient = std::make_shared<RecordedGradient>(state, value);
    output.register_hook([weak = std::weak_ptr(gradient)](const at::Tensor& grad) {
      const auto record = weak.lock();
      if (record && grad.defined()) record->add(grad);
    });
    return gradient;
  }
};

namespace {

// Weak, so that a recorder may be destroyed in any order and any thread.
thread_local std::vector<std::weak_ptr<MapRecording>> living;

void forget_the_dead() {
  living.erase(std::remove_if(living.begin(), living.end(),
                              [](const auto& recording) { return recording.expired(); }),
               living.end());
}

std::shared_ptr<MapRecording> start_recording(const MapRecorderOptions& options) {
  TORCH_CHECK(options.budget_bytes() >= 0,
              "MapRecorderOptions: budget_bytes: expected a number >= 0, found ",
              options.budget_bytes());
  auto recording = std::make_shared<MapRecording>();
  recording->options = options;
  living.push_back(recording);
  return recording;
}

}  // namespace

bool is_recording() {
  return !living.empty();
}

void record_map(const torch::nn::Module& module, const std::shared_ptr<const MapState>& map,
                const at::Tensor& value, const at::Tensor& output) {
  for (const auto& weak : living) {
    if (const auto recording = weak.lock()) recording->add(module, map, value, output);
  }
}

}  // namespace detail

bool RecordedMap::has_gradient() const {
  return gradient && gradient->sum().defined();
}

AttentionAttribution RecordedMap::attribution() const {
  const auto sum = gradient ? gradient->sum() : at::Tensor();
  TORCH_CHECK(sum.defined(), "MapRecorder: attribution of \"", name, "\": expected ",
              gradient ? "a call that a backward has reached, found none"
                       : "one that was recorded with MapRecorderOptions::gradients and whose "
                         "output requires a gradient, found another");
  return AttentionAttribution(
      std::make_shared<detail::AttributionState>(*gradient->map, gradient->value(), sum));
}

MapRecorder::MapRecorder(const MapRecorderOptions& options)
    : recording_(detail::start_recording(options)) {}

MapRecorder::MapRecorder(const torch::nn::Module& root, const MapRecorderOptions& options)
    : MapRecorder(options) {
  // Without itself, which only a module on the heap can list.
  recording_->names.emplace(&root, "");
  for (const auto& module : root.named_modules({}, /*include_self=*/false)) {
    recording_->names.emplace(module.value().get(), module.key());
  }
}

MapRecorder::~MapRecorder() {
  recording_.reset();
  detail::forget_the_dead();
}

const std::vector<RecordedMap>& MapRecorder::records() const {
  return recording_->records;
}

std::vector<AttentionMap> MapRecorder::maps(const std::string& name) const {
  std::vector<AttentionMap> found;
  for (const auto& record : recording_->records) {
    if (record.name == name) found.push_back(record.map);
  }
  return found;
}

std::vector<AttentionAttribution> MapRecorder::attributions(const std::string& name) const {
  std::vector<AttentionAttribution> found;
  for (const auto& record : recording_->records) {
    if (record.name == name) found.push_back(record.attribution());
  }
  return found;
}

void MapRecorder::zero_grad() {
  for (const auto& record : recording_->records) {
    if (record.gradient) record.gradient->forget();
  }
}

int64_t MapRecorder::nbytes() const {
  return recording_->bytes;
}

int64_t MapRecorder::dropped() const {
  return recording_->dropped;
}

void MapRecorder::clear() {
  recording_->records.clear();
  recording_->bytes = recording_->calls = recording_->dropped = 0;
}

}  // namespace mha
