"""README's table of models, from the list of those that are tested (models.txt).

python models_table.py           writes it into README.md
python models_table.py --check   exits with 1 if it is not what README.md has
"""

import sys
import textwrap
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = (
    "<!-- models: written by tests/python/models_table.py -->\n",
    "<!-- end of models -->\n",
)


def table():
    lines = (Path(__file__).parent / "models.txt").read_text().splitlines()
    computed = sorted(line for line in lines if line and ":" not in line)
    refused = {}
    for line in lines:
        name, colon, reason = line.partition(": ")
        if colon:
            refused.setdefault(reason, []).append(name)
    text = f"Computed, {len(computed)}: " + ", ".join(f"`{name}`" for name in computed) + "."
    rows = [*textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False), ""]
    rows += ["| refused | since it |", "| --- | --- |"]
    for reason, names in refused.items():
        rows.append("| " + ", ".join(f"`{name}`" for name in sorted(names)) + f" | {reason} |")
    return "\n".join(rows) + "\n"


def main():
    readme = README.read_text()
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    written = before + BEGIN + table() + END + after
    if "--check" in sys.argv[1:]:
        if readme != written:
            sys.exit("README.md: run tests/python/models_table.py")
    else:
        README.write_text(written)


if __name__ == "__main__":
    main()
