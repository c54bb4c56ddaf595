#include "module/archive.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <locale>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mha::detail {
namespace {

using torch::serialize::InputArchive;

// What an archive gives to a module, and in what they differ.
struct Comparison {
  std::vector<std::pair<at::Tensor, at::Tensor>> values;  // the module's and the archive's
  std::ostringstream problems;

  void compare(const std::string& name, const at::Tensor& expected, InputArchive& archive,
               const std::string& key, bool is_buffer) {
    at::Tensor found;
    if (!archive.try_read(key, found, is_buffer) || !found.defined()) {
      problems << "\n  missing: " << name << ", " << expected.scalar_type() << ' '
               << expected.sizes();
      return;
    }
    if (found.sizes() != expected.sizes()) {
      problems << "\n  shape of " << name << ": expected " << expected.sizes() << ", found "
               << found.sizes();
    }
    if (found.scalar_type() != expected.scalar_type()) {
      problems << "\n  dtype of " << name << ": expected " << expected.scalar_type()
               << ", found " << found.scalar_type();
    }
    if (found.layout() != expected.layout()) {
      problems << "\n  layout of " << name << ": expected " << expected.layout() << ", found "
               << found.layout();
    }
    // Between these two no tensor's data can be set.
    if (found.is_meta() != expected.is_meta()) {
      problems << "\n  device of " << name << ": expected " << expected.device() << ", found "
               << found.device();
    }
    values.emplace_back(expected, found);
  }

  void compare(torch::nn::Module& module, InputArchive& archive, const std::string& prefix) {
    std::set<std::string> known;
    for (const bool is_buffer : {false, true}) {
      const auto tensors =
          is_buffer ? module.named_buffers(false) : module.named_parameters(false);
      for (const auto& tensor : tensors) {
        if (!tensor.value().defined()) continue;
        known.insert(tensor.key());
        compare(prefix + tensor.key(), tensor.value(), archive, tensor.key(), is_buffer);
      }
    }
    for (const auto& child : module.named_children()) {
      known.insert(child.key());
      if (!child.value()->is_serializable()) continue;
      InputArchive part;
      if (!archive.try_read(child.key(), part)) {
        problems << "\n  missing: " << prefix << child.key() << ", a layer";
        continue;
      }
      compare(*child.value(), part, prefix + child.key() + ".");
    }
    for (const auto& key : archive.keys()) {
      // Modules of archives say of themselves, beside tensors and layers, whether they train
      // and more of that kind.
      c10::IValue value;
      if (known.count(key) != 0 || !archive.try_read(key, value)) continue;
      if (value.isTensor() || value.isObject()) {
        problems << "\n  unexpected: " << prefix << key;
      }
    }
  }
};

}  // namespace

void load_archive(torch::nn::Module& module, InputArchive& archive) {
  Comparison comparison;
  comparison.problems.imbue(std::locale::classic());
  comparison.compare(module, archive, "");
  const std::string problems = comparison.problems.str();
  TORCH_CHECK(problems.empty(), "torch::load: the archive does not fit the module:", problems);
  const c10::NoGradGuard no_grad;
  for (auto& [tensor, value] : comparison.values) tensor.set_data(value);
}

}  // namespace mha::detail
