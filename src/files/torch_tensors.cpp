#include "files/torch_tensors.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "files/excerpt.h"
#include "files/pickle.h"
#include "files/torch_globals.h"

namespace mha::detail {
namespace {

using PickleKind = PickleValue::Kind;

constexpr size_t kMaxPickleDepth = 32;      // of dictionaries inside each other
constexpr size_t kMaxTorchTensors = 16384;  // a shared dictionary could stand for any number
constexpr size_t kMaxNamesSize = 2 << 20;
constexpr size_t kMaxTensorRank = 64;

// What is known of a tensor that is not read.
constexpr DtypeInfo kOtherTensor = {"a tensor of another kind", "", 8, {}};

class TorchTensors {
 public:
  TorchTensors(const std::string& path, const Pickle& pickle, std::string root,
               const std::map<std::string, ZipEntry>& entries)
      : path_(path), pickle_(pickle), root_(std::move(root)), entries_(entries) {}

  std::map<std::string, TensorView> collect() {
    const PickleValue* root = dict_of(pickle_.root());
    TORCH_CHECK(root != nullptr, path_, ": expected a dictionary of tensors, found ",
                kind_of_root(),
                "; in Python, torch.save(module.state_dict(), path) writes one");
    collect(*root, "", 0);
    return std::move(views_);
  }

 private:
  template <typename... What>
  [[noreturn]] void fail(const What&... what) const {
    TORCH_CHECK(false, path_, ": tensor ", excerpt(name_), ": ", what...);
  }

  std::string kind_of_root() const {
    const PickleValue& root = pickle_.root();
    const std::string name =
        root.kind == PickleKind::opaque ? pickle_.global(root) : std::string();
    return name.empty() ? "another value" : "an object of " + excerpt(name);
  }

  // The dictionary that a value is, or has as its state; null if none.
  const PickleValue* dict_of(const PickleValue& value) const {
    if (value.kind == PickleKind::dict) return &value;
    if (value.kind != PickleKind::object) return nullptr;
    const PickleValue& state = pickle_.arguments(value);
    return state.kind == PickleKind::dict ? &state : nullptr;
  }

  void collect(const PickleValue& dict, const std::string& prefix, size_t depth) {
    TORCH_CHECK(depth < kMaxPickleDepth, path_, ": expected dictionaries at most ",
                kMaxPickleDepth, " deep, found more at ", excerpt(prefix));
    pickle_.for_each_pair(dict, [&](const PickleValue& key, const PickleValue& value) {
      TORCH_CHECK(++visited_ <= 8 * kMaxTorchTensors, path_, ": expected at most ",
                  8 * kMaxTorchTensors, " values in dictionaries, found more");
      if (key.kind != PickleKind::string) return;
      const PickleValue* inner = dict_of(value);
      if (inner == nullptr && value.kind != PickleKind::call) return;
      const std::string_view text = pickle_.string(key);
      TORCH_CHECK(text.size() + prefix.size() < kMaxNamesSize, path_,
                  ": expected names of at most ", kMaxNamesSize, " bytes in all, found more");
      std::string name = prefix + std::string(text);
      if (inner != nullptr) {
        collect(*inner, name + ".", depth + 1);
      } else if (is_tensor(value)) {
        add(std::move(name), value);
      }
    });
  }

  bool is_tensor(const PickleValue& call) const {
    return torch_rebuild(pickle_.global(pickle_.callee(call))) != Rebuild::none;
  }

  void add(std::string name, const PickleValue& call) {
    name_ = name;
    names_size_ += name.size();
    if (names_size_ > kMaxNamesSize || views_.size() == kMaxTorchTensors) {
      fail("expected at most ", kMaxTorchTensors, " tensors with names of ", kMaxNamesSize,
           " bytes in all, found more");
    }
    TensorView view = tensor(call);
    if (!views_.emplace(std::move(name), std::move(view)).second) {
      fail("expected one of that name, found several");
    }
  }

  const PickleValue& argument(const PickleValue& arguments, size_t i, PickleKind kind,
                              const char* what) const {
    const PickleValue& value = pickle_.element(arguments, i);
    if (value.kind != kind) fail(what, ": found another kind of value");
    return value;
  }

  // What the call of a rebuilding function gives.
  TensorView tensor(const PickleValue& call) const {
    const std::string callee = pickle_.global(pickle_.callee(call));
    const PickleValue& arguments = pickle_.arguments(call);
    switch (torch_rebuild(callee)) {
      case Rebuild::tensor:
      case Rebuild::tensor_v2:
      case Rebuild::tensor_v3:
        return plain_tensor(callee, arguments);
      case Rebuild::parameter: {  // its data first
        if (arguments.count < 3) fail("parameter: expected 3 arguments");
        const auto& data = argument(arguments, 0, PickleKind::call, "parameter: data");
        return tensor_within(pickle_.global(pickle_.callee(data)), pickle_.arguments(data));
      }
      case Rebuild::from_type: {
        if (arguments.count < 3) fail("expected 4 arguments of ", callee);
        const auto& type = pickle_.element(arguments, 1);
        if (type.kind != PickleKind::global || !is_plain_tensor_type(pickle_.global(type))) {
          break;
        }
        return tensor_within(
            pickle_.global(argument(arguments, 0, PickleKind::global, "function")),
            argument(arguments, 2, PickleKind::tuple, "arguments"));
      }
      case Rebuild::other:
        break;
      case Rebuild::none:
        fail("expected a tensor, found ", excerpt(callee));
    }
    return other_tensor();
  }

  // The tensor inside of another's call, which may not hold one in its turn.
  TensorView tensor_within(const std::string& callee, const PickleValue& arguments) const {
    switch (torch_rebuild(callee)) {
      case Rebuild::tensor:
      case Rebuild::tensor_v2:
      case Rebuild::tensor_v3:
        return plain_tensor(callee, arguments);
      case Rebuild::none:
        fail("expected a tensor, found ", excerpt(callee));
      default:
        return other_tensor();
    }
  }

  static TensorView other_tensor() {
    TensorView view;
    view.dtype = &kOtherTensor;
    return view;
  }

  TensorView plain_tensor(const std::string& callee, const PickleValue& arguments) const {
    const Rebuild rebuild = torch_rebuild(callee);
    const size_t least = rebuild == Rebuild::tensor ? 4 : rebuild == Rebuild::tensor_v2 ? 6 : 7;
    const size_t most = rebuild == Rebuild::tensor ? 4 : least + 1, found = arguments.count;
    if (found < least || found > most) {
      fail("expected ", least, least == most ? "" : " or " + std::to_string(most),
           " arguments of ", callee, ", found ", found);
    }
    if (found > least) {  // flags such as "negative", without which the values are wrong
      const PickleValue& flags = pickle_.element(arguments, least);
      bool any = flags.kind != PickleKind::dict && flags.kind != PickleKind::none;
      if (flags.kind == PickleKind::dict) {
        pickle_.for_each_pair(flags, [&](const auto&, const auto&) { any = true; });
      }
      if (any) fail("expected a plain tensor, found one with flags (conjugate, negative)");
    }
    TensorView view;
    const int64_t bytes = storage(arguments, view);
    if (rebuild == Rebuild::tensor_v3) {
      const PickleValue& dtype = pickle_.element(arguments, 6);
      if (dtype.kind == PickleKind::opaque) return other_tensor();
      const std::string name =
          pickle_.global(argument(arguments, 6, PickleKind::global, "dtype"));
      view.dtype = torch_dtype(name);
      if (view.dtype == nullptr) fail("dtype: expected one, found ", excerpt(name));
    }
    view.offset = argument(arguments, 1, PickleKind::integer, "offset").number;
    view.sizes = integers(arguments, 2, "sizes");
    view.strides = integers(arguments, 3, "strides");
    check_view(view, bytes * 8 / view.dtype->bits);
    return view;
  }

  // Sets where the tensor's storage lies and its type; returns its size in bytes.
  int64_t storage(const PickleValue& arguments, TensorView& view) const {
    const PickleValue& persistent = argument(arguments, 0, PickleKind::persistent, "storage");
    const PickleValue& tuple = pickle_.arguments(persistent);
    if (tuple.count != 5) fail("storage: expected 5 values, found ", tuple.count);
    const auto& kind = argument(tuple, 0, PickleKind::string, "storage: kind");
    if (pickle_.string(kind) != "storage") {
      fail("storage: expected 'storage', found ", excerpt(pickle_.string(kind)));
    }
    const auto& type_global = argument(tuple, 1, PickleKind::global, "storage: type");
    const std::string type = pickle_.global(type_global);
    view.dtype = torch_storage_dtype(type);
    if (view.dtype == nullptr) fail("storage: expected a type, found ", excerpt(type));
    const auto& key = argument(tuple, 2, PickleKind::string, "storage: key");
    argument(tuple, 3, PickleKind::string, "storage: device");
    const int64_t count = argument(tuple, 4, PickleKind::integer, "storage: size").number;
    view.storage = root_ + "/data/" + std::string(pickle_.string(key).substr(0, 1024));
    const auto entry = entries_.find(view.storage);
    if (entry == entries_.end()) {
      fail("storage: expected the entry ", excerpt(view.storage), ", found none");
    }
    const int64_t size = entry->second.size, element = view.dtype->bits / 8;
    if (count < 0 || count > size / element || count * element != size) {
      fail("storage ", excerpt(pickle_.string(key)), ": expected ", count, " elements of ",
           view.dtype->name, ", found an entry of ", size, " bytes");
    }
    return size;
  }

  std::vector<int64_t> integers(const PickleValue& arguments, size_t i,
                                const char* what) const {
    PickleValue tuple = pickle_.element(arguments, i);
    if (tuple.kind == PickleKind::call &&
        pickle_.global(pickle_.callee(tuple)) == "torch.Size" &&
        pickle_.arguments(tuple).count == 1) {
      tuple = pickle_.element(pickle_.arguments(tuple), 0);
    }
    if (tuple.kind != PickleKind::tuple) fail(what, ": expected a tuple");
    if (tuple.count > kMaxTensorRank) {
      fail(what, ": expected at most ", kMaxTensorRank, " dimensions, found ", tuple.count);
    }
    std::vector<int64_t> values;
    for (size_t k = 0; k < tuple.count; ++k) {
      values.push_back(argument(tuple, k, PickleKind::integer, what).number);
      if (values.back() < 0) fail(what, ": expected numbers from 0 on, found ", values.back());
    }
    return values;
  }

  void check_view(const TensorView& view, int64_t elements) const {
    if (view.sizes.size() != view.strides.size()) {
      fail("strides: expected ", view.sizes.size(), " of them, found ", view.strides.size());
    }
    if (view.offset < 0 || view.offset > elements) {
      fail("offset: expected 0 to the ", elements, " elements of its storage, found ",
           view.offset);
    }
    // A 0 among the sizes does not excuse the others: LibTorch's own products would overflow.
    constexpr int64_t max = std::numeric_limits<int64_t>::max();
    int64_t product = 1, last = 0;
    bool is_empty = false, fits = true;
    for (size_t i = 0; i < view.sizes.size(); ++i) {
      const int64_t size = std::max<int64_t>(view.sizes[i], 1), stride = view.strides[i];
      is_empty |= view.sizes[i] == 0;
      if (size > max / 128 / product) {
        fail("sizes: expected fewer than 2^56 elements, found ", at::IntArrayRef(view.sizes));
      }
      product *= size;
      if (!fits || stride == 0 || size == 1) continue;
      fits = stride <= elements / (size - 1) && last <= elements - (size - 1) * stride;
      if (fits) last += (size - 1) * stride;
    }
    if (is_empty) return;
    if (!fits || last >= elements - view.offset) {
      fail("expected sizes ", at::IntArrayRef(view.sizes), " with strides ",
           at::IntArrayRef(view.strides), " from ", view.offset, " on inside the ", elements,
           " elements of its storage, found them to reach outside");
    }
    if (product > elements) {
      fail("expected at most the ", elements, " elements of its storage, found sizes ",
           at::IntArrayRef(view.sizes), " (an expanded tensor: save a clone() of it)");
    }
  }

  const std::string& path_;
  const Pickle& pickle_;
  const std::string root_;
  const std::map<std::string, ZipEntry>& entries_;
  std::map<std::string, TensorView> views_;
  std::string name_;  // of the tensor that is read
  size_t visited_ = 0, names_size_ = 0;
};

}  // namespace

std::map<std::string, TensorView> torch_tensors(
    const std::string& path, std::string pickle_text, const std::string& root,
    const std::map<std::string, ZipEntry>& entries) {
  const std::string where = path + ": " + root + "/data.pkl";
  const Pickle pickle(where, std::move(pickle_text), [&](const std::string& global) {
    return is_known_global(where, global);
  });
  return TorchTensors(path, pickle, root, entries).collect();
}

}  // namespace mha::detail
