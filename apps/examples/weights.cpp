#include <mha/weight_file.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  mha::MultiHeadAttention trained(64, 4);
  mha::save(trained, "layer.safetensors");

  mha::MultiHeadAttention attention = mha::load("layer.safetensors");

  // One layer of a BERT checkpoint; the layout is found from the names.
  auto where = mha::WeightFileOptions().prefix("encoder.layer.0.attention");
  mha::save(trained, "bert.safetensors",
            mha::WeightFileOptions(where).layout(mha::Layout::bert));
  mha::MultiHeadAttention bert = mha::load("bert.safetensors", /*num_heads=*/4, where);

  auto x = torch::randn({1, 7, 64});
  auto expected = trained->forward(x).output;
  const bool equal = torch::equal(attention->forward(x).output, expected) &&
                     torch::equal(bert->forward(x).output, expected);
  std::cout << (equal ? "equal outputs\n" : "outputs differ\n");
  return equal ? 0 : 1;
}
