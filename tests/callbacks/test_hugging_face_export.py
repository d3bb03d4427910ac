# SPDX-License-Identifier: Apache-2.0
"""What a run saves is exported beside it while it trains; what can't be exported ends nothing."""

import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.callbacks import HuggingFaceExportCallback
from nemo2.checkpoint.directory import temporary_name
from nemo2.checkpoint.lineage import run_of
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
from support import resharding, small_runs


def warm_exports() -> None:
    """Exports are forks of a process that has imported what they import (`support.warm_commands`)."""
    sys.executable = shutil.which("python") or sys.executable


def train(folder: Path, *callbacks: pl.Callback, steps: int = 3, **options: Any) -> dict[str, Any]:
    saves = ModelCheckpoint(dirpath=str(folder / "checkpoints"), filename="{step}", save_top_k=1, **options)
    model = small_runs.build_llama(share_embeddings_and_output_weights=False)
    return small_runs.fit(model, max_steps=steps, callbacks=[*callbacks, saves])


def in_one_process(folder: str) -> list[str]:
    """Exports last as long as training, as those of real runs do: one is begun, one waits, and the last replaces it."""
    warm_exports()
    trained, python = Path(folder) / "trained", Path(folder) / "python"
    python.write_text(f"#!/bin/sh\nwhile [ ! -e '{trained}' ]; do sleep 0.05; done\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    sys.executable = str(python)

    class Ends(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trained.touch()

    callback = HuggingFaceExportCallback(every_n_saves=2, keep=1, dtype="bf16")
    train(Path(folder), callback, Ends(), steps=5, every_n_train_steps=1)
    return [str(path) for path in callback.exported]


def test_every_second_save_and_the_last_are_exported_and_the_newest_is_kept(
    run_on_ranks: Any, tmp_path: Path, warm_commands: dict[str, str]
) -> None:
    from transformers import AutoModelForCausalLM

    [exported] = run_on_ranks(in_one_process, 1, str(tmp_path), timeout=300.0, env=warm_commands)
    assert exported == [str(tmp_path / "hugging_face" / "step=5")]
    assert sorted(path.name for path in (tmp_path / "hugging_face").iterdir()) == [".run", "step=5"]
    [checkpoint] = (tmp_path / "checkpoints").glob("*last")
    model, info = AutoModelForCausalLM.from_pretrained(exported[0], output_loading_info=True, dtype="auto")
    assert not any(info.values()) and model.dtype == torch.bfloat16
    trained = resharding.whole_tensors(checkpoint)["module.embedding.word_embeddings.weight"]
    assert torch.equal(model.get_input_embeddings().weight, trained.bfloat16())
    assert not [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".tmp")]


def that_fails(folder: str) -> tuple[int, list[str]]:
    warm_exports()
    told: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logging.getLogger("nemo2.callbacks").addHandler(Told())
    exports = Path(folder) / "exports"

    class InTheWay(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if exports.is_dir():
                exports.rmdir()
                exports.touch()

    callback = HuggingFaceExportCallback(directory=str(exports))
    losses = train(Path(folder), callback, InTheWay(), every_n_train_steps=3)["losses"]
    return len(losses), told


def test_an_export_that_fails_is_said_and_ends_nothing(
    run_on_ranks: Any, tmp_path: Path, warm_commands: dict[str, str]
) -> None:
    [(steps, told)] = run_on_ranks(that_fails, 1, str(tmp_path), timeout=300.0, env=warm_commands)
    [failure] = [message for message in told if "failed" in message]
    assert steps == 3 and "training continues" in failure and "File exists" in failure
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer: Any = SimpleNamespace(checkpoint_callback=ModelCheckpoint(), ckpt_path=None, is_global_zero=True)
    model: Any = None
    with pytest.raises(ConfigError, match="HuggingFaceExportCallback.directory: cannot write to .*inside"):
        HuggingFaceExportCallback(directory=str(tmp_path / "file" / "inside")).on_train_start(trainer, model)


def of_two_runs(folder: str) -> dict[str, Any]:
    warm_exports()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("nemo2.callbacks").addHandler(handler)
    exports, found = Path(folder) / "exports", {}
    for name in ("one", "two"):
        small_runs.release()
        callback = HuggingFaceExportCallback(directory=str(exports))
        train(Path(folder) / name, callback, steps=1, every_n_train_steps=1)
        found[name] = (len(callback.exported), (exports / "step=1" / "model.safetensors").stat().st_mtime_ns)
    return found | {"told": [message for message in told if "failed" in message]}


def test_the_exports_of_another_run_are_not_replaced(
    run_on_ranks: Any, tmp_path: Path, warm_commands: dict[str, str]
) -> None:
    [found] = run_on_ranks(of_two_runs, 1, str(tmp_path), timeout=300.0, env=warm_commands)
    assert [found["one"][0], found["two"][0]] == [1, 0] and found["one"][1] == found["two"][1]
    [failure] = found["told"]
    owner = run_of(tmp_path / "exports")
    assert owner is not None and owner.id in failure and "training continues" in failure


def that_is_killed(folder: str) -> dict[str, Any]:
    """Of a run whose first export is killed half-way: what it says, and what lies in the folder of exports then, and at the
    end."""
    warm_exports()
    told: list[str] = []
    found: dict[str, Any] = {"told": told}
    exports = Path(folder) / "hugging_face"

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    class Kills(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            running = callback._running
            if running is None or "half" in found:
                return
            half = temporary_name(exports / "step=2")  # as a process leaves it that has begun to write
            half.mkdir(parents=True)
            (half / "model.safetensors").write_bytes(b"half")
            running.process.kill()
            running.process.wait()
            found["half"] = sorted(path.name for path in exports.iterdir())

    logging.getLogger("nemo2.callbacks").addHandler(Told())
    callback = HuggingFaceExportCallback(every_n_saves=2)
    saves = ModelCheckpoint(dirpath=f"{folder}/checkpoints", filename="{step}", save_top_k=1, every_n_train_steps=1)
    model = small_runs.build_llama(share_embeddings_and_output_weights=False)
    small_runs.fit(model, max_steps=3, callbacks=[callback, saves, Kills()])
    return found | {"exports": sorted(path.name for path in exports.iterdir())}


def test_an_export_that_is_killed_leaves_nothing_and_the_next_is_made(
    run_on_ranks: Any, tmp_path: Path, warm_commands: dict[str, str]
) -> None:
    [found] = run_on_ranks(that_is_killed, 1, str(tmp_path), timeout=300.0, env=warm_commands)
    assert any("step=2 failed, and training continues: exit code -9" in message for message in found["told"]), found
    assert any("unfinished" in name for name in found["half"]) and found["exports"] == [".run", "step=3"]


class Waits(pl.Callback):
    """Background saves are published when the next one begins, or at the end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        io = trainer.strategy.checkpoint_io
        publish = io.maybe_finalize_save_checkpoint
        io.maybe_finalize_save_checkpoint = lambda blocking=False: blocking and publish(blocking=True)


def of_a_resumed_run(folder: str, in_background: bool) -> list[Any]:
    """The names in the folder of exports after each start of a run, and the saves that were counted."""
    warm_exports()
    found, checkpoint = [], None
    for steps in (2, 4, 4):  # the last start finds nothing to train
        small_runs.release()
        callback = HuggingFaceExportCallback(every_n_saves=3, keep=1)
        saves = small_runs.keep(f"{folder}/checkpoints", save_top_k=-1, every_n_train_steps=1)
        model = small_runs.build_llama(share_embeddings_and_output_weights=False)
        small_runs.fit(
            model,
            max_steps=steps,
            callbacks=[callback, saves, Waits()],
            ckpt_path=checkpoint,
            ckpt_async_save=in_background,
        )
        checkpoint = f"{folder}/checkpoints/step={steps}"
        found.append([sorted(path.name for path in Path(folder, "hugging_face").iterdir()), callback._saves])
    return found


@pytest.mark.parametrize("in_background", [False, True])
def test_a_resumed_run_counts_and_keeps_the_exports_of_the_run_so_far(
    run_on_ranks: Any, tmp_path: Path, warm_commands: dict[str, str], in_background: bool
) -> None:
    [found] = run_on_ranks(of_a_resumed_run, 1, str(tmp_path), in_background, timeout=300.0, env=warm_commands)
    assert found == [[[".run", "step=2"], 2], [[".run", "step=4"], 4], [[".run", "step=4"], 4]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every_n_saves": 0}, "every_n_saves=0: must be a whole number of at least 1, or None"),
        ({"keep": 0}, "keep=0: must be a whole number"),
        ({"at_end": False}, "would export nothing"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HuggingFaceExportCallback(**settings)
