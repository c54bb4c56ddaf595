#include "map/map_recorder.h"

#include <c10/util/Exception.h>
#include <mha/map_recorder.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "runtime/message.h"

namespace mha {

namespace detail {

struct MapRecording {
  std::unordered_map<const torch::nn::Module*, std::string> names;
  int64_t budget_bytes;
  std::vector<RecordedMap> records;
  int64_t bytes = 0, calls = 0, dropped = 0;

  void add(const torch::nn::Module& module, const AttentionMap& map) {
    const int64_t call = calls++;
    if (map.nbytes() > budget_bytes - bytes) {
      if (dropped++ == 0) {
        TORCH_WARN(message("MapRecorder: a map of ", map.nbytes(), " bytes beside ", bytes,
                           " kept ones exceeds the budget of ", budget_bytes,
                           " and is dropped; see dropped() and "
                           "MapRecorderOptions::budget_bytes"));
      }
      return;
    }
    const auto name = names.find(&module);
    records.push_back({name != names.end() ? name->second : std::to_string(call), map});
    bytes += map.nbytes();
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
  recording->budget_bytes = options.budget_bytes();
  living.push_back(recording);
  return recording;
}

}  // namespace

bool is_recording() {
  return !living.empty();
}

void record_map(const torch::nn::Module& module, const AttentionMap& map) {
  for (const auto& weak : living) {
    if (const auto recording = weak.lock()) recording->add(module, map);
  }
}

}  // namespace detail

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
