// Guards models in several files: that a layer is found across them, and that a broken or
// hostile index reaches no other file and is refused with an error that says why. Exact.
#include <gtest/gtest.h>
#include <mha/weight_file.h>

#include <filesystem>

#include "files/safetensors.h"
#include "files/sharded_file.h"
#include "support/cost.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"
#include "support/weight_file_support.h"

namespace mha {
namespace {

using detail::ShardedFile;
using detail::TensorFile;
using detail::write_safetensors;
using test::are_bit_equal;
using test::bert_model;
using test::error_of;
using test::is_bit_equal;
using test::parameters_of;
using test::TemporaryDirectory;
using test::Tensors;
using test::write_bytes;

// Splits a model in two, a tensor here and a tensor there, and writes their index.
void write_sharded(const TemporaryDirectory& directory, const Tensors& model) {
  TensorFile shards[2];
  std::string map;
  size_t i = 0;
  for (const auto& [name, tensor] : model) {
    const size_t shard = i++ % 2;
    shards[shard].tensors[name] = tensor;
    map += (map.empty() ? "\"" : ",\"") + name + "\":\"model-" + std::to_string(shard) + "\"";
  }
  write_safetensors(directory.file("model-0"), shards[0]);
  write_safetensors(directory.file("model-1"), shards[1]);
  write_bytes(directory.file("index"),
              "{\"metadata\":{\"total_size\":1.5e3,\"more\":[[null,true,\"x\"]]},"
              "\"weight_map\":{" +
                  map + "}}\n");
}

TEST(ShardedFileTest, ALayerIsGatheredFromTheFilesOfItsIndex) {
  const TemporaryDirectory directory;
  const Tensors model = bert_model(2, 6);
  write_sharded(directory, model);
  ShardedFile file(directory.file("index"));
  EXPECT_EQ(file.files(),
            (std::vector<std::string>{directory.file("index"), directory.file("model-0"),
                                      directory.file("model-1")}));
  Tensors found;
  for (const auto& [name, entry] : file.entries()) found[name] = file.read(name);
  EXPECT_TRUE(are_bit_equal(found, model));

  write_safetensors(directory.file("whole"), {model, {}});
  const auto where = WeightFileOptions().prefix("encoder.layer.1.attention");
  EXPECT_TRUE(are_bit_equal(parameters_of(*load(directory.file("index"), 2, where)),
                            parameters_of(*load(directory.file("whole"), 2, where))));
}

TEST(ShardedFileTest, AnIndexMayNameManyTensorsAndBeginWithWhiteSpace) {
  const TemporaryDirectory directory;
  const at::Tensor one = torch::ones({1});
  std::string map;
  for (int shard = 0; shard < 4; ++shard) {
    TensorFile file;
    const std::string name = "model-0000" + std::to_string(shard) + "-of-00004.safetensors";
    for (int i = 0; i < 20'000; ++i) {
      const std::string tensor = "model.layers." + std::to_string(shard) + ".mlp.experts." +
                                 std::to_string(i) + ".down_proj.weight";
      file.tensors[tensor] = one;
      map += (map.empty() ? "\"" : ",\"") + tensor + "\":\"" + name + "\"";
    }
    write_safetensors(directory.file(name), file);
  }
  write_bytes(directory.file("index"), " \n{\"weight_map\":{" + map + "}}");
  const auto file = detail::open_tensors(directory.file("index"));
  EXPECT_EQ(file->entries().size(), 80'000U);
  EXPECT_TRUE(
      torch::equal(file->read("model.layers.3.mlp.experts.19999.down_proj.weight"), one));
}

TEST(ShardedFileTest, AnIndexThatIsNotOneOrReachesElsewhereIsRefused) {
  const TemporaryDirectory directory;
  write_sharded(directory, {{"a", torch::ones({2})}, {"b", torch::ones({3})}});
  const std::string path = directory.file("bad");
  write_bytes(directory.file("..."), "");
  const auto map = [](const std::string& items) { return "{\"weight_map\":{" + items + "}}"; };
  const std::string beside =
      ": weight_map: expected the name of a file beside the index, found ";
  const std::string name = ": weight_map: tensor 'a': expected the name of a file, found ";
  const std::pair<std::string, std::string> bad[] = {
      {"{}", ": expected an index with a weight_map, found none"},
      {"{\"metadata\":{\"weight_map\":{\"a\":\"model-0\"}}}",
       ": expected an index with a weight_map, found none"},
      {"{\"weight_map\":[]}", ": weight_map: expected an object, found an array"},
      {"{\"weight_map\":\"model-0\"}", ": weight_map: expected an object, found a string"},
      {"{\"weight_map\":null}", ": weight_map: expected an object, found null"},
      {map("\"a\":1"), name + "a number"},
      {map("\"a\":null"), name + "null"},
      {map("\"a\":[\"model-0\"]"), name + "an array"},
      {map("\"a\":{}"), name + "an object"},
      {map("\"a\":\"model-0\",\"a\":\"model-0\""),
       ": weight_map: tensor 'a': expected one of that name, found several"},
      {"{\"weight_map\":{},\"weight_map\":{}}", ": weight_map: expected one, found several"},
      {map("\"a\":\"../model-0\""), beside + "'../model-0'"},
      {map("\"a\":\"/etc/passwd\""), beside + "'/etc/passwd'"},
      {map("\"a\":\"..\""), beside + "'..'"},
      {map("\"a\":\"\""), beside + "''"},
      {map("\"a\":\"model-0\\u0000\""), beside + "'model-0\\x00'"},
      {map("\"a\":\"x\\\\y\""), beside + "'x\\y'"},
      {map("\"a\":\"" + std::string(256, 'x') + "\""),
       beside + "'" + std::string(200, 'x') + "...'"},
      {map("\"a\":\"model-1\""),
       ": tensor 'a': expected it in 'model-1', found it missing there"},
      {map("\"a\":\"model-0\"") + "}", ": expected valid JSON, found none at byte 31"},
      {"{\"weight_map\":", ": expected valid JSON, found none at byte 15"},
      {"{\"weight_map\":{}" + std::string(1, '\0') + "}",
       ": expected text, found a zero byte at byte 16"},
  };
  for (const auto& [text, error] : bad) {
    write_bytes(path, text);
    EXPECT_EQ(error_of([&] { ShardedFile(path).entries(); }), path + error)
        << text.substr(0, 200);
  }
  write_bytes(path, map("\"a\":\"missing\""));
  EXPECT_EQ(error_of([&] { ShardedFile(path).entries(); }),
            path + ": tensor 'a': expected it in " + directory.file("missing") +
                ", found no such file");
  write_bytes(path, map("\"a\":\"bad\""));  // itself
  EXPECT_EQ(error_of([&] { ShardedFile(path).entries(); }),
            path + ": expected a file with tensors, found another index");
}

// A model of two layers with a file for each, and one for the rest.
std::string write_by_layer(const TemporaryDirectory& directory, const Tensors& model,
                           const std::string& more_of_index = "") {
  std::map<std::string, TensorFile> shards;
  std::string map;
  for (const auto& [name, tensor] : model) {
    const std::string shard = name.find("layer.0.") != std::string::npos   ? "layer-0"
                              : name.find("layer.1.") != std::string::npos ? "layer-1"
                                                                           : "rest";
    shards[shard].tensors[name] = tensor;
    map += "\"" + name + "\":\"" + shard + "\",";
  }
  for (const auto& [shard, file] : shards) write_safetensors(directory.file(shard), file);
  map += more_of_index;
  if (map.back() == ',') map.pop_back();
  write_bytes(directory.file("index"), "{\"weight_map\":{" + map + "}}");
  return directory.file("index");
}

TEST(ShardedFileTest, OnlyTheFilesOfTheWantedLayerMustBeThere) {
  const TemporaryDirectory directory;
  const Tensors model = bert_model(2, 6);
  const std::string path = write_by_layer(directory, model);
  write_safetensors(directory.file("whole"), {model, {}});
  std::filesystem::remove(directory.file("layer-0"));
  write_bytes(directory.file("rest"), "no weights");
  const auto where = [](int layer) {
    return WeightFileOptions().prefix("encoder.layer." + std::to_string(layer) + ".attention");
  };
  EXPECT_TRUE(are_bit_equal(parameters_of(*load(path, 2, where(1))),
                            parameters_of(*load(directory.file("whole"), 2, where(1)))));
  MultiHeadAttention module(6, 2);
  const Tensors before = parameters_of(*module);
  const std::string error = error_of([&] { load(module, path, where(0)); });
  EXPECT_EQ(error,
            path + ": tensor 'encoder.layer.0.attention.output.dense.bias': expected it in " +
                directory.file("layer-0") + ", found no such file");
  EXPECT_TRUE(are_bit_equal(parameters_of(*module), before));
}

// As of a head that shares the memory of the embeddings.
TEST(ShardedFileTest, ANameThatOnlyTheIndexHasHindersTheLayersThatNeedItAndNoOthers) {
  const TemporaryDirectory directory;
  Tensors model = bert_model(2, 6);
  const std::string key = "encoder.layer.1.attention.self.key.weight";
  const std::string path = write_by_layer(
      directory, model, "\"lm_head.weight\":\"layer-0\",\"none.weight\":\"nowhere\"");
  TensorFile without;
  for (const auto& [name, tensor] : model) {
    if (name.find("layer.1.") != std::string::npos && name != key) {
      without.tensors[name] = tensor;
    }
  }
  write_safetensors(directory.file("layer-1"), without);
  const auto where = [](int layer) {
    return WeightFileOptions().prefix("encoder.layer." + std::to_string(layer) + ".attention");
  };
  EXPECT_TRUE(is_bit_equal(load(path, 2, where(0))->W_k->weight.detach(),
                           model.at("encoder.layer.0.attention.self.key.weight")));
  EXPECT_EQ(error_of([&] { load(path, 2, where(1)); }),
            path + ": tensor '" + key + "': expected it in 'layer-1', found it missing there");
  ShardedFile file(path);
  EXPECT_EQ(
      error_of([&] { file.read("lm_head.weight"); }),
      path + ": tensor 'lm_head.weight': expected it in 'layer-0', found it missing there");
  EXPECT_TRUE(is_bit_equal(file.read("pooler.dense.weight"), model.at("pooler.dense.weight")));
  EXPECT_FALSE(file.has("lm_head.bias"));
  EXPECT_EQ(file.find("lm_head.bias"), nullptr);
}

TEST(ShardedFileTest, AHostileIndexCostsLittleWorkAnd64MiBBeyondItsSize) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("index");
  std::string many = "{\"weight_map\":{", files = many;
  for (int i = 0; many.size() < 32'000'000; ++i) many += "\"" + std::to_string(i) + "\":\"x\",";
  for (int i = 0; i < 20000; ++i) {
    const std::string number = std::to_string(i);
    files += "\"" + number + "\":\"" + number + "\",";
  }
  const std::pair<std::string, std::string> hostile[] = {
      {many + "\"x\":\"x\"}}", "names of at most"},
      {files + "\"x\":\"x\"}}", "at most 4096 files, found 20001"},
      {"{\"x\":" + std::string(1'000'000, '['), "valid JSON"},
      {"{" + std::string(33 << 20, ' ') + "}", "an index of at most 33554432 bytes"},
  };
  error_of([&] { ShardedFile file(path); });  // what only the first error costs
  test::check_that_memory_is_measured();
  for (const auto& [text, expected] : hostile) {
    write_bytes(path, text);
    std::string error;
    const test::Cost cost =
        test::cost_of([&] { error = error_of([&] { ShardedFile file(path); }); });
    EXPECT_NE(error.find(expected), std::string::npos) << error;
    EXPECT_LT(cost.work, 10) << expected;
    EXPECT_LT(cost.memory, static_cast<int64_t>(text.size()) + (64 << 20)) << expected;
  }
}

}  // namespace
}  // namespace mha
