#pragma once

#include <mha/multi_head_attention.h>

#include <string>

namespace mha::detail {

/// The parameters that a module itself has registered, which `named_parameters` would copy.
torch::OrderedDict<std::string, at::Tensor>& registered_parameters(torch::nn::Module& module);

/// Throws `c10::Error` that names the member unless `member` is what `owner`, which the error
/// calls `subject`, has registered as `name`.
void check_registered(const char* subject, const torch::nn::Module& owner, const char* name,
                      const at::Tensor& member);

/// Throws unless W_q, W_k, W_v and W_o are there.
void check_has_layers(const MultiHeadAttentionImpl& module);

/// `check_registered` for all parameters and layers of a module.
void check_registered(const MultiHeadAttentionImpl& module);

}  // namespace mha::detail
