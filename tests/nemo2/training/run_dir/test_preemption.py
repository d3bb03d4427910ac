# SPDX-License-Identifier: Apache-2.0
"""A signal to any rank ends the run after the step, saved, with an exit code that says so."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from nemo2.base.errors import EXIT_PREEMPTED, ConfigError, Preempted
from nemo2.checkpoint.directory import finished
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE, read_faults, record_fault
from nemo2.training.run_dir.preemption import PreemptionCallback, _default_signals
from support import small_runs

STEPS = 6


class SignalAt(pl.Callback):
    """One rank sends itself a signal before a step, twice; and SIGTERM while it ends, as launchers do to those that are left."""

    def __init__(self, number: int, step: int, rank: int) -> None:
        self.number, self.step, self.rank = number, step, rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)
            os.kill(os.getpid(), self.number)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def keeping(directory: str, every: int = 100) -> Any:
    return small_runs.keep(directory, every_n_train_steps=every, save_last=True)


def preempted(directory: str) -> dict[str, Any]:
    """An undisturbed run, one that rank 1 hears SIGUSR1 in, and what goes on from it."""
    os.environ[FAULT_DIR_VARIABLE] = f"{directory}/faults"
    before = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"max_steps": STEPS, "tensor_model_parallel_size": 2}
    found: dict[str, Any] = {"whole": small_runs.fit(small_runs.build_llama(), **options)["losses"]}
    for name, asynchronous in (("foreground", False), ("background", True)):
        folder = f"{directory}/{name}"
        try:
            small_runs.fit(
                small_runs.build_llama(),
                callbacks=[PreemptionCallback("SIGUSR1"), SignalAt(signal.SIGUSR1, 2, 1), keeping(folder)],
                ckpt_async_save=asynchronous,
                **options,
            )
        except Preempted as error:
            found[f"{name} code"], found[f"{name} message"] = error.code, error.message
        [(path, manifest)] = finished(Path(folder))
        found[f"{name} saved"] = manifest.step
        found[name] = small_runs.fit(small_runs.build_llama(), ckpt_path=str(path), **options)["losses"]
    found["restored"] = signal.getsignal(signal.SIGTERM) == before
    found["faults"] = [(fault.kind, fault.explained) for fault in read_faults(f"{directory}/faults")]
    return found


def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_from_there(run_on_ranks, tmp_path):
    for found in run_on_ranks(preempted, 2, str(tmp_path)):
        for name in ("foreground", "background"):
            assert found[f"{name} code"] == EXIT_PREEMPTED == 143
            assert found[f"{name} saved"] == 3
            assert "SIGUSR1 after step 3: saved" in found[f"{name} message"]
            assert found[name] == found["whole"][3:]
        assert found["restored"]
    assert ("Preempted", True) in found["faults"]


class StopAt(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 1


ENDS: dict[str, tuple[int, dict[str, Any], type[pl.Callback]]] = {
    "max_steps": (2, {}, pl.Callback),
    "max_epochs": (-1, {"max_epochs": 1, "limit_train_batches": 2}, pl.Callback),
    "should_stop": (-1, {}, StopAt),
}


def in_the_last_step(directory: str, end: str) -> list[int]:
    max_steps, options, stop = ENDS[end]
    callbacks = [stop(), PreemptionCallback(), SignalAt(signal.SIGTERM, 1, 0), keeping(directory)]
    small_runs.fit(small_runs.build_llama(), max_steps=max_steps, trainer=options, callbacks=callbacks)
    return [manifest.step for _, manifest in finished(Path(directory))]


@pytest.mark.quick
@pytest.mark.parametrize("end", ENDS)
def test_a_signal_in_the_last_step_lets_the_run_end_as_it_would(run_on_ranks, tmp_path, end):
    assert run_on_ranks(in_the_last_step, 1, str(tmp_path), end)[0] == [2]


class SignalIn(pl.Callback):
    """Sends this process a signal in a phase of the run, once."""

    def __init__(self, number: int, phase: str) -> None:
        self.number, self.phase = number, phase

    def reached(self, phase: str) -> None:
        if phase == self.phase:
            self.phase = ""
            os.kill(os.getpid(), self.number)

    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        self.reached("model")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.reached("first step" if batch_idx == 0 else "step")

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.reached("validation")

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.reached("save")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.reached("end")


PHASES = [
    ("SIGTERM", "first step", 1), ("SIGHUP", "step", 2), ("SIGUSR1", "step", 2), ("SIGINT", "step", 2),
    ("SIGHUP", "validation", 2), ("SIGUSR1", "save", 3), ("SIGTERM", "end", None),
]  # fmt: skip
"""Signal, phase, and the step after which the run is saved and ends; None: it ends as it would."""


def in_every_phase(directory: str) -> dict[str, tuple[int, list[int]]]:
    """Of runs of four steps, validated and saved every two, their exit codes and what they saved."""
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, in all processes below
    before = [signal.getsignal(number) for number in signal.Signals]
    found = {}
    for name, phase, _ in PHASES:
        folder, code = f"{directory}/{name} {phase}", 0
        keep = keeping(folder, every=2)
        try:
            small_runs.fit(
                small_runs.build_llama(),
                max_steps=4,
                callbacks=[PreemptionCallback(), SignalIn(signal.Signals[name], phase), keep],
                trainer={"limit_val_batches": 1, "val_check_interval": 2},
            )
        except Preempted as error:
            code = error.code
        found[f"{name} {phase}"] = code, sorted(manifest.step for _, manifest in finished(Path(folder)))
        assert [signal.getsignal(number) for number in signal.Signals] == before
    return found


def test_signals_save_in_every_phase_and_a_run_that_is_over_ends_as_it_would(run_on_ranks, tmp_path):
    found = run_on_ranks(in_every_phase, 1, str(tmp_path), timeout=240.0)[0]
    for name, phase, last in PHASES:
        code, saved = found[f"{name} {phase}"]
        assert (code, saved[-1]) == ((0, 4) if last is None else (EXIT_PREEMPTED, last)), (name, phase)


class SignalWhile(small_runs.TokenData):
    """Sends this process a signal before there is anything to save."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def setup(self, stage: str) -> None:
        os.kill(os.getpid(), self.number)


def before_training(directory: str) -> dict[str, tuple[int, int]]:
    """Of runs in processes of their own that a signal meets before their first step: how they ended, and checkpoints."""
    import multiprocessing

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, in all processes below
    found = {}
    for name, phase in (("SIGTERM", "data"), ("SIGUSR1", "model"), ("SIGHUP", "data")):
        folder, number = f"{directory}/{name} {phase}", signal.Signals[name]
        data = SignalWhile(number) if phase == "data" else None
        callbacks = [PreemptionCallback(), SignalIn(number, phase), keeping(folder)]

        def run(data: Any = data, callbacks: Any = callbacks) -> None:
            small_runs.fit(small_runs.build_llama(), data, max_steps=2, callbacks=callbacks)

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join(100)
        found[f"{name} {phase}"] = process.exitcode, len(finished(Path(folder)))
    return found


def test_a_signal_before_the_first_step_ends_the_process_and_nothing_is_saved(run_on_ranks, tmp_path):
    found = run_on_ranks(before_training, 1, str(tmp_path), init_process_group=False, timeout=240.0)[0]
    assert found == {
        "SIGTERM data": (-signal.SIGTERM, 0), "SIGUSR1 model": (-signal.SIGUSR1, 0), "SIGHUP data": (-signal.SIGHUP, 0),
    }  # fmt: skip


def test_signals_that_somebody_handles_or_ignores_are_left_to_them(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGUSR1, lambda *args: None)
    try:
        assert _default_signals() == [signal.SIGTERM]
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert _default_signals() == [signal.SIGTERM, signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGUSR1, before[1])


def test_requested_signals_are_handled_beside_sigterm():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1)}
    callback = PreemptionCallback("SIGUSR2")
    try:
        callback.on_train_start(pl.Trainer(logger=False, enable_checkpointing=False), pl.LightningModule())
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGUSR2) == callback._record_signal
        assert signal.getsignal(signal.SIGUSR1) == before[signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("sig", ["SIGTREM", "SIGKILL", 9, 1000])
def test_a_signal_that_cannot_be_caught_is_refused(sig):
    with pytest.raises(ConfigError, match=r"PreemptionCallback\.sig="):
        PreemptionCallback(sig)


def test_the_exit_code_reaches_whoever_launched_the_run(tmp_path, monkeypatch):
    from nemo2.cli.app import _code
    from nemo2.launch.failure import explain_failure

    monkeypatch.setenv(FAULT_DIR_VARIABLE, str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    record_fault(Preempted("SIGTERM after step 3: saved here. Run the same command again."))
    failure = explain_failure(fault_dir=tmp_path, log_dir=tmp_path)
    assert failure.exit_code == _code(failure) == EXIT_PREEMPTED
    assert str(failure).startswith("SIGTERM after step 3: saved here.")
