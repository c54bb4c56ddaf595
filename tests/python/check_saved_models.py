"""Lets transformers load layers that mha::save wrote, and compares what the models return.

    python check_saved_models.py MODELS DIRECTORY

MODELS is what model_layers.py wrote. Each folder in DIRECTORY has the name of one of its models
and files with some of its layers, under the model's own names, written by saved_models_test.cpp.
Exits with 1 if a name is not the model's, if transformers misses one, or if a result differs.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from model_layers import inputs_of

TOLERANCE = 2e-6  # of the largest number


def loaded(folder):
    model, found = AutoModel.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not found[problem], f"{folder}: {problem}: {found[problem]}"
    return model.eval()


def results(model):
    arguments, _ = inputs_of(model)
    with torch.no_grad():
        returned = model(**arguments)
    return {name: value for name, value in returned.items() if isinstance(value, torch.Tensor)}


def check(model, saved, folder):
    expected = results(loaded(model))
    tensors = load_file(model / "model.safetensors")
    replaced = {}
    for file in saved.iterdir():
        for name, tensor in load_file(file).items():
            assert name in tensors, f"{saved.name}: {name} is none of the model's"
            assert name not in replaced or torch.equal(tensor, replaced[name]), name
            replaced[name] = tensor
    shutil.copy(model / "config.json", folder)
    save_file(tensors | replaced, folder / "model.safetensors", {"format": "pt"})
    actual = results(loaded(folder))
    assert actual.keys() == expected.keys() and actual
    for name, tensor in expected.items():
        difference = (actual[name] - tensor).abs().max().item()
        if not difference <= TOLERANCE * tensor.abs().max().item():
            raise AssertionError(f"{saved.name}: {name} differs by {difference}")
    # The test would not see a layer that is not read.
    wrong = {name: tensor / 2 for name, tensor in replaced.items()}
    save_file(tensors | wrong, folder / "model.safetensors", {"format": "pt"})
    actual = results(loaded(folder))
    assert any(not torch.allclose(actual[name], expected[name]) for name in expected), saved.name


def main():
    torch.set_num_threads(1)
    models, directory = Path(sys.argv[1]), Path(sys.argv[2])
    saved = sorted(path for path in directory.iterdir() if path.is_dir())
    if not saved:
        raise FileNotFoundError(f"{directory} holds no model")
    for path in saved:
        with tempfile.TemporaryDirectory() as folder:
            check(models / path.name, path, Path(folder))
    print(f"transformers reads the saved layers of {len(saved)} models")


if __name__ == "__main__":
    main()
