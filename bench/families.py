# SPDX-License-Identifier: Apache-2.0
"""How far each family of models is from transformers' own, and how long its code is, beside Megatron-Bridge's.

python -m tools.hugging_face --measure    # the differences, of each tiny model: bench/results/hugging-face-logits.json
python bench/families.py FOLDER_OF_MEGATRON_BRIDGE/src/megatron/bridge/models

A line of code holds more than a comment or a docstring. Megatron-Bridge's are those of the modules that register an architecture
of the family, and of their providers. It needs neither torch nor transformers.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).with_name("results") / "hugging-face-logits.json"
LAYOUTS = ("TP 2, SP", "PP 2", "EP 2")
MODELS = Path(__file__).resolve().parents[1] / "nemo2" / "models"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """The lines of a module with code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for one in tokens if one.type not in _NO_CODE for line in range(one.start[0], one.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def bridges(root: Path) -> dict[str, set[Path]]:
    """Megatron-Bridge's modules by the architecture that they register."""
    modules = defaultdict(set)
    for file in root.rglob("*_bridge.py"):
        if "conversion" in file.parts:  # its docstrings register examples
            continue
        text = file.read_text()
        for name in re.findall(r'register_bridge\(\s*source="?(\w+)', text):
            constant = re.search(rf'^{name} = "(\w+)"', text, re.MULTILINE)
            provider = file.with_name(file.name.replace("_bridge", "_provider"))
            modules[constant[1] if constant else name] |= {one for one in (file, provider) if one.is_file()}
    return modules


def table(bridge: Path) -> str:
    """The families as Markdown, in the order of their modules."""
    theirs = bridges(bridge)
    measured = json.loads(FIGURES.read_text()).values()
    head = ("file", "models", "in", "out", *LAYOUTS, "bytes", "greedy tokens", "lines", "Megatron-Bridge's")
    rows, compared = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], [0, 0]
    for file in sorted(MODELS.glob("*.py")):
        text = file.read_text()
        architectures = re.findall(r'"(\w+(?:ForCausalLM|LMHeadModel|ChatGLMModel))"', text)
        if not architectures:
            continue
        own, files = code_lines(text), {one for name in architectures for one in theirs.get(name, ())}
        beside = sum(code_lines(one.read_text()) for one in files)
        if files:
            compared = [compared[0] + own, compared[1] + beside]
        cells = figures([one for one in measured if one.get("family") == file.stem])
        rows.append(f"| `{file.name}` | {' | '.join(cells)} | {own} | {beside if files else '–'} |")
    total = ["all that both have", *[""] * (len(head) - 3), *map(str, compared)]
    return "\n".join([*rows, f"| {' | '.join(total)} |"])


def figures(rows: list[dict[str, Any]]) -> list[str]:
    """Of the tiny models of a family how many they are, the greatest differences in millionths, and what is equal in all."""
    if not rows:
        return ["0", *"–" * (len(LAYOUTS) + 4)]
    differences = [[row["in"] for row in rows], [row["out"] for row in rows]]
    differences += [[row["layouts"].get(layout) for row in rows] for layout in LAYOUTS]
    greatest = (max((one for one in each if one is not None), default=None) for each in differences)
    return [
        str(len(rows)),
        *("–" if one is None else f"{one * 1e6:.1f}" for one in greatest),
        "equal" if not any(row["other_bytes"] for row in rows) else "different",
        f"{sum(row['greedy'] for row in rows)} equal" if all(row["greedy"] for row in rows) else "different",
    ]


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
