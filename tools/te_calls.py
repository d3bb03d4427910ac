# SPDX-License-Identifier: Apache-2.0
"""Writes docs/transformer_engine.md: what the versions of Transformer Engine accept, and nemo2's handling of it.

    python -m tools.te_calls

`tests/transformer_engine/facts.py` measures each version. The rows below word the questions, and nemo2's handling of
the answers, which `tests/transformer_engine/test_formats.py` and the tests of the settings check. `calls_in` reads the
calls of Megatron-Core and nemo2.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "transformer_engine"
PAGE = ROOT / "docs" / "transformer_engine.md"
PACKAGE = "transformer_engine"
MISSING = "–"


Row = tuple[str, Callable[[Any], str], str]
"""A question, its answer from a version's table (or from a part of it), and nemo2's handling."""


def accepted(*keys: str) -> Callable[[Any], str]:
    """Whether a version accepts something: the answer at ``keys`` is None, or the words with which it refuses."""

    def answer(table: Any) -> str:
        for key in keys:
            if key not in table:
                return MISSING
            table = table[key]
        return "yes" if table is None else "refused"

    return answer


def accepted_of(key: str) -> Callable[[Any], str]:
    """The names at ``key`` that a version accepts."""
    return lambda table: ", ".join(name for name, words in table.get(key, {}).items() if words is None) or MISSING


def _in_userbuffers(quantizer: str, before_quantizers: str) -> Callable[[Any], str]:
    """Versions before 2.8 have no such check: their table holds a sentence instead of answers."""
    return lambda table: (
        before_quantizers if isinstance(table["quantizers"], str) else accepted(quantizer)(table["quantizers"])
    )


def _two_modes(table: Any) -> str:
    return MISSING if table["userbuffers"]["two_modes"] is None else "yes"


def _delayed_wgrad(table: Any) -> str:
    refusal = table["userbuffers"]["beside_a_delayed_wgrad"]
    return "yes" if refusal is None else MISSING if "unexpected keyword" in refusal else "refused"


_DIFFERENCES: tuple[Row, ...] = (
    (
        "a layer with userbuffers, built before they are started",
        accepted("layers", "LayerNormLinear", "column ub_overlap_ag", "before_start"),
        "starts userbuffers first",
    ),
    ("userbuffers started twice", accepted("userbuffers", "twice"), "keeps equal userbuffers, stops different ones"),
    (
        "userbuffers without a process group",
        accepted("userbuffers", "without_process_group"),
        "starts userbuffers after the process groups",
    ),
    (
        "userbuffers of another size, after the first are destroyed",
        accepted("userbuffers", "other_size_after_destroy"),
        "supports it",
    ),
    ("userbuffers destroyed twice", accepted("userbuffers", "destroyed_twice"), "stops running userbuffers, once"),
    (
        "a buffer requested after userbuffers are destroyed",
        accepted("userbuffers", "asked_after_destroy"),
        "destroys userbuffers after the last step and after the graphs",
    ),
    ("delayed scaling in userbuffers", _in_userbuffers("Float8Quantizer", "yes"), "supports it"),
    ("current scaling in userbuffers", _in_userbuffers("Float8CurrentScalingQuantizer", "yes"), "supports it"),
    ("MXFP8 in userbuffers", _in_userbuffers("MXFP8Quantizer", "refused"), "rejects it before 2.4"),
    ("blockwise scaling in userbuffers", _in_userbuffers("Float8BlockQuantizer", "refused"), "rejects it"),
    ("NVFP4 in userbuffers", _in_userbuffers("NVFP4Quantizer", MISSING), "rejects it"),
    ("two sets of buffers, for layers in 8 and in 16 bits", _two_modes, "rejects it before 2.8"),
    ("a delayed weight gradient with a bulk exchange", _delayed_wgrad, "rejects it from 2.3 on"),
    (
        "an empty state, loaded into a layer",
        accepted("extra_states", "Linear", "empty"),
        "skips it when it loads weights",
    ),
    (
        "a checkpoint without the attention's state",
        accepted("extra_states", "DotProductAttention", "without"),
        "loads it",
    ),
    (
        "a checkpoint without a linear layer's state",
        accepted("extra_states", "Linear", "without"),
        "keeps the layer's own state",
    ),
)
_IN_A_FORMAT: tuple[Row, ...] = (
    ("a step through Megatron-Core", accepted("step"), "supports it"),
    ("parameters in the format (`fp8_param_gather`)", accepted("parameters_in_it"), "supports it"),
    ("layers recomputed in the backward", accepted("recomputed"), "supports it if the version does"),
    ("first and last layers in bf16", accepted("layers_in_16_bits"), "rejects it with delayed scaling"),
    (
        "its state, loaded as it was saved",
        accepted("state_loaded"),
        "allows unpickling after it has inspected the state",
    ),
    ("its state, loaded with unpickling allowed", accepted("state_loaded_with_leave"), "as above"),
    ("its state, loaded by a model in bf16", accepted("state_loaded_into_16_bits"), "as above"),
    ("the state of a model in bf16, loaded", accepted("state_of_16_bits_loaded"), "loads it"),
    ("GPUs (compute capability)", accepted_of("gpus"), "rejects others"),
    ("CUDA of torch", accepted_of("cuda"), "rejects older versions, on the ranks"),
    ("tokens of a product", accepted_of("tokens"), "rejects others"),
    ("widths of a product", accepted_of("width"), "rejects others"),
)
_CAPTURES: tuple[Row, ...] = (
    ("a step in bf16, captured, replayed, reset", accepted("bf16"), "rejects it before 2.6"),
    *(
        (f"the same in {name}", accepted(name), "as above")
        for name in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
    ),
    ("first and last layers in bf16, the others captured in fp8", accepted("some layers in 16 bits"), "as above"),
    ("norms recomputed inside a graph", accepted("norms recomputed"), "as above"),
    ("a hook on a captured layer", accepted("a hook on a layer"), "rejects it, and names the hook"),
    (
        "the hooks that gather parameters, in place",
        accepted("hooks that gather parameters"),
        "removes them during the capture",
    ),
    ("these hooks, removed and restored", accepted("these hooks, paused"), "as above"),
    (
        "one layer in evaluation, others in training",
        accepted("one layer in evaluation"),
        "captures within training steps",
    ),
    (
        "inside torch.autocast",
        accepted("inside torch.autocast"),
        "doesn't use it: parameters have the precision's dtype",
    ),
    ("captured twice by one helper", accepted("captured twice"), "captures once per run"),
    (
        "captured again by the next run of the process",
        accepted("a second run of the process"),
        "deletes the graphs when a run ends",
    ),
    ("a step without graphs after they are deleted", accepted("a step after their end"), "as above"),
)
_GROUPS_SET_LATER: tuple[Row, ...] = (
    ("a group set after the layer is built", accepted("after it was built"), "sets the group when it builds the layer"),
    ("a group of another exchange, set later", accepted("of another exchange, later"), "uses one exchange per run"),
    ("the group removed later", accepted("none, later"), "as above"),
)

_ON_GPUS_ONLY = (
    (
        "any GPU",
        "a capture allocates nothing, waits for nothing and reads nothing back (`cudaErrorStreamCapture...`)",
        "rules `experts-are-captured-in-part` and `captured-steps-are-alike`; the step rejects packed samples",
    ),
    ("any GPU", "random generators in a capture are graph-safe", "turns `use_te_rng_tracker` on with graphs"),
    (
        "several GPUs",
        "the GPUs of a node can map the buffers' memory (`CommOverlapP2P`)",
        "`tp_comm_bootstrap_backend`; otherwise Transformer Engine's own error",
    ),
    ("cuDNN", "a kernel for the size, mask and dtype (`get_fused_attn_backend`)", "`auto` takes another backend"),
    (
        "flash-attn",
        "the installed version is supported",
        "`auto` takes another backend, with Transformer Engine's warning",
    ),
)
"""Conditions that no machine without a GPU can try: read in the sources."""


def tables() -> dict[str, Any]:
    """The measured tables by version, oldest first."""
    by_version = {path.stem: json.loads(path.read_text()) for path in TABLES.glob("*.json")}
    return dict(sorted(by_version.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def calls_in(root: Path) -> dict[str, set[str]]:
    """A package's calls and subclasses of Transformer Engine, with the keywords that it passes."""
    calls: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        text = path.read_text()
        if PACKAGE in text:
            for name, keywords in _calls_of(ast.parse(text)):
                calls.setdefault(name, set()).update(keywords)
    return calls


def _calls_of(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(rf"{PACKAGE}(\.|$)", node.module or ""):
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            ours = [one for one in node.names if re.match(rf"{PACKAGE}(_torch)?(\.|$)", one.name)]
            names |= {
                one.asname or one.name.split(".")[0]: one.name if one.asname else one.name.split(".")[0] for one in ours
            }

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := dotted(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)) is not None:
            yield name, {one.arg for one in node.keywords if one.arg}
        elif isinstance(node, ast.ClassDef):
            yield from ((name, set()) for base in node.bases if (name := dotted(base)) is not None)


def page() -> str:
    """The page's text."""
    by_version = tables()
    versions = list(by_version.values())
    heads = [version.rpartition(".")[0] for version in by_version]

    def part(key: str) -> list[Any]:
        return [table[key] for table in versions]

    def answers(rows: Iterable[Row], parts: list[Any]) -> str:
        lines = ([words, *map(answer, parts), handling] for words, answer, handling in rows)
        return _table(["tested", *heads, "nemo2"], lines)

    def names(first: str, parts: list[Any], accepted_by: Callable[[Any], list[str] | None]) -> str:
        lines = ([case, *(", ".join(accepted_by(one[case]) or [MISSING]) for one in parts)] for case in parts[0])
        return _table([first, *heads], lines)

    lacking = sorted(
        name for name in versions[-1]["signatures"] if any(one.get(name) is None for one in part("signatures"))
    )
    presence = (
        [
            f"`{name.removeprefix(f'{PACKAGE}.')}`",
            *(MISSING if one.get(name) is None else "yes" for one in part("signatures")),
        ]
        for name in lacking
    )
    return _PAGE.format(
        differences=answers(_DIFFERENCES, versions),
        formats="\n\n".join(
            f"### {name}\n\n{answers(_IN_A_FORMAT, [formats[name] for formats in part('formats')])}"
            for name in versions[0]["formats"]
        ),
        attention=names("with", part("attention"), lambda ways: [way for way, words in ways.items() if words is None]),
        backends=names("with", part("backends"), lambda backends: backends),
        later=answers(_GROUPS_SET_LATER, part("exchange_groups")),
        captures=answers(_CAPTURES, part("graphs")),
        gpus=_table(["needs", "condition", "nemo2"], _ON_GPUS_ONLY),
        calls=_table([f"{PACKAGE}.", *heads], presence),
    )


def _table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


_PAGE = """# Transformer Engine, version by version

<!-- Written by `python -m tools.te_calls`; a test compares. -->

This page shows which versions of Transformer Engine support which formats and calls, and how nemo2 handles the
differences. Use it to choose a version, or to understand why nemo2 rejects a recipe.

All answers come from each version's own Python code, imported and called on a machine without a GPU. Kernels were
replaced by empty results. The answers therefore don't show what a kernel itself rejects.

- `tests/transformer_engine/facts.py` asks the questions and stores the answers in `tests/transformer_engine`.
- A stand-in that answers from these tables carries whole training runs in the tests.
- A step in each number format runs through Megatron-Core's own layers and contexts.

In the tables, *yes* means that the version accepts the call, *refused* that it raises an error, and – that it doesn't
have it. The last column says how nemo2 handles it.

## Differences between versions

{differences}

## Steps in each format

Each test runs three layers, forward and backward, with the fields that `trainer.plugins` sets in the model's
configuration (`tests/transformer_engine/steps.py`). The last rows list the accepted sizes among
1, 4, 8, 16, 32, 64, 128. Newer versions leave some of the checks to their kernels.

{formats}

## Attention over context-parallel ranks

The table lists the accepted values of `cp_comm_type`, with two ranks (`tests/transformer_engine/attention.py`).
'a2a+p2p' is rejected because its groups are missing. nemo2 rejects the other unsupported combinations before a run.

{attention}

## Attention backends

The table lists the backends that the version leaves on a Hopper GPU with flash-attn and a suitable cuDNN
kernel (`tests/transformer_engine/backends.py`). The version takes the first of them. nemo2 rejects a recipe whose
`attention_backend` requires another one.

{backends}

## Groups of context-parallel ranks

Megatron-Core calls `set_context_parallel_group` only for packed samples (`tests/transformer_engine/attention.py`).

{later}

## Layers as CUDA graphs

These captures use `cuda_graph_impl='transformer_engine'` through nemo2's training loop, Megatron-Core's
helper and the version's own `make_graphed_callables` (`tests/transformer_engine/graphs.py`). A captured graph is empty.
Before 2.6 Megatron-Core doesn't find its helpers.

{captures}

## What only a GPU can answer

These conditions come from the sources. No version checks them without a GPU.

{gpus}

## Calls that some versions don't have

Megatron-Core and nemo2 use these calls. Megatron-Core checks the version before it uses one, and works without it or
rejects the setting. Every version has the calls that aren't listed.

{calls}
"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
