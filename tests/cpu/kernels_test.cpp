// Guards the tables of kernels: each instruction set fills its own, by name, and a member that
// it forgets is null. Members are read as words, so a new one needs no word here. Exact.
#include <mha/cpu_isa.h>

#include <cstring>

#include "runtime/cpu_kernels.h"
#include "support/every_isa_test.h"

namespace mha {
namespace {

class KernelsTest : public test::EveryIsaTest {};

TEST_F(KernelsTest, EveryInstructionSetFillsEveryMemberOfATableOfItsOwn) {
  std::vector<const cpu::Kernels*> tables;
  for (const CpuIsa isa : available_cpu_isas()) {
    set_cpu_isa(isa);
    const cpu::Kernels& kernels = detail::cpu_kernels();
    EXPECT_EQ(std::count(tables.begin(), tables.end(), &kernels), 0) << isa;
    tables.push_back(&kernels);
    constexpr size_t count = sizeof(cpu::Kernels) / sizeof(void*);
    static_assert(sizeof(cpu::Kernels) % sizeof(void*) == 0 &&
                  sizeof(int64_t) == sizeof(void*));
    std::array<uintptr_t, count> words{};
    std::memcpy(words.data(), &kernels, sizeof kernels);
    for (size_t i = 0; i < count; ++i) EXPECT_NE(words[i], 0) << isa << ", member " << i;
  }
}

}  // namespace
}  // namespace mha
