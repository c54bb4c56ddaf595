#pragma once

#include <functional>
#include <string>
#include <vector>

#include "wrong_calls/tensor_entries.h"

namespace mha::test {

/// A call that must be refused. The golden file (wrong_calls.txt) says with what words.
struct WrongCall {
  std::string name;
  std::function<void()> call;
};
using WrongCalls = std::vector<WrongCall>;

/// Every tensor argument of the API x what a tensor may be that it should not.
WrongCalls wrong_tensors(const EntrySetting& setting);
/// Arguments that do not fit each other, numbers out of range and objects that are empty.
WrongCalls wrong_arguments(EntrySetting& setting);
/// Options without a meaning.
WrongCalls wrong_options(EntrySetting& setting);

}  // namespace mha::test
