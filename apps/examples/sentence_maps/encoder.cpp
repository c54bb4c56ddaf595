#include "encoder.h"

#include <files/safetensors.h>
#include <mha/weight_file.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace nn = torch::nn;

namespace {

EncoderConfig read_config(const std::string& path) {
  std::ifstream stream(path);
  TORCH_CHECK(stream, path, ": cannot be read");
  const auto json = nlohmann::json::parse(stream);
  TORCH_CHECK(json.at("hidden_act") == "gelu", path, ": expected hidden_act gelu, found ",
              json.at("hidden_act").dump());
  return {json.at("hidden_size"),       json.at("intermediate_size"),
          json.at("num_hidden_layers"), json.at("num_attention_heads"),
          json.at("vocab_size"),        json.at("max_position_embeddings"),
          json.at("type_vocab_size"),   json.at("layer_norm_eps")};
}

nn::LayerNorm layer_norm(const EncoderConfig& config) {
  return nn::LayerNorm(nn::LayerNormOptions({config.hidden_size}).eps(config.layer_norm_eps));
}

/// Copies the parameters of one of LibTorch's modules from under its name in the file.
void read_module(nn::Module& module, mha::detail::SafetensorsFile& file,
                 const std::string& name) {
  for (const auto& parameter : module.named_parameters()) {
    const std::string full_name = name + '.' + parameter.key();
    const torch::Tensor stored = file.read(full_name);
    TORCH_CHECK(stored.sizes() == parameter->sizes(), full_name, ": expected ",
                parameter->sizes(), ", found ", stored.sizes());
    parameter->copy_(stored);
  }
}

}  // namespace

EncoderLayerImpl::EncoderLayerImpl(const EncoderConfig& config)
    : attention(register_module(
          "attention",
          mha::MultiHeadAttention(config.hidden_size, config.num_attention_heads))),
      attention_norm(register_module("attention_norm", layer_norm(config))),
      output_norm(register_module("output_norm", layer_norm(config))),
      intermediate(register_module("intermediate",
                                   nn::Linear(config.hidden_size, config.intermediate_size))),
      output(register_module("output",
                             nn::Linear(config.intermediate_size, config.hidden_size))) {}

mha::AttentionOutput EncoderLayerImpl::forward(const torch::Tensor& x, const mha::Mask& mask) {
  const auto [attended, maps] = attention->forward(x, {}, {}, mask);
  const torch::Tensor y = attention_norm->forward(x + attended);
  return {output_norm->forward(y + output->forward(torch::gelu(intermediate->forward(y)))),
          maps};
}

SentenceEncoderImpl::SentenceEncoderImpl(const EncoderConfig& config)
    : words(register_module("words", nn::Embedding(config.vocab_size, config.hidden_size))),
      positions(register_module(
          "positions", nn::Embedding(config.max_position_embeddings, config.hidden_size))),
      types(
          register_module("types", nn::Embedding(config.type_vocab_size, config.hidden_size))),
      embedding_norm(register_module("embedding_norm", layer_norm(config))),
      layers(register_module("layers", nn::ModuleList())) {
  for (int64_t i = 0; i < config.num_hidden_layers; ++i)
    layers->push_back(EncoderLayer(config));
}

EncodedSentences SentenceEncoderImpl::forward(const torch::Tensor& ids,
                                              const torch::Tensor& attention_mask) {
  const torch::Tensor places = torch::arange(ids.size(1));
  torch::Tensor x = embedding_norm->forward(words->forward(ids) + positions->forward(places) +
                                            types->forward(torch::zeros_like(ids)));
  const mha::Mask mask = mha::Mask::keep_keys(attention_mask);
  EncodedSentences result;
  for (const auto& layer : *layers) {
    auto [output, maps] = layer->as<EncoderLayer>()->forward(x, mask);
    x = output;
    result.maps.push_back(maps);
  }
  const torch::Tensor real = attention_mask.unsqueeze(-1).to(x.scalar_type());
  const torch::Tensor mean = (x * real).sum(1) / real.sum(1);
  result.embedding = nn::functional::normalize(mean);
  return result;
}

SentenceEncoder load_encoder(const std::string& directory) {
  const torch::NoGradGuard no_grad;
  const EncoderConfig config = read_config(directory + "/config.json");
  const std::string path = directory + "/model.safetensors";
  SentenceEncoder encoder(config);
  mha::detail::SafetensorsFile file(path);
  read_module(*encoder->words, file, "embeddings.word_embeddings");
  read_module(*encoder->positions, file, "embeddings.position_embeddings");
  read_module(*encoder->types, file, "embeddings.token_type_embeddings");
  read_module(*encoder->embedding_norm, file, "embeddings.LayerNorm");
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string name = "encoder.layer." + std::to_string(i);
    auto& layer = *encoder->layers->ptr<EncoderLayerImpl>(i);
    mha::load(layer.attention, path, mha::WeightFileOptions().prefix(name + ".attention"));
    read_module(*layer.attention_norm, file, name + ".attention.output.LayerNorm");
    read_module(*layer.intermediate, file, name + ".intermediate.dense");
    read_module(*layer.output, file, name + ".output.dense");
    read_module(*layer.output_norm, file, name + ".output.LayerNorm");
  }
  encoder->eval();
  return encoder;
}
