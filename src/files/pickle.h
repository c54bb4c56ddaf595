#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>

namespace mha::detail {

/// A value of a pickle. `index`: where it lies among the document's values of its kind.
struct PickleValue {
  enum class Kind : uint8_t {
    none,
    boolean,     // number: 0 or 1
    integer,     // number
    real,        // its value is not kept
    string,      // index and count: its bytes in the text
    tuple,       // count elements
    list,        // its elements are not kept
    dict,        //
    global,      // index and count: "module\nname" in the text
    call,        // of a global with a tuple: what it would return is the reader's to say
    persistent,  // an object outside of the pickle, named by a tuple
    object,      // of a class, with a dict as its state
    opaque,      // what is not known: a global, whose name is kept as that of a global, and all
                 // that comes of it; an integer of more than 8 bytes, without a name
    mark,        // of the machine
  };
  Kind kind = Kind::none;
  uint32_t count = 0;
  union {
    int64_t number;
    size_t index;
  };
  PickleValue() : number(0) {}
};

/// A pickle, taken apart by a machine that does nothing else: it knows protocol 2 with the
/// operations that state dicts and checkpoints need, names globals but never looks them up, and
/// notes calls but never makes them. So whatever a file says, nothing in it is executed. A
/// global that is not `known` is opaque, and so is what a call of it would return: that is
/// never built, and what would be its state or its items is dropped.
///
/// Anything else is refused by its name: other operations, values of more than
/// `kMaxPickleMemory` bytes in all.
/// Source of the format: CPython, Lib/pickletools.py.
class Pickle {
 public:
  /// Throws `c10::Error` that starts with `where`, which names the file and the entry.
  /// `known` is asked for each global, "module.name", and may throw.
  Pickle(std::string where, std::string text,
         const std::function<bool(const std::string& global)>& known);

  /// What the pickle is.
  const PickleValue& root() const { return root_; }

  std::string_view string(const PickleValue& value) const;
  /// "module.name" of a global, or of an opaque value; empty if it has none.
  std::string global(const PickleValue& value) const;
  /// Element `i` of a tuple, which has it.
  const PickleValue& element(const PickleValue& tuple, size_t i) const;
  /// The global of a call or the class of an object.
  const PickleValue& callee(const PickleValue& value) const;
  /// The tuple of a call or a persistent object, the state of an object.
  const PickleValue& arguments(const PickleValue& value) const;
  /// Calls `visit(key, value)` for the pairs of a dict, in the order in which they were set.
  template <typename Visit>
  void for_each_pair(const PickleValue& dict, Visit visit) const {
    for (size_t i = dicts_[dict.index].first; i != 0; i = pairs_[i].next) {
      visit(pairs_[i].key, pairs_[i].value);
    }
  }

 private:
  struct Node {
    PickleValue callee, arguments;
  };
  struct Pair {
    PickleValue key, value;
    size_t next = 0;  // 0: none
  };
  struct Dict {
    size_t first = 0, last = 0;
  };

  friend class PickleMachine;

  std::string where_, text_;
  // Deques, since a growing vector would need twice the memory.
  std::deque<PickleValue> elements_;
  std::deque<Node> nodes_;
  std::deque<Pair> pairs_ = std::deque<Pair>(1);
  std::deque<Dict> dicts_;
  PickleValue root_;
};

/// Some ten thousand tensors.
inline constexpr size_t kMaxPickleMemory = 6 << 20;

}  // namespace mha::detail
