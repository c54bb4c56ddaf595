"""Runs the example sentence_relevance and compares its numbers with autograd's in float64.

    python sentence_relevance_test.py EXAMPLE WORD_PIECES

The reference is the model's equations in Python's torch, with the attention weights as leaves of
their own gradients (`retain_grad`), and Chefer, Gur & Wolf's sums over its layers. The tokens are
those of export_minilm.py. 1e-3 of the largest relevance is what float32 may leave after six
layers of gradients; it leaves about 2e-5.

Without a package it ends with 77 and a line that says which is missing.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import numpy as np
    import tokenizers  # noqa: F401, for the script
    import torch
    from torch.nn import functional

    from export_minilm import Encoder, model_directory, word_pieces

    MODEL = model_directory()
except ImportError as error:
    print(f"SKIPPED: {error}; `bash cmake/bootstrap.sh test` installs it")
    sys.exit(77)

SENTENCES = (
    "A man is playing the guitar, and everyone in the small bar listens.",
    "Somebody makes music.",
)


class TorchEncoder(Encoder):
    """The same equations on tensors that record gradients."""

    def __init__(self, directory):
        super().__init__(directory)
        self.weights = {name: torch.from_numpy(w) for name, w in self.weights.items()}
        self.maps = []

    def layer_norm(self, x, name):
        parameters = (self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
        return functional.layer_norm(x, x.shape[-1:], *parameters, self.epsilon)

    def attention(self, x, name):
        T, E = x.shape

        def heads(role):
            projected = self.linear(x, f"{name}.self.{role}")
            return projected.view(T, self.heads, -1).transpose(0, 1)

        q, k, v = heads("query"), heads("key"), heads("value")
        weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(E // self.heads), -1)
        weights.requires_grad_()
        weights.retain_grad()
        self.maps.append(weights)
        return self.linear((weights @ v).transpose(0, 1).reshape(T, E), f"{name}.output.dense")

    def encode(self, ids):
        self.maps = []
        x = self.embed(torch.tensor([ids]))[0]
        for n in range(self.layers):
            name = f"encoder.layer.{n}"
            attended = self.attention(x, f"{name}.attention")
            x = self.layer_norm(x + attended, f"{name}.attention.output.LayerNorm")
            inner = functional.gelu(self.linear(x, f"{name}.intermediate.dense"))
            x = x + self.linear(inner, f"{name}.output.dense")
            x = self.layer_norm(x, f"{name}.output.LayerNorm")
        return functional.normalize(x.mean(0), dim=0)


def reference(vocabulary):
    """The similarity, and what each token of the first sentence gave to it."""
    index = {piece: i for i, piece in enumerate(vocabulary)}
    ids = [[index[piece] for piece in word_pieces(text, index)] for text in SENTENCES]
    encoder = TorchEncoder(MODEL)
    target = encoder.encode(ids[1]).detach()
    similarity = encoder.encode(ids[0]) @ target
    similarity.backward()
    identity = torch.eye(len(ids[0]), dtype=torch.float64)
    relevance = identity
    for weights in encoder.maps:
        relevance = relevance + (weights * weights.grad).clamp(min=0).mean(0) @ relevance
    return similarity.item(), (relevance - identity).mean(0).detach().numpy()


def main():
    example, script = sys.argv[1:]
    vocabulary = (MODEL / "vocab.txt").read_text(encoding="utf-8").splitlines()
    similarity, expected = reference(vocabulary)
    with tempfile.TemporaryDirectory(prefix="mha-relevance-") as name:
        folder = Path(name)
        files = [folder / "tokens.json", folder / "other.json"]
        for file, text in zip(files, SENTENCES):
            file.write_bytes(subprocess.check_output([sys.executable, script, MODEL, text]))
        subprocess.run([example, MODEL, *files, folder], check=True)
        found = json.loads((folder / "relevance.json").read_text())
        is_png = (folder / "relevance.png").read_bytes().startswith(b"\x89PNG")
        picture = (folder / "relevance.svg").read_text(encoding="utf-8")
    difference = np.abs(np.array(found["relevance"]) - expected).max() / expected.max()
    print(f"similarity {similarity:.4f}; largest difference {difference:.1e} of the largest")
    if not (abs(found["similarity"] - similarity) < 1e-5 and difference < 1e-3):
        raise AssertionError(f"expected {similarity}, {expected}; found {found}")
    if not (is_png and "guitar" in picture):
        raise AssertionError("the pictures are not all there")


if __name__ == "__main__":
    main()
