"""Writes what Python's torch computes, for python_reference_test.cpp to compare with.

    python export_goldens.py DIRECTORY

DIRECTORY gets one folder a case, reference/<case>, torch/<case> and sdpa/<case>, with the calls
(see golden.py) and, for the modules, `state_dict.safetensors` as a user would save it.
"""

import math
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from golden import dtype_name, generator_of, keep_some, randn, save, save_call, seed_of
from reference import MultiHeadAttention

DTYPES = (torch.float32, torch.float64)


def export_reference(directory):
    # d_model, num_heads, N, L, S; the first is the example in the README.
    sizes = [(512, 8, 4, 20, 20), (4, 1, 2, 3, 5), (6, 2, 1, 4, 1)]
    sizes += [(15, 5, 3, 2, 7), (64, 4, 2, 9, 6)]
    for d_model, num_heads, N, L, S in sizes:
        for bias in (True, False):
            for dtype in DTYPES:
                name = f"{d_model}_{num_heads}_{'bias' if bias else 'no_bias'}_{dtype_name(dtype)}"
                options = {"d_model": d_model, "num_heads": num_heads, "dtype": dtype_name(dtype)}
                options |= {"seed": seed_of(name)} | ({} if bias else {"bias": 0})

                # A whole program under one seed: the module's parameters, then its input.
                torch.manual_seed(options["seed"])
                module = MultiHeadAttention(d_model, num_heads, bias, dtype)
                x = torch.randn(N, L, d_model, dtype=dtype)
                output, weights = module(x, x, x)
                program = {"x": x, "output": output, "weights": weights}
                save(directory / name / "program.safetensors", program, options)
                save(directory / name / "state_dict.safetensors", module.state_dict())

                if d_model > 100:
                    continue  # the files of its gradients would be large
                generator = generator_of(name)
                masks = reference_masks(generator, N, num_heads, L, S)
                for mask_name, (mask, tensors, meaning) in masks.items():
                    leaves = {
                        "query": randn(generator, N, L, d_model, dtype=dtype).requires_grad_(),
                        "key": randn(generator, N, S, d_model, dtype=dtype).requires_grad_(),
                        "value": randn(generator, N, S, d_model, dtype=dtype).requires_grad_(),
                    }
                    module.zero_grad()
                    save_call(
                        directory / name / f"{mask_name}.call.safetensors",
                        lambda: module(*leaves.values(), mask),
                        leaves,
                        tensors,
                        options | {"masks": meaning},
                        lambda: {name: p.grad for name, p in module.named_parameters()},
                    )


def reference_masks(generator, N, H, L, S):
    """name -> (mask as the class takes it, tensors for mha, masks of equal meaning)"""
    masks = {"none": (None, {}, "")}
    keep = keep_some(generator, L, S).to(torch.int64)
    masks["keep_2d"] = (keep, {"mask.keep": keep}, "keep")
    keep = keep_some(generator, N, L, S).to(torch.float32) * 3  # whatever is not 0 may attend
    masks["keep_3d"] = (keep.unsqueeze(1), {"mask.keep": keep}, "keep")
    keep = keep_some(generator, N, 1, L, S)
    masks["keep_sample"] = (keep, {"mask.keep": keep}, "keep")
    keep = keep_some(generator, N, H, L, S).to(torch.uint8)
    masks["keep_head"] = (keep, {"mask.keep": keep}, "keep")
    keep = torch.tril(torch.ones(L, S))
    masks["causal"] = (keep, {"mask.keep": keep}, "keep|causal_top_left")

    lengths = torch.randint(1, S + 1, (N,), generator=generator)
    real = (torch.arange(S) < lengths[:, None]).to(torch.int64)
    padding = {"mask.keep_keys": real, "mask.lengths": lengths}
    real = real[:, None, None, :]
    masks["padding"] = (real, padding, "keep_keys|lengths")
    keep = torch.tril(real.expand(N, 1, L, S))
    masks["causal_padding"] = (
        keep,
        padding | {"mask.keep": keep},
        "keep|causal_top_left&keep_keys|lengths&causal_top_left",
    )
    return masks


def export_torch(directory):
    """nn.MultiheadAttention in training mode and with gradients: in evaluation without gradients
    it runs another implementation, which has mask faults and NaN rows of its own."""
    # d_model, num_heads, N, L, S, options of the module
    cases = {
        "plain": (12, 3, 2, 5, 4, {}),
        "wide": (64, 8, 3, 11, 17, {}),
        "no_bias": (12, 3, 2, 5, 4, {"bias": False}),
        "kdim_vdim": (12, 3, 2, 5, 4, {"kdim": 7, "vdim": 9}),
        "kdim_no_bias": (8, 2, 3, 2, 6, {"kdim": 5, "bias": False}),
        "bias_kv": (12, 3, 2, 5, 4, {"add_bias_kv": True}),
        "zero_attn": (12, 3, 2, 5, 4, {"add_zero_attn": True}),
        "all": (20, 4, 3, 6, 7, {"kdim": 3, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True}),
        "sequence_first": (12, 3, 2, 5, 4, {"batch_first": False}),
        "unbatched": (12, 3, None, 5, 4, {}),
    }
    for case, (d_model, num_heads, N, L, S, module_options) in cases.items():
        for dtype in DTYPES:
            name = f"{case}_{dtype_name(dtype)}"
            generator = generator_of(name)
            torch.manual_seed(seed_of(name))
            arguments = {"batch_first": True, "dtype": dtype} | module_options
            module = nn.MultiheadAttention(d_model, num_heads, **arguments)
            with torch.no_grad():  # torch starts them at 0, where a lost bias would go unseen
                for bias in (module.in_proj_bias, module.out_proj.bias):
                    if bias is not None:
                        bias.copy_(randn(generator, *bias.shape, dtype=dtype) / 4)
            save(directory / name / "state_dict.safetensors", module.state_dict())
            options = {"d_model": d_model, "num_heads": num_heads, "dtype": dtype_name(dtype)}
            options |= {key: int(value) for key, value in module_options.items()}

            def leaf(length, width):
                tensor = randn(generator, *(() if N is None else (N,)), length, width, dtype=dtype)
                if not arguments["batch_first"]:
                    tensor = tensor.transpose(0, 1).contiguous()
                return tensor.requires_grad_()

            masks = torch_masks(generator, N, num_heads, L, S, dtype)
            for mask_name, (mask, tensors, meaning) in masks.items():
                for weights in ("per_head", "averaged", "none"):
                    inputs = (leaf(L, d_model), leaf(S, module.kdim), leaf(S, module.vdim))
                    leaves = dict(zip(("query", "key", "value"), inputs))
                    if "mask.add" in tensors:
                        leaves["mask.add"] = tensors["mask.add"].clone().requires_grad_()
                        mask = {"attn_mask": leaves["mask.add"]}
                    module.zero_grad()
                    save_call(
                        directory / name / f"{mask_name}_{weights}.call.safetensors",
                        lambda: module(
                            *inputs,
                            need_weights=weights != "none",
                            average_attn_weights=weights == "averaged",
                            **mask,
                        ),
                        leaves,
                        {key: tensor for key, tensor in tensors.items() if key not in leaves},
                        options | {"weights": weights, "masks": meaning},
                        lambda: native_gradients(module),
                    )


def torch_masks(generator, N, H, L, S, dtype):
    """name -> (arguments of nn.MultiheadAttention, tensors for mha, masks of equal meaning)"""
    masks = {"none": ({}, {}, "")}
    block = ~keep_some(generator, L, S)
    masks["block_2d"] = ({"attn_mask": block}, {"mask.block": block}, "block")
    block = ~keep_some(generator, (N or 1) * H, L, S)
    masks["block_head"] = ({"attn_mask": block}, {"mask.block": block}, "block")

    causal = torch.triu(torch.ones(L, S, dtype=torch.bool), diagonal=1)
    lengths = torch.randint(1, S + 1, (N or 1,), generator=generator)
    padding = torch.arange(S) >= lengths[:, None]
    padding = padding[0] if N is None else padding
    masks["causal_padding"] = (
        {"attn_mask": causal, "key_padding_mask": padding},
        {"mask.block": causal, "mask.block_keys": padding, "mask.lengths": lengths},
        "block&block_keys|causal_top_left&lengths",
    )

    # An added mask is a leaf of every call, see export_torch.
    masks["add_2d"] = ({}, {"mask.add": randn(generator, L, S, dtype=dtype)}, "add")
    add = randn(generator, (N or 1) * H, L, S, dtype=dtype)
    add = add.masked_fill(~keep_some(generator, *add.shape), -math.inf)
    masks["add_head"] = ({}, {"mask.add": add}, "add")
    return masks


def native_gradients(module):
    """Gradients of nn.MultiheadAttention's parameters by mha's names."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.grad.chunk(3)
    else:
        weights = [getattr(module, f"{role}_proj_weight").grad for role in "qkv"]
    gradients = {f"W_{role}.weight": weight for role, weight in zip("qkv", weights)}
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.grad.chunk(3)
        gradients |= {f"W_{role}.bias": bias for role, bias in zip("qkv", biases)}
    gradients |= {f"W_o.{name}": p.grad for name, p in module.out_proj.named_parameters()}
    if module.bias_k is not None:
        gradients |= {"bias_k": module.bias_k.grad, "bias_v": module.bias_v.grad}
    return gradients


def export_sdpa(directory):
    # leading dimensions, heads of query, heads of key and value, L, S, D, Dv
    cases = {
        "plain": ((2,), 3, 3, 5, 4, 8, 8),
        "square": ((2,), 2, 2, 6, 6, 4, 4),
        "value_width": ((3,), 2, 2, 4, 7, 5, 9),
        "grouped": ((2,), 6, 2, 3, 5, 4, 4),
        "no_leading": ((), 3, 3, 4, 5, 6, 6),
        "two_leading": ((2, 3), 2, 2, 3, 4, 5, 5),
        "long": ((1,), 2, 2, 70, 130, 16, 16),
    }
    for case, (leading, H, Hk, L, S, D, Dv) in cases.items():
        for dtype in DTYPES:
            name = f"{case}_{dtype_name(dtype)}"
            generator = generator_of(name)
            for call_name, (arguments, tensors, meaning) in sdpa_calls(
                generator, math.prod(leading), H, L, S, dtype
            ).items():
                leaves = {
                    "query": randn(generator, *leading, H, L, D, dtype=dtype).requires_grad_(),
                    "key": randn(generator, *leading, Hk, S, D, dtype=dtype).requires_grad_(),
                    "value": randn(generator, *leading, Hk, S, Dv, dtype=dtype).requires_grad_(),
                }
                if "mask.add" in tensors:
                    leaves["mask.add"] = tensors.pop("mask.add").requires_grad_()
                    arguments = {"attn_mask": leaves["mask.add"]}
                save_call(
                    directory / name / f"{call_name}.call.safetensors",
                    lambda: (sdpa(leaves, leading, H // Hk, **arguments), None),
                    leaves,
                    tensors,
                    {"masks": meaning, "weights": "none"}
                    | {key: value for key, value in arguments.items() if key == "scale"},
                )


def sdpa_calls(generator, N, H, L, S, dtype):
    """name -> (arguments of torch's function, tensors for mha, masks of equal meaning)"""
    calls = {"none": ({}, {}, ""), "scale": ({"scale": 0.3}, {}, "")}
    for name, shape in {"2d": (L, S), "sample": (N, 1, L, S), "head": (N, H, L, S)}.items():
        keep = keep_some(generator, *shape)
        calls[f"keep_{name}"] = ({"attn_mask": keep}, {"mask.keep": keep}, "keep")
    calls["causal"] = ({"is_causal": True}, {}, "causal_top_left")
    # An added mask is a leaf of every call, see export_sdpa.
    calls["add"] = ({}, {"mask.add": randn(generator, 1, H, L, S, dtype=dtype)}, "add")
    return calls


def sdpa(leaves, leading, heads_per_key, attn_mask=None, **arguments):
    """torch's function has no grouped heads in all versions, and masks that broadcast over the
    leading dimensions one by one, where mha's count their product."""
    key, value = (leaves[name].repeat_interleave(heads_per_key, -3) for name in ("key", "value"))
    if attn_mask is not None and attn_mask.dim() == 4:
        per_sample = attn_mask.expand(math.prod(leading), *attn_mask.shape[1:])
        attn_mask = per_sample.reshape(*leading, *attn_mask.shape[1:])
    return F.scaled_dot_product_attention(leaves["query"], key, value, attn_mask, **arguments)


def main():
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    directory = Path(sys.argv[1])
    shutil.rmtree(directory, ignore_errors=True)  # no case of an earlier run may linger
    export_reference(directory / "reference")
    export_torch(directory / "torch")
    export_sdpa(directory / "sdpa")
    print(f"torch {torch.__version__}: {len(list(directory.rglob('*.safetensors')))} files")


if __name__ == "__main__":
    main()
