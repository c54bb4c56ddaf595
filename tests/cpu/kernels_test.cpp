// Guards the tables of kernels: each instruction set fills its own, by name, and a member that
// it forgets is null. Members are read as words, so a new one needs no word here. Exact.
#include <mha/cpu_isa.h>

#include <cstring>

#include "runtime/cpu_kernels.h"
#include "support/every_isa_test.h"

namespace mha {
namespace {

class KernelsTest : public test::EveryIsaTest {};

template <typename Table>
void expect_filled(const Table& table, CpuIsa isa) {
  constexpr size_t count = sizeof(Table) / sizeof(void*);
  static_assert(sizeof(Table) % sizeof(void*) == 0 && sizeof(int64_t) == sizeof(void*));
  std::array<uintptr_t, count> words{};
  std::memcpy(words.data(), &table, sizeof table);
  for (size_t i = 0; i < count; ++i) EXPECT_NE(words[i], 0) << isa << ", member " << i;
}

// A set with matrix tiles has a table of those, beside one that it may share.
TEST_F(KernelsTest, EveryInstructionSetFillsEveryMemberOfATableOfItsOwn) {
  std::vector<const void*> tables;
  for (const CpuIsa isa : available_cpu_isas()) {
    set_cpu_isa(isa);
    const auto* tiles = detail::tile_kernels();
    expect_filled(detail::cpu_kernels(), isa);
    if (tiles) expect_filled(*tiles, isa);
    const void* own = tiles ? static_cast<const void*>(tiles) : &detail::cpu_kernels();
    EXPECT_EQ(std::count(tables.begin(), tables.end(), own), 0) << isa;
    tables.push_back(own);
  }
}

}  // namespace
}  // namespace mha
