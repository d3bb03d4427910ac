# SPDX-License-Identifier: Apache-2.0
"""Every call into Transformer Engine, version by version, and what we do about it: docs/transformer_engine.md.

    python -m tools.te_calls

The calls are read off Megatron-Core's sources and ours (`calls_in`); whether a version has them, and what it refuses, are the
tables that `tools/te_facts.py` measures. `GROUPS` says what is ours to do, with the test that holds it.
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


_BUFFERS = "tests/nemo2/overlap/test_userbuffers.py"
_RUNS = f"{_BUFFERS}::test_a_run_builds_its_layers_over_started_buffers_trains_as_without_and_frees_them"
_FP8 = "tests/nemo2/test_fp8.py::test_one_value_sets_model_buffers_and_optimizer"
GROUPS = (
    Group(
        "Layers",
        r"pytorch\.(Linear|LayerNormLinear|LayerNormMLP|LayerNorm|RMSNorm)$",
        "Built by Megatron-Core after the process groups and the userbuffers, in every entry.",
        _RUNS,
    ),
    Group(
        "Userbuffers",
        r"module\.base\.(initialize_ub|destroy_ub)$",
        "Started before the first layer, once, with the arguments that the version has; stopped when the run ends.",
        f"{_BUFFERS}::test_the_same_buffers_stay_and_others_take_their_place",
    ),
    Group(
        "Recipes of fp8 and fp4",
        r"common\.recipe\.|fp8\.check_",
        "`trainer.plugins` names one; a machine whose GPU or version lacks it is refused before a run.",
        "tests/tools/test_te_calls.py::test_a_recipe_is_refused_where_the_version_has_none",
    ),
    Group(
        "Contexts of fp8",
        r"(fp8_autocast|autocast|FP8GlobalStateManager(\.\w+)?)$",
        "Entered by Megatron-Core around each layer, from the fields that `trainer.plugins` sets.",
        _FP8,
    ),
    Group(
        "Primary weights in fp8",
        r"(fp8_model_init|quantized_model_init|tensor\.QuantizedTensor|float8_tensor\..*|tensor\.utils\.\w+|cast_to_fp8)$",
        "`fp8_param_gather` sets model and buffers together, and is refused without `fp8`.",
        "tests/nemo2/checks/test_rules.py::test_the_broken_recipe_is_refused_by_its_rule",
    ),
    Group(
        "CUDA graphs",
        r"(pytorch\.make_graphed_callables|graph\.\w+|make_weak_ref)$",
        "Called by Megatron-Core's helpers where `cuda_graph_impl` asks for it; what can't be captured is refused.",
        "tests/nemo2/parallel/test_cuda_graphs.py",
    ),
    Group(
        "Attention and context parallelism",
        r"(DotProductAttention|attention\..*|thd_get_partitioned_indices)$",
        "`cp_comm_type` unset is a ring; Transformer Engine picks the back end, which `attention_backend` may narrow.",
        "tests/nemo2/overlap/test_overlap_rules.py::"
        "test_asked_for_nothing_transformer_engine_goes_round_a_ring_and_the_plain_attention_gathers",
    ),
    Group(
        "Random streams, recomputation and offloading",
        r"(CudaRNGStatesTracker|distributed\.\w+|pytorch\.checkpoint|get_cpu_offload_context)$",
        "Chosen by `recompute_*`, `cpu_offloading` and `use_te_rng_tracker`, which CUDA graphs turn on.",
        "tests/nemo2/checks/test_rules.py::test_the_broken_recipe_is_refused_by_its_rule",
    ),
    Group(
        "Experts",
        r"(pytorch\.GroupedLinear|moe_\w+|pytorch\.ep\.\w+|general_gemm|get_workspace|get_dummy_wgrad|rmsnorm_fwd)$",
        "Built by Megatron-Core where `moe_grouped_gemm`, `moe_permute_fusion` and the dispatcher ask for it.",
        "tests/nemo2/checks/test_rules.py::test_the_mended_recipe_is_refused_by_none",
    ),
    Group(
        "Operations",
        r"pytorch\.ops\.\w+$",
        "Behind `use_transformer_engine_op_fuser`, which no recipe sets.",
        "tests/tools/test_te_calls.py::test_no_recipe_asks_for_the_fused_operations",
    ),
    Group(
        "Optimizer",
        r"optimizers\.\w+$",
        "Adam of Transformer Engine where it is there, torch's elsewhere, with the same state.",
        "tests/nemo2/backend/test_fused_adam.py",
    ),
    Group(
        "Loss and helpers",
        r"(parallel_cross_entropy|nvtx_range_\w+|round_up_to_nearest_multiple)$",
        "The loss where `cross_entropy_fusion_impl` is 'te'; helpers have no setting.",
        "tests/nemo2/backend/test_cuda.py",
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


_LIMITS = "tests/nemo2/overlap/test_userbuffer_limits.py"
_FORMATS = f"{_LIMITS}::test_a_format_is_refused_where_the_version_refuses_it"
BEHAVIOURS = (
    Behaviour(
        "a layer with userbuffers, built before they are started",
        _refused("layers", "LayerNormLinear", "column ub_overlap_ag", "before_start"),
        "start first",
        _RUNS,
    ),
    Behaviour(
        "userbuffers started twice", _refused("userbuffers", "twice"), "keep the same ones, stop others", GROUPS[1].test
    ),
    Behaviour(
        "userbuffers without a process group",
        _refused("userbuffers", "without_process_group"),
        "start inside the strategy's world",
        _RUNS,
    ),
    Behaviour(
        "userbuffers of another size, once the first are destroyed",
        _refused("userbuffers", "other_size_after_destroy"),
        "done",
        GROUPS[1].test,
    ),
    Behaviour(
        "userbuffers destroyed twice",
        _refused("userbuffers", "destroyed_twice"),
        "stop what runs, once",
        GROUPS[1].test,
    ),
    Behaviour(
        "a buffer asked for after they are destroyed",
        _refused("userbuffers", "asked_after_destroy"),
        "destroy behind the last step, and behind the graphs",
        _RUNS,
    ),
    Behaviour("delayed scaling in userbuffers", _carries("Float8Quantizer", "yes"), "carried", _FORMATS),
    Behaviour("current scaling in userbuffers", _carries("Float8CurrentScalingQuantizer", "yes"), "carried", _FORMATS),
    Behaviour("MXFP8 in userbuffers", _carries("MXFP8Quantizer", "refused"), "refused before 2.4", _FORMATS),
    Behaviour("blockwise scaling in userbuffers", _carries("Float8BlockQuantizer", "refused"), "refused", _FORMATS),
    Behaviour("NVFP4 in userbuffers", _carries("NVFP4Quantizer", "–"), "refused", _FORMATS),
    Behaviour(
        "two sets of buffers, for layers in 8 and in 16 bits",
        lambda table: "–" if table["userbuffers"]["two_modes"] is None else "yes",
        "refused before 2.8",
        f"{_LIMITS}::test_layers_in_two_dtypes_need_two_sets_of_buffers",
    ),
    Behaviour(
        "a weight gradient put off beside its bulk exchange",
        lambda table: (
            "yes"
            if table["userbuffers"]["beside_a_delayed_wgrad"] is None
            else "–"
            if "unexpected keyword" in table["userbuffers"]["beside_a_delayed_wgrad"]
            else "refused"
        ),
        "refused from 2.3 on",
        f"{_LIMITS}::test_a_delayed_weight_gradient_has_no_exchange_beside_it",
    ),
    Behaviour(
        "a state without bytes, loaded into a layer",
        _refused("extra_states", "Linear", "empty"),
        "left out where weights are loaded",
        f"{_BUFFERS}::test_the_oldest_version_resumes_what_the_newest_saved",
    ),
    Behaviour(
        "a checkpoint without the attention's state",
        _refused("extra_states", "DotProductAttention", "without"),
        "loaded",
        f"{_BUFFERS}::test_the_newest_version_resumes_and_generates",
    ),
    Behaviour(
        "a checkpoint without a linear layer's state",
        _refused("extra_states", "Linear", "without"),
        "the layer's own is kept",
        f"{_BUFFERS}::test_the_newest_version_resumes_and_generates",
    ),
)


class Asked(NamedTuple):
    """A question to a format's steps (`tools/te_steps.py`), by the key of its answer; what we do, and the test of that."""

    key: str
    asked: str
    does: str
    test: str


_OURS = "tests/tools/test_te_formats.py"
_STATES = f"{_OURS}::test_a_state_that_the_version_refuses_is_loaded_with_the_leave_that_we_give"
STEPS = (
    Asked(
        "step", "a step through Megatron-Core", "done", f"{_OURS}::test_a_format_that_a_version_has_goes_through_a_step"
    ),
    Asked(
        "parameters_in_it",
        "parameters in the format (`fp8_param_gather`)",
        "done",
        f"{_OURS}::test_a_format_that_a_version_has_goes_through_a_step",
    ),
    Asked(
        "recomputed",
        "layers recomputed in the backward",
        "done",
        f"{_OURS}::test_a_format_that_a_version_has_goes_through_a_step",
    ),
    Asked(
        "layers_in_16_bits",
        "first and last layers in bf16",
        "refused with delayed scaling",
        "tests/nemo2/checks/test_rules.py::test_the_broken_recipe_is_refused_by_its_rule",
    ),
    Asked(
        "state_loaded",
        "its state, loaded as it was saved",
        "leave is given to unpickle what was looked through",
        _STATES,
    ),
    Asked("state_loaded_with_leave", "its state, loaded with leave to unpickle", "as above", _STATES),
    Asked("state_loaded_into_16_bits", "its state, loaded by a model in bf16", "as above", _STATES),
    Asked("state_of_16_bits_loaded", "the state of a model in bf16, loaded", "loaded", _STATES),
)
SIZES = (
    Asked(
        "gpus",
        "GPUs (compute capability)",
        "others are refused",
        f"{_OURS}::test_a_gpu_is_refused_where_the_version_refuses_it",
    ),
    Asked(
        "cuda",
        "CUDA of torch",
        "older ones are refused on the ranks",
        f"{_OURS}::test_a_cuda_is_refused_where_the_version_refuses_it",
    ),
    Asked(
        "tokens", "tokens of a product", "others are refused", f"{_OURS}::test_sizes_that_a_version_refuses_are_refused"
    ),
    Asked(
        "width", "widths of a product", "others are refused", f"{_OURS}::test_sizes_that_a_version_refuses_are_refused"
    ),
)
_GRAPHS = "tests/nemo2/parallel/test_cuda_graphs.py"
_CAPTURED = f"{_OURS}::test_a_captured_step_of_each_format_goes_through_or_is_refused_before"
_MEETS = f"{_OURS}::test_preconditions_of_a_capture_are_refusals_that_we_meet"
CAPTURES = (
    Asked("bf16", "a step in bf16, captured, replayed, reset", "refused before 2.6", _CAPTURED),
    *(
        Asked(name, f"the same in {name}", "as above", _CAPTURED)
        for name in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
    ),
    Asked("some layers in 16 bits", "first and last layers in bf16, the others captured in fp8", "as above", _CAPTURED),
    Asked("norms recomputed", "norms recomputed inside a graph", "as above", _CAPTURED),
    Asked(
        "a hook on a layer",
        "a hook on a captured layer",
        "refused by its name",
        f"{_GRAPHS}::test_hooks_on_captured_layers_are_refused",
    ),
    Asked(
        "hooks that gather parameters",
        "the hooks that gather parameters, in place",
        "taken off for the capture",
        f"{_GRAPHS}::test_gathering_parameters_goes_on_beside_graphs_of_layers",
    ),
    Asked(
        "these hooks, paused",
        "these hooks, taken off and back",
        "as above",
        f"{_GRAPHS}::test_gathering_parameters_goes_on_beside_graphs_of_layers",
    ),
    Asked(
        "one layer in evaluation",
        "one layer in evaluation, others in training",
        "captured inside training steps",
        _MEETS,
    ),
    Asked(
        "inside torch.autocast",
        "inside torch.autocast",
        "none is entered: parameters have the precision's dtype",
        "tests/nemo2/test_precision.py::test_it_is_lightnings_mixed_precision_without_its_autocast_and_scaler",
    ),
    Asked("captured twice", "captured twice by one helper", "once a run", _MEETS),
    Asked(
        "a second run of the process",
        "captured again by the next run of the process",
        "closed when a run ends",
        _CAPTURED,
    ),
    Asked("a step after their end", "a step without graphs after they are deleted", "as above", _CAPTURED),
)
LATER = (
    Asked("after it was built", "groups that come after the layer was built", "given when it is built", _MEETS),
    Asked("of another exchange, later", "groups of another exchange, later", "one exchange for a run", _MEETS),
    Asked("none, later", "no group any more", "as above", _MEETS),
)
READ = (
    (
        "every GPU",
        "a capture allocates nothing, waits for nothing and reads nothing back (`cudaErrorStreamCapture...`)",
        "`experts-are-captured-in-part`, `captured-steps-are-alike`; packed samples are refused in the step",
    ),
    ("every GPU", "generators of a capture are graph-safe", "`use_te_rng_tracker` is turned on with graphs"),
    (
        "several GPUs",
        "buffers of a node lie in memory that its GPUs map (`CommOverlapP2P`)",
        "`tp_comm_bootstrap_backend`; Transformer Engine's own words otherwise",
    ),
    ("cuDNN", "a kernel for the size, mask and dtype (`get_fused_attn_backend`)", "`auto` takes another back end"),
    ("flash-attn", "the installed version is one of theirs", "`auto` takes another back end, with their warning"),
)
"""What no machine without a GPU can try: read in the sources."""
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
    lines = [_HEAD, f"| what is asked | {heads} | we |", f"|{rule}|---|"]
    for one in BEHAVIOURS:
        cells = " | ".join(one.answer(table) for table in by_version.values())
        lines.append(f"| {one.asked} | {cells} | {one.does} |")
    lines += ["", "## Steps in each format", "", _STEPS]
    for recipe in next(iter(by_version.values()))["formats"]:
        lines += ["", f"### {recipe}", "", f"| what is asked | {heads} | we |", f"|{rule}|---|"]
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
    lines += ["", "## Back ends of attention", "", _BACKENDS, "", f"| beside | {heads} |", f"|{rule}|"]
    for beside in next(iter(by_version.values()))["backends"]:
        left = [table["backends"][beside] for table in by_version.values()]
        lines.append(f"| {beside} | {' | '.join('–' if one is None else ', '.join(one) for one in left)} |")
    lines += [
        "",
        "## Groups of context-parallel ranks",
        "",
        _LATER,
        "",
        f"| what is asked | {heads} | we |",
        f"|{rule}|---|",
    ]
    for one in LATER:
        cells = " | ".join(_answer(table["exchange_groups"], one.key) for table in by_version.values())
        lines.append(f"| {one.asked} | {cells} | {one.does} |")
    lines += ["", "## Layers as CUDA graphs", "", _CAPTURES, "", f"| what is asked | {heads} | we |", f"|{rule}|---|"]
    for one in CAPTURES:
        cells = " | ".join(_answer(table["graphs"], one.key) for table in by_version.values())
        lines.append(f"| {one.asked} | {cells} | {one.does} |")
    lines += ["", "## What only a GPU can answer", "", _READ, "", "| asks | for | we |", "|---|---|---|"]
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

Megatron-Core and nemo2 call Transformer Engine in many places, and its versions differ. Each version's own Python code was
imported and tried without a GPU (`tools/te_facts.py`); what it answered is kept as tables (`tests/transformer_engine`), and a
stand-in that answers from these tables carries whole runs. Steps in each number format went through Megatron-Core's own layers
and contexts over the version's own code, with empty answers in place of kernels. What a kernel itself refuses isn't among them.

## What versions do differently
"""
_STEPS = f"""Three layers, forward and backward, with the fields that `trainer.plugins` lays into the model's configuration
(`tools/te_steps.py`). Sizes are those that are taken, of {", ".join(map(str, (1, 4, 8, 16, 32, 64, 128)))}; newer versions leave
some to their kernels. Tests: `{_OURS}`."""
_ATTENTION = f"""Which `cp_comm_type` goes with what, over two ranks (`tools/te_attention.py`). 'a2a+p2p' is refused for want of
its groups; of the others what isn't taken is refused before a run. Test: `{_short(ATTENTION_TEST)}`."""
_BACKENDS = f"""Those that the version's own choice leaves on a Hopper where flash-attn is installed and cuDNN has the kernel
(`tools/te_backends.py`); it takes the first. Where `attention_backend` asks for another, the recipe is refused. Test:
`{_short(BACKENDS_TEST)}`."""
_LATER = "`set_context_parallel_group`, which Megatron-Core calls for packed samples only (`tools/te_attention.py`)."
_CAPTURES = """`cuda_graph_impl='transformer_engine'` through our loop, Megatron-Core's helper and the version's own
``make_graphed_callables`` (`tools/te_graphs.py`); a captured graph holds nothing. Before 2.6 Megatron-Core finds no helpers."""
_READ = "Read in the sources; no version says it before a GPU is asked."
_CALLS = """Each as the version has it or not. Where a call is missing, Megatron-Core asks for the version first, and goes without
or refuses."""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
