#pragma once

#include <mha/multi_head_attention.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

/// What the files beside a BERT model say of its sizes; the names are those of config.json.
struct EncoderConfig {
  int64_t hidden_size, intermediate_size, num_hidden_layers, num_attention_heads;
  int64_t vocab_size, max_position_embeddings, type_vocab_size;
  double layer_norm_eps;
};

/// One layer: attention and a feed-forward network, each followed by the residual sum and a
/// LayerNorm.
struct EncoderLayerImpl : torch::nn::Module {
  explicit EncoderLayerImpl(const EncoderConfig& config);

  /// x (N, T, E) -> output (N, T, E) and the attention weights (N, H, T, T).
  mha::AttentionOutput forward(const torch::Tensor& x, const mha::Mask& mask);

  mha::MultiHeadAttention attention{nullptr};
  torch::nn::LayerNorm attention_norm{nullptr}, output_norm{nullptr};
  torch::nn::Linear intermediate{nullptr}, output{nullptr};
};
TORCH_MODULE(EncoderLayer);

/// What the encoder makes of a batch of sentences.
struct EncodedSentences {
  torch::Tensor embedding;          // (N, E), each of length 1
  std::vector<torch::Tensor> maps;  // of each layer, (N, H, T, T)
};

/// A sentence encoder: BERT, the mean over the tokens, normalised.
/// Sources: Devlin et al., "BERT", 2018; Reimers and Gurevych, "Sentence-BERT", 2019.
struct SentenceEncoderImpl : torch::nn::Module {
  explicit SentenceEncoderImpl(const EncoderConfig& config);

  /// ids (N, T) int64; attention_mask (N, T), 0 at padding.
  EncodedSentences forward(const torch::Tensor& ids, const torch::Tensor& attention_mask);

  torch::nn::Embedding words{nullptr}, positions{nullptr}, types{nullptr};
  torch::nn::LayerNorm embedding_norm{nullptr};
  torch::nn::ModuleList layers;
};
TORCH_MODULE(SentenceEncoder);

/// The encoder in `directory`, which holds config.json and model.safetensors.
SentenceEncoder load_encoder(const std::string& directory);
