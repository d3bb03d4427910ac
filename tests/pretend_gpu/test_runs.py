# SPDX-License-Identifier: Apache-2.0
"""Shrunk recipes on pretend GPUs: they train, save, go on in another layout and on a CPU, are fine-tuned, exported and asked
for text. Layouts against one process are `tests.long.parity`, which `make pretend-gpu` runs too."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.pretend_gpu import runs
from support.pretend_gpu.runs import CPU, ONE

pytestmark = [pytest.mark.pretend_gpu, pytest.mark.timeout(280)]
NAME = "llama3_8b"
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def pretrained(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run that saved asynchronously, and what its first rank recorded."""
    folder = tmp_path_factory.mktemp("pretrained")
    processes = runs.shrunk(NAME).processes
    return folder, run(runs.train, processes, str(folder), NAME, overrides=["strategy.ckpt_async_save=True"])


def test_a_recipe_trains_validates_and_saves(pretrained):
    folder, record = pretrained
    assert record["backend"] == "cuda" and record["peak_mib"] > 0
    assert len(record["losses"]) == runs.STEPS and len(record["validation"]) == 1
    assert runs.checkpoint_of(str(folder)).is_dir()


def test_a_run_goes_on_in_another_layout_and_on_a_cpu_with_the_same_loss(run, pretrained, tmp_path):
    folder, _ = pretrained
    losses = {}
    for name, (world, env) in {"gpus": (4, None), "cpus": (4, CPU), "one gpu": (1, None), "one cpu": (1, CPU)}.items():
        shutil.copytree(folder, tmp_path / name)
        overrides = [*ONE, "trainer.devices=1"] if world == 1 else []
        record = run(runs.train, world, str(tmp_path / name), NAME, steps=4, overrides=overrides, env=env)
        assert record["backend"] == ("cpu" if env else "cuda")
        losses[name] = record["losses"]
    assert len(losses["gpus"]) == 1
    assert losses["cpus"] == pytest.approx(losses["gpus"], rel=1e-3)
    assert losses["one gpu"] == pytest.approx(losses["gpus"], rel=1e-3)  # of bf16
    assert losses["one cpu"] == pytest.approx(losses["one gpu"], rel=1e-3)


def test_an_adapter_is_trained_on_a_run_s_weights(run, pretrained, tmp_path):
    folder, _ = pretrained
    world = runs.shrunk(NAME, scheme="lora").processes
    record = run(runs.train, world, str(tmp_path), NAME, scheme="lora", base=str(runs.checkpoint_of(str(folder))))
    assert record["backend"] == "cuda" and len(record["losses"]) == runs.STEPS
    assert all(norm > 0 for norm in record["norms"])
    assert runs.checkpoint_of(str(tmp_path)).is_dir()


def written(checkpoint: str, folder: str | None = None) -> str:
    """The greedy text of a checkpoint; into ``folder`` its weights as transformers reads them."""
    from nemo2 import llm

    if folder is not None:
        llm.export_ckpt(checkpoint, "hf", output_path=folder)
    [text] = llm.generate(checkpoint, prompts=["1 2 3"], max_new_tokens=4, temperature=0)
    return text.text


def test_a_run_writes_and_is_exported(run, pretrained, tmp_path):
    import transformers

    checkpoint = str(runs.checkpoint_of(str(pretrained[0])))
    assert run(written, 1, checkpoint, str(tmp_path / "hf")) == run(written, 1, checkpoint, env=CPU)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.num_hidden_layers == runs.shrunk(NAME).recipe.model.config.num_layers
