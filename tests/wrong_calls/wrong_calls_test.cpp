// Guards what a wrong call says: some 890 of them, each with its words in wrong_calls.txt.
// Every message begins with what was called, says what was expected and what was found, and is
// ours: none is LibTorch's. None of the calls changes a parameter, a cache or an input. The few
// that have a meaning are in the file as "accepted". MHA_UPDATE_GOLDEN=1 writes the file anew,
// for its difference to be read.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "support/expect.h"
#include "wrong_calls/wrong_calls.h"

namespace mha {
namespace {

using test::WrongCall;

constexpr const char* accepted = "accepted";

std::string message_of(const WrongCall& wrong) {
  try {
    wrong.call();
  } catch (const c10::Error& error) {
    std::string message = error.what_without_backtrace();
    std::replace(message.begin(), message.end(), '\n', ' ');
    return message;
  } catch (const std::exception& error) {
    return std::string("not a c10::Error: ") + error.what();
  }
  return accepted;
}

std::map<std::string, std::string> golden() {
  std::map<std::string, std::string> lines;
  std::ifstream file(MHA_WRONG_CALLS);
  for (std::string name, message; std::getline(file, name) && std::getline(file, message);) {
    lines[name] = message.substr(2);  // indented
  }
  return lines;
}

// What was called, or an option or argument of it.
bool begins_with_ours(const std::string& message) {
  for (const char* ours : {"scaled_dot_product_attention: ",
                           "AttentionMap: ",
                           "attention_rollout: ",
                           "AttentionAttribution: ",
                           "attention_relevance: ",
                           "Mask::",
                           "Mask: ",
                           "alibi_slopes: ",
                           "MultiHeadAttention: ",
                           "MultiHeadAttentionOptions: ",
                           "KVCache: ",
                           "KVCache::",
                           "KVCacheOptions: ",
                           "apply_rotary: ",
                           "RotaryOptions: ",
                           "rotary_frequencies: ",
                           "LinearScaling: ",
                           "NtkScaling: ",
                           "YarnScaling: ",
                           "Llama3Scaling: ",
                           "LongRopeScaling: ",
                           "TemperatureTuning: ",
                           "RelativePositionBias: ",
                           "RelativePositionBiasOptions: ",
                           "MapRecorderOptions: ",
                           "prune_heads: "}) {
    if (message.rfind(ours, 0) == 0) return true;
  }
  return false;
}

bool is_bit_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].sizes() != b[i].sizes() ||
        std::memcmp(a[i].data_ptr(), b[i].data_ptr(), a[i].nbytes()) != 0) {
      return false;
    }
  }
  return true;
}

TEST(WrongCallsTest, EveryWrongCallSaysWhatWasExpectedAndFoundAndChangesNothing) {
  const at::NoGradGuard no_grad;
  test::EntrySetting setting;
  auto calls = test::wrong_tensors(setting);
  for (auto& more : {test::wrong_arguments(setting), test::wrong_options(setting)}) {
    calls.insert(calls.end(), more.begin(), more.end());
  }
  const bool updates = std::getenv("MHA_UPDATE_GOLDEN") != nullptr;
  const auto expected = golden();
  std::ostringstream lines;
  auto before = setting.state();
  int refused = 0;
  for (const WrongCall& wrong : calls) {
    const auto message = message_of(wrong);
    lines << wrong.name << "\n  " << message << '\n';
    const auto after = setting.state();
    EXPECT_TRUE(is_bit_same(before, after)) << wrong.name << " changed something";
    before = after;
    if (!updates) {
      const auto line = expected.find(wrong.name);
      ASSERT_TRUE(line != expected.end()) << wrong.name << " is not in " << MHA_WRONG_CALLS;
      EXPECT_EQ(message, line->second) << wrong.name;
    }
    if (message == accepted) continue;
    ++refused;
    EXPECT_TRUE(begins_with_ours(message)) << wrong.name << ": " << message;
    EXPECT_NE(message.find("expected"), std::string::npos) << wrong.name << ": " << message;
    EXPECT_NE(message.find("found"), std::string::npos) << wrong.name << ": " << message;
  }
  EXPECT_GE(refused, 300);
  if (updates) {
    std::ofstream(MHA_WRONG_CALLS) << lines.str();
  } else {
    EXPECT_EQ(expected.size(), calls.size()) << "lines of calls that are no more";
  }
}

}  // namespace
}  // namespace mha
