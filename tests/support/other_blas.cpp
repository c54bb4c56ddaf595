// LibTorch's matrix products in another order of sums at every call, as other CPUs, thread
// counts and places in memory give: whatever test passes with it asks nothing of a BLAS beyond
// rounding. In use where MHA_TEST_BLAS=reordered is set in the environment.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmv_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/randperm.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "support/torch_headers.h"

namespace mha::test {
namespace {

// Any order of the terms of each sum.
at::Tensor draw_order(int64_t terms) {
  static std::mutex mutex;
  static at::Generator generator = at::detail::createCPUGenerator(1);
  const std::lock_guard<std::mutex> lock(mutex);
  return at::randperm(terms, generator, at::TensorOptions(at::kLong));
}

struct Factors {
  at::Tensor left, right;
};
// (…, M, K) and (…, K, P), or (K), with K in another order.
Factors reorder(const at::Tensor& left, const at::Tensor& right) {
  const auto order = draw_order(left.size(-1));
  return {left.index_select(-1, order), right.index_select(right.dim() > 1 ? -2 : 0, order)};
}

at::Tensor mm(const at::Tensor& left, const at::Tensor& right) {
  if (left.size(-1) != right.size(0)) return at::cpu::mm(left, right);  // which refuses it
  const auto factors = reorder(left, right);
  return at::cpu::mm(factors.left, factors.right);
}

at::Tensor bmm(const at::Tensor& left, const at::Tensor& right) {
  if (left.size(-1) != right.size(-2)) return at::cpu::bmm(left, right);
  const auto factors = reorder(left, right);
  return at::cpu::bmm(factors.left, factors.right);
}

at::Tensor addmm(const at::Tensor& added, const at::Tensor& left, const at::Tensor& right,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  if (left.size(-1) != right.size(0)) return at::cpu::addmm(added, left, right, beta, alpha);
  const auto factors = reorder(left, right);
  return at::cpu::addmm(added, factors.left, factors.right, beta, alpha);
}

at::Tensor baddbmm(const at::Tensor& added, const at::Tensor& left, const at::Tensor& right,
                   const at::Scalar& beta, const at::Scalar& alpha) {
  if (left.size(-1) != right.size(-2)) {
    return at::cpu::baddbmm(added, left, right, beta, alpha);
  }
  const auto factors = reorder(left, right);
  return at::cpu::baddbmm(added, factors.left, factors.right, beta, alpha);
}

at::Tensor addmv(const at::Tensor& added, const at::Tensor& left, const at::Tensor& right,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  if (left.size(-1) != right.size(0)) return at::cpu::addmv(added, left, right, beta, alpha);
  const auto factors = reorder(left, right);
  return at::cpu::addmv(added, factors.left, factors.right, beta, alpha);
}

std::unique_ptr<torch::Library> take_the_place_of_the_blas() {
  const char* wanted = std::getenv("MHA_TEST_BLAS");
  if (!wanted || std::strcmp(wanted, "reordered") != 0) return nullptr;
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten",
                                                  c10::DispatchKey::CPU, __FILE__, __LINE__);
  library->impl("mm", &mm);
  library->impl("bmm", &bmm);
  library->impl("addmm", &addmm);
  library->impl("baddbmm", &baddbmm);
  library->impl("addmv", &addmv);
  return library;
}

const auto in_its_place = take_the_place_of_the_blas();

}  // namespace
}  // namespace mha::test
