"""Runs the example sentence_maps and compares its embeddings with the model's own equations.

    python sentence_maps_test.py EXAMPLE WORD_PIECES

EXAMPLE is the program, WORD_PIECES the script beside its source. The reference is the encoder of
export_minilm.py, NumPy in float64 without torch, over token ids that it finds without the
package `tokenizers`; then the mean over the tokens, normalised. 1e-5, for the cosine and for each
of the 384 numbers, is what the example promises; float32 leaves about 1e-7.

Without a package it ends with 77 and a line that says which is missing.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import numpy as np
    import tokenizers  # noqa: F401, for the script

    from export_minilm import Encoder, model_directory, word_pieces

    MODEL = model_directory()
except ImportError as error:
    print(f"SKIPPED: {error}; `bash cmake/bootstrap.sh test` installs it")
    sys.exit(77)

SENTENCES = (
    "The cat slept on the warm stones because it was tired.",
    "Na\u00efve eigenvalues aren't antidisestablishmentarianism!",
    "Hi",
)


def reference(text):
    """The tokens and the embedding by the model's equations."""
    vocabulary = (MODEL / "vocab.txt").read_text(encoding="utf-8").splitlines()
    index = {piece: i for i, piece in enumerate(vocabulary)}
    tokens = word_pieces(text, index)
    ids = np.array([[index[token] for token in tokens]])
    encoder, mask = Encoder(MODEL), np.ones_like(ids)
    x, maps = encoder.embed(ids), []
    for n in range(encoder.layers):
        name = f"encoder.layer.{n}"
        output, weights = encoder.attention(x, mask, f"{name}.attention")
        maps.append(weights[0])
        x = encoder.rest_of_layer(x, output, name)
    mean = x[0].mean(0)
    return tokens, mean / np.linalg.norm(mean), maps


def main():
    example, script = sys.argv[1:]
    for text in SENTENCES:
        tokens, expected, _ = reference(text)
        with tempfile.TemporaryDirectory(prefix="mha-sentence-") as folder:
            tokens_file = Path(folder) / "tokens.json"
            tokens_file.write_bytes(subprocess.check_output([sys.executable, script, MODEL, text]))
            written = json.loads(tokens_file.read_text())["tokens"]
            subprocess.run([example, MODEL, tokens_file, folder, "0.0", "5.11"], check=True)
            found = np.array(json.loads((Path(folder) / "embedding.json").read_text()))
            pages = {path.name for path in Path(folder).glob("layer*.html")}
            picture = (Path(folder) / "heads.svg").read_text(encoding="utf-8")
        if written != tokens:
            raise AssertionError(f"expected the tokens {tokens}, found {written}")
        cosine = found @ expected / np.linalg.norm(found)
        difference = np.abs(found - expected).max()
        print(f"{len(tokens)} tokens: cosine 1 - {1 - cosine:.1e}, largest difference {difference:.1e}")
        if not (cosine >= 0.99999 and difference < 1e-5):
            raise AssertionError(f"cosine {cosine}, largest difference {difference}")
        if pages != {f"layer{n}.html" for n in range(6)} or "layer 5, head 11" not in picture:
            raise AssertionError(f"the pictures are not all there: {pages}")


if __name__ == "__main__":
    main()
