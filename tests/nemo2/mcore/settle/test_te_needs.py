# SPDX-License-Identifier: Apache-2.0
"""One oldest Transformer Engine; what Megatron-Core wants a newer one for is refused before a rank starts."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from nemo2 import recipes
from nemo2.base.backend.extras import OLDEST_TE
from nemo2.base.errors import ConfigError
from nemo2.mcore.settle import Machine
from nemo2.mcore.settle.te_needs import NEEDS, refuse_an_older_transformer_engine
from nemo2.preflight.checks.find import find
from tools import te_calls

CORE = Path(megatron.core.__path__[0])
IN_ITS_CONFIGURATION = "transformer/transformer_config.py"
"""There Megatron-Core refuses as the configuration is made, which `nemo2 check` makes for the machine's version."""
COVERED = {
    ("fp8_utils.py", "2.3.0"): ("2.3", "fp8_param"),
    ("models/common/language_module/language_module.py", "2.7.0"): ("2.7", "cuda_graph_impl"),
    ("extensions/transformer_engine.py", "2.8.0"): ("2.8", "softmax_type"),
    ("extensions/transformer_engine.py", "2.9.0"): ("2.9", "qk_clip"),
    ("extensions/transformer_engine.py", "2.10.0"): ("2.10", "batch_invariant_mode"),
    ("distributed/fsdp/mcore_fsdp_adapter.py", "2.10"): ("2.10", "gradient_accumulation_fusion"),
    ("transformer/moe/moe_utils.py", "2.13.0"): ("2.13", "moe_router_fusion"),
    ("extensions/transformer_engine.py", "2.14.0"): ("2.14", "use_grouped_gemm_for_dense_mlp"),
    ("transformer/moe/shared_experts.py", "2.14.0"): ("2.14", "use_grouped_gemm_for_shared_expert"),
    ("transformer/transformer_layer.py", "2.14.0"): ("2.14", "fine_grained_activation_offloading"),
    ("extensions/transformer_engine.py", "2.3.0"): ("2.3", "rotary_interleaved"),
    # A rule refuses fp4 before 2.8 (`gpu-has-the-format`).
    ("fp4_utils.py", "2.7.0.dev0"): None,
    ("transformer/cuda_graphs.py", "2.7.0.dev0"): None,
}


def wanted(tree: ast.Module) -> Iterator[str]:
    """Versions that a file's code refuses to go without: in an assertion, or in the condition of a raise."""
    for node in ast.walk(tree):
        raises = isinstance(node, ast.If) and any(isinstance(one, ast.Raise) for one in (*node.body, *node.orelse))
        if not (raises or isinstance(node, ast.Assert)):
            continue
        calls = (one for one in ast.walk(node.test) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name))
        for call in calls:
            if call.func.id == "is_te_min_version":  # pyright: ignore[reportAttributeAccessIssue]
                yield ast.literal_eval(call.args[0])


def refusals() -> set[tuple[str, str]]:
    """File and version of each refusal of a version that `OLDEST_TE` doesn't reach."""
    files = [path for path in CORE.rglob("*.py") if "is_te_min_version" in path.read_text()]
    found = {
        (path.relative_to(CORE).as_posix(), version)
        for path in files
        for version in wanted(ast.parse(path.read_text()))
    }
    return {(file, version) for file, version in found if Version(version) > Version(OLDEST_TE)}


def test_the_package_the_tables_and_the_rehearsal_begin_with_one_version() -> None:
    project = tomllib.loads((te_calls.ROOT / "pyproject.toml").read_text())["project"]
    [line] = project["optional-dependencies"]["te"]
    measured = list(te_calls.tables())
    allowed = Requirement(line).specifier
    assert [one.version for one in allowed if one.operator == ">="] == [OLDEST_TE.removesuffix(".0")]
    assert measured[0] == OLDEST_TE
    assert all(version in allowed for version in measured)
    newest = Version(measured[-1])
    assert f"{newest.major}.{newest.minor + 1}.0" not in allowed


def test_each_version_that_megatron_core_asks_for_is_known() -> None:
    """Neither more nor less: a new comparison in Megatron-Core fails here, until it has its need or its reason."""
    found = {one for one in refusals() if one[0] != IN_ITS_CONFIGURATION}
    assert found <= COVERED.keys(), found - COVERED.keys()
    assert len(found) >= 5
    named = {(need.since, name) for need in NEEDS for name in need.fields}
    assert {one for one in COVERED.values() if one is not None} <= named


ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("2.3", {"rotary_interleaved": True, "apply_rope_fusion": True}, {}),
    ("2.3", {"fp8_param": True}, {"use_megatron_fsdp": True}),
    ("2.6", {"cuda_graph_impl": "local"}, {}),
    (
        "2.7",
        {"cuda_graph_impl": "full_iteration", "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
        {},
    ),
    ("2.8", {"softmax_type": "learnable"}, {}),
    ("2.8", {"use_transformer_engine_op_fuser": True, "gated_linear_unit": False}, {}),
    ("2.9", {"qk_clip": True}, {}),
    ("2.9", {"log_max_attention_logit": True}, {}),
    ("2.10", {"batch_invariant_mode": True}, {}),
    ("2.10", {"gradient_accumulation_fusion": True}, {"use_megatron_fsdp": True}),
    ("2.13", {"moe_router_fusion": True, "moe_router_score_function": "sqrtsoftplus"}, {}),
    ("2.14", {"use_grouped_gemm_for_shared_expert": True}, {}),
    ("2.14", {"use_grouped_gemm_for_dense_mlp": True}, {}),
    (
        "2.14",
        {
            "fine_grained_activation_offloading": True,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn"],
        },
        {},
    ),
]


def settings(model: dict[str, Any], ddp: dict[str, Any]) -> tuple[Any, Any]:
    plain = {"softmax_type": "vanilla", "cross_entropy_loss_fusion": False, "gated_linear_unit": True}
    return SimpleNamespace(**plain | model), SimpleNamespace(**{"use_megatron_fsdp": False} | ddp)


@pytest.mark.parametrize(("since", "model", "ddp"), ASKED, ids=lambda value: str(value)[:60])
def test_an_older_version_is_refused_and_that_version_is_not(
    since: str, model: dict[str, Any], ddp: dict[str, Any]
) -> None:
    asked, buffers = settings(model, ddp)
    with pytest.raises(ConfigError, match=rf"requires Transformer Engine {since} or newer, but 2\.2\.0 is installed"):
        refuse_an_older_transformer_engine(asked, buffers, "2.2.0")
    refuse_an_older_transformer_engine(asked, buffers, since)
    other, without = settings({}, {})
    refuse_an_older_transformer_engine(other, without, "2.2.0")


def test_each_need_is_asked_for() -> None:
    assert {(since, next(iter(model))) for since, model, _ in ASKED} == {(one.since, one.fields[0]) for one in NEEDS}


@pytest.mark.parametrize(
    ("fields", "since"),
    [
        ({"rotary_interleaved": True, "apply_rope_fusion": True}, "2.3.0"),
        ({"softmax_type": "learnable"}, "2.8.0"),
        ({"symmetric_ar_type": "two_shot"}, "2.3.0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_recipe_is_refused_by_the_check_for_a_machine_with_an_older_version(
    fields: dict[str, Any], since: str
) -> None:
    """The last by Megatron-Core's configuration, which is made for that machine's version."""

    def told(version: str) -> list[str]:
        asked = recipes.get("llama3_8b").pretrain_recipe()
        asked.trainer.strategy.context_parallel_size = 1
        for field, value in fields.items():
            setattr(asked.model.config, field, value)
        return [one.message for one in find(asked, machine=Machine(transformer_engine=version))]

    [message] = told("2.2.0")
    name, value = next(iter(fields.items()))
    ours = f"model.config.{name}={value!r}" in message and f"Transformer Engine {since[:-2]} or newer" in message
    assert ours or f"TE version {since[:-2]} or higher" in message
    assert told(since) == []
