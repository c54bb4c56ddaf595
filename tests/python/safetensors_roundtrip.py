"""The Python half of safetensors_roundtrip_test.cpp.

    python safetensors_roundtrip.py write FILE
    python safetensors_roundtrip.py check FILE

`write` writes the contents below with Python's safetensors; `check` exits with 1 if FILE, which
the C++ writer made, does not hold exactly them. The C++ test states the same contents anew.
"""

import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
METADATA = {"format": 'pt "quoted" \\ and\n\u0001\u007f\u00e9\u20ac'}


def contents():
    values = torch.tensor([0.0, 1.0, 2.0, 77.0, 100.0, 127.0], dtype=torch.float64)
    tensors = {}
    for name, dtype in DTYPES.items():
        tensors[f"{name}.matrix"] = values.view(2, 3).to(dtype)
        tensors[f"{name}.scalar"] = torch.ones((), dtype=dtype)
        tensors[f"{name}.empty"] = torch.empty(2, 0, 3, dtype=dtype)
    tensors['"name"\\\n\u00e9'] = torch.tensor([float("inf"), -0.0, 1e-45])
    return tensors


def check(path):
    expected = contents()
    with safe_open(path, "pt") as file:
        if file.metadata() != METADATA:
            raise AssertionError(f"metadata: {file.metadata()}")
        if set(file.keys()) != set(expected):
            raise AssertionError(f"names: {sorted(file.keys())}")
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            same = found.dtype == tensor.dtype and found.shape == tensor.shape
            # Bytes tell -0 from 0.
            same = same and bytes(found.untyped_storage()) == bytes(tensor.untyped_storage())
            if not same:
                raise AssertionError(f"{name}: expected {tensor}, found {found}")


def main():
    command, path = sys.argv[1:]
    if command == "write":
        save_file(contents(), path, METADATA)
    else:
        check(path)


if __name__ == "__main__":
    main()
