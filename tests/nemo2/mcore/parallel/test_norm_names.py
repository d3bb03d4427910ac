# SPDX-License-Identifier: Apache-2.0
"""One name for each tensor of a model, and one training of additions, whichever layers it is built of:
tests/transformer_engine/crossing.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo2.mcore.parallel.norm_names import renamed_norms
from support.hf_models import ROWS
from support.nightly import daily_and_nightly
from tests.transformer_engine.adapted import ADAPTERS

ROOT = Path(__file__).parents[4]
DAILY = (
    "Qwen 3 MoE, mixed",
    "DeepSeek V3",
    "Llama-Nemotron Super, Ultra (by a Llama)",
    "Gemma 2",
    "GPT-OSS",
    "Nemotron-H, Nemotron Nano v2",
    "Qwen3-Next",
    "Command R7B, Command A",
    "OLMo 3",
    "Hunyuan",
)
"""A row for each place in which a norm stands."""


@pytest.fixture(
    scope="module", params=daily_and_nightly([*(row.name for row in ROWS), *ADAPTERS], [*DAILY, ADAPTERS[-1]])
)
def crossed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("crossing")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = ROOT / "tests" / "transformer_engine" / "crossing.py"
    command = [sys.executable, "-W", "ignore", str(script), str(work / "out.json"), str(work), *request.param]
    variables = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}  # the stand-in's layers are a CPU's
    done = subprocess.run(command, env=os.environ | variables, cwd=work, capture_output=True, text=True, timeout=600)
    assert (work / "out.json").exists(), done.stderr[-3000:]
    return json.loads((work / "out.json").read_text())


@pytest.mark.timeout(660)  # about 25 s on an idle core
def test_transformer_engine_s_layers_and_plain_ones_store_the_same_tensors(crossed: Any) -> None:
    assert len(crossed["names"]) >= len(DAILY)
    for name, shapes in crossed["names"].items():
        assert not isinstance(shapes, str), f"{name}: {shapes}"
        theirs, plain = shapes
        assert theirs == plain, name


@pytest.mark.timeout(660)
def test_a_run_goes_on_from_a_checkpoint_of_the_other_s_layers(crossed: Any) -> None:
    """Parameters and moments to the bit, and the losses of the run that wasn't interrupted."""
    assert len(crossed["runs"]) == (2 if "DeepSeek V3" in crossed["names"] else 1)
    for name, run in crossed["runs"].items():
        assert isinstance(run, dict), f"{name}: {run}"
        assert (run["different"], run["only"]) == ([], []), name
        assert run["parameters"] >= run["states"] > 30
        assert run["losses"] == pytest.approx(run["expected"], rel=1e-6), name


@pytest.mark.timeout(660)
def test_experts_that_would_be_grouped_are_built_one_by_one_and_train_as_plain_ones(crossed: Any) -> None:
    assert len(crossed["adapted"]) == (1 if "DeepSeek V3" in crossed["names"] else len(ADAPTERS) - 1)
    for adapter, found in crossed["adapted"].items():
        theirs, plain = found["engine"], found["plain"]
        assert isinstance(theirs, dict) and isinstance(plain, dict), found
        assert (theirs["experts"], theirs["inside"]) == (["SequentialMLP"], ["TEColumnParallelLinear"]), adapter
        assert theirs["keys"] == plain["keys"] and any(".experts." in key for key in theirs["keys"]), adapter
        assert len(set(plain["losses"])) == len(plain["losses"])
        assert theirs["losses"] == pytest.approx(plain["losses"], rel=1e-6), adapter


@pytest.mark.timeout(660)
def test_groups_of_models_that_are_gone_leave_no_threads(crossed: Any) -> None:
    """Those of some 70 layouts in one process look every 10 ms for what came, and leave the others no time."""
    assert crossed["threads"] < 300


def test_names_of_plain_layers_become_transformer_engine_s() -> None:
    """Layer by layer or stacked, of the model and of the optimizer's state; those that are one norm in a layer of another kind
    are left alone."""
    latent = "module.decoder.layers.0.self_attention."
    experts = "optimizer.state.exp_avg.module.decoder.layers.1."
    stored = [
        f"{latent}linear_kv_up_proj.weight",
        f"{latent}kv_layernorm.weight",
        "module.decoder.layers.0.input_layernorm.weight",
        "module.decoder.layers.0.pre_mlp_layernorm.bias",
        "module.decoder.layers.0.mlp.linear_fc1.weight",
        "module.decoder.layers.1.mlp.router.weight",
        f"{experts}mlp.linear_fc1.layer_norm_weight",
        f"{experts}self_attention.q_layernorm.weight",
        "mtp.layers.0.transformer_layer.input_layernorm.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight",
    ]
    assert renamed_norms(stored) == {
        f"{latent}kv_layernorm.weight": f"{latent}linear_kv_up_proj.layer_norm_weight",
        "module.decoder.layers.0.pre_mlp_layernorm.bias": "module.decoder.layers.0.mlp.linear_fc1.layer_norm_bias",
        f"{experts}mlp.linear_fc1.layer_norm_weight": f"{experts}pre_mlp_layernorm.weight",
        "mtp.layers.0.transformer_layer.input_layernorm.weight": (
            "mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight"
        ),
    }
    assert renamed_norms([name for name in stored if "norm" in name]) == {}


def save_as_before_and_resume(directory: str) -> dict[str, Any]:
    """Of a model with experts, under the names that Megatron-Core gives its plain layers; losses of both runs, and the names."""
    from unittest import mock

    import torch

    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from support import small_runs
    from support.resharding import MOE, whole_tensors

    def fit(*callbacks: Any, **options: Any) -> list[float]:
        small_runs.release()
        model = small_runs.build_llama(distributed=True, **MOE)
        return small_runs.fit(model, max_steps=4, callbacks=callbacks, **options)["losses"]

    keep = ModelCheckpoint(dirpath=directory, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=False)
    with mock.patch("nemo2.mcore.parallel.sharded_state.renamed_norms", lambda stored: {}):
        expected = fit(keep)
    losses = fit(ckpt_path=Path(directory) / "step=2")
    names = sorted(whole_tensors(Path(directory) / "step=2"))
    assert torch.distributed.is_initialized()
    return {"expected": expected[2:], "losses": losses, "names": names}


def test_checkpoints_with_the_names_of_plain_layers_are_still_read(run_on_ranks: Any, tmp_path: Path) -> None:
    [found] = run_on_ranks(save_as_before_and_resume, 1, str(tmp_path))
    assert "module.decoder.layers.mlp.linear_fc1.layer_norm_weight" in found["names"]
    assert "module.decoder.layers.pre_mlp_layernorm.weight" not in found["names"]
    assert found["losses"] == found["expected"]


@pytest.mark.parametrize(
    ("module", "belongs"),
    [
        ("decoder.layers.0.input_layernorm", True),
        ("decoder.layers.0", True),
        ("decoder.layers.0.self_attention", False),
    ],
)
def test_a_norm_that_is_fused_with_a_linear_layer_belongs_to_the_norm_of_plain_layers(
    module: str, belongs: bool
) -> None:
    from nemo2.mcore.parallel.inspection import belongs_to

    assert belongs_to("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", module) is belongs
