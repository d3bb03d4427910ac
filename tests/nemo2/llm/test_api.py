# SPDX-License-Identifier: Apache-2.0
"""The entry points as a script calls them: a run's directory, resuming by name, validation, and generation."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support import small_runs

STEPS = 4


def parts(directory: str, *, max_steps: int, resume: Any = None, **config: Any) -> dict[str, Any]:
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    return small_runs.run_arguments(
        directory,
        model=small_runs.build_llama(**config, vocab_size=None),
        checkpoints=ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, verbose=False),
        resume=resume,
        max_steps=max_steps,
        trainer={"limit_val_batches": 1, "val_check_interval": 2},
    )


def trained(directory: str) -> dict[str, Any]:
    """Two steps, a restart under the same name up to four, a validation of the result, and the errors on the way."""
    from nemo2.base.errors import CheckpointError, ConfigError
    from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
    from nemo2.llm import api

    found: dict[str, Any] = {}
    first = parts(directory, max_steps=STEPS)
    first["trainer"].callbacks.append(stop_after(3))
    found["starts from random weights"] = []
    with mock.patch.object(api._log, "warning") as warning:
        found["directory"] = str(api.finetune(**first))
        found["starts from random weights"].append("random weights" in str(warning.mock_calls))
    found["names after stopping"] = names(found["directory"])
    small_runs.release()
    second = parts(directory, max_steps=STEPS)
    with mock.patch.object(api._log, "warning") as warning:
        api.finetune(**second)
        found["starts from random weights"].append("random weights" in str(warning.mock_calls))
    found["consumed"] = second["trainer"].strategy.consumed_samples
    found["names"] = names(found["directory"])
    with pytest.raises(CheckpointError) as done:
        api.pretrain(**parts(directory, max_steps=STEPS))
    found["done"] = str(done.value)
    third = parts(directory, max_steps=STEPS)
    api.validate(**third)
    found["validated"] = float(third["trainer"].callback_metrics["val_loss"])
    found["trained"] = float(second["trainer"].callback_metrics["val_loss"])
    clash = parts(directory, max_steps=STEPS, seq_length=small_runs.SEQ * 2)
    with pytest.raises(ConfigError) as caught:
        api.pretrain(**clash)
    found["clash"] = str(caught.value)
    weights = AutoResume(restore_config=RestoreConfig(path=found["directory"]))
    other = parts(f"{directory}/other", max_steps=STEPS, resume=weights, hidden_size=64)
    with pytest.raises(CheckpointError, match="belong to another model"):
        api.pretrain(**other)
    found["built"] = any(True for _ in other["model"].parameters())
    nonsense = parts(directory, max_steps=STEPS, rotary_base=-1)
    nonsense["model"].optim.config.clip_grad = -1.0
    with pytest.raises(ConfigError) as caught:
        api.pretrain(**nonsense)
    found["nonsense"] = str(caught.value)
    return found


def in_the_directory_of_another(directory: str) -> list[tuple[str, bool]]:
    """The errors of new runs in a run's directory, and whether they left all of its files as they were."""
    from nemo2.base.errors import CheckpointError
    from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
    from nemo2.llm import api

    first = Path(str(api.pretrain(**parts(directory, max_steps=2))))
    other = Path(str(api.pretrain(**parts(f"{directory}/elsewhere", max_steps=2))))
    weights = str(next((other / "checkpoints").glob("*-last")))
    saved = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    errors = []
    for entry_point, resume in (
        (api.pretrain, AutoResume()),
        (api.pretrain, AutoResume(restore_config=RestoreConfig(path=weights))),
        (api.validate, AutoResume(resume_from_path=weights)),
    ):
        small_runs.release()
        with pytest.raises(CheckpointError) as caught:
            entry_point(**parts(directory, max_steps=STEPS, resume=resume))
        unchanged = saved == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
        errors.append((str(caught.value), unchanged))
    return errors


def test_a_run_in_the_directory_of_another_ends_before_it_changes_a_file(run_on_ranks, tmp_path):
    from nemo2.checkpoint.lineage import run_of

    errors = run_on_ranks(in_the_directory_of_another, 1, str(tmp_path))[0]
    run = run_of(tmp_path / "tiny" / "checkpoints")
    assert run is not None
    for message, unchanged in errors:
        assert f"of run {run.id}, but this run is" in message and "resume.resume_if_exists=True" in message
        assert unchanged, message


def stop_after(step: int) -> Any:
    """From outside, as a time limit does."""
    import lightning.pytorch as pl

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= step

    return Stop()


def names(directory: str) -> list[str]:
    return sorted(path.name for path in (Path(directory) / "checkpoints").glob("[!.]*"))


def steps(names: list[str]) -> list[str]:
    return sorted(name.rpartition("-step=")[2] for name in names)


def test_a_run_is_resumed_by_its_name_finished_once_and_then_validated(run_on_ranks, tmp_path):
    found = run_on_ranks(trained, 1, str(tmp_path))[0]
    assert Path(found["directory"]).is_relative_to(tmp_path)
    assert steps(found["names after stopping"]) == [
        "2-consumed_samples=16",
        "3-consumed_samples=24-last",
    ]
    assert steps(found["names"]) == [
        "2-consumed_samples=16",
        "3-consumed_samples=24",
        "4-consumed_samples=32-last",
    ]
    assert all(name.startswith("tiny--") for name in found["names"])
    assert found["consumed"] == STEPS * 8
    assert found["starts from random weights"] == [True, False]
    assert not found["built"], "weights of other sizes are refused before the model is built"
    assert "is complete" in found["done"]
    assert found["validated"] == pytest.approx(found["trained"], rel=1e-6)
    assert "model.config.seq_length=32 contradicts data.seq_length=16" in found["clash"]
    assert "model.config.rotary_base=-1: must be above 0" in found["nonsense"]
    assert "optim.config.clip_grad=-1.0: must be at least 0" in found["nonsense"]
    metrics = Path(found["directory"]) / "metrics.jsonl"
    assert metrics.read_text().count("reduced_train_loss") == STEPS


def test_a_run_that_saves_nothing_says_so_unless_that_is_asked_for(caplog):
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from nemo2.llm.api import _warn_without_checkpoints
    from nemo2.training.strategy import MegatronStrategy
    from nemo2.training.trainer import Trainer

    for asked in ({"enable_checkpointing": False}, {"callbacks": [ModelCheckpoint()]}):
        _warn_without_checkpoints(Trainer(devices=1, strategy=MegatronStrategy(), **asked))
    assert not caplog.text
    _warn_without_checkpoints(Trainer(devices=1, strategy=MegatronStrategy()))
    assert "This run saves no checkpoint. Set log=NeMoLogger(ckpt=ModelCheckpoint())" in caplog.text


def test_tokenizers_are_shared_as_asked():
    import types

    from nemo2.base.errors import ConfigError
    from nemo2.mcore.settle.agreement import share_tokenizer

    model, data = types.SimpleNamespace(tokenizer="m"), types.SimpleNamespace(tokenizer="d")
    share_tokenizer(model, data, None)
    assert (model.tokenizer, data.tokenizer) == ("m", "d")
    share_tokenizer(model, data, "data")
    assert model.tokenizer == "d"
    model.tokenizer = "m"
    share_tokenizer(model, data, "model")
    assert data.tokenizer == "m"
    given = object()
    share_tokenizer(model, data, given)
    assert model.tokenizer is data.tokenizer is given
    with pytest.raises(ConfigError, match="tokenizer='dta': must be 'data', 'model'"):
        share_tokenizer(model, data, "dta")


# ---------------------------------------------------------------------------------------------------------- illegal


def refused(arguments: dict[str, Any], model: dict[str, Any]) -> tuple[str, bool]:
    """The answer to building and starting a run with these strategy arguments, and whether ranks had met."""
    import torch

    from nemo2.base.errors import ConfigError

    small_runs.quiet()
    with pytest.raises(ConfigError) as caught:
        trainer = small_runs.build_trainer(max_steps=1, trainer=arguments.pop("trainer", None), **arguments)
        trainer.fit(small_runs.build_llama(**model), small_runs.TokenData())
    return str(caught.value), torch.distributed.is_initialized()


ILLEGAL: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "world": ({"tensor_model_parallel_size": 2}, {}, "= 2 * 1 * 1 = 2 does not divide the world of 1 rank"),
    "sequence parallel": ({"sequence_parallel": True}, {}, "Cannot use sequence parallelism without tensor parallelism"),
    "model's size": ({}, {"tensor_model_parallel_size": 2}, "contradicts strategy.tensor_model_parallel_size=1"),
    "gone": ({"moe_extended_tp": True}, {}, "strategy.moe_extended_tp=True: Megatron-Core no longer supports it"),
    "ddp": ({"ddp": "pytorch"}, {}, "strategy.ddp='pytorch'"),
    "main params": ({"ckpt_load_main_params": True}, {}, "strategy.ckpt_load_optimizer=True"),
    "format": ({"save_ckpt_format": "zarr"}, {}, "strategy.save_ckpt_format='zarr'"),
    "strictness": ({"ckpt_load_strictness": "raise"}, {}, "strategy.ckpt_load_strictness='raise': must be None or one of"),
}  # fmt: skip


def all_refused(names: list[str]) -> dict[str, tuple[str, bool]]:
    return {name: refused(dict(ILLEGAL[name][0]), ILLEGAL[name][1]) for name in names}


def test_what_cannot_run_is_refused_before_ranks_meet(run_on_ranks):
    answers = run_on_ranks(all_refused, 1, list(ILLEGAL), init_process_group=False)[0]
    for name in ILLEGAL:
        message, met = answers[name]
        assert ILLEGAL[name][2].lower() in message.lower(), (name, message)
        assert not met, f"{name}: a process group existed already"


def wrong_world() -> str:
    from nemo2.base.errors import ConfigError

    small_runs.quiet()
    with pytest.raises(ConfigError) as caught:
        trainer = small_runs.build_trainer(max_steps=1)  # devices=1, as no process group is up
        trainer.fit(small_runs.build_llama(), small_runs.TokenData())
    return str(caught.value)


def test_a_world_of_another_size_than_the_trainers_is_refused(run_on_ranks):
    for message in run_on_ranks(wrong_world, 2, init_process_group=False):
        assert "= 1 * 1 = 1, but the launcher started 2 processes" in message
