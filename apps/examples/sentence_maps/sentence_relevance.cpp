// Draws which tokens make a sentence similar to another one, by the relevance of Chefer, Gur &
// Wolf (2021):
//
//     python word_pieces.py MODEL "A sentence." > tokens.json
//     python word_pieces.py MODEL "Another one." > other.json
//     example_sentence_relevance MODEL tokens.json other.json OUTPUT
//
// MODEL is as for example_sentence_maps. OUTPUT, a folder, gets a picture (relevance.svg, .png)
// of what each token of the first sentence gave to the similarity by way of each output token,
// and relevance.json with the similarity and the number of each token.
#include <mha/draw.h>
#include <mha/map_recorder.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "encoder.h"
#include "sentence.h"

namespace {

torch::Tensor embed(SentenceEncoder& encoder, const Sentence& sentence) {
  const torch::Tensor ids = torch::tensor(sentence.ids).unsqueeze(0);
  return encoder->forward(ids, torch::ones_like(ids)).embedding[0];
}

void run(const Arguments& arguments) {
  const Sentence sentence = read_sentence(arguments[1]), other = read_sentence(arguments[2]);
  const std::filesystem::path output = arguments[3];
  SentenceEncoder encoder = load_encoder(arguments[0]);
  const torch::Tensor target = embed(encoder, other).detach();

  mha::MapRecorder recorder(*encoder, mha::MapRecorderOptions().gradients(true));
  const torch::Tensor similarity = embed(encoder, sentence).dot(target);  // a cosine
  similarity.backward();
  std::vector<mha::AttentionAttribution> layers;
  for (const auto& record : recorder.records()) layers.push_back(record.attribution());
  const torch::Tensor all = mha::attention_relevance(layers)[0];
  const torch::Tensor relevance = all - torch::eye(all.size(0));  // without the residual's own

  std::filesystem::create_directories(output);
  mha::draw::Maps maps;
  maps.weights = relevance;
  maps.queries = maps.keys = sentence.tokens;
  maps.title = sentence.text + " What makes it similar to: " + other.text;
  for (const char* name : {"relevance.svg", "relevance.png"}) {
    mha::draw::save(maps, output / name);
  }
  // The embedding is the mean over the output tokens.
  const torch::Tensor of_token = relevance.mean(0).contiguous();
  const float* numbers = of_token.data_ptr<float>();
  const std::vector<float> values(numbers, numbers + of_token.numel());
  const nlohmann::json json{{"similarity", similarity.item<float>()}, {"relevance", values}};
  std::ofstream(output / "relevance.json") << json.dump() << '\n';
  std::cout << "similarity " << similarity.item<float>() << '\n';
  for (size_t i = 0; i < values.size(); ++i) {
    std::cout << sentence.tokens[i] << ' ' << values[i] << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_example(argc, argv, 4,
                     "example_sentence_relevance MODEL TOKENS.json OTHER.json OUTPUT", run);
}
