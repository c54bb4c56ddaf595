"""Makes a tiny seeded checkpoint of each architecture in models.txt, and what its layers compute.

    python model_layers.py DIRECTORY

DIRECTORY/NAME is a model's folder as transformers' `save_pretrained` leaves it, from which nothing
is taken but the names and numbers that it has on disk. Beside it, of each call that was caught in
a run of the whole model: DIRECTORY/NAME/LAYER.PART.safetensors with

    input, key            what the projections of queries and of keys were given
    keep_keys             1 for real tokens, where the call has padding
    output                what the projection of the output returned
    weights               what the attention returned as such, where it does

and `layer`, `part`, `causal` in its metadata. Nothing is downloaded. A name with a `-` before a
variant is that architecture in another configuration; a line `NAME: REASON` in models.txt is
one that is refused with these words, and has a config.json alone.
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModel, logging  # noqa: E402

logging.set_verbosity_error()
logging.disable_progress_bar()

LENGTH, PADDED, VOCABULARY = 11, 3, 97

# Sizes that make a model small, under all the names that they have.
SMALL = {
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "word_embed_proj_dim"], 32
    ),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"], 4
    ),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 2),
    **dict.fromkeys(
        ["encoder_layers", "decoder_layers", "num_decoder_layers", "num_key_value_heads"], 2
    ),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner", "dff"], 48),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"], 48),
    **dict.fromkeys(["d_kv", "head_dim", "rotary_dim"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 64),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["moe_intermediate_size", "embedding_size", "image_size"], 16),
    **dict.fromkeys(["shared_expert_intermediate_size", "input_embedding_size"], 16),
    "decoder_vocab_size": VOCABULARY,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "n_group": 1,
    "topk_group": 1,
}

SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 2.5, 4.0, 8.0],
}
BERT = (
    "encoder.layer.{}.attention.self",
    "query",
    "key",
    "encoder.layer.{}.attention.output.dense",
)
ROTATED = ("layers.{}.self_attn", "q_proj", "k_proj", "layers.{}.self_attn.o_proj")
BART = ("layers.{}.self_attn", "q_proj", "k_proj", "layers.{}.self_attn.out_proj")
GPT2 = ("h.{}.attn", "c_attn", None, "h.{}.attn.c_proj")
VIT = ("layers.{}.attention", "q_proj", "k_proj", "layers.{}.attention.o_proj")
VIT_LAYER = ("encoder.layer.{}.attention", "q_proj", "k_proj", "encoder.layer.{}.attention.o_proj")
OLDER_VIT = (
    "encoder.layer.{}.attention.attention",
    "query",
    "key",
    "encoder.layer.{}.attention.output.dense",
)
CLIP = ("encoder.layers.{}.self_attn", "q_proj", "k_proj", "encoder.layers.{}.self_attn.out_proj")
WAV = ("encoder.layers.{}.attention", "q_proj", "k_proj", "encoder.layers.{}.attention.out_proj")
PACKED = ("h.{}.self_attention", "query_key_value", None, "h.{}.self_attention.dense")


def bart(cross="encoder_attn"):
    return {
        part: (
            f"{side}.layers.{{}}.{name}",
            "q_proj",
            "k_proj",
            f"{side}.layers.{{}}.{name}.out_proj",
        )
        for part, side, name in (
            ("encoder", "encoder", "self_attn"),
            ("decoder", "decoder", "self_attn"),
            ("cross", "decoder", cross),
        )
    }


def t5():
    return {
        part: (f"{at}", "q", "k", f"{at}.o")
        for part, at in (
            ("encoder", "encoder.block.{}.layer.0.SelfAttention"),
            ("decoder", "decoder.block.{}.layer.0.SelfAttention"),
            ("cross", "decoder.block.{}.layer.1.EncDecAttention"),
        )
    }


def under(prefix, modules):
    attention, query, key, output = modules
    return (prefix + attention, query, key, prefix + output)


# Where in the model's modules each attention is: the attention, its projections of queries and
# keys, and that of its output; and what the configuration is beside SMALL.
CASES = {
    "llama": (ROTATED, {}),
    "llama-llama3_rope": (ROTATED, {"rope_parameters": LLAMA3, "attention_bias": True}),
    "llama-yarn": (ROTATED, {"rope_parameters": YARN, "head_dim": 16}),
    "llama-linear_rope": (
        ROTATED,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-yarn_mscale": (
        ROTATED,
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}, "head_dim": 16},
    ),
    "llama-proportional_rope": (
        ROTATED,
        {
            "rope_parameters": {
                "rope_type": "proportional",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "factor": 2.0,
            }
        },
    ),
    "arcee": (ROTATED, {}),
    "mistral": (ROTATED, {"sliding_window": 4}),
    "mistral-full": (ROTATED, {"sliding_window": None}),
    "ministral": (ROTATED, SLIDING),
    "mixtral": (ROTATED, {"sliding_window": 4}),
    "phimoe": (ROTATED, {"attention_bias": True}),
    "starcoder2": (ROTATED, {"sliding_window": 5}),
    "qwen2": (ROTATED, {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}),
    "qwen2_moe": (ROTATED, {}),
    "qwen3": (ROTATED, {}),
    "qwen3_moe": (ROTATED, {}),
    "qwen3_next": (ROTATED, {"layer_types": ["full_attention", "full_attention"], "head_dim": 16}),
    "gemma": (ROTATED, {"head_dim": 16}),
    "gemma2": (ROTATED, {**SLIDING, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}),
    "gemma3_text": (ROTATED, {**SLIDING, "query_pre_attn_scalar": 24}),
    "vaultgemma": (
        ROTATED,
        {**SLIDING, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    ),
    "phi3": (
        ("layers.{}.self_attn", "qkv_proj", None, "layers.{}.self_attn.o_proj"),
        {"sliding_window": 4},
    ),
    "phi3-longrope": (
        ("layers.{}.self_attn", "qkv_proj", None, "layers.{}.self_attn.o_proj"),
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi3-longrope_beyond": (
        ("layers.{}.self_attn", "qkv_proj", None, "layers.{}.self_attn.o_proj"),
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    ),
    "phi": (("layers.{}.self_attn", "q_proj", "k_proj", "layers.{}.self_attn.dense"), {}),
    "phi-qk_layernorm": (
        ("layers.{}.self_attn", "q_proj", "k_proj", "layers.{}.self_attn.dense"),
        {"qk_layernorm": True},
    ),
    "persimmon": (
        ("layers.{}.self_attn", "query_key_value", None, "layers.{}.self_attn.dense"),
        {},
    ),
    "stablelm": (
        ROTATED,
        {
            "use_qkv_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "stablelm-qk_layernorm": (ROTATED, {"qk_layernorm": True}),
    "nemotron": (ROTATED, {}),
    "olmo": (ROTATED, {}),
    "olmo2": (ROTATED, {}),
    "olmo3": (ROTATED, SLIDING),
    "olmoe": (ROTATED, {}),
    "flex_olmo": (ROTATED, {}),
    "minimax_m2": (ROTATED, {}),
    "minimax_m2-partial_rotary": (
        ROTATED,
        {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}},
    ),
    "hunyuan_v1_dense": (ROTATED, {}),
    "hunyuan_v1_dense-alpha": (
        ROTATED,
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 50.0,
            }
        },
    ),
    "hunyuan_v1_moe": (ROTATED, {}),
    "mimo_v2_flash": (
        ROTATED,
        {**SLIDING, "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1},
    ),
    "llama4_text": (
        ROTATED,
        {"attention_chunk_size": 4, "no_rope_layers": [1, 0], "floor_scale": 4},
    ),
    "llama4_text-no_chunks": (
        ROTATED,
        {"attention_chunk_size": None, "no_rope_layers": [1, 0], "use_qk_norm": False},
    ),
    "llama4": (under("language_model.model.", ROTATED), {}),
    "mistral3": (under("language_model.", ROTATED), {}),
    "ministral3": (
        ROTATED,
        {
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "cohere": (ROTATED, {}),
    "cohere-qk_norm": (ROTATED, {"use_qk_norm": True}),
    "cohere2": (ROTATED, SLIDING),
    "granite": (ROTATED, {"attention_multiplier": 0.2}),
    "granitemoe": (ROTATED, {"attention_multiplier": 0.2}),
    "granitemoeshared": (ROTATED, {"attention_multiplier": 0.2}),
    "glm": (ROTATED, {}),
    "glm4": (ROTATED, {}),
    "glm4_moe": (ROTATED, {"use_qk_norm": True, "attention_bias": True}),
    "ernie4_5": (ROTATED, {}),
    "ernie4_5_moe": (ROTATED, {}),
    "exaone4": (ROTATED, SLIDING),
    "helium": (ROTATED, {}),
    "smollm3": (ROTATED, {"no_rope_layers": [1, 0]}),
    "seed_oss": (ROTATED, {}),
    "apertus": (ROTATED, {"rope_parameters": LLAMA3}),
    "lfm2": (("layers.{}.self_attn", "q_proj", "k_proj", "layers.{}.self_attn.out_proj"), {}),
    "afmoe": (ROTATED, SLIDING),
    "gpt_oss": (ROTATED, {**SLIDING, "rope_parameters": {**YARN, "truncate": False}}),
    "modernbert-decoder": (
        ("layers.{}.attn", "q_proj", "k_proj", "layers.{}.attn.Wo"),
        {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 8},
    ),
    "gpt2": (GPT2, {}),
    "openai-gpt": (GPT2, {}),
    "imagegpt": (GPT2, {}),
    "gpt_bigcode": (GPT2, {}),
    "gpt_bigcode-multi_head": (GPT2, {"multi_query": False}),
    "gptj": (("h.{}.attn", "q_proj", "k_proj", "h.{}.attn.out_proj"), {"rotary_dim": 4}),
    "codegen": (("h.{}.attn", "qkv_proj", None, "h.{}.attn.out_proj"), {"rotary_dim": 4}),
    "ctrl": (("h.{}.multi_head_attention", "Wq", "Wk", "h.{}.multi_head_attention.dense"), {}),
    "gpt_neo": (
        ("h.{}.attn.attention", "q_proj", "k_proj", "h.{}.attn.attention.out_proj"),
        {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "gpt_neox": (("layers.{}.attention", "query_key_value", None, "layers.{}.attention.dense"), {}),
    "bloom": (PACKED, {}),
    "falcon": (PACKED, {}),
    "falcon-new_decoder": (
        PACKED,
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon-multi_head": (PACKED, {"multi_query": False}),
    "mpt": (("blocks.{}.attn", "Wqkv", None, "blocks.{}.attn.out_proj"), {}),
    "mpt-six_heads": (
        ("blocks.{}.attn", "Wqkv", None, "blocks.{}.attn.out_proj"),
        {"n_heads": 6, "d_model": 48},
    ),
    "opt": (under("decoder.", BART), {}),
    "xglm": (BART, {}),
    "biogpt": (BART, {}),
    "bert": (BERT, {}),
    "bert-decoder": (BERT, {"is_decoder": True}),
    "bert-generation": (BERT, {}),
    "ernie": (BERT, {}),
    "electra": (BERT, {}),
    "layoutlm": (BERT, {}),
    "megatron-bert": (BERT, {}),
    "rembert": (BERT, {}),
    "roberta": (BERT, {}),
    "camembert": (BERT, {}),
    "xlm-roberta": (BERT, {}),
    "xlm-roberta-xl": (BERT, {}),
    "xmod": (BERT, {"default_language": "en_XX"}),
    "data2vec-text": (BERT, {}),
    "roberta-prelayernorm": (BERT, {}),
    "splinter": (BERT, {}),
    "roc_bert": (BERT, {}),
    "tapas": (BERT, {}),
    "markuplm": (BERT, {}),
    "visual_bert": (BERT, {}),
    "roformer": (BERT, {}),
    "esm": (BERT, {"position_embedding_type": "rotary"}),
    "esm-absolute": (BERT, {"position_embedding_type": "absolute"}),
    "albert": (
        (
            "encoder.albert_layer_groups.{}.albert_layers.0.attention",
            "query",
            "key",
            "encoder.albert_layer_groups.{}.albert_layers.0.attention.dense",
        ),
        {"num_hidden_groups": 2},
    ),
    "distilbert": (
        (
            "transformer.layer.{}.attention",
            "q_lin",
            "k_lin",
            "transformer.layer.{}.attention.out_lin",
        ),
        {},
    ),
    "xlm": (("attentions.{}", "q_lin", "k_lin", "attentions.{}.out_lin"), {}),
    "flaubert": (("attentions.{}", "q_lin", "k_lin", "attentions.{}.out_lin"), {}),
    "mpnet": (
        ("encoder.layer.{}.attention.attn", "q", "k", "encoder.layer.{}.attention.attn.o"),
        {},
    ),
    "modernbert": (
        ("layers.{}.attn", "Wqkv", None, "layers.{}.attn.Wo"),
        {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 6},
    ),
    "nomic_bert": (ROTATED, {}),
    "eurobert": (ROTATED, {}),
    "vit": (VIT, {}),
    "vit-no_qkv_bias": (VIT, {"qkv_bias": False}),
    "deit": (VIT, {}),
    "dinov2": (VIT_LAYER, {}),
    "dinov2_with_registers": (VIT_LAYER, {}),
    "vit_mae": (VIT, {}),
    "vit_msn": (VIT, {}),
    "ijepa": (VIT, {}),
    "yolos": (OLDER_VIT, {"image_size": [16, 16]}),
    "audio-spectrogram-transformer": (
        VIT,
        {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    "vivit": (VIT, {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    "videomae": (OLDER_VIT, {"num_frames": 4, "tubelet_size": 2}),
    "beit": (VIT, {}),
    "data2vec-vision": (OLDER_VIT, {}),
    "clip_vision_model": (CLIP, {}),
    "clip_text_model": (CLIP, {}),
    "siglip_vision_model": (CLIP, {}),
    "siglip_text_model": (CLIP, {}),
    "clip": ({"text": under("text_model.", CLIP), "vision": under("vision_model.", CLIP)}, {}),
    "siglip": ({"text": under("text_model.", CLIP), "vision": under("vision_model.", CLIP)}, {}),
    "gemma3": (under("language_model.", ROTATED), {}),
    "wav2vec2": (WAV, {}),
    "hubert": (WAV, {}),
    "unispeech": (WAV, {}),
    "data2vec-audio": (WAV, {}),
    "bart": (bart(), {}),
    "mbart": (bart(), {}),
    "pegasus": (bart(), {}),
    "marian": (bart(), {}),
    "m2m_100": (bart(), {}),
    "blenderbot": (bart(), {}),
    "blenderbot-small": (bart(), {}),
    "plbart": (bart(), {}),
    "speech_to_text": (bart(), {}),
    "whisper": (bart(), {"max_source_positions": 16, "num_mel_bins": 8}),
    "t5": (t5(), {}),
    "mt5": (t5(), {}),
    "umt5": (t5(), {}),
    "switch_transformers": (t5(), {}),
}

# Those that AutoModel does not make.
CLASSES = {"siglip_text_model": "SiglipTextModel"}

# What makes a configuration one that is refused, of an architecture that is not.
REFUSED = {
    "llama-dynamic_rope": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    },
    "olmo-clip_qkv": {"clip_qkv": 8.0},
    "olmoe-clip_qkv": {"clip_qkv": 8.0},
    "falcon-alibi": {"alibi": True},
    "mpt-clip_qkv": {"attn_config": {"clip_qkv": 8.0}},
    "beit-relative_position_bias": {"use_relative_position_bias": True},
    "gpt2-scaled_by_layer": {"scale_attn_by_inverse_layer_idx": True},
    "gemma-bidirectional": {"use_bidirectional_attention": True},
    "qwen3_next-linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2-conv": {"layer_types": ["conv", "full_attention"]},
    "roformer-rotary_value": {"rotary_value": True},
}


def listed():
    """The lines of models.txt: name, and the reason of those that are refused."""
    lines = (Path(__file__).parent / "models.txt").read_text().splitlines()
    return {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines if line}


def model_type_of(name):
    """`bert-decoder` is a `bert`, `bert-generation` an architecture of its own."""
    return name if name in CONFIG_MAPPING else name.rpartition("-")[0]


def configuration(name, beside):
    kind = CONFIG_MAPPING[model_type_of(name)]
    default = kind()
    aliases = default.attribute_map or {}
    members = default.to_dict()
    small = {key: size for key, size in SMALL.items() if key in members and key not in beside}
    small |= beside
    for section in ("text_config", "vision_config"):
        if section in members:
            small[section] = configuration(members[section]["model_type"], {}).to_dict()
    if "layer_types" in members and "layer_types" not in small:
        small["layer_types"] = None
    return kind(**{key: value for key, value in small.items() if aliases.get(key) not in small})


def draw(model):
    """Weights of a size at which every part of a layer matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:  # tables of sines
                continue
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            else:
                is_gain = parameter.numel() > 0 and bool((parameter == 1).all())
                parameter.normal_(float(is_gain), 0.4)


def inputs_of(model):
    """The arguments of a call, the first sample whole and the second padded, if that can be."""
    config, forward = model.config, type(model).forward.__code__.co_varnames
    generator = torch.Generator().manual_seed(7)
    name = model.main_input_name
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    keep[1, LENGTH - PADDED :] = 0
    if name == "input_ids":
        arguments = {"input_ids": ids, "attention_mask": keep}
    elif name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        arguments = {name: torch.randn(2, *frames, 3, height, width, generator=generator)}
        keep = None
    elif name == "input_values":
        if hasattr(config, "num_mel_bins"):
            arguments = {
                name: torch.randn(2, config.max_length, config.num_mel_bins, generator=generator)
            }
        else:
            arguments = {name: torch.randn(2, 4000, generator=generator)}
        keep = None
    elif name == "input_features":
        if hasattr(config, "num_mel_bins"):  # Whisper: as long as its positions
            arguments = {
                name: torch.randn(
                    2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator
                )
            }
        else:
            arguments = {
                name: torch.randn(2, 4 * LENGTH, config.input_feat_per_channel, generator=generator)
            }
        keep = None
    else:
        raise ValueError(name)
    takes_pictures = hasattr(model, "vision_model") and config.model_type != "llama4"
    if "vision_config" in config.to_dict() and takes_pictures:
        size = config.vision_config.image_size
        arguments["pixel_values"] = torch.randn(2, 3, size, size, generator=generator)
    if config.is_encoder_decoder:
        arguments["decoder_input_ids"] = torch.randint(
            3, VOCABULARY, (2, LENGTH - 2), generator=generator
        )
    if "use_cache" in forward:
        arguments["use_cache"] = False
    return arguments, keep


def first_tensor(arguments, keywords):
    given = [*arguments, *keywords.values()]
    return next(value for value in given if isinstance(value, torch.Tensor))


def catch(model, layer, modules):
    """Hooks that fill the dictionary they return."""
    attention, query, key, output = (m and m.format(layer) for m in modules)
    caught = {}

    def before(name):
        def hook(module, arguments, keywords):
            caught[name] = first_tensor(arguments, keywords).detach().clone()

        return hook

    def after(module, arguments, result):
        caught["output"] = result.detach().clone()

    def attended(module, arguments, result):
        maps = [x for x in result[1:] if isinstance(x, torch.Tensor) and x.dim() == 4]
        if maps:  # behind a position bias, if there is one
            caught["weights"] = maps[-1].detach().clone()

    at = model.get_submodule(attention)
    at.register_forward_hook(attended)
    at.get_submodule(query).register_forward_pre_hook(before("input"), with_kwargs=True)
    if key:
        at.get_submodule(key).register_forward_pre_hook(before("key"), with_kwargs=True)
    model.get_submodule(output).register_forward_hook(after)
    return caught


def make(directory, name, modules, beside):
    torch.manual_seed(5)
    folder = directory / name
    config = configuration(name, beside)
    if name in CLASSES:
        config._attn_implementation = "eager"
        model = getattr(transformers, CLASSES[name])(config).eval()
    else:
        model = AutoModel.from_config(config, attn_implementation="eager").eval()
    draw(model)
    model.save_pretrained(folder)
    parts = modules if isinstance(modules, dict) else {"": modules}
    caught = {
        (part, layer): catch(model, layer, at) for part, at in parts.items() for layer in (0, 1)
    }
    arguments, keep = inputs_of(model)
    with torch.no_grad():
        # Llama 4's whole model fails without a picture.
        (model.language_model if name == "llama4" else model)(**arguments)
    for (part, layer), tensors in caught.items():
        if part != "cross" and "key" in tensors:
            assert torch.equal(tensors["key"], tensors["input"]), name
            del tensors["key"]
        keys = tensors.get("key", tensors["input"])
        if keep is not None and part != "decoder" and keys.shape[1] == keep.shape[1]:
            tensors["keep_keys"] = keep
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(tensors, folder / f"{layer}.{part}.call", {"layer": str(layer), "part": part})


def refuse(directory, name):
    """A configuration that is refused for what it sets, or for its type whatever it sets."""
    folder = directory / name
    if name in REFUSED:
        configuration(name, REFUSED[name]).save_pretrained(folder)
    else:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": name}))


def main():
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True, parents=True)
    torch.set_num_threads(1)
    only = sys.argv[2:]
    models = listed()
    assert only or set(CASES) == {name for name, reason in models.items() if not reason}
    for name, (modules, beside) in CASES.items():
        if not only or name in only:
            make(directory, name, modules, beside)
    for name, reason in models.items():
        if reason and not only:
            refuse(directory, name)


if __name__ == "__main__":
    main()
