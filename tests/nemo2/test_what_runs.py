# SPDX-License-Identifier: Apache-2.0
"""A run has the settings of its recipe: the documents' snippets on gloo ranks, and the comparison before the first step."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest

from support import small_runs


def snippet(name: str) -> Any:
    """The callbacks and buffers that one of the documents' snippets ends with."""
    from nemo2 import llm
    from nemo2.callbacks import MegatronCommOverlapCallback

    recipe = llm.llama3_8b.pretrain_recipe(performance_mode=True)
    if name == "tp_comm_overlap":
        recipe.trainer.callbacks = [
            cb for cb in recipe.trainer.callbacks if not isinstance(cb, MegatronCommOverlapCallback)
        ]
        recipe.trainer.callbacks.append(MegatronCommOverlapCallback(tp_comm_overlap=False))
    elif name == "overlap_p2p_comm":
        recipe.trainer.callbacks = [
            cb for cb in recipe.trainer.callbacks if not isinstance(cb, MegatronCommOverlapCallback)
        ]
        recipe.trainer.callbacks.append(MegatronCommOverlapCallback(overlap_p2p_comm=True, batch_p2p_comm=False))
        recipe.strategy.pipeline_model_parallel_size = 2
        recipe.strategy.virtual_pipeline_model_parallel_size = 2
    else:
        recipe.strategy.ddp_config.overlap_grad_sync = False
        recipe.strategy.ddp_config.overlap_param_gather = False
    return recipe


def run(name: str) -> dict[str, Any]:
    """Two steps of the snippet's recipe, shrunk; the effective configuration of the run, and what `explain` said before."""
    import fiddle as fdl

    from nemo2.mcore.settle import Machine, settle
    from nemo2.training.run_dir.effective import effective_config

    small_runs.quiet()
    recipe = snippet(name)
    for field, value in {**small_runs.MODEL, "num_layers": 4, "vocab_size": 50_304}.items():
        setattr(recipe.model.config, field, value)
    del recipe.model.config.seq_length
    recipe.strategy.context_parallel_size = 1
    recipe.data.seq_length, recipe.data.micro_batch_size, recipe.data.global_batch_size = 16, 2, 8
    recipe.data.num_train_samples = 64
    recipe.data.num_workers = 0  # eight processes a rank would each import torch
    trainer = recipe.trainer
    trainer.devices, trainer.num_nodes, trainer.max_steps, trainer.limit_val_batches = 2, 1, 2, 0
    trainer.enable_progress_bar = False
    recipe.strategy.ckpt_async_save = False
    recipe.optim.lr_scheduler.warmup_steps = 1
    said = settle(recipe, Machine.here())
    live = fdl.build(recipe.trainer)
    model, data, optim = fdl.build(recipe.model), fdl.build(recipe.data), fdl.build(recipe.optim)
    model.config.seq_length = 16
    optim.connect(model)
    live.fit(model, data)
    result = effective_config(live, model)
    agree = {
        (section, field): (found[field], getattr(said.objects[path], field))
        for section, path, found in (
            ("ddp", "trainer.strategy.ddp", result["ddp"]),
            ("optimizer", "optim.config", result["optimizer"]),
        )
        for field in found
        if isinstance(found[field], bool)
    }
    names = ("overlap_p2p_comm", "batch_p2p_comm", "tp_comm_overlap")
    agree |= {("model", name): (result["model"][name], getattr(said.objects["model.config"], name)) for name in names}
    return {"effective": result, "agree": agree, "refusals": said.messages}


@pytest.mark.parametrize(
    ("name", "section", "expected"),
    [
        ("tp_comm_overlap", "model", {"tp_comm_overlap": False}),
        ("overlap_p2p_comm", "model", {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
        ("overlap_grad_sync", "ddp", {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    ],
)
def test_the_documents_snippets_run_and_the_effective_configuration_shows_them(
    run_on_ranks: Any, name: str, section: str, expected: dict[str, Any]
) -> None:
    for found in run_on_ranks(run, 2, name):
        assert {field: found["effective"][section][field] for field in expected} == expected
        callbacks = [entry["class"] for entry in found["effective"]["callbacks"]]
        assert sum(entry.endswith("MegatronCommOverlapCallback") for entry in callbacks) == 1
        different = {place: values for place, values in found["agree"].items() if values[0] != values[1]}
        assert not different and not found["refusals"], "explain says what the run does"


class Meddler(pl.Callback):
    """Changes a setting behind its user's back, or says so."""

    def __init__(self, announced: bool) -> None:
        self.announced = announced

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        from nemo2.config.provenance import adjust

        if self.announced:
            adjust(pl_module.optim.config, "clip_grad", 0.5, why="a test says so")
        else:
            pl_module.optim.config.clip_grad = 0.5


def meddled(announced: bool) -> tuple[str, int]:
    """What the run ends with, and its steps."""
    from nemo2.base.errors import ConfigError
    from nemo2.mcore.parallel.ddp_config import remember_arguments

    remember_arguments()
    small_runs.quiet()
    recorder = small_runs.Recorder()
    trainer = small_runs.build_trainer(max_steps=1, callbacks=[recorder, Meddler(announced)])
    try:
        trainer.fit(small_runs.build_llama(), small_runs.TokenData())
    except ConfigError as error:
        return str(error), len(recorder.losses)
    return "", len(recorder.losses)


@pytest.mark.parametrize("announced", [True, False])
def test_a_silent_change_stops_the_run_before_its_first_step(run_on_ranks: Any, announced: bool) -> None:
    ((said, steps),) = run_on_ranks(meddled, 1, announced, init_process_group=False)
    if announced:
        assert (said, steps) == ("", 1)
    else:
        assert re.search(r"optim\.config\.clip_grad is 0\.5 instead of 1\.0 \(set at .*small_runs", said)
        assert steps == 0
