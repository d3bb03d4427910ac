# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a run resumes from, and its words where it can't."""

import contextlib
import shutil
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nemo2.base.errors import CheckpointError, RunFinished
from nemo2.base.noise import send_to
from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
from nemo2.checkpoint.directory import finished
from nemo2.checkpoint.lineage import Run, begin, run_of
from support import small_runs
from support.saved_checkpoints import saved


def trainer(directory: Path, max_steps: int = 100) -> Any:
    return types.SimpleNamespace(
        checkpoint_callback=types.SimpleNamespace(dirpath=str(directory)),
        default_root_dir="/nowhere",
        max_steps=max_steps,
        world_size=1,
        is_global_zero=True,
        ckpt_path=None,
        strategy=types.SimpleNamespace(restore_config=None),
    )


def test_the_newest_finished_checkpoint_is_resumed(tmp_path):
    saved(tmp_path / "step=9", 9)
    newest = saved(tmp_path / "step=10-last", 10)
    (tmp_path / ".unfinished-0-step=11").mkdir()
    (tmp_path / "step=12").mkdir()
    a_trainer = trainer(tmp_path)
    assert AutoResume(resume_if_exists=True).setup(a_trainer) == newest
    assert a_trainer.ckpt_path == newest


def test_without_being_asked_nothing_is_resumed(tmp_path):
    saved(tmp_path / "step=9", 9)
    assert AutoResume().setup(trainer(tmp_path)) is None


def test_of_two_checkpoints_of_one_step_the_later_is_resumed(tmp_path):
    """As after a resume from an earlier step, whose validation gave another name."""
    saved(tmp_path / "val_loss=2.00-step=10", 10)
    later = saved(tmp_path / "val_loss=1.00-step=10", 10)
    assert AutoResume(resume_if_exists=True).setup(trainer(tmp_path)) == later


def test_finding_nothing_is_an_error_that_says_where_it_looked_unless_told_otherwise(tmp_path):
    with pytest.raises(CheckpointError, match=rf"looked in {tmp_path}.*resume_ignore_no_checkpoint=True"):
        AutoResume(resume_if_exists=True).setup(trainer(tmp_path))
    assert AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True).setup(trainer(tmp_path)) is None


@pytest.mark.parametrize(
    ("begun", "told"), [(False, "No checkpoint"), (True, "The run was interrupted before its first")]
)
def test_only_a_run_that_starts_again_at_the_beginning_says_so_on_the_console(tmp_path, caplog, begun, told):
    if begun:
        begin(tmp_path, None)
    kept = []
    with contextlib.ExitStack() as stack:
        stack.callback(send_to, None)
        send_to(types.SimpleNamespace(handle=kept.append))
        kept.clear()  # what was said before there was a log
        caplog.set_level("INFO")
        AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True).setup(trainer(tmp_path))
    shown = [record.getMessage() for record in caplog.records]
    (message,) = shown if begun else [record.getMessage() for record in kept]
    assert message.startswith(told) and message.endswith(f"to resume from in {tmp_path}; starting from the beginning.")
    assert bool(shown) == begun


@pytest.mark.parametrize("ignore", [False, True])
def test_checkpoints_that_cannot_be_used_are_never_a_reason_to_start_anew(tmp_path, ignore):
    from nemo2.training.run_dir.directory import furthest_run

    run = tmp_path / "2026-01-01_00-00-00"
    torn = saved(run / "checkpoints" / "step=9", 9)
    (torn / "manifest.json").write_text("{")
    resume = AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=ignore)
    with pytest.raises(CheckpointError, match=r"none of them is usable: .*step=9 \(manifest\.json cannot be read\)"):
        resume.setup(trainer(run / "checkpoints"))
    assert furthest_run(tmp_path) == run, "a new folder would hide it"
    # With a good one beside it, that one is taken.
    good = saved(run / "checkpoints" / "step=3", 3)
    assert resume.setup(trainer(run / "checkpoints")) == good


def test_only_a_checkpoint_that_was_found_may_give_way_to_an_older_one(tmp_path):
    chosen = saved(tmp_path / "step=5", 5)
    for options, expected in (({"resume_if_exists": True}, True), ({"resume_from_path": str(chosen)}, False)):
        a_trainer = trainer(tmp_path)
        a_trainer.strategy.checkpoint_io = types.SimpleNamespace(fall_back=False)
        AutoResume(**options).setup(a_trainer)
        assert a_trainer.strategy.checkpoint_io.fall_back is expected


def test_another_directory_may_be_a_run_a_folder_of_checkpoints_or_one_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    newest = saved(tmp_path / "run" / "2026-01-01" / "checkpoints" / "step=5", 5)
    for place in (tmp_path / "run", newest.parent, newest.parent.parent, newest, "~/run"):
        found = AutoResume(resume_if_exists=True, resume_from_directory=str(place)).setup(trainer(tmp_path / "empty"))
        assert found == newest


@pytest.mark.parametrize("named", [True, False])
def test_a_named_directory_without_a_checkpoint_warns(tmp_path, caplog, named):
    directory = {"resume_from_directory": str(tmp_path / "nowhere")} if named else {}
    resume = AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True, **directory)
    assert resume.setup(trainer(tmp_path / "empty")) is None
    assert ("No checkpoint to resume from" in caplog.text) == named


def test_a_run_that_saves_nothing_never_goes_on_from_what_lies_in_the_working_directory(tmp_path, monkeypatch):
    saved(tmp_path / "checkpoints" / "step=9", 9)
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "run" / "checkpoints"
    a_trainer = trainer(tmp_path)
    a_trainer.checkpoint_callback, a_trainer.default_root_dir = None, str(tmp_path)
    resume = AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    assert resume.setup(a_trainer) is None and resume.setup(a_trainer, directory=own) is None
    with pytest.raises(CheckpointError, match="looked in no directory: the run saves no checkpoints"):
        AutoResume(resume_if_exists=True).setup(a_trainer)
    # Its own are found all the same, e.g. to be validated.
    assert resume.setup(a_trainer, directory=saved(own / "step=3", 3).parent) == own / "step=3"


def test_a_checkpoint_of_another_run_is_refused_unless_it_is_named(tmp_path):
    own, stranger = saved(tmp_path / "step=5", 5, run="own"), saved(tmp_path / "step=9", 9, run="stranger")
    (tmp_path / ".run").write_text('{"id": "own", "lineage": []}')
    resume = AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    assert resume.setup(trainer(tmp_path)) == own
    assert AutoResume(resume_from_path=str(stranger)).setup(trainer(tmp_path)) == stranger
    named = AutoResume(resume_if_exists=True, resume_from_directory=str(tmp_path))
    assert named.setup(trainer(tmp_path / "elsewhere")) == stranger
    shutil.rmtree(own)
    with pytest.raises(
        CheckpointError, match=r"step=9 \(belongs to run stranger.*run own; resume\.resume_from_path accepts it"
    ):
        resume.setup(trainer(tmp_path))


def test_a_path_is_taken_as_it_is_or_refused(tmp_path):
    saved(tmp_path / "step=9", 9)
    chosen = saved(tmp_path / "step=5", 5)
    assert AutoResume(resume_from_path=str(chosen), resume_if_exists=True).setup(trainer(tmp_path)) == chosen
    with pytest.raises(CheckpointError, match="resume.resume_from_path=/no/such: this checkpoint directory does not"):
        AutoResume(resume_from_path="/no/such").setup(trainer(tmp_path))


@pytest.mark.parametrize("setting", ["resume_from_path", "resume_from_directory"])
def test_the_same_command_goes_on_from_what_the_run_has_saved_since_it_began_elsewhere(tmp_path, setting):
    there = saved(tmp_path / "there" / "step=4", 4, run="there", lineage=["before"])
    own = tmp_path / "own"
    own.mkdir()
    (own / ".run").write_text('{"id": "own", "lineage": ["before", "there"]}')
    named = {setting: str(there if setting == "resume_from_path" else there.parent), "resume_if_exists": True}
    saved(own / "step=4", 4, run="own", lineage=["before", "there"])
    assert AutoResume(**named).setup(trainer(own)) == AutoResume(**named).checkpoint_in(own) == there
    later = saved(own / "step=6", 6, run="own", lineage=["before", "there"])
    assert AutoResume(**named).setup(trainer(own)) == AutoResume(**named).checkpoint_in(own) == later
    with pytest.raises(CheckpointError, match="step=6 is complete: it is at step 6"):
        AutoResume(**named).setup(trainer(own, max_steps=6))
    (own / ".run").write_text('{"id": "own", "lineage": ["before", "another"]}')
    shutil.rmtree(later)
    saved(own / "step=6", 6, run="own", lineage=["before", "another"])
    assert AutoResume(**named).setup(trainer(own)) == there, "a checkpoint of another run is named"


def test_a_run_that_went_back_to_its_own_checkpoint_goes_on_from_what_it_has_saved_since(tmp_path):
    steps = {step: saved(tmp_path / f"step={step}", step, run="own", saved_at=float(step)) for step in (3, 6, 9)}
    (tmp_path / ".run").write_text('{"id": "own", "lineage": []}')
    command = AutoResume(resume_from_path=str(steps[3]), resume_if_exists=True)
    a_trainer = trainer(tmp_path)
    assert command.setup(a_trainer) == a_trainer.checkpoint_callback.requested == steps[3]
    run = begin(tmp_path, steps[3], requested=True)
    assert begin(tmp_path, steps[3]) == Run(id="own"), "only a named one is gone back to"
    assert begin(tmp_path, steps[3], requested=True) == run == run_of(tmp_path)
    later = saved(tmp_path / "again-4", 4, saved_at=10.0, **run.signature())
    for resume in (command, AutoResume(resume_if_exists=True)):
        a_trainer = trainer(tmp_path, max_steps=9)
        assert resume.setup(a_trainer) == resume.checkpoint_in(tmp_path) == later
        assert not hasattr(a_trainer.checkpoint_callback, "requested")
    assert begin(tmp_path, later) == run
    renamed = AutoResume(resume_from_path=str(steps[6]) + "-last").setup(trainer(tmp_path))
    assert renamed == steps[6], "the last checkpoint is renamed when a newer one is saved"
    # Another of its checkpoints is gone back to, also one of the attempt before.
    other = AutoResume(resume_from_path=str(steps[6]), resume_if_exists=True)
    assert other.setup(trainer(tmp_path)) == steps[6]
    assert begin(tmp_path, steps[6], requested=True).returned_to == (3.0, 6.0)
    assert [path.name for path, _ in finished(tmp_path)] == ["step=3", "step=6", "step=9", "again-4"]


def test_a_model_that_was_never_imported_is_told_with_the_command_that_imports_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_MODELS_CACHE", str(tmp_path))
    resume = AutoResume(restore_config=RestoreConfig(path="nemo://org/name"))
    trainer = types.SimpleNamespace(
        strategy=types.SimpleNamespace(), checkpoint_callback=None, default_root_dir=tmp_path
    )
    with pytest.raises(CheckpointError, match=f"nemo2 import hf://org/name --output {tmp_path}/org/name"):
        resume.setup(trainer, model=types.SimpleNamespace())


def test_a_finished_run_is_not_resumed_but_on_purpose(tmp_path):
    done = saved(tmp_path / "step=10", 10)
    with pytest.raises(CheckpointError, match=r"at step 10, and trainer\.max_steps=10.*resume_past_end=True"):
        AutoResume(resume_if_exists=True).setup(trainer(tmp_path, max_steps=10))
    assert AutoResume(resume_if_exists=True, resume_past_end=True).setup(trainer(tmp_path, max_steps=10)) == done
    assert AutoResume(resume_if_exists=True).setup(trainer(tmp_path, max_steps=-1)) == done


def test_a_finished_run_goes_on_with_more_steps_or_its_first_error_says_how(tmp_path):
    whole = saved(tmp_path / "step=8", 8)
    saved(tmp_path / "step=10-last", 10, weights_only=True)
    resume = AutoResume(resume_if_exists=True)
    with pytest.raises(RunFinished, match=r"is complete.*To train further from step 8"):
        resume.setup(trainer(tmp_path, max_steps=10))
    assert resume.setup(trainer(tmp_path, max_steps=20)) == whole
    shutil.rmtree(whole)
    with pytest.raises(CheckpointError) as refused:
        resume.setup(trainer(tmp_path, max_steps=10))
    assert f"resume.restore_config.path={tmp_path / 'step=10-last'}" in str(refused.value)
    assert "resume_past_end" not in str(refused.value)  # it would fail on weights only


def test_a_launch_of_a_finished_run_is_one_error_before_processes_start(tmp_path, monkeypatch):
    from nemo2.launch import launch, launcher
    from nemo2.recipes import llama_tiny

    class Started(Exception):
        pass

    def start(*_, **__):
        raise Started

    monkeypatch.setattr(launcher, "on_experiment", start)
    run = tmp_path / "first" / "2026-01-01_00-00-00"
    saved(run / "checkpoints" / "step=10-last", 10, weights_only=True)

    def launched(**settings):
        recipe = llama_tiny.pretrain_recipe(dir=str(tmp_path), name="first")
        recipe.trainer.max_steps = settings.get("max_steps", 10)
        recipe.log.name = settings.get("name", "first")
        recipe.resume.resume_past_end = settings.get("past_end", False)
        return launch(recipe, devices=2)

    with pytest.raises(CheckpointError, match=r"is complete: it is at step 10.*log\.name.*restore_config\.path"):
        launched()
    for settings in ({"max_steps": 20}, {"past_end": True}):  # each rank would refuse it, too
        with pytest.raises(CheckpointError, match=r"cannot be resumed\..*log\.name.*restore_config\.path"):
            launched(**settings)
    with pytest.raises(Started):
        launched(name="second")
    saved(run / "checkpoints" / "step=8", 8)
    for settings in ({"max_steps": 20}, {"past_end": True}):
        with pytest.raises(Started):
            launched(**settings)


@pytest.mark.parametrize("named", [False, True])
def test_weights_without_an_optimizer_cannot_be_resumed_but_validated(tmp_path, named):
    path = saved(tmp_path / "step=10", 10, weights_only=True)
    resume = AutoResume(resume_from_path=str(path)) if named else AutoResume(resume_if_exists=True)
    with pytest.raises(CheckpointError, match=r"weights only.*restore_config\.path.*save_optim_on_train_end=True"):
        resume.setup(trainer(tmp_path))
    assert resume.setup(trainer(tmp_path, max_steps=10), training=False) == path


def test_a_checkpoint_of_the_run_itself_goes_before_weights_to_start_from(tmp_path):
    restore = RestoreConfig(path=str(tmp_path / "other"))
    fresh, resumed = trainer(tmp_path / "run"), trainer(tmp_path / "run")
    AutoResume(restore_config=restore, resume_if_exists=True).setup(fresh)
    assert fresh.strategy.restore_config is restore and fresh.ckpt_path is None
    own = saved(tmp_path / "run" / "step=3", 3)
    AutoResume(restore_config=restore, resume_if_exists=True).setup(resumed)
    # The strategy reads the other only for what the run's own holds no part of, as additions hold none of their base.
    assert resumed.strategy.restore_config is restore and resumed.ckpt_path == own


def started_from_weights(directory: str) -> dict[str, Any]:
    """A run of two steps, and what runs that start from its weights do first."""
    callbacks = [small_runs.keep(directory), *_at_step_two(directory)]
    first = small_runs.fit(small_runs.build_llama(), max_steps=3, callbacks=callbacks)
    path = f"{directory}/two"
    found: dict[str, Any] = {"first": first}
    from nemo2.checkpoint import changes

    starts: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "weights": ({}, {}),
        "with the optimizer": ({"load_optim_state": True}, {}),
        "with other positions": ({}, {"rotary_base": 20000.0}),
    }
    for name, (options, config) in starts.items():
        restore = RestoreConfig(path=path, **options)
        with mock.patch.object(changes._log, "warning") as warning:
            found[name] = small_runs.fit(
                small_runs.build_llama(**config), small_runs.TokenData(size=8), max_steps=1, restore_config=restore,
                inspect=lambda trainer: trainer.strategy.optimizers[0].mcore_optimizer.state_dict() is not None,
            )  # fmt: skip
        found[name]["warnings"] = [call.args for call in warning.call_args_list]
    half: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": 2}
    small_runs.fit(small_runs.build_llama(lr=0.1), callbacks=_at_step_two(f"{directory}/half"), **half)
    restore = RestoreConfig(path=f"{directory}/half/two", load_model_state=False, load_optim_state=True)
    found["only the optimizer"] = small_runs.fit(
        small_runs.build_llama(lr=1e-12), small_runs.TokenData(size=8), restore_config=restore, **half
    )
    with pytest.raises(CheckpointError) as caught:
        small_runs.fit(small_runs.build_llama(), max_steps=1, restore_config=RestoreConfig(path=f"{directory}/no"))
    found["missing"] = str(caught.value)
    restore = RestoreConfig(path=f"{directory}/weights", load_optim_state=True)
    with pytest.raises(CheckpointError) as caught:
        small_runs.fit(small_runs.build_llama(), max_steps=1, restore_config=restore)
    found["weights only"] = str(caught.value)
    return found


def _at_step_two(directory: str) -> list[Any]:
    import lightning.pytorch as pl

    class Saver(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(f"{directory}/two")
                trainer.save_checkpoint(f"{directory}/weights", weights_only=True)

    return [Saver()]


def test_a_run_started_from_weights_has_those_and_nothing_else(run_on_ranks, tmp_path):
    found = run_on_ranks(started_from_weights, 1, str(tmp_path))[0]
    first, weights = found["first"], found["weights"]
    # It sees sample 0 first, not sample 16, under the weights of step 2: another loss than either run's.
    assert weights["samples"] == [list(range(8))]
    assert weights["consumed"] == [8]
    assert weights["losses"][0] not in first["losses"]
    assert found["with the optimizer"]["losses"] == weights["losses"]
    assert not weights["warnings"]
    [(_, told_of, contradictions)] = found["with other positions"]["warnings"]
    assert str(told_of).endswith("two") and "model.config.rotary_base=20000.0" in contradictions
    first_loss, second_loss = found["only the optimizer"]["losses"]
    assert first_loss == second_loss, "the fp32 copies in the optimizer's state are the other run's weights"
    assert "this checkpoint directory does not exist" in found["missing"]
    assert "load_optim_state=True" in found["weights only"]
