"""Loads what mha::save wrote into Python's modules and compares what they compute.

    python check_saved.py DIRECTORY

Every folder in DIRECTORY holds `state_dict.safetensors`, which mha::save wrote, and
`call.safetensors`: the inputs and results of the C++ module, and its options as metadata. Written
by python_reference_test.cpp. Exits with 1 if a folder does not agree, or if there is none.
"""

import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from reference import MultiHeadAttention

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


def module_of(options):
    d_model, num_heads = int(options["d_model"]), int(options["num_heads"])
    dtype = getattr(torch, options["dtype"])
    if options["layout"] == "native":
        return MultiHeadAttention(d_model, num_heads, bool(int(options["bias"])), dtype)
    return nn.MultiheadAttention(
        d_model,
        num_heads,
        bias=bool(int(options["bias"])),
        add_bias_kv=bool(int(options["add_bias_kv"])),
        kdim=int(options["kdim"]),
        vdim=int(options["vdim"]),
        batch_first=True,
        dtype=dtype,
    )


def check(case):
    with safe_open(case / "call.safetensors", "pt") as file:
        options = file.metadata()
        call = {name: file.get_tensor(name) for name in file.keys()}
    module = module_of(options)
    module.load_state_dict(load_file(case / "state_dict.safetensors"), strict=True)
    arguments = {} if options["layout"] == "native" else {"average_attn_weights": False}
    # In training mode and with gradients: torch's other path has faults of its own.
    results = module(call["query"], call["key"], call["value"], **arguments)
    for name, result in zip(("output", "weights"), results):
        expected = call[name]
        difference = (result - expected).abs().max().item()
        if result.shape != expected.shape or not difference <= TOLERANCE[expected.dtype]:
            raise AssertionError(f"{case.name}: {name} differs by {difference}")


def main():
    torch.set_num_threads(1)
    cases = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    if not cases:
        raise FileNotFoundError(f"{sys.argv[1]} holds no case")
    for case in cases:
        check(case)
    print(f"Python agrees on {len(cases)} saved modules")


if __name__ == "__main__":
    main()
