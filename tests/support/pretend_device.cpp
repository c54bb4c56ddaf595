#include "support/pretend_device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

// Only what LibTorch has had since 1.13, but for generators, of which 2.6 and later are known:
// an earlier one runs all but dropout.
#define MHA_TEST_HAS_HOOKS \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 6))

namespace mha::test {
namespace {

constexpr auto type = c10::DeviceType::PrivateUse1;
const c10::Device the_device{type, 0};

// A backward runs on a thread of the device.
struct Account {
  std::mutex mutex;
  HostTraffic traffic;
  std::atomic<int64_t> bytes{0}, peak{0};

  void read(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex);
    traffic.reads.push_back(name);
  }
  void write() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++traffic.writes;
  }
  void take(int64_t count) {
    const int64_t now = bytes += count;
    int64_t before = peak;
    while (before < now && !peak.compare_exchange_weak(before, now)) {
    }
  }
};

Account& account() {
  static auto& only = *new Account();  // outlives tensors that are never freed
  return only;
}

// A storage of one device that keeps one of the other.
struct Kept {
  c10::Storage storage;
  int64_t counted;
};

void release(void* context) {
  auto* kept = static_cast<Kept*>(context);
  account().take(-kept->counted);
  delete kept;
}

c10::DataPtr pointer_to(const c10::Storage& storage, c10::Device device) {
  const auto counted = device.is_cpu() ? 0 : static_cast<int64_t>(storage.nbytes());
  account().take(counted);
  auto* data = const_cast<void*>(storage.data());
  return {data, new Kept{storage, counted}, &release, device};
}

void set_layout(const at::Tensor& tensor, const at::Tensor& like) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
}

// The same memory as a tensor of the other device.
at::Tensor on_device(const at::Tensor& cpu) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), cpu.storage().nbytes(),
                       pointer_to(cpu.storage(), the_device), nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), cpu.dtype());
  set_layout(tensor, cpu);
  return tensor;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       pointer_to(tensor.storage(), at::kCPU), c10::GetAllocator(at::kCPU),
                       /*resizable=*/true);
  auto cpu = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  set_layout(cpu, tensor);
  return cpu;
}

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == type;
}

class PretendGenerator final : public c10::GeneratorImpl {
 public:
  PretendGenerator() : PretendGenerator(at::detail::createCPUGenerator()) {}
  explicit PretendGenerator(at::Generator cpu)
      : GeneratorImpl(the_device, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }
  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }
#if MHA_TEST_HAS_HOOKS
  void set_offset(uint64_t) override { TORCH_CHECK(false, "pretend device: no offsets"); }
  uint64_t get_offset() const override { return 0; }
#endif

 private:
  GeneratorImpl* clone_impl() const override { return new PretendGenerator(cpu_.clone()); }

  at::Generator cpu_;
};

const at::Generator& default_generator() {
  static const auto& only = *new at::Generator(at::make_generator<PretendGenerator>());
  return only;
}

at::Generator cpu_generator(const c10::IValue& given) {
  const auto generator = given.isNone() ? default_generator() : given.toGenerator();
  const auto* ours = dynamic_cast<PretendGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours, "pretend device: expected a generator of its own, found one of ",
              generator.device());
  return ours->cpu();
}

bool is_flags(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         (value.toTensor().scalar_type() == at::kBool ||
          value.toTensor().scalar_type() == at::kByte);
}

// Whether a device must be waited for, since the result's size is among the numbers.
bool reads_numbers(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  static const std::array names{
      "aten::nonzero",          "aten::masked_select",      "aten::equal",
      "aten::_unique",          "aten::_unique2",           "aten::unique_dim",
      "aten::bincount",         "aten::unique_consecutive", "aten::unique_dim_consecutive",
      "aten::is_nonzero",       "aten::argwhere",           "aten::_local_scalar_dense",
      "aten::repeat_interleave"};
  if (std::find(names.begin(), names.end(), schema.name()) != names.end()) return true;
  if (schema.name().rfind("aten::index", 0) != 0) return false;
  for (const auto& argument : arguments) {
    if (!argument.isList()) continue;
    const auto list = argument.toListRef();
    if (std::any_of(list.begin(), list.end(), is_flags)) return true;
  }
  return false;
}

// One call of an operator on the CPU's view of its arguments.
class CallOnCpu {
 public:
  CallOnCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    const auto& schema = op_.schema();
    if (reads_numbers(schema, at::ArrayRef<c10::IValue>(stack_).slice(first_))) {
      account().read(schema.name());
    }
    for (size_t i = first_; i < stack_.size(); ++i) {
      const auto& argument = schema.arguments()[i - first_];
      if (argument.name() == "generator") {
        stack_[i] = cpu_generator(stack_[i]);
      } else if (stack_[i].isDevice()) {
        stack_[i] = c10::Device(at::kCPU);
      } else {
        stack_[i] = mapped(stack_[i], [&](const at::Tensor& tensor) {
          return to_cpu(tensor, argument.name());
        });
      }
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (const auto& [ours, cpu] : pairs_) take_new_size(ours, cpu);
    for (size_t i = stack_.size() - schema.returns().size(); i < stack_.size(); ++i) {
      stack_[i] =
          mapped(stack_[i], [&](const at::Tensor& tensor) { return to_device(tensor); });
    }
  }

 private:
  // Tensors, alone and in lists.
  template <typename Map>
  static c10::IValue mapped(const c10::IValue& value, const Map& map) {
    if (value.isTensor()) return map(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(map(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : tensor);
      }
      return list;
    }
    return value;
  }

  at::Tensor to_cpu(const at::Tensor& tensor, const std::string& argument) {
    if (!tensor.defined()) return tensor;
    if (!is_here(tensor)) {
      // Numbers of C++ are such tensors, too.
      TORCH_CHECK(tensor.device().is_cpu() && tensor.dim() == 0 &&
                      tensor.unsafeGetTensorImpl()->is_wrapped_number(),
                  "pretend device: ", op_.schema().name(), ": ", argument,
                  ": expected every tensor on ", the_device, ", found one of ", tensor.sizes(),
                  " on ", tensor.device());
      return tensor;
    }
    for (const auto& [ours, cpu] : pairs_) {
      if (ours.is_same(tensor)) return cpu;
    }
    pairs_.emplace_back(tensor, on_cpu(tensor));
    return pairs_.back().second;
  }

  // What was an argument stays it, and a view of one is a view.
  at::Tensor to_device(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (const auto& [ours, cpu] : pairs_) {
      if (cpu.is_same(tensor)) return ours;
      if (!cpu.storage().is_alias_of(tensor.storage())) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), tensor.dtype());
      set_layout(view, tensor);
      return view;
    }
    return on_device(tensor);
  }

  // An operator may give its result another size.
  static void take_new_size(const at::Tensor& ours, const at::Tensor& cpu) {
    const auto storage = ours.storage();
    if (storage.data() != cpu.storage().data()) {
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
          pointer_to(cpu.storage(), the_device));
      storage.unsafeGetStorageImpl()->set_nbytes(cpu.storage().nbytes());
    }
    if (ours.sizes() != cpu.sizes() || ours.strides() != cpu.strides()) set_layout(ours, cpu);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  size_t first_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // ours, and the CPU's view of it
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  CallOnCpu(op, stack).run();
}

at::Tensor filled(const at::Tensor& cpu) {
  const auto storage = cpu.storage();  // all bits 1 are NaN, -1 and true
  if (storage.nbytes() > 0)
    std::memset(const_cast<void*>(storage.data()), 0xff, storage.nbytes());
  return on_device(cpu);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return filled(at::empty(
      sizes, at::TensorOptions(at::kCPU).dtype(c10::dtype_or_default(dtype)), format));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return filled(at::empty_strided(
      sizes, strides, at::TensorOptions(at::kCPU).dtype(c10::dtype_or_default(dtype))));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (!is_here(to)) account().read("copy to the CPU");
  if (!is_here(from)) account().write();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto target = is_here(to) ? on_cpu(to) : to;
  target.copy_(is_here(from) ? on_cpu(from) : from);
  return to;
}

at::Scalar item(const at::Tensor& tensor) {
  account().read("item");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return on_cpu(tensor).item();
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

// So that `Module::to` may put our tensors into parameters.
bool may_take_place_of(const at::Tensor&, const at::Tensor&) {
  return true;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &item);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_has_compatible_shallow_copy_type", &may_take_place_of);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// One device with one stream. Not LibTorch's own that does nothing: it knows no index.
struct PretendGuard final : public c10::impl::NoOpDeviceGuardImpl<type> {
  c10::Device getDevice() const override { return the_device; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, the_device); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, PretendGuard)

#if MHA_TEST_HAS_HOOKS
struct PretendHooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
};

const bool has_hooks = [] {
  c10::register_privateuse1_backend("pretend");
  at::RegisterPrivateUse1HooksInterface(new PretendHooks());
  return true;
}();
#endif

}  // namespace

at::Device pretend_device() {
  return the_device;
}

HostTraffic traffic_of(const std::function<void()>& call) {
  const auto taken = [] {
    const std::lock_guard<std::mutex> lock(account().mutex);
    return std::exchange(account().traffic, {});
  };
  const auto before = taken();
  call();
  return taken();
}

int64_t device_peak_of(const std::function<void()>& call) {
  const int64_t before = account().bytes;
  account().peak = before;
  call();
  return account().peak - before;
}

}  // namespace mha::test
