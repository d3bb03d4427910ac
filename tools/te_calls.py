# SPDX-License-Identifier: Apache-2.0
"""Writes docs/transformer_engine.md: every call into Transformer Engine by version, and nemo2's handling of it.

    python -m tools.te_calls

The calls come from the sources of Megatron-Core and nemo2 (`calls_in`). `tests/transformer_engine/facts.py` measures which
calls a version has and refuses. `GROUPS` describes nemo2's handling, with the test that checks it.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "transformer_engine"
PAGE = ROOT / "docs" / "transformer_engine.md"
PACKAGE = "transformer_engine"


class Group(NamedTuple):
    """Calls that belong together: a pattern of their names, what a run does about them, and the test that holds it."""

    title: str
    names: str
    does: str
    test: str


_BUFFERS = "tests/nemo2/mcore/overlap/test_userbuffers.py"
_RUNS = f"{_BUFFERS}::test_a_run_builds_its_layers_over_started_buffers_trains_as_without_and_frees_them"
_FP8 = "tests/nemo2/mcore/test_fp8.py::test_one_value_sets_model_buffers_and_optimizer"
GROUPS = (
    Group(
        "Layers",
        r"pytorch\.(Linear|LayerNormLinear|LayerNormMLP|LayerNorm|RMSNorm)$",
        "Megatron-Core builds them after the process groups and the userbuffers, in every entry point.",
        _RUNS,
    ),
    Group(
        "Userbuffers",
        r"module\.base\.(initialize_ub|destroy_ub)$",
        "nemo2 starts them once, before the first layer, with the version's arguments, and stops them when the run ends.",
        f"{_BUFFERS}::test_the_same_buffers_stay_and_others_take_their_place",
    ),
    Group(
        "Recipes of fp8 and fp4",
        r"common\.recipe\.|fp8\.check_",
        "`trainer.plugins` names a recipe. The launch rejects a recipe that the GPU or the version lacks.",
        "tests/tools/test_te_calls.py::test_a_recipe_is_refused_where_the_version_has_none",
    ),
    Group(
        "Contexts of fp8",
        r"(fp8_autocast|autocast|FP8GlobalStateManager(\.\w+)?)$",
        "Megatron-Core enters them around each layer, with the fields that `trainer.plugins` sets.",
        _FP8,
    ),
    Group(
        "Primary weights in fp8",
        r"(fp8_model_init|quantized_model_init|tensor\.QuantizedTensor|float8_tensor\..*|tensor\.utils\.\w+|cast_to_fp8)$",
        "`fp8_param_gather` sets the model and the buffers together. It is rejected without `fp8`.",
        "tests/nemo2/preflight/checks/test_rules.py::test_the_broken_recipe_is_refused_by_its_rule",
    ),
    Group(
        "CUDA graphs",
        r"(pytorch\.make_graphed_callables|graph\.\w+|make_weak_ref)$",
        "Megatron-Core's helpers call them if `cuda_graph_impl` is set. The launch rejects a model that can't be captured.",
        "tests/nemo2/mcore/parallel/test_cuda_graphs.py",
    ),
    Group(
        "Attention and context parallelism",
        r"(DotProductAttention|attention\..*|thd_get_partitioned_indices)$",
        "Without `cp_comm_type` ranks use a ring. Transformer Engine picks the backend, and `attention_backend` can narrow it.",
        "tests/nemo2/report/trace/test_overlap.py::test_keys_and_values_go_round_the_ring_while_a_rank_attends",
    ),
    Group(
        "Random streams, recomputation and offloading",
        r"(CudaRNGStatesTracker|distributed\.\w+|pytorch\.checkpoint|get_cpu_offload_context)$",
        "`recompute_*`, `cpu_offloading` and `use_te_rng_tracker` choose them. CUDA graphs turn `use_te_rng_tracker` on.",
        "tests/nemo2/preflight/checks/test_rules.py::test_the_broken_recipe_is_refused_by_its_rule",
    ),
    Group(
        "Experts",
        r"(pytorch\.GroupedLinear|moe_\w+|pytorch\.ep\.\w+|general_gemm|get_workspace|get_dummy_wgrad|rmsnorm_fwd)$",
        "Megatron-Core builds them if `moe_grouped_gemm`, `moe_permute_fusion` or the dispatcher requires them.",
        "tests/nemo2/preflight/checks/test_rules.py::test_the_mended_recipe_is_refused_by_none",
    ),
    Group(
        "Operations",
        r"pytorch\.ops\.\w+$",
        "`use_transformer_engine_op_fuser` uses them. No recipe sets it.",
        "tests/tools/test_te_calls.py::test_no_recipe_asks_for_the_fused_operations",
    ),
    Group(
        "Optimizer",
        r"optimizers\.\w+$",
        "nemo2 uses Transformer Engine's Adam if it is installed, and torch's Adam otherwise, with the same state.",
        "tests/nemo2/base/backend/test_fused_adam.py",
    ),
    Group(
        "Loss and helpers",
        r"(parallel_cross_entropy|nvtx_range_\w+|round_up_to_nearest_multiple)$",
        "The loss runs if `cross_entropy_fusion_impl` is 'te'. Helpers have no setting.",
        "tests/nemo2/base/backend/test_cuda.py",
    ),
)


class Behaviour(NamedTuple):
    """A difference between versions, read off the tables: a question, the answer of a table in a word, what we do, the test."""

    asked: str
    answer: Any
    does: str
    test: str


def _refused(*path: str) -> Any:
    def answer(table: Any) -> str:
        for key in path:
            table = table[key]
        return "yes" if table is None else "refused"

    return answer


def _carries(quantizer: str, before: str) -> Any:
    def answer(table: Any) -> str:
        found = table["quantizers"]
        if isinstance(found, str):
            return before
        return "–" if quantizer not in found else "yes" if found[quantizer] is None else "refused"

    return answer


_LIMITS = "tests/nemo2/mcore/overlap/test_userbuffer_limits.py"
_FORMATS = f"{_LIMITS}::test_a_format_is_refused_where_the_version_refuses_it"
BEHAVIOURS = (
    Behaviour(
        "a layer with userbuffers, built before they are started",
        _refused("layers", "LayerNormLinear", "column ub_overlap_ag", "before_start"),
        "starts userbuffers first",
        _RUNS,
    ),
    Behaviour(
        "userbuffers started twice",
        _refused("userbuffers", "twice"),
        "keeps equal userbuffers, stops different ones",
        GROUPS[1].test,
    ),
    Behaviour(
        "userbuffers without a process group",
        _refused("userbuffers", "without_process_group"),
        "starts userbuffers after the process groups",
        _RUNS,
    ),
    Behaviour(
        "userbuffers of another size, after the first are destroyed",
        _refused("userbuffers", "other_size_after_destroy"),
        "supports it",
        GROUPS[1].test,
    ),
    Behaviour(
        "userbuffers destroyed twice",
        _refused("userbuffers", "destroyed_twice"),
        "stops running userbuffers, once",
        GROUPS[1].test,
    ),
    Behaviour(
        "a buffer requested after userbuffers are destroyed",
        _refused("userbuffers", "asked_after_destroy"),
        "destroys userbuffers after the last step and after the graphs",
        _RUNS,
    ),
    Behaviour("delayed scaling in userbuffers", _carries("Float8Quantizer", "yes"), "supports it", _FORMATS),
    Behaviour(
        "current scaling in userbuffers", _carries("Float8CurrentScalingQuantizer", "yes"), "supports it", _FORMATS
    ),
    Behaviour("MXFP8 in userbuffers", _carries("MXFP8Quantizer", "refused"), "rejects it before 2.4", _FORMATS),
    Behaviour("blockwise scaling in userbuffers", _carries("Float8BlockQuantizer", "refused"), "rejects it", _FORMATS),
    Behaviour("NVFP4 in userbuffers", _carries("NVFP4Quantizer", "–"), "rejects it", _FORMATS),
    Behaviour(
        "two sets of buffers, for layers in 8 and in 16 bits",
        lambda table: "–" if table["userbuffers"]["two_modes"] is None else "yes",
        "rejects it before 2.8",
        f"{_LIMITS}::test_layers_in_two_dtypes_need_two_sets_of_buffers",
    ),
    Behaviour(
        "a delayed weight gradient with a bulk exchange",
        lambda table: (
            "yes"
            if table["userbuffers"]["beside_a_delayed_wgrad"] is None
            else "–"
            if "unexpected keyword" in table["userbuffers"]["beside_a_delayed_wgrad"]
            else "refused"
        ),
        "rejects it from 2.3 on",
        f"{_LIMITS}::test_a_delayed_weight_gradient_has_no_exchange_beside_it",
    ),
    Behaviour(
        "an empty state, loaded into a layer",
        _refused("extra_states", "Linear", "empty"),
        "skips it when it loads weights",
        f"{_BUFFERS}::test_the_oldest_version_resumes_what_the_newest_saved",
    ),
    Behaviour(
        "a checkpoint without the attention's state",
        _refused("extra_states", "DotProductAttention", "without"),
        "loads it",
        f"{_BUFFERS}::test_the_newest_version_resumes_and_generates",
    ),
    Behaviour(
        "a checkpoint without a linear layer's state",
        _refused("extra_states", "Linear", "without"),
        "keeps the layer's own state",
        f"{_BUFFERS}::test_the_newest_version_resumes_and_generates",
    ),
)


class Asked(NamedTuple):
    """A question to a format's steps (`tests/transformer_engine/steps.py`), by its answer's key; what we do, and its test."""

    key: str
    asked: str
    does: str
    test: str


_OURS = "tests/transformer_engine/test_formats.py"
_STATES = f"{_OURS}::test_a_state_that_the_version_refuses_is_loaded_with_the_leave_that_we_give"
STEPS = (
    Asked(
        "step",
        "a step through Megatron-Core",
        "supports it",
        f"{_OURS}::test_a_format_that_a_version_has_goes_through_a_step",
    ),
    Asked(
        "parameters_in_it",
        "parameters in the format (`fp8_param_gather`)",
        "supports it",
        f"{_OURS}::test_a_format_that_a_version_has_goes_through_a_step",
    ),
    Asked(
        "recomputed",
        "layers recomputed in the backward",
        "supports it if the version does",
        f"{_OURS}::test_a_format_that_a_version_has_goes_through_a_step",
    ),
    Asked(
        "layers_in_16_bits",
        "first and last layers in bf16",
        "rejects it with delayed scaling",
        "tests/nemo2/preflight/checks/test_rules.py::test_the_broken_recipe_is_refused_by_its_rule",
    ),
    Asked(
        "state_loaded",
        "its state, loaded as it was saved",
        "allows unpickling after it has inspected the state",
        _STATES,
    ),
    Asked("state_loaded_with_leave", "its state, loaded with unpickling allowed", "as above", _STATES),
    Asked("state_loaded_into_16_bits", "its state, loaded by a model in bf16", "as above", _STATES),
    Asked("state_of_16_bits_loaded", "the state of a model in bf16, loaded", "loads it", _STATES),
)
SIZES = (
    Asked(
        "gpus",
        "GPUs (compute capability)",
        "rejects others",
        f"{_OURS}::test_a_gpu_is_refused_where_the_version_refuses_it",
    ),
    Asked(
        "cuda",
        "CUDA of torch",
        "rejects older versions, on the ranks",
        f"{_OURS}::test_a_cuda_is_refused_where_the_version_refuses_it",
    ),
    Asked("tokens", "tokens of a product", "rejects others", f"{_OURS}::test_sizes_that_a_version_refuses_are_refused"),
    Asked("width", "widths of a product", "rejects others", f"{_OURS}::test_sizes_that_a_version_refuses_are_refused"),
)
_GRAPHS = "tests/nemo2/mcore/parallel/test_cuda_graphs.py"
_CAPTURED = f"{_OURS}::test_a_captured_step_of_each_format_goes_through_or_is_refused_before"
_MEETS = f"{_OURS}::test_preconditions_of_a_capture_are_refusals_that_we_meet"
CAPTURES = (
    Asked("bf16", "a step in bf16, captured, replayed, reset", "rejects it before 2.6", _CAPTURED),
    *(
        Asked(name, f"the same in {name}", "as above", _CAPTURED)
        for name in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
    ),
    Asked("some layers in 16 bits", "first and last layers in bf16, the others captured in fp8", "as above", _CAPTURED),
    Asked("norms recomputed", "norms recomputed inside a graph", "as above", _CAPTURED),
    Asked(
        "a hook on a layer",
        "a hook on a captured layer",
        "rejects it, and names the hook",
        f"{_GRAPHS}::test_hooks_on_captured_layers_are_refused",
    ),
    Asked(
        "hooks that gather parameters",
        "the hooks that gather parameters, in place",
        "removes them during the capture",
        f"{_GRAPHS}::test_layers_are_captured_after_the_warm_up_and_train_as_without",
    ),
    Asked(
        "these hooks, paused",
        "these hooks, removed and restored",
        "as above",
        f"{_GRAPHS}::test_layers_are_captured_after_the_warm_up_and_train_as_without",
    ),
    Asked(
        "one layer in evaluation",
        "one layer in evaluation, others in training",
        "captures within training steps",
        _MEETS,
    ),
    Asked(
        "inside torch.autocast",
        "inside torch.autocast",
        "doesn't use it: parameters have the precision's dtype",
        "tests/nemo2/mcore/test_precision.py::test_it_is_lightnings_mixed_precision_without_its_autocast_and_scaler",
    ),
    Asked("captured twice", "captured twice by one helper", "captures once per run", _MEETS),
    Asked(
        "a second run of the process",
        "captured again by the next run of the process",
        "deletes the graphs when a run ends",
        _CAPTURED,
    ),
    Asked("a step after their end", "a step without graphs after they are deleted", "as above", _CAPTURED),
)
LATER = (
    Asked(
        "after it was built", "a group set after the layer is built", "sets the group when it builds the layer", _MEETS
    ),
    Asked("of another exchange, later", "a group of another exchange, set later", "uses one exchange per run", _MEETS),
    Asked("none, later", "the group removed later", "as above", _MEETS),
)
READ = (
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
BACKENDS_TEST = f"{_OURS}::test_a_back_end_that_a_version_does_not_leave_is_refused"
ATTENTION_TEST = f"{_OURS}::test_what_a_version_does_not_exchange_is_refused"


def tables() -> dict[str, Any]:
    """The measured tables by version, oldest first."""
    found = {path.stem: json.loads(path.read_text()) for path in TABLES.glob("*.json")}
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def calls_in(root: Path) -> dict[str, set[str]]:
    """A package's calls and subclasses of Transformer Engine, with the keywords that it passes."""
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        text = path.read_text()
        if PACKAGE in text:
            for name, keywords in _calls_of(ast.parse(text)):
                found.setdefault(name, set()).update(keywords)
    return found


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


def group_of(name: str) -> Group:
    """The one group of a call.

    Raises:
        LookupError: there are none, or several.
    """
    found = [group for group in GROUPS if re.search(rf"(^|\.)({group.names})", name)]
    if len(found) != 1:
        raise LookupError(f"{name} is in {len(found)} groups: {[group.title for group in found]}")
    return found[0]


def page() -> str:
    """The page: behaviours first, then the calls by group."""
    by_version = tables()
    heads = " | ".join(version.rpartition(".")[0] for version in by_version)
    rule = "|".join("---" for _ in range(len(by_version) + 1))
    lines = [_HEAD, f"| tested | {heads} | nemo2 |", f"|{rule}|---|"]
    for one in BEHAVIOURS:
        cells = " | ".join(one.answer(table) for table in by_version.values())
        lines.append(f"| {one.asked} | {cells} | {one.does} |")
    lines += ["", "## Steps in each format", "", _STEPS]
    for recipe in next(iter(by_version.values()))["formats"]:
        lines += ["", f"### {recipe}", "", f"| tested | {heads} | nemo2 |", f"|{rule}|---|"]
        found = [table["formats"][recipe] for table in by_version.values()]
        for one in STEPS:
            lines.append(f"| {one.asked} | {' | '.join(_answer(format_, one.key) for format_ in found)} | {one.does} |")
        for one in SIZES:
            lines.append(f"| {one.asked} | {' | '.join(_taken(format_, one.key) for format_ in found)} | {one.does} |")
    lines += ["", "## Attention over context-parallel ranks", "", _ATTENTION]
    lines += ["", f"| with | {heads} |", f"|{rule}|"]
    for beside in next(iter(by_version.values()))["attention"]:
        ways = [table["attention"][beside] for table in by_version.values()]
        cells = (", ".join(way for way, words in found.items() if words is None) or "–" for found in ways)
        lines.append(f"| {beside} | {' | '.join(cells)} |")
    lines += ["", "## Attention backends", "", _BACKENDS, "", f"| beside | {heads} |", f"|{rule}|"]
    for beside in next(iter(by_version.values()))["backends"]:
        left = [table["backends"][beside] for table in by_version.values()]
        lines.append(f"| {beside} | {' | '.join('–' if one is None else ', '.join(one) for one in left)} |")
    lines += [
        "",
        "## Groups of context-parallel ranks",
        "",
        _LATER,
        "",
        f"| tested | {heads} | nemo2 |",
        f"|{rule}|---|",
    ]
    for one in LATER:
        cells = " | ".join(_answer(table["exchange_groups"], one.key) for table in by_version.values())
        lines.append(f"| {one.asked} | {cells} | {one.does} |")
    lines += ["", "## Layers as CUDA graphs", "", _CAPTURES, "", f"| tested | {heads} | nemo2 |", f"|{rule}|---|"]
    for one in CAPTURES:
        cells = " | ".join(_answer(table["graphs"], one.key) for table in by_version.values())
        lines.append(f"| {one.asked} | {cells} | {one.does} |")
    lines += ["", "## What only a GPU can answer", "", _READ, "", "| needs | condition | nemo2 |", "|---|---|---|"]
    lines += [f"| {asks} | {what} | {does} |" for asks, what, does in READ]
    lines += ["", "## Call by call", "", _CALLS]
    names = sorted({name for table in by_version.values() for name in table["signatures"]})
    for group in GROUPS:
        lines += ["", f"### {group.title}", "", f"{group.does} Test: `{_short(group.test)}`.", ""]
        lines += [f"| {PACKAGE}. | {heads} |", f"|{rule}|"]
        for name in (name for name in names if group_of(name) is group):
            cells = " | ".join(
                "yes" if table["signatures"].get(name) is not None else "–" for table in by_version.values()
            )
            lines.append(f"| `{name.removeprefix(f'{PACKAGE}.')}` | {cells} |")
    return "\n".join(lines) + "\n"


def _answer(found: dict[str, Any], key: str) -> str:
    return "–" if key not in found else "yes" if found[key] is None else "refused"


def _taken(found: dict[str, Any], key: str) -> str:
    return ", ".join(name for name, words in found.get(key, {}).items() if words is None) or "–"


def _short(test: str) -> str:
    path, _, name = test.partition("::")
    return name or path


_HEAD = """# Transformer Engine, call by call

<!-- Written by `python -m tools.te_calls`; a test compares. -->

This page shows which versions of Transformer Engine support which calls and formats, and how nemo2 handles the
differences. Use it to choose a version, or to understand why nemo2 rejects a recipe.

All answers come from each version's own Python code, imported and called on a machine without a GPU. Kernels were
replaced by empty results. The answers therefore don't show what a kernel itself rejects.

- `tests/transformer_engine/facts.py` asks the questions and stores the answers in `tests/transformer_engine`.
- A stand-in that answers from these tables carries whole training runs in the tests.
- A step in each number format runs through Megatron-Core's own layers and contexts.

In the tables, *yes* means that the version accepts the call, *refused* that it raises an error, and – that it doesn't
have it. The last column says how nemo2 handles it.

## Differences between versions
"""
_STEPS = f"""Each test runs three layers, forward and backward, with the fields that `trainer.plugins` sets in the model's
configuration (`tests/transformer_engine/steps.py`). The last rows list the accepted sizes among
{", ".join(map(str, (1, 4, 8, 16, 32, 64, 128)))}. Newer versions leave some of the checks to their kernels.
Tests: `{_OURS}`."""
_ATTENTION = f"""The table lists the accepted values of `cp_comm_type`, with two ranks
(`tests/transformer_engine/attention.py`). 'a2a+p2p' is rejected because its groups are missing. nemo2 rejects the other
unsupported combinations before a run. Test: `{_short(ATTENTION_TEST)}`."""
_BACKENDS = f"""The table lists the backends that the version leaves on a Hopper GPU with flash-attn and a suitable cuDNN
kernel (`tests/transformer_engine/backends.py`). The version takes the first of them. nemo2 rejects a recipe whose
`attention_backend` requires another one. Test: `{_short(BACKENDS_TEST)}`."""
_LATER = """Megatron-Core calls `set_context_parallel_group` only for packed samples (`tests/transformer_engine/attention.py`)."""
_CAPTURES = """These captures use `cuda_graph_impl='transformer_engine'` through nemo2's training loop, Megatron-Core's
helper and the version's own `make_graphed_callables` (`tests/transformer_engine/graphs.py`). A captured graph is empty.
Before 2.6 Megatron-Core doesn't find its helpers."""
_READ = "These conditions come from the sources. No version checks them without a GPU."
_CALLS = """*Yes* means that the version has the call. Where a call is missing, Megatron-Core checks the version first,
and works without the call or rejects the setting."""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
