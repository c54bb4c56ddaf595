"""Writes the node tests of ONNX's Attention operator, for onnx_test.cpp to run.

    python export_onnx.py DIRECTORY

DIRECTORY gets one safetensors file a case: inputs and expected outputs as `in.Q`, `out.Y` and so
on, the node's attributes as metadata. The forms that spell the operator out in other operators
(`_expanded`) are the same data again and are left out.
"""

import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.backend.test.case.node import collect_testcases
from safetensors.torch import save_file


def as_tensor(array):
    array = np.array(array, order="C")  # a copy, also of a scalar
    if array.dtype.name == "bfloat16":  # unknown to torch's numpy bridge
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def named(prefix, names, arrays):
    present = [name for name in names if name]
    assert len(present) == len(arrays), (names, len(arrays))
    return {f"{prefix}.{name}": as_tensor(array) for name, array in zip(present, arrays)}


def formal_names(given, formal):
    """The operator's own names, whatever the case calls its values; "" for what is left out."""
    return [parameter.name if name else "" for name, parameter in zip(given, formal)]


def export(case, directory):
    (node,) = case.model.graph.node
    opset = case.model.opset_import[0].version
    schema = onnx.defs.get_schema("Attention", opset)
    ((inputs, outputs),) = case.data_sets
    tensors = named("in", formal_names(node.input, schema.inputs), inputs)
    tensors |= named("out", formal_names(node.output, schema.outputs), outputs)
    attributes = {a.name: str(onnx.helper.get_attribute_value(a)) for a in node.attribute}
    save_file(tensors, directory / f"{case.name}.safetensors", attributes | {"opset": str(opset)})


def main(directory):
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with warnings.catch_warnings():  # making other operators' cases overflows here and there
        warnings.simplefilter("ignore", RuntimeWarning)
        cases = collect_testcases("Attention")
    for case in cases:
        if "_expanded" not in case.name:
            export(case, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
