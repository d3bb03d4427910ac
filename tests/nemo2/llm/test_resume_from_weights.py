# SPDX-License-Identifier: Apache-2.0
"""What a start from weights provides, a resume provides: the tokenizer of a release, an imported model, a run's folder."""

import shutil
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest

from support import small_runs, tuned_runs
from support.nightly import daily_and_nightly
from support.tuned_runs import METHODS

STEPS = 2
SOURCES = ("release", "import", "run")
CASES = [(source, peft, "records") for source in SOURCES for peft in ("LoRA", "full")]
CASES += [("release", peft, "records") for peft in METHODS if peft not in ("LoRA", "full")]
CASES += [("import", "LoRA", samples) for samples in ("conversations", "packed")]  # `make drill` has the others
DAILY = [("release", "full", "records"), ("import", "LoRA", "packed"), ("run", "full", "records")]


class Killed(BaseException):
    """Ends a run at once, as far as one process can end it for itself."""


class Kill(pl.Callback):
    """Ends the run after the first step, whose checkpoint is saved by then."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            raise Killed


def finetune(
    directory: str,
    path: str,
    *,
    peft: str,
    folder: str,
    samples: str = "records",
    max_steps: int = STEPS,
    kill: bool = False,
) -> tuple[list[float], Any]:
    """The losses of a run without a tokenizer of its own, and its model's tokenizer."""
    small_runs.release()
    recorder, model = small_runs.Recorder(), None
    trainer = small_runs.build_trainer(max_steps=max_steps, callbacks=[recorder, *([Kill()] if kill else [])])
    with pytest.raises(Killed) if kill else nullcontext():
        model = tuned_runs.finetune(directory, path=path, folder=folder, peft=peft, samples=samples, trainer=trainer)
    return recorder.losses, getattr(model, "tokenizer", None)


def runs_of(directory: str, cases: list[tuple[str, str, str]]) -> dict[Any, Any]:
    from nemo2.checkpoint.context import tokenizer_identity

    small_runs.quiet()
    paths = {
        "release": f"hf://{directory}/released",
        "import": f"{directory}/imported",
        "run": f"{directory}/base",
    }
    finetune(f"{directory}/base", paths["release"], peft="full", max_steps=1, folder=directory)
    found: dict[Any, Any] = {}
    for source, peft, samples in cases:
        options: dict[str, Any] = {"path": paths[source], "peft": peft, "samples": samples, "folder": directory}
        place = f"{directory}/{source}_{peft}_{samples}"
        whole, expected = finetune(f"{place}_whole", **options)
        first, _ = finetune(place, kill=True, **options)
        rest, tokenizer = finetune(place, **options)
        same = tokenizer_identity(tokenizer) == tokenizer_identity(expected)
        found[source, peft, samples] = (whole, [*first, *rest], same)
    return found


def without_the_release(directory: str) -> tuple[int, bool]:
    small_runs.quiet()
    rest, tokenizer = finetune(
        f"{directory}/release_full_records",
        path=f"hf://{directory}/released",
        peft="full",
        folder=directory,
        max_steps=STEPS + 1,
    )
    return len(rest), tokenizer is not None


@pytest.fixture(scope="module", params=daily_and_nightly(CASES, DAILY))
def runs(request: Any, run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Any, Any], Any]:
    """Of each case its two runs; and, where a case is trained whole from the release, what a run does that goes on without it."""
    directory = tmp_path_factory.mktemp("tuned")
    run_on_ranks(tuned_runs.prepare, 1, str(directory))
    found = run_on_ranks(runs_of, 2, str(directory), request.param, timeout=600)[0]
    shutil.rmtree(directory / "released")
    if ("release", "full", "records") not in found:
        return found, None
    return found, run_on_ranks(without_the_release, 2, str(directory), timeout=200)[0]


def test_a_resumed_run_has_the_tokenizer_and_the_losses_of_an_uninterrupted_one(runs: Any):
    for case, (whole, resumed, same_tokenizer) in runs[0].items():
        assert same_tokenizer and len(set(whole)) == STEPS, case
        assert resumed == whole, case


def test_a_run_of_all_parameters_goes_on_with_its_own_copy_of_the_tokenizer_when_the_release_has_gone(runs: Any):
    assert runs[1] == (1, True) or CASES[1] not in runs[0]
