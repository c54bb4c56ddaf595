// Runs the tests and says on which kernels, for the summary of cmake/instruction_sets.py.
//
// ctest runs an executable on the widest instruction set that the CPU has, and with --on=SET on
// each by name. Here, where the CPU is known, the run ends as skipped (77, by convention) if
// the CPU lacks the set or the run without a name is on it.
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <mha/cpu_isa.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "runtime/attention_path.h"
#include "runtime/cpu_kernels.h"

namespace mha::test {
namespace {

/// Why there is nothing to do on the set of that name; empty if there is.
std::string reason_to_skip(const std::string& set) {
  const auto available = available_cpu_isas();
  if (set == c10::str(available.back()))
    return "the widest here, on which the tests run unasked";
  const bool is_available = std::any_of(available.begin(), available.end(),
                                        [&](CpuIsa isa) { return set == c10::str(isa); });
  return is_available ? "" : "this CPU cannot";
}

/// Whether the kernels in use multiply bfloat16 by twos.
bool multiplies_pairs() {
  cpu::AttentionForward args;
  args.storage = cpu::Storage::bfloat16;
  args.query_is_bfloat16 = true;
  args.head_dim = 16;
  return detail::cpu_kernels().can_dot(args);
}

/// "plain", or the instruction set in use, and the extension that it takes where that is
/// faster.
std::string kernels() {
  if (detail::kernels_are_off()) return std::getenv("MHA_PATH");
  std::string names = c10::str(cpu_isa());
  if (multiplies_pairs()) names += " avx512_bf16";
  return names;
}

}  // namespace
}  // namespace mha::test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::string on = "--on=";
  const std::string argument = argc > 1 ? argv[1] : "";
  if (argument.rfind(on, 0) == 0) {
    const std::string set = argument.substr(on.size());
    const std::string reason = mha::test::reason_to_skip(set);
    if (!reason.empty()) {
      std::printf("not run: %s: %s\n", set.c_str(), reason.c_str());
      return 77;
    }
  }
  std::printf("kernels: %s\n", mha::test::kernels().c_str());
  std::fflush(stdout);
  return RUN_ALL_TESTS();
}
