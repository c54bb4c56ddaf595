#include "weights/layouts.h"

namespace mha::detail {

const char* const kBuiltInLayouts = R"json([

{"name": "native",
 "tensors": [{"name": "W_q"}, {"name": "W_k"}, {"name": "W_v"}, {"name": "W_o"}, {"name": "W_g"},
             {"name": "bias_k"}, {"name": "bias_v"}, {"name": "sinks"}, {"name": "q_norm"},
             {"name": "k_norm"}, {"name": "q_norm_bias"}, {"name": "k_norm_bias"}]},

{"name": "torch",
 "tensors": [{"name": "in_proj_weight", "holds": ["W_q.weight", "W_k.weight", "W_v.weight"]},
             {"name": "in_proj_bias", "holds": ["W_q.bias", "W_k.bias", "W_v.bias"]},
             {"name": "out_proj", "holds": "W_o"}, {"name": "bias_k"}, {"name": "bias_v"}],
 "tensors_apart": [{"name": "q_proj_weight", "holds": "W_q.weight"},
                   {"name": "k_proj_weight", "holds": "W_k.weight"},
                   {"name": "v_proj_weight", "holds": "W_v.weight"},
                   {"name": "in_proj_bias", "holds": ["W_q.bias", "W_k.bias", "W_v.bias"]},
                   {"name": "out_proj", "holds": "W_o"}, {"name": "bias_k"}, {"name": "bias_v"}],
 "grouped_heads": false, "free_head_dim": false, "free_output_bias": false},

{"name": "bert",
 "tensors": [{"name": "self.query", "holds": "W_q"}, {"name": "self.key", "holds": "W_k"},
             {"name": "self.value", "holds": "W_v"}, {"name": "output.dense", "holds": "W_o"}],
 "ignored": ["output.LayerNorm.*", "LayerNorm.*", "ln.*", "self_attn_layer_norm.*",
             "self.rotary_embeddings.inv_freq"],
 "grouped_heads": false, "free_output_bias": false},

{"name": "gpt2",
 "tensors": [{"name": "c_attn", "holds": ["W_q", "W_k", "W_v"], "transposed": true},
             {"name": "c_proj", "holds": "W_o", "transposed": true}],
 "ignored": ["bias", "masked_bias"],
 "grouped_heads": false, "free_head_dim": false, "free_output_bias": false},

{"name": "vit",
 "tensors": [{"name": "qkv", "holds": ["W_q", "W_k", "W_v"]}, {"name": "proj", "holds": "W_o"},
             {"name": "q_norm.weight", "holds": "q_norm"},
             {"name": "q_norm.bias", "holds": "q_norm_bias"},
             {"name": "k_norm.weight", "holds": "k_norm"},
             {"name": "k_norm.bias", "holds": "k_norm_bias"}],
 "grouped_heads": false, "free_head_dim": false},

{"name": "llama",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "o_proj", "holds": "W_o"},
             {"name": "sinks"}, {"name": "q_norm.weight", "holds": "q_norm"},
             {"name": "k_norm.weight", "holds": "k_norm"}],
 "ignored": ["rotary_emb.inv_freq"]},

{"name": "stablelm",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "o_proj", "holds": "W_o"},
             {"name": "q_layernorm.norms.{}.weight", "holds": "q_norm"},
             {"name": "k_layernorm.norms.{}.weight", "holds": "k_norm"}],
 "ignored": ["rotary_emb.inv_freq"], "told_by_names": false},

{"name": "mimo",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "o_proj", "holds": "W_o"},
             {"name": "attention_sink_bias", "holds": "sinks"}],
 "ignored": ["rotary_emb.inv_freq"], "told_by_names": false},

{"name": "hunyuan",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "o_proj", "holds": "W_o"},
             {"name": "query_layernorm.weight", "holds": "q_norm"},
             {"name": "key_layernorm.weight", "holds": "k_norm"}],
 "ignored": ["rotary_emb.inv_freq"], "told_by_names": false},

{"name": "gemma3",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "o_proj", "holds": "W_o"},
             {"name": "q_norm.weight", "holds": "q_norm", "plus": 1},
             {"name": "k_norm.weight", "holds": "k_norm", "plus": 1}],
 "told_by_names": false},

{"name": "qwen3_next",
 "tensors": [{"name": "q_proj", "holds": ["W_q", "W_g"], "packing": "heads"},
             {"name": "k_proj", "holds": "W_k"}, {"name": "v_proj", "holds": "W_v"},
             {"name": "o_proj", "holds": "W_o"},
             {"name": "q_norm.weight", "holds": "q_norm", "plus": 1},
             {"name": "k_norm.weight", "holds": "k_norm", "plus": 1}],
 "told_by_names": false},

{"name": "afmoe",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "o_proj", "holds": "W_o"},
             {"name": "gate_proj", "holds": "W_g"}, {"name": "q_norm.weight", "holds": "q_norm"},
             {"name": "k_norm.weight", "holds": "k_norm"}]},

{"name": "bart",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "out_proj", "holds": "W_o"},
             {"name": "q_layernorm.weight", "holds": "q_norm"},
             {"name": "k_layernorm.weight", "holds": "k_norm"}],
 "ignored": ["bias", "masked_bias", "rotary_emb.inv_freq"]},

{"name": "whisper",
 "tensors": [{"name": "q_proj", "holds": "W_q"},
             {"name": "k_proj", "holds": "W_k", "bias": false},
             {"name": "v_proj", "holds": "W_v"}, {"name": "out_proj", "holds": "W_o"}]},

{"name": "phi",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "dense", "holds": "W_o"},
             {"name": "q_layernorm.weight", "holds": "q_norm"},
             {"name": "q_layernorm.bias", "holds": "q_norm_bias"},
             {"name": "k_layernorm.weight", "holds": "k_norm"},
             {"name": "k_layernorm.bias", "holds": "k_norm_bias"}],
 "ignored": ["rotary_emb.inv_freq"]},

{"name": "modernbert_decoder",
 "tensors": [{"name": "q_proj", "holds": "W_q"}, {"name": "k_proj", "holds": "W_k"},
             {"name": "v_proj", "holds": "W_v"}, {"name": "Wo", "holds": "W_o"}]},

{"name": "phi3",
 "tensors": [{"name": "qkv_proj", "holds": ["W_q", "W_k", "W_v"]},
             {"name": "o_proj", "holds": "W_o"}],
 "ignored": ["rotary_emb.inv_freq"]},

{"name": "codegen",
 "tensors": [{"name": "qkv_proj", "holds": ["W_q", "W_v", "W_k"], "repeats": 4},
             {"name": "out_proj", "holds": "W_o"}],
 "ignored": ["causal_mask"]},

{"name": "modernbert",
 "tensors": [{"name": "Wqkv", "holds": ["W_q", "W_k", "W_v"]}, {"name": "Wo", "holds": "W_o"}]},

{"name": "mpt",
 "tensors": [{"name": "Wqkv", "holds": ["W_q", "W_k", "W_v"]},
             {"name": "out_proj", "holds": "W_o"}],
 "ignored": ["rotary_emb.inv_freq"]},

{"name": "gpt_bigcode",
 "tensors": [{"name": "c_attn", "holds": ["W_q", "W_k", "W_v"], "packing": "groups"},
             {"name": "c_proj", "holds": "W_o"}],
 "ignored": ["bias", "masked_bias"], "told_by_names": false},

{"name": "gpt_neox",
 "tensors": [{"name": "query_key_value", "holds": ["W_q", "W_k", "W_v"], "packing": "groups"},
             {"name": "dense", "holds": "W_o"},
             {"name": "q_layernorm.weight", "holds": "q_norm"},
             {"name": "q_layernorm.bias", "holds": "q_norm_bias"},
             {"name": "k_layernorm.weight", "holds": "k_norm"},
             {"name": "k_layernorm.bias", "holds": "k_norm_bias"}],
 "ignored": ["bias", "masked_bias", "rotary_emb.inv_freq"]},

{"name": "t5",
 "tensors": [{"name": "q", "holds": "W_q"}, {"name": "k", "holds": "W_k"},
             {"name": "v", "holds": "W_v"}, {"name": "o", "holds": "W_o"}],
 "ignored": ["relative_attention_bias.weight"]},

{"name": "distilbert",
 "tensors": [{"name": "q_lin", "holds": "W_q"}, {"name": "k_lin", "holds": "W_k"},
             {"name": "v_lin", "holds": "W_v"}, {"name": "out_lin", "holds": "W_o"}]},

{"name": "albert",
 "tensors": [{"name": "query", "holds": "W_q"}, {"name": "key", "holds": "W_k"},
             {"name": "value", "holds": "W_v"}, {"name": "dense", "holds": "W_o"}],
 "ignored": ["LayerNorm.*"]},

{"name": "ctrl",
 "tensors": [{"name": "Wq", "holds": "W_q"}, {"name": "Wk", "holds": "W_k"},
             {"name": "Wv", "holds": "W_v"}, {"name": "dense", "holds": "W_o"}]},

{"name": "hf_vit",
 "tensors": [{"name": "attention.query", "holds": "W_q"},
             {"name": "attention.key", "holds": "W_k"},
             {"name": "attention.value", "holds": "W_v"},
             {"name": "output.dense", "holds": "W_o"}]},

{"name": "beit",
 "tensors": [{"name": "attention.query", "holds": "W_q"},
             {"name": "attention.key", "holds": "W_k", "bias": false},
             {"name": "attention.value", "holds": "W_v"},
             {"name": "output.dense", "holds": "W_o"}]},

{"name": "videomae",
 "tensors": [{"name": "attention.query", "holds": "W_q", "bias": false},
             {"name": "attention.key", "holds": "W_k", "bias": false},
             {"name": "attention.value", "holds": "W_v", "bias": false},
             {"name": "attention.q_bias", "holds": "W_q.bias"},
             {"name": "attention.v_bias", "holds": "W_v.bias"},
             {"name": "output.dense", "holds": "W_o"}]}

])json";

}  // namespace mha::detail
