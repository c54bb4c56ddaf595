"""Writes the files that torch_file_test.cpp and layout_python_test.cpp read.

    python weight_files.py DIRECTORY

Each `NAME.pt` that can be read has a `NAME.safetensors` beside it with the same tensors, written
by Python's safetensors. `refused/` holds those that must not be read. `LAYOUT.layer.safetensors`
holds a layer with the names and shapes of a model family at a prefix, and `input` and `output`
of the arithmetic that its Python code does. `MODEL_model.DTYPE.safetensors` are such layers under
a causal mask, rotated where the model does, computed by numpy in float64.
"""

import argparse
import datetime
import functools
import random
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import nn

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def dtypes():
    values = torch.tensor([0.0, 1.0, 2.0, 77.0, 100.0, 127.0], dtype=torch.float64)
    tensors = OrderedDict()
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        tensors[f"{name}.matrix"] = values.view(2, 3).to(dtype)
        tensors[f"{name}.scalar"] = torch.ones((), dtype=dtype)
        tensors[f"{name}.empty"] = torch.empty(2, 0, 3, dtype=dtype)
    tensors["special.\u00e9"] = torch.tensor([float("inf"), -0.0, 1e-45])
    return tensors


def views():
    base = torch.arange(24, dtype=torch.float32)
    matrix = base.view(4, 6)
    return {
        "base": base,
        "matrix": matrix,
        "transposed": matrix.t(),
        "column": matrix[:, 2],
        "steps": matrix[1:3, ::2],
        "element": base[5],
        "overlapping": base[:8].unfold(0, 4, 2),
        "repeated": base[3].expand(2, 3),
        "nothing": base[24:],
        "permuted": base.view(2, 3, 4).permute(2, 0, 1),
    }


def parameters():
    with_state = nn.Parameter(torch.randn(3, 2))
    with_state.origin = "an attribute"
    return {
        "trained": nn.Parameter(torch.randn(2, 3)),
        "frozen": nn.Parameter(torch.randn(4), requires_grad=False),
        "with_state": with_state,
        "buffer": torch.randn(2),
    }


def checkpoint(module):
    optimizer = torch.optim.Adam(module.parameters())
    module(*[torch.randn(1, 2, 8)] * 3)[0].sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "loss": 0.25,
        "steps": 10**12,
        "name": "run",
        "none": None,
        "flags": [True, (False, -1), {"inner": torch.ones(1)}],
        5: torch.ones(2),
        "model": {"state_dict": module.state_dict()},
        "optimizer": optimizer.state_dict(),
    }


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "built"))


class Slots:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = 1, [torch.ones(2)]


def training(module):
    """What scripts put beside a model, as `weights_only` takes it: no tensor but its own."""
    with_attribute = torch.ones(3)
    with_attribute.origin = "an attribute"
    return {
        "model": module.state_dict(),
        "kept": with_attribute,
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "counts": Counter("abca"),
        "set": {1, 2},
        "bytes": bytearray(b"abc"),
        "raw": b"abc",
        "complex": 1 + 2j,
    }


def objects(module, directory):
    return {
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99), path=Path("a/b"), w=torch.ones(2)),
        "scalar": numpy.float64(0.5),
        "array": numpy.arange(6.0).reshape(2, 3),
        "strings": numpy.array(["a", "bc"]),
        "state": numpy.random.default_rng(1).bit_generator.state,
        "legacy": numpy.random.RandomState(1).get_state(),
        "random": random.Random(1).getstate(),
        "when": datetime.datetime(2024, 1, 2),
        "default": defaultdict(dict, {"a": {"w": torch.ones(2)}}),
        "huge": 1 << 4000,
        "slots": Slots(),
        "class": nn.Linear,
        "module": nn.Linear(2, 3),
        "partial": functools.partial(torch.add, torch.ones(1)),
        "sparse": torch.ones(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "trap": Trap(directory / "built"),
        "model": module.state_dict(),
    }


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def gpt2():
    width = 12
    layer = {
        "c_attn.weight": torch.randn(width, 3 * width) / 3,
        "c_attn.bias": torch.randn(3 * width),
        "c_proj.weight": torch.randn(width, width) / 3,
        "c_proj.bias": torch.randn(width),
    }
    x = torch.randn(2, 5, width)
    q, k, v = (x @ layer["c_attn.weight"] + layer["c_attn.bias"]).split(width, dim=2)
    attended = attend(heads(q, 3), heads(k, 3), heads(v, 3))
    output = attended @ layer["c_proj.weight"] + layer["c_proj.bias"]
    layer["bias"] = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    layer["masked_bias"] = torch.tensor(-1e4)
    return "transformer.h.0.attn", layer, x, output


def vit():
    width = 12
    qkv, proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
    x = torch.randn(2, 5, width)
    q, k, v = qkv(x).reshape(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    output = proj(attend(q, k, v))
    layer = {f"qkv.{k}": v for k, v in qkv.state_dict().items()}
    layer |= {f"proj.{k}": v for k, v in proj.state_dict().items()}
    return "blocks.0.attn", layer, x, output


def llama():
    width, count, kv_count, size = 12, 6, 2, 4
    shapes = {"q": (count * size, width), "k": (kv_count * size, width)}
    shapes |= {"v": (kv_count * size, width), "o": (width, count * size)}
    layer = {f"{n}_proj.weight": torch.randn(shape) / 3 for n, shape in shapes.items()}
    x = torch.randn(2, 5, width)
    q, k, v = (x @ layer[f"{name}_proj.weight"].t() for name in "qkv")
    attended = attend(heads(q, count), heads(k, kv_count), heads(v, kv_count))
    output = attended @ layer["o_proj.weight"].t()
    layer["rotary_emb.inv_freq"] = torch.ones(2)
    return "model.layers.0.self_attn", layer, x, output


def rotate(x, base, fast_share):
    """x (N, H, T, D), by LLaMA 3.1's frequencies for 4 times 16 positions, in float64."""
    half = x.shape[3] // 2
    wavelengths = 2 * numpy.pi * base ** (numpy.arange(half) / half)
    turns = 16 / wavelengths
    smooth = numpy.clip((turns - 1) / (fast_share - 1), 0, 1)
    radians = 2 * numpy.pi / wavelengths * ((1 - smooth) / 4 + smooth)
    angles = numpy.arange(x.shape[2])[:, None] * radians
    cos, sin = numpy.cos(angles), numpy.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return numpy.concatenate([a * cos - b * sin, b * cos + a * sin], axis=3)


def attend_causally(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = (numpy.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) / q.shape[3] ** 0.5
    length = q.shape[2]
    scores = numpy.where(numpy.tril(numpy.ones((length, length), bool)), scores, -numpy.inf)
    weights = numpy.exp(scores - scores.max(axis=3, keepdims=True))
    attended = weights / weights.sum(axis=3, keepdims=True) @ v
    return attended.swapaxes(1, 2).reshape(q.shape[0], length, -1)


def split(x, count):
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def llama_model(gained=False, biased=False):
    """A layer of LLaMA 3.1, with Qwen 3's gains or Qwen 2's biases: numpy in float64 alone."""
    random = numpy.random.default_rng(7)
    width, count, kv_count, size = 24, 6, 2, 8
    rows = {"q": count * size, "k": kv_count * size, "v": kv_count * size, "o": width}
    layer = {
        f"{n}_proj.weight": random.normal(size=(r, width if n != "o" else count * size)) / 4
        for n, r in rows.items()
    }
    if biased:
        layer |= {f"{n}_proj.bias": random.normal(size=rows[n]) for n in "qkv"}
    x = random.normal(size=(2, 40, width))
    q, k, v = (
        split(x @ layer[f"{n}_proj.weight"].T + layer.get(f"{n}_proj.bias", 0), c)
        for n, c in (("q", count), ("k", kv_count), ("v", kv_count))
    )
    if gained:
        layer["q_norm.weight"], layer["k_norm.weight"] = random.uniform(0.5, 1.5, (2, size))
        q, k = (
            x / numpy.sqrt((x**2).mean(axis=3, keepdims=True) + 1e-6) * layer[f"{n}_norm.weight"]
            for n, x in (("q", q), ("k", k))
        )
    attended = attend_causally(rotate(q, 500000, 4), rotate(k, 500000, 4), v)
    return "model.layers.1.self_attn", layer, x, attended @ layer["o_proj.weight"].T


def qwen_model():
    return llama_model(gained=True)


def qwen2_model():
    return llama_model(biased=True)


def gpt2_model():
    """A layer of GPT-2: numpy in float64 alone."""
    random = numpy.random.default_rng(8)
    width = 24
    layer = {
        "c_attn.weight": random.normal(size=(width, 3 * width)) / 4,
        "c_attn.bias": random.normal(size=3 * width),
        "c_proj.weight": random.normal(size=(width, width)) / 4,
        "c_proj.bias": random.normal(size=width),
    }
    x = random.normal(size=(2, 40, width))
    inputs = x @ layer["c_attn.weight"] + layer["c_attn.bias"]
    q, k, v = (split(part, 4) for part in numpy.split(inputs, 3, axis=2))
    output = attend_causally(q, k, v) @ layer["c_proj.weight"] + layer["c_proj.bias"]
    return "h.1.attn", layer, x, output


def write_model(path, prefix, layer, x, output):
    tensors = {f"{prefix}.{name}": values for name, values in layer.items()}
    tensors |= {"input": x, "output": output}
    tensors = {name: torch.tensor(values) for name, values in tensors.items()}
    save_file(tensors, path.with_suffix(".float64.safetensors"))
    save_file({n: t.float() for n, t in tensors.items()}, path.with_suffix(".float32.safetensors"))


def write_layout(path, prefix, layer, x, output):
    tensors = {f"{prefix}.{name}": tensor.detach() for name, tensor in layer.items()}
    save_file(tensors | {"input": x, "output": output.detach().contiguous()}, path)


def write(directory, name, contents, expected):
    torch.save(contents, directory / f"{name}.pt")
    save_file(
        {key: tensor.detach().clone().contiguous() for key, tensor in expected.items()},
        directory / f"{name}.safetensors",
    )


def write_refused(directory):
    directory.mkdir(exist_ok=True)
    module = nn.MultiheadAttention(8, 2)
    state = module.state_dict()
    torch.save(state, directory / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(state, directory / "protocol_4.pt", pickle_protocol=4)
    torch.save(module, directory / "module.pt")
    torch.jit.script(nn.Linear(2, 2)).save(directory / "torch_script.pt")
    torch.save(torch.ones(2), directory / "tensor.pt")
    torch.save([torch.ones(2)], directory / "list.pt")
    torch.save({"a": torch.ones(1).expand(1000)}, directory / "expanded.pt")
    torch.save({"a": torch.ones(2, dtype=torch.cfloat).conj().imag}, directory / "negative.pt")
    torch.save(
        {"a": torch.ones(2), "b": {"c": torch.ones(2)}, "b.c": torch.ones(2)},
        directory / "twice.pt",
    )


def main():
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True)
    warnings.filterwarnings("ignore")
    torch.manual_seed(5)
    torch.set_num_threads(1)
    write(directory, "dtypes", dtypes(), dtypes())
    write(directory, "views", views(), views())
    tensors = parameters()
    write(directory, "parameters", tensors, tensors)
    packed = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    write(directory, "packed", packed.state_dict(), packed.state_dict())
    apart = nn.MultiheadAttention(8, 2, kdim=3, vdim=5, bias=False, dtype=torch.float64)
    write(directory, "apart", apart.state_dict(), apart.state_dict())
    module = nn.MultiheadAttention(8, 2)
    contents = checkpoint(module)
    expected = {f"model.state_dict.{k}": v for k, v in module.state_dict().items()}
    write(directory, "checkpoint", contents, expected)
    contents = training(module)
    expected = {f"model.{k}": v for k, v in module.state_dict().items()}
    write(directory, "training", contents, expected | {"kept": contents["kept"]})
    torch.load(directory / "training.pt", weights_only=True)
    (directory / "built").unlink(missing_ok=True)
    torch.save(objects(packed, directory), directory / "objects.pt")
    torch.serialization.set_crc32_options(False)
    write(directory, "no_checksums", module.state_dict(), module.state_dict())
    torch.serialization.set_crc32_options(True)
    other = {"complex": torch.ones(2, dtype=torch.cfloat), "unsigned": torch.ones(3).to(torch.uint16)}
    torch.save(other, directory / "other_dtypes.pt")
    write_refused(directory / "refused")
    for layout in (gpt2, vit, llama):
        write_layout(directory / f"{layout.__name__}.layer.safetensors", *layout())
    for model in (llama_model, qwen_model, qwen2_model, gpt2_model):
        write_model(directory / model.__name__, *model())


if __name__ == "__main__":
    main()
