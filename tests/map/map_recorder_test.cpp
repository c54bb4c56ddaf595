// The recorder: what it records, under which name, within which budget, and that nobody else
// notices. Maps are compared with those of `trace`, to the bit.

#include <gtest/gtest.h>
#include <mha/map_recorder.h>
#include <mha/multi_head_attention.h>
#include <torch/nn/modules/container/modulelist.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/expect.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::test {
namespace {

// Two layers of one module list and a head outside, one of them called twice.
struct Model : torch::nn::Module {
  Model() {
    layers = register_module("layers", torch::nn::ModuleList());
    layers->push_back(MultiHeadAttention(16, 2));
    layers->push_back(MultiHeadAttention(16, 4));
    head = register_module("head", MultiHeadAttention(16, 1));
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < 2; ++i)
      x = x + layers->at<MultiHeadAttentionImpl>(i).forward(x).output;
    return head->forward(head->forward(x).output).output;
  }
  torch::nn::ModuleList layers{nullptr};
  MultiHeadAttention head{nullptr};
};

std::vector<std::string> names(const MapRecorder& recorder) {
  std::vector<std::string> found;
  for (const auto& record : recorder.records()) found.push_back(record.name);
  return found;
}

using Names = std::vector<std::string>;

class MapRecorderTest : public ::testing::Test {
 protected:
  const at::NoGradGuard no_grad_;
  std::shared_ptr<Model> model_ = std::make_shared<Model>();
  const at::Tensor x_ = torch::randn({2, 7, 16});
  // Keys and queries of (2, 7, 16), and two float32 for each of 14 rows and H heads.
  static int64_t bytes(int64_t heads) { return 4 * (2 * 2 * 7 * 16 + 2 * 14 * heads); }
};

TEST_F(MapRecorderTest, RecordsEveryCallUnderItsModulesName) {
  const auto expected = model_->forward(x_);
  const MapRecorder recorder(*model_);
  const auto output = model_->forward(x_);
  EXPECT_TRUE(is_same_result(output, expected));
  EXPECT_EQ(names(recorder), (Names{"layers.0", "layers.1", "head", "head"}));
  EXPECT_EQ(recorder.maps("layers.1").size(), 1u);
  EXPECT_EQ(recorder.maps("head").size(), 2u);
  EXPECT_TRUE(recorder.maps("layers").empty());
  EXPECT_EQ(recorder.maps("layers.1")[0].num_heads(), 4);
  EXPECT_TRUE(
      is_same_result(recorder.maps("layers.0")[0].dense(),
                     model_->layers->at<MultiHeadAttentionImpl>(0).trace(x_).map.dense()));
}

TEST_F(MapRecorderTest, KeepsTheCallsOfOneModuleInOrder) {
  const MapRecorder recorder(*model_);
  const auto first = model_->head->trace(x_, {}, {}, Mask::causal()).map;
  const auto second = model_->head->trace(2 * x_).map;
  const auto maps = recorder.maps("head");
  ASSERT_EQ(maps.size(), 2u);
  EXPECT_TRUE(is_same_result(maps[0].dense(), first.dense()));
  EXPECT_TRUE(is_same_result(maps[1].dense(), second.dense()));
}

TEST_F(MapRecorderTest, WithoutARootNumbersTheCalls) {
  const MapRecorder recorder;
  model_->forward(x_);
  EXPECT_EQ(names(recorder), (Names{"0", "1", "2", "3"}));
}

TEST_F(MapRecorderTest, TheRootItselfHasTheEmptyNameAndStrangersANumber) {
  MultiHeadAttentionImpl on_the_stack(16, 2);
  const MapRecorder recorder(on_the_stack);
  on_the_stack.forward(x_);
  model_->head->forward(x_);
  EXPECT_EQ(names(recorder), (Names{"", "1"}));
}

TEST_F(MapRecorderTest, RecordsNoMoreOnceItIsGone) {
  auto recorder = std::make_unique<MapRecorder>();
  model_->head->forward(x_);
  const auto map = recorder->records().at(0).map;
  recorder.reset();
  model_->head->forward(x_);
  EXPECT_EQ(map.num_queries(), 7) << "a map outlives its recorder";
  const MapRecorder later;
  EXPECT_TRUE(later.records().empty());
}

TEST_F(MapRecorderTest, NestsInAnyOrderAndEachRecords) {
  auto outer = std::make_unique<MapRecorder>();
  model_->head->forward(x_);
  auto inner = std::make_unique<MapRecorder>(*model_);
  model_->head->forward(x_);
  outer.reset();
  model_->head->forward(x_);
  EXPECT_EQ(names(*inner), (Names{"head", "head"}));
}

TEST_F(MapRecorderTest, DoesNothingInOtherThreads) {
  const MapRecorder recorder;
  std::thread([&] {
    const at::NoGradGuard no_grad;
    model_->forward(x_);
  }).join();
  EXPECT_TRUE(recorder.records().empty());
}

TEST_F(MapRecorderTest, MayBeDestroyedInAnotherThread) {
  auto recorder = std::make_unique<MapRecorder>();
  std::thread([&] { recorder.reset(); }).join();
  model_->head->forward(x_);
}

TEST_F(MapRecorderTest, ACallThatThrowsRecordsNothingAndTheNextOneIsRecorded) {
  MapRecorder recorder;
  EXPECT_THROW(model_->head->forward(torch::randn({2, 7, 15})), c10::Error);
  EXPECT_TRUE(recorder.records().empty());
  try {
    const MapRecorder lost;
    throw std::runtime_error("out of its scope");
  } catch (const std::runtime_error&) {
  }
  model_->head->forward(x_);
  EXPECT_EQ(recorder.records().size(), 1u);
}

TEST_F(MapRecorderTest, DropsAndCountsWhatExceedsTheBudget) {
  testing::internal::CaptureStderr();
  MapRecorder recorder(*model_, MapRecorderOptions().budget_bytes(bytes(2) + 2 * bytes(1)));
  model_->forward(x_);
  // The second layer, with four heads, fits, and of the others none.
  EXPECT_EQ(names(recorder), (Names{"layers.0", "layers.1"}));
  EXPECT_EQ(recorder.nbytes(), bytes(2) + bytes(4));
  EXPECT_EQ(recorder.dropped(), 2);
  const auto warning = testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("MapRecorder"), std::string::npos) << warning;
  EXPECT_EQ(warning.find("MapRecorder", warning.find("budget_bytes")), std::string::npos)
      << "more than one warning: " << warning;
  recorder.clear();
  EXPECT_EQ(recorder.nbytes() + recorder.dropped(), 0);
  model_->head->forward(x_);
  EXPECT_EQ(names(recorder), (Names{"head"}));
}

TEST_F(MapRecorderTest, ANegativeBudgetIsAnError) {
  EXPECT_TRUE(refuses([] { MapRecorder(MapRecorderOptions().budget_bytes(-1)); },
                      {"budget_bytes", "0", "1"}));
  model_->head->forward(x_);
}

TEST_F(MapRecorderTest, KeepsTheGraphWhereGradientsAreAskedFor) {
  const at::AutoGradMode grad(true);
  const MapRecorder recorder(*model_);
  model_->forward(x_);
  recorder.maps("layers.0")[0].entropy().sum().backward();
  const auto& layer = model_->layers->at<MultiHeadAttentionImpl>(0);
  EXPECT_GT(layer.W_q->weight.grad().abs().max().item<double>(), 0);
}

// A query over many keys takes other kernels when nothing but its output is wanted.
TEST_F(MapRecorderTest, ObservingChangesNoBitOfTheOutput) {
  for (const int64_t queries : {1, 2, 40}) {
    const auto query = torch::randn({1, queries, 16}), keys = torch::randn({1, 2000, 16});
    const auto alone = model_->head->forward(query, keys, keys, {}, Weights::none).output;
    const MapRecorder recorder;
    const auto seen = model_->head->forward(query, keys, keys, {}, Weights::none).output;
    EXPECT_TRUE(is_same_result(seen, alone)) << queries;
    const auto weights = model_->head->forward(query, keys, keys).weights;
    EXPECT_TRUE(is_close(recorder.records().at(0).map.dense(), weights, 2e-7)) << queries;
  }
}

}  // namespace
}  // namespace mha::test
