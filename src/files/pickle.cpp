#include "files/pickle.h"

#include <c10/util/Exception.h>

#include <utility>

#include "files/pickle_op.h"

namespace mha::detail {
namespace {

using Kind = PickleValue::Kind;

std::string_view kind_name(Kind kind) {
  constexpr std::string_view names[] = {
      "None",      "a bool",    "an integer",      "a float",  "a string",
      "a tuple",   "a list",    "a dict",          "a global", "a call",
      "a storage", "an object", "an opaque value", "a mark"};
  return names[static_cast<size_t>(kind)];
}

}  // namespace

class PickleMachine {
 public:
  PickleMachine(Pickle& pickle, const std::function<bool(const std::string&)>& known)
      : pickle_(pickle), text_(pickle.text_), known_(known) {}

  void run() {
    if (text_.substr(0, 2) != "\x80\x02") {
      fail("expected protocol 2, which torch.save writes, found ",
           text_.size() < 2 || text_[0] != '\x80'
               ? "none"
               : std::to_string(static_cast<unsigned char>(text_[1])));
    }
    while (true) {
      op_at_ = position_;
      const auto op = static_cast<PickleOp>(static_cast<unsigned char>(take(1)[0]));
      if (op == PickleOp::kStop) break;
      step(op);
    }
    if (stack_.size() != 1) fail("expected one value at the end, found ", stack_.size());
    if (position_ != text_.size()) {
      fail("expected the end, found ", text_.size() - position_, " more bytes");
    }
    pickle_.root_ = pop();
  }

 private:
  template <typename... What>
  [[noreturn]] void fail(const What&... what) const {
    TORCH_CHECK(false, pickle_.where_, ": byte ", op_at_, ": ", what...);
  }

  std::string_view take(size_t size) {
    if (size > text_.size() - position_) {
      fail("expected ", size, " bytes, found ", text_.size() - position_);
    }
    position_ += size;
    return text_.substr(position_ - size, size);
  }

  // A little-endian number.
  uint64_t take_number(size_t size) {
    const std::string_view bytes = take(size);
    uint64_t value = 0;
    for (size_t i = size; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
    return value;
  }

  void charge(size_t bytes) {
    used_ += bytes;
    if (used_ > kMaxPickleMemory) {
      fail("expected values of at most ", kMaxPickleMemory, " bytes in all, found more");
    }
  }

  void push(PickleValue value) {
    charge(sizeof value);
    stack_.push_back(value);
  }
  void push(Kind kind, int64_t number = 0) {
    PickleValue value;
    value.kind = kind;
    value.number = number;
    push(value);
  }
  void push_text(Kind kind, std::string_view text) {
    PickleValue value;
    value.kind = kind;
    value.index = static_cast<size_t>(text.data() - text_.data());
    value.count = static_cast<uint32_t>(text.size());
    push(value);
  }

  PickleValue& top() {
    if (stack_.empty() || stack_.back().kind == Kind::mark) {
      fail("expected a value on the stack, found none");
    }
    return stack_.back();
  }
  PickleValue pop() {
    const PickleValue value = top();
    stack_.pop_back();
    used_ -= sizeof value;
    return value;
  }
  PickleValue pop(Kind kind) {
    if (top().kind != kind) {
      fail("expected ", kind_name(kind), ", found ", kind_name(top().kind));
    }
    return pop();
  }

  // How many values lie above the last mark.
  size_t above_mark() const {
    for (size_t count = 0; count < stack_.size(); ++count) {
      if (stack_[stack_.size() - 1 - count].kind == Kind::mark) return count;
    }
    fail("expected a mark on the stack, found none");
  }
  void drop_mark() {
    stack_.pop_back();
    used_ -= sizeof(PickleValue);
  }

  void push_tuple(size_t count) {
    PickleValue tuple;
    tuple.kind = Kind::tuple;
    tuple.index = pickle_.elements_.size();
    tuple.count = static_cast<uint32_t>(count);
    charge(count * sizeof(PickleValue));
    pickle_.elements_.resize(tuple.index + count);
    for (size_t i = count; i-- > 0;) pickle_.elements_[tuple.index + i] = pop();
    push(tuple);
  }

  void push_dict() {
    charge(sizeof(Pickle::Dict));
    pickle_.dicts_.emplace_back();
    push(Kind::dict, static_cast<int64_t>(pickle_.dicts_.size() - 1));
  }

  void push_node(Kind kind, PickleValue callee, PickleValue arguments) {
    charge(sizeof(Pickle::Node));
    pickle_.nodes_.push_back({callee, arguments});
    push(kind, static_cast<int64_t>(pickle_.nodes_.size() - 1));
  }

  // The top `count` values become pairs of the dict below them, and below a mark if there is
  // one.
  void set_items(size_t count, bool marked) {
    if (count % 2 != 0) fail("expected pairs of key and value, found ", count, " values");
    const size_t begin = stack_.size() - count;
    const size_t below = begin - (marked ? 1 : 0);
    const Kind owner = below == 0 ? Kind::mark : stack_[below - 1].kind;
    if (owner != Kind::dict && owner != Kind::opaque) {
      fail("expected a dict to set items of, found ",
           below == 0 ? "nothing" : kind_name(owner));
    }
    for (size_t i = begin; owner == Kind::dict && i < stack_.size(); i += 2) {
      Pickle::Dict& dict = pickle_.dicts_[stack_[below - 1].index];
      charge(sizeof(Pickle::Pair));
      const size_t added = pickle_.pairs_.size();
      pickle_.pairs_.push_back({stack_[i], stack_[i + 1], 0});
      (dict.last == 0 ? dict.first : pickle_.pairs_[dict.last].next) = added;
      dict.last = added;
    }
    for (size_t i = 0; i < count; ++i) pop();
    if (marked) drop_mark();
  }

  void global() {
    const size_t begin = position_;
    for (int line = 0; line < 2; ++line) {
      const size_t end = text_.find('\n', position_);
      if (end == std::string_view::npos || end - position_ > 200) {
        fail("expected a global's module and name in lines of at most 200 bytes");
      }
      position_ = end + 1;
    }
    push_text(Kind::global, text_.substr(begin, position_ - 1 - begin));
    if (!known_(pickle_.global(top()))) top().kind = Kind::opaque;
  }

  void reduce() {
    const PickleValue arguments = pop(Kind::tuple);
    if (top().kind == Kind::opaque) return;  // what a call of it returns
    const PickleValue callee = pop(Kind::global);
    if (pickle_.global(callee) == "collections.OrderedDict") {
      if (arguments.count != 0) fail("collections.OrderedDict: expected no arguments");
      push_dict();
    } else {
      push_node(Kind::call, callee, arguments);
    }
  }

  // A dict's attributes (a state dict's `_metadata`) are dropped.
  void build() {
    const PickleValue state = pop();
    if (top().kind == Kind::opaque) return;
    if (state.kind != Kind::dict) {
      fail("expected ", kind_name(Kind::dict), ", found ", kind_name(state.kind));
    }
    if (top().kind == Kind::dict) return;
    if (top().kind != Kind::object) {
      fail("expected an object to set the state of, found ", kind_name(top().kind));
    }
    PickleValue& arguments = pickle_.nodes_[top().index].arguments;
    if (arguments.kind != Kind::none) fail("expected one state for an object, found several");
    arguments = state;
  }

  void put(size_t index) {
    if (index > memo_.size()) {
      fail("memo: expected an index up to ", memo_.size(), ", found ", index);
    }
    if (index == memo_.size()) {
      charge(sizeof(PickleValue));
      memo_.emplace_back();
    }
    memo_[index] = top();
  }
  void get(size_t index) {
    if (index >= memo_.size()) {
      fail("memo: expected an index below ", memo_.size(), ", found ", index);
    }
    push(memo_[index]);
  }

  void append(size_t count, bool marked) {
    for (size_t i = 0; i < count; ++i) pop();
    if (marked) drop_mark();
    if (top().kind != Kind::list && top().kind != Kind::opaque) {
      fail("expected a list to append to, found ", kind_name(top().kind));
    }
  }

  void step_integer(size_t size) {
    if (size > 8) {
      take(size);
      return push(Kind::opaque);
    }
    const unsigned unused = 64 - 8 * static_cast<unsigned>(size);
    // Moved to the top and back, so that the sign spreads.
    const auto value =
        size == 0 ? 0 : static_cast<int64_t>(take_number(size) << unused) >> unused;
    push(Kind::integer, value);
  }

  void step(PickleOp op) {
    switch (op) {
      case PickleOp::kProto:
        if (op_at_ != 0) fail("expected the protocol at the beginning only");
        take(1);
        return;
      case PickleOp::kMark:
        return push(Kind::mark);
      case PickleOp::kNone:
        return push(Kind::none);
      case PickleOp::kNewTrue:
        return push(Kind::boolean, 1);
      case PickleOp::kNewFalse:
        return push(Kind::boolean, 0);
      case PickleOp::kBinInt:
        return step_integer(4);
      case PickleOp::kBinInt1:
        return push(Kind::integer, static_cast<int64_t>(take_number(1)));
      case PickleOp::kBinInt2:
        return push(Kind::integer, static_cast<int64_t>(take_number(2)));
      case PickleOp::kLong1:
        return step_integer(take_number(1));
      case PickleOp::kLong4:
        return step_integer(take_number(4));
      case PickleOp::kBinFloat:
        take(8);
        return push(Kind::real);
      case PickleOp::kBinUnicode:
      case PickleOp::kBinString:
        return push_text(Kind::string, take(take_number(4)));
      case PickleOp::kShortBinString:
        return push_text(Kind::string, take(take_number(1)));
      case PickleOp::kEmptyTuple:
        return push_tuple(0);
      case PickleOp::kTuple: {
        const size_t count = above_mark();
        push_tuple(count);
        const PickleValue tuple = pop();
        drop_mark();
        return push(tuple);
      }
      case PickleOp::kTuple1:
        return push_tuple(1);
      case PickleOp::kTuple2:
        return push_tuple(2);
      case PickleOp::kTuple3:
        return push_tuple(3);
      case PickleOp::kEmptyList:
        return push(Kind::list);
      case PickleOp::kAppend:
        return append(1, false);
      case PickleOp::kAppends:
        return append(above_mark(), true);
      case PickleOp::kEmptyDict:
        return push_dict();
      case PickleOp::kSetItem:
        if (stack_.size() < 3) fail("expected a dict, a key and a value on the stack");
        return set_items(2, false);
      case PickleOp::kSetItems:
        return set_items(above_mark(), true);
      case PickleOp::kGlobal:
        return global();
      case PickleOp::kReduce:
        return reduce();
      case PickleOp::kNewObj: {
        const PickleValue arguments = pop(Kind::tuple);
        if (top().kind == Kind::opaque) return;
        if (arguments.count != 0) fail("expected an object made without arguments");
        return push_node(Kind::object, pop(Kind::global), PickleValue());
      }
      case PickleOp::kPop:
        if (!stack_.empty() && stack_.back().kind == Kind::mark) return drop_mark();
        pop();
        return;
      case PickleOp::kPopMark:
        for (size_t count = above_mark(); count > 0; --count) pop();
        return drop_mark();
      case PickleOp::kBuild:
        return build();
      case PickleOp::kBinPersId:
        return push_node(Kind::persistent, PickleValue(), pop(Kind::tuple));
      case PickleOp::kBinPut:
        return put(take_number(1));
      case PickleOp::kLongBinPut:
        return put(take_number(4));
      case PickleOp::kBinGet:
        return get(take_number(1));
      case PickleOp::kLongBinGet:
        return get(take_number(4));
      default:
        fail("the operation ", static_cast<int>(op), " is not allowed in a state dict");
    }
  }

  Pickle& pickle_;
  const std::string_view text_;
  const std::function<bool(const std::string&)>& known_;
  size_t position_ = 0, op_at_ = 0, used_ = 0;
  std::deque<PickleValue> stack_, memo_;
};

Pickle::Pickle(std::string where, std::string text,
               const std::function<bool(const std::string&)>& known)
    : where_(std::move(where)), text_(std::move(text)) {
  PickleMachine(*this, known).run();
}

std::string_view Pickle::string(const PickleValue& value) const {
  TORCH_INTERNAL_ASSERT(value.kind == PickleValue::Kind::string);
  return std::string_view(text_).substr(value.index, value.count);
}

std::string Pickle::global(const PickleValue& value) const {
  TORCH_INTERNAL_ASSERT(value.kind == PickleValue::Kind::global ||
                        value.kind == PickleValue::Kind::opaque);
  std::string name = text_.substr(value.index, value.count);
  if (!name.empty()) name[name.find('\n')] = '.';
  return name;
}

const PickleValue& Pickle::element(const PickleValue& tuple, size_t i) const {
  TORCH_INTERNAL_ASSERT(tuple.kind == PickleValue::Kind::tuple && i < tuple.count);
  return elements_[tuple.index + i];
}

const PickleValue& Pickle::callee(const PickleValue& value) const {
  return nodes_[value.index].callee;
}

const PickleValue& Pickle::arguments(const PickleValue& value) const {
  return nodes_[value.index].arguments;
}

}  // namespace mha::detail
