// Guards that files of torch.save which are broken or hostile are refused, with an error that
// says where and why, before they cost time or memory, and that nothing in them is executed.
// The pickles are made by hand from their specification; whole messages are compared.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "files/excerpt.h"
#include "files/torch_file.h"
#include "support/cost.h"
#include "support/file_support.h"
#include "support/torch_file_support.h"
#include "support/torch_headers.h"

namespace mha::detail {
namespace {

using test::error_of;
using test::expect_refused;
using test::good_pickle;
using test::little_endian;
using test::pickle_of;
using test::pickled_dict;
using test::pickled_global;
using test::pickled_integer;
using test::pickled_integers;
using test::pickled_ordered_dict;
using test::pickled_storage;
using test::pickled_tensor;
using test::pickled_text;
using test::pickled_tuple;
using test::six_floats;
using test::TemporaryDirectory;
using test::torch_file_bytes;
using test::write_bytes;
using test::zip_bytes;
using test::ZipItem;

TEST(TorchFileErrorTest, AnOperationThatIsNotAllowedOrAnObjectAtTheTopIsRefusedByItsName) {
  const auto bytes = [](const std::string& value) {
    return torch_file_bytes(pickle_of(value));
  };
  const std::string pickle = "a/data.pkl: ";
  const auto refused = [&](const std::string& name) {
    return "expected a dictionary of tensors, found an object of '" + name +
           "'; in Python, torch.save(module.state_dict(), path) writes one";
  };
  const auto operation = [&](int op, int at = 2) {
    return pickle + "byte " + std::to_string(at) + ": the operation " + std::to_string(op) +
           " is not allowed in a state dict";
  };
  expect_refused({
      {bytes(pickled_global("os", "system") + pickled_tuple({pickled_text("true")}) + "R"),
       refused("os.system")},
      {bytes(pickled_global("builtins", "eval")), refused("builtins.eval")},
      {bytes(pickled_global("torch", "load")), refused("torch.load")},
      {bytes(pickled_global("torch.nn.modules.activation", "MultiheadAttention")),
       refused("torch.nn.modules.activation.MultiheadAttention")},
      {bytes(pickled_global("numpy.core.multiarray", "_reconstruct")),
       refused("numpy.core.multiarray._reconstruct")},
      {bytes(pickled_global("\x1b[2J", "x")), refused("\\x1b[2J.x")},
      {bytes(pickled_global("__torch__.torch.nn.modules.linear", "Linear")),
       pickle + "'__torch__.torch.nn.modules.linear.Linear': a TorchScript archive holds code, "
                "which is not read: in Python, torch.save(torch.jit.load(path).state_dict(), "
                "other_path) writes its weights"},
      {bytes(std::string(1, 'i') + "os\nsystem\n"), operation('i')},  // INST
      {bytes("(" + std::string(1, 'o')), operation('o', 3)},          // OBJ
      {bytes(pickled_text("os") + pickled_text("system") + "\x93"), operation(0x93, 20)},
      {bytes("\x82\x01"), operation(0x82)},  // EXT1
      {bytes("Pkey\n"), operation('P')},     // PERSID
      {bytes("\x94"), operation(0x94)},      // MEMOIZE
      {bytes("I1\n"), operation('I')},
  });
}

// What Python's unpickler would do with these is to build, to call, to execute.
TEST(TorchFileErrorTest, WhatIsNotKnownIsPassedOverAndNeverBuilt) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x.pt"), made = directory.file("made");
  const std::string dict = pickled_dict({pickled_text("k"), pickled_integer(1)});
  const std::string evil =
      pickled_global("os", "system") + pickled_tuple({pickled_text("touch " + made)}) + "R";
  const std::string tensor = pickled_tensor(six_floats(), 0, {2, 3}, {3, 1});
  const std::string unknown = pickled_global("some", "Class");
  const std::string opaque[] = {
      evil,
      pickled_global("builtins", "eval") + pickled_tuple({pickled_text("1")}) + "R",
      pickled_global("argparse", "Namespace") + ")\x81" + dict + "b",
      pickled_global("numpy.core.multiarray", "scalar") + pickled_tuple({"N", dict}) + "R",
      unknown,                                                  // the class itself
      unknown + pickled_tuple({tensor, evil}) + "\x81",         // made of arguments
      unknown + ")\x81" + pickled_tuple({"N", dict}) + "b",     // state in slots
      unknown + ")R(" + pickled_text("k") + tensor + "u",       // items of a dict
      unknown + ")R" + pickled_text("k") + tensor + "s",        // one item
      unknown + ")R(" + tensor + "NNe",                         // elements of a list
      unknown + ")R" + tensor + "a",                            // one element
      unknown + ")R)R)R",                                       // what calls return
      "\x8a\x09" + std::string(9, '\1'),                        // a long integer
      "\x8b" + little_endian(300, 4) + std::string(300, '\1'),  // a longer one
      "N(NN1",                                                  // values that are dropped
      "NN0",
      pickled_global("collections", "Counter") + pickled_tuple({dict}) + "R",
      pickled_global("builtins", "set") + pickled_tuple({"]"}) + "R",
      pickled_global("_codecs", "encode") + pickled_tuple({pickled_text("b")}) + "R",
      pickled_global("torch", "device") + pickled_tuple({pickled_text("cpu")}) + "R",
      pickled_global("torch", "float32"),
      std::string("U\3abc"),
      "T" + little_endian(3, 4) + "abc",
  };
  for (const std::string& value : opaque) {
    SCOPED_TRACE(excerpt(value));
    const std::string inner =
        pickled_dict({pickled_text("x"), tensor, pickled_text("other"), value});
    write_bytes(path, torch_file_bytes(pickle_of(
                          pickled_dict({pickled_text("before"), value, pickled_text("model"),
                                        inner, pickled_text("after"), value}))));
    TorchFile file(path);
    ASSERT_EQ(file.entries().size(), 1U);
    EXPECT_EQ(file.entries().begin()->first, "model.x");
    EXPECT_TRUE(at::equal(file.read("model.x"), at::arange(6, at::kFloat).view({2, 3})));
    EXPECT_FALSE(std::filesystem::exists(made));
  }
}

TEST(TorchFileErrorTest, TensorsOfOtherKindsAreKnownByNameAndNotRead) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x.pt");
  const std::string v2 = pickled_global("torch._utils", "_rebuild_tensor_v2");
  const std::string one = pickled_integers({6}), stride = pickled_integers({1});
  const std::string arguments = pickled_tuple(
      {six_floats(), pickled_integer(0), one, stride, "\x89", pickled_ordered_dict()});
  const auto of_type = [&](const std::string& type) {
    return pickled_global("torch._tensor", "_rebuild_from_type_v2") +
           pickled_tuple({v2, type, arguments, pickled_dict({pickled_text("a"), "N"})}) + "R";
  };
  const auto v3 = [&](const std::string& dtype) {
    return pickled_global("torch._utils", "_rebuild_tensor_v3") +
           pickled_tuple({six_floats(), pickled_integer(0), one, stride, "\x89",
                          pickled_ordered_dict(), dtype}) +
           "R";
  };
  write_bytes(
      path,
      torch_file_bytes(pickle_of(pickled_dict(
          {pickled_text("sparse"),
           pickled_global("torch._utils", "_rebuild_sparse_tensor") + pickled_tuple({"N"}) +
               "R",
           pickled_text("subclass"), of_type(pickled_global("some", "Quantized")),
           pickled_text("int3"), v3(pickled_global("torch", "int3")), pickled_text("first"),
           pickled_global("torch._utils", "_rebuild_tensor") +
               pickled_tuple({six_floats(), pickled_integer(0), one, stride}) + "R",
           pickled_text("attribute"), of_type(pickled_global("torch", "Tensor")),
           pickled_text("parameter"),
           of_type(pickled_global("torch.nn.parameter", "Parameter"))}))));
  TorchFile file(path);
  for (const char* name : {"first", "attribute", "parameter"}) {
    EXPECT_TRUE(at::equal(file.read(name), at::arange(6, at::kFloat))) << name;
  }
  for (const char* name : {"sparse", "subclass", "int3"}) {
    EXPECT_EQ(error_of([&] { file.read(name); }),
              path + ": tensor '" + name +
                  "': expected a dtype that can be read, found a tensor of another kind");
  }
}

TEST(TorchFileErrorTest, APickleThatIsNotWellFormedIsRefusedWithItsPlace) {
  const auto bytes = [](const std::string& value) {
    return torch_file_bytes(pickle_of(value));
  };
  const auto raw = [](const std::string& pickle) { return torch_file_bytes(pickle); };
  const auto at = [](int byte, const std::string& problem) {
    return "a/data.pkl: byte " + std::to_string(byte) + ": " + problem;
  };
  expect_refused({
      {raw(""), at(0, "expected protocol 2, which torch.save writes, found none")},
      {raw("N."), at(0, "expected protocol 2, which torch.save writes, found none")},
      {raw("\x80\x04N."), at(0, "expected protocol 2, which torch.save writes, found 4")},
      {raw("\x80\x02"), at(2, "expected 1 bytes, found 0")},
      {raw("\x80\x02."), at(2, "expected one value at the end, found 0")},
      {raw("\x80\x02NN."), at(4, "expected one value at the end, found 2")},
      {raw("\x80\x02N.N"), at(3, "expected the end, found 1 more bytes")},
      {bytes("X\xff\xff\xff\xff"), at(2, "expected 4294967295 bytes, found 1")},
      {bytes("\x8a\x09" + std::string(3, '\0')), at(2, "expected 9 bytes, found 4")},
      {bytes("\x8b\xff\xff\xff\x7f"), at(2, "expected 2147483647 bytes, found 1")},
      {bytes("1"), at(2, "expected a mark on the stack, found none")},
      {bytes("0"), at(2, "expected a value on the stack, found none")},
      {bytes("cos"),
       at(2, "expected a global's module and name in lines of at most 200 bytes")},
      {bytes("c" + std::string(201, 'm') + "\nname\n"),
       at(2, "expected a global's module and name in lines of at most 200 bytes")},
      {bytes("t"), at(2, "expected a mark on the stack, found none")},
      {bytes("\x85"), at(2, "expected a value on the stack, found none")},
      {bytes("N(\x86"), at(4, "expected a value on the stack, found none")},
      {bytes("h\x01"), at(2, "memo: expected an index below 0, found 1")},
      {bytes("Nr\xff\xff\xff\xff"), at(3, "memo: expected an index up to 0, found 4294967295")},
      {bytes("NNs"), at(4, "expected a dict, a key and a value on the stack")},
      {bytes("NNNs"), at(5, "expected a dict to set items of, found None")},
      {bytes("}(Nu"), at(5, "expected pairs of key and value, found 1 values")},
      {bytes("NNa"), at(4, "expected a list to append to, found None")},
      {bytes("N)R"), at(4, "expected a global, found None")},
      {bytes(pickled_global("collections", "OrderedDict") + "(Nt" + "R"),
       at(30, "collections.OrderedDict: expected no arguments")},
      {bytes("N}b"), at(4, "expected an object to set the state of, found None")},
      {bytes("NNb"), at(4, "expected a dict, found None")},
      {bytes("}NQ"), at(4, "expected a tuple, found None")},
      {bytes("\x80\x02"), at(2, "expected the protocol at the beginning only")},
  });
}

TEST(TorchFileErrorTest, ATensorThatDoesNotFitItsStorageIsRefusedByItsName) {
  const auto bytes = [](const std::string& value) {
    return torch_file_bytes(pickle_of(pickled_dict({pickled_text("x"), value})));
  };
  const auto view = [&](int64_t offset, std::initializer_list<int64_t> sizes,
                        std::initializer_list<int64_t> strides) {
    return bytes(pickled_tensor(six_floats(), offset, sizes, strides));
  };
  const std::string x = "tensor 'x': ",
                    outside = " elements of its storage, found them to reach outside";
  const int64_t max = std::numeric_limits<int64_t>::max();
  std::string ones = "(";
  for (int i = 0; i < 65; ++i) ones += pickled_integer(1);
  const auto storage = [&](const std::string& values) {
    return bytes(pickled_tensor(values + "Q", 0, {1}, {1}));
  };
  const std::string float_storage = pickled_global("torch", "FloatStorage");
  const auto rebuild = [&](const std::string& name, const std::string& arguments) {
    return bytes(pickled_global("torch._utils", name) + arguments + "R");
  };
  const std::string v2 = "_rebuild_tensor_v2", v3 = "_rebuild_tensor_v3";
  const auto one = pickled_integers({1});
  expect_refused({
      {view(0, {7}, {1}),
       x + "expected sizes [7] with strides [1] from 0 on inside the 6" + outside},
      {view(1, {6}, {1}),
       x + "expected sizes [6] with strides [1] from 1 on inside the 6" + outside},
      {view(0, {2}, {6}),
       x + "expected sizes [2] with strides [6] from 0 on inside the 6" + outside},
      {view(0, {2, 3}, {4, 1}),
       x + "expected sizes [2, 3] with strides [4, 1] from 0 on inside the 6" + outside},
      {view(6, {}, {}),
       x + "expected sizes [] with strides [] from 6 on inside the 6" + outside},
      {view(0, {3}, {max}),
       x + "expected sizes [3] with strides [9223372036854775807] from 0 on inside the 6" +
           outside},
      {view(0, {2, 2}, {max, max}),
       x +
           "expected sizes [2, 2] with strides [9223372036854775807, 9223372036854775807] from "
           "0 on inside the 6" +
           outside},
      {view(0, {1000000}, {0}),
       x + "expected at most the 6 elements of its storage, found sizes [1000000] (an expanded "
           "tensor: save a clone() of it)"},
      {view(0, {max}, {0}),
       x + "sizes: expected fewer than 2^56 elements, found [9223372036854775807]"},
      {view(0, {1 << 30, 1 << 30}, {0, 0}),
       x + "sizes: expected fewer than 2^56 elements, found [1073741824, 1073741824]"},
      {view(0, {0, 1 << 30, 1 << 30}, {0, 0, 0}),
       x + "sizes: expected fewer than 2^56 elements, found [0, 1073741824, 1073741824]"},
      {view(7, {0}, {1}), x + "offset: expected 0 to the 6 elements of its storage, found 7"},
      {view(-1, {1}, {1}), x + "offset: expected 0 to the 6 elements of its storage, found -1"},
      {view(0, {-1}, {1}), x + "sizes: expected numbers from 0 on, found -1"},
      {view(5, {2}, {-1}), x + "strides: expected numbers from 0 on, found -1"},
      {view(0, {2, 3}, {1}), x + "strides: expected 2 of them, found 1"},
      {rebuild(v2, "(" + six_floats() + pickled_integer(0) + ones + "t" + one + "\x89" +
                       pickled_ordered_dict() + "t"),
       x + "sizes: expected at most 64 dimensions, found 65"},
      {rebuild(v2, "(" + six_floats() + pickled_integer(0) + "N" + one + "\x89" + "Nt"),
       x + "sizes: expected a tuple"},
      {rebuild(v2, "(" + six_floats() + "N" + one + one + "\x89" + "Nt"),
       x + "offset: found another kind of value"},
      {rebuild(v2, ")"),
       x + "expected 6 or 7 arguments of torch._utils._rebuild_tensor_v2, found 0"},
      {rebuild(v2, "(NNNNNNt"), x + "storage: found another kind of value"},
      {rebuild(v2, "(" + six_floats() + pickled_integer(0) + one + one + "\x89" + "N" +
                       pickled_dict({pickled_text("neg"), "\x88"}) + "t"),
       x + "expected a plain tensor, found one with flags (conjugate, negative)"},
      {rebuild(v3, "(" + six_floats() + pickled_integer(0) + one + one + "\x89" + "N" +
                       pickled_global("torch", "FloatStorage") + "t"),
       x + "dtype: expected one, found 'torch.FloatStorage'"},
      {rebuild("_rebuild_parameter", "(NNt"), x + "parameter: expected 3 arguments"},
      {rebuild("_rebuild_parameter", "(NNNt"),
       x + "parameter: data: found another kind of value"},
      {rebuild("_rebuild_parameter",
               "(" + pickled_global("torch", "Size") + ")R" + "\x89" + "Nt"),
       x + "expected a tensor, found 'torch.Size'"},
      {bytes(pickled_tensor(pickled_storage("FloatStorage", "1", 6), 0, {1}, {1})),
       x + "storage: expected the entry 'a/data/1', found none"},
      {bytes(pickled_tensor(pickled_storage("FloatStorage", "0", 7), 0, {1}, {1})),
       x + "storage '0': expected 7 elements of F32, found an entry of 24 bytes"},
      {bytes(pickled_tensor(pickled_storage("DoubleStorage", "0", 6), 0, {1}, {1})),
       x + "storage '0': expected 6 elements of F64, found an entry of 24 bytes"},
      {bytes(pickled_tensor(pickled_storage("FloatStorage", "0", 6 + (int64_t{1} << 62)), 0,
                            {1}, {1})),
       x + "storage '0': expected 4611686018427387910 elements of F32, found an entry of 24 "
           "bytes"},
      {storage(pickled_tuple({"N"})), x + "storage: expected 5 values, found 1"},
      {storage(pickled_tuple({pickled_text("module"), float_storage, pickled_text("0"),
                              pickled_text("cpu"), pickled_integer(6)})),
       x + "storage: expected 'storage', found 'module'"},
      {storage(pickled_tuple({pickled_text("storage"), pickled_global("torch", "float32"),
                              pickled_text("0"), pickled_text("cpu"), pickled_integer(6)})),
       x + "storage: expected a type, found 'torch.float32'"},
      {bytes(pickled_tensor(pickled_storage("BoolStorage", "0", 24), 0, {24}, {1})),
       x + "expected bytes 0 and 1 for BOOL, found 128 at 6"},
      {bytes(pickled_tensor(pickled_storage("QInt8Storage", "0", 24), 0, {24}, {1})),
       x + "expected a dtype that can be read, found a quantized type"},
  });
}

TEST(TorchFileErrorTest, APickleThatIsNoDictionaryOfTensorsIsRefused) {
  const auto bytes = [](const std::string& value) {
    return torch_file_bytes(pickle_of(value));
  };
  const std::string no_dictionary =
      "expected a dictionary of tensors, found another value; in Python, "
      "torch.save(module.state_dict(), path) writes one";
  const auto tensor = pickled_tensor(six_floats(), 0, {1}, {1});
  std::string chain = pickled_text("x") + tensor, deep = pickled_dict({chain});
  for (int i = 0; i < 33; ++i) deep = pickled_dict({pickled_text("d"), deep});
  expect_refused({
      {bytes(tensor), no_dictionary},
      {bytes("]" + tensor + "a"), no_dictionary},
      {bytes("N"), no_dictionary},
      {bytes(pickled_dict({pickled_text("x"), tensor, pickled_text("x"), tensor})),
       "tensor 'x': expected one of that name, found several"},
      {bytes(pickled_dict({pickled_text("a.x"), tensor, pickled_text("a"),
                           pickled_dict({pickled_text("x"), tensor})})),
       "tensor 'a.x': expected one of that name, found several"},
      {bytes("}q" + std::string(1, '\0') + pickled_text("self") + "h" + std::string(1, '\0') +
             "s"),
       "expected dictionaries at most 32 deep, found more at '" +
           [] {
             std::string prefix;
             for (int i = 0; i < 32; ++i) prefix += "self.";
             return prefix;
           }() +
           "'"},
      {bytes(deep), "expected dictionaries at most 32 deep, found more at '" +
                        [] {
                          std::string prefix;
                          for (int i = 0; i < 32; ++i) prefix += "d.";
                          return prefix;
                        }() +
                        "'"},
  });
}

TEST(TorchFileErrorTest, AHostileTorchFileCostsLittleWorkAnd16MiBBeyondItsSize) {
  struct Hostile {
    const char* what;
    std::string bytes;
    std::string error;
  };
  const auto bytes = [](const std::string& value) {
    return torch_file_bytes(pickle_of(value));
  };
  const size_t much = 16 << 20;
  // Each dictionary holds the one before it twice: 2^30 tensors in two kilobytes.
  const std::string one =
      pickled_dict({pickled_text("x"), pickled_tensor(six_floats(), 0, {1}, {1})}) + "q" +
      std::string(1, '\0');
  std::string doubled = "}(" + pickled_text("0") + one;
  for (int i = 1; i <= 30; ++i) {
    const std::string before = std::string("h") + static_cast<char>(i - 1);
    doubled += pickled_text(std::to_string(i)) +
               pickled_dict({pickled_text("a"), before, pickled_text("b"), before}) + "q" +
               static_cast<char>(i);
  }
  // One long key, which many tensors have in their names.
  std::string named =
      "}(" + pickled_text("d") + one + pickled_text(std::string(1 << 20, 'n')) + "}(";
  for (int i = 0; i < 1000; ++i) {
    named += pickled_text(std::to_string(i)) + "h" + std::string(1, '\0');
  }
  std::string entries = zip_bytes(std::vector<ZipItem>(20000, ZipItem{"x", ""}));
  std::vector<ZipItem> many;
  for (int i = 0; i < 20000; ++i)
    many.push_back({std::to_string(i) + std::string(300, 'n'), ""});
  std::string storages = "}(";
  for (int i = 0; i < 200000; ++i) storages += pickled_text("k") + six_floats();
  const Hostile files[] = {
      {"nested marks", bytes(std::string(much, '(')), "at most 6291456 bytes in all"},
      {"lists", bytes(std::string(much, ']')), "at most 6291456 bytes in all"},
      {"dictionaries", bytes(std::string(much, '}')), "at most 6291456 bytes in all"},
      {"nested tuples", bytes("N" + std::string(much, '\x85')), "at most 6291456 bytes in all"},
      {"one memo index again and again",
       bytes("N" +
             [&] {
               std::string puts;
               while (puts.size() < much) puts += std::string("q\0", 2);
               return puts;
             }() +
             "N"),
       "one value at the end"},
      {"a string longer than the file", bytes("X\xff\xff\xff\x7f"),
       "expected 2147483647 bytes"},
      {"dictionaries in each other twice", bytes(doubled + "u"),
       "with names of 2097152 bytes in all"},
      {"one long name for many", bytes(named + "uu"), "with names of 2097152 bytes in all"},
      {"many storages", bytes(storages + "u"), "at most 6291456 bytes in all"},
      {"many entries of one name", entries, "found several"},
      {"many entries", zip_bytes(many), "without an entry .../data.pkl"},
      {"a tensor of a size that only a promise gives",
       bytes(pickled_dict(
           {pickled_text("x"), pickled_tensor(six_floats(), 0, {int64_t{1} << 40}, {0})})),
       "an expanded tensor"},
  };
  const TemporaryDirectory directory;
  const std::string path = directory.file("hostile.pt");
  error_of([&] { TorchFile file(path); });  // what only the first error costs
  test::check_that_memory_is_measured();
  for (const Hostile& hostile : files) {
    SCOPED_TRACE(hostile.what);
    write_bytes(path, hostile.bytes);
    std::string error;
    const test::Cost cost =
        test::cost_of([&] { error = error_of([&] { TorchFile file(path); }); });
    EXPECT_NE(error.find(hostile.error), std::string::npos) << error.substr(0, 500);
    EXPECT_LT(cost.work, 10);
    EXPECT_LT(cost.memory, static_cast<int64_t>(hostile.bytes.size()) + (16 << 20));
  }
}

}  // namespace
}  // namespace mha::detail
