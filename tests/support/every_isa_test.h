#pragma once

#include <gtest/gtest.h>
#include <mha/cpu_isa.h>

#include <cstdlib>

#include "runtime/attention_path.h"

namespace mha::test {

/// For tests that try each instruction set by `set_cpu_isa` themselves.
class EveryIsaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (detail::kernels_are_off()) GTEST_SKIP() << "MHA_PATH=plain: the kernels are not in use";
    if (std::getenv("MHA_CPU_ISA"))
      GTEST_SKIP() << "MHA_CPU_ISA: the run without it tries them all";
  }
  void TearDown() override { set_cpu_isa(before_); }

 private:
  const CpuIsa before_ = cpu_isa();
};

}  // namespace mha::test
