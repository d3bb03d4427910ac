# SPDX-License-Identifier: Apache-2.0
"""Evaluation during training: the figures are those of the model at that step, in every layout, and training doesn't notice."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import DataError
from nemo2.callbacks import EvaluationCallback
from support import small_runs
from support.nightly import each_case, requested

TEXTS = {"short.txt": "def main():\n", "long.txt": "for line in sys.stdin: print(line.rstrip()) # ä\n" * 3}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP 2 with SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "DP 2": (2, {}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
}


def train(directory: str, *, evaluated: bool = True, **strategy: Any) -> dict[str, Any]:
    """Three steps; figures after the second and the third."""
    import torch

    from nemo2 import llm

    small_runs.release()
    torch.manual_seed(1234)
    data = small_runs.random_bytes()
    model = small_runs.build_llama(vocab_size=None, distributed=True, hidden_dropout=0.1)
    model.tokenizer = data.tokenizer
    recorder = small_runs.Recorder()
    measure = EvaluationCallback(every_n_steps=2, texts=[f"{directory}/{name}" for name in TEXTS])
    parts = small_runs.run_arguments(
        directory,
        model=model,
        data=data,
        name=f"{evaluated}-{torch.distributed.get_world_size()}-{'-'.join(strategy)}",
        max_steps=3,
        callbacks=[recorder, *([measure] if evaluated else [])],
        **{"pipeline_dtype": torch.float32} | strategy,
    )
    trainer, place = parts["trainer"], llm.pretrain(**parts)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "evaluation/" in name}
    return {"losses": recorder.losses, "metrics": metrics, "place": str(place)}


def after(places: dict[str, str], directory: str) -> dict[str, dict[str, float]]:
    """The same figures of the checkpoints, in one process; each is added to its run's report."""
    from nemo2 import llm
    from nemo2.llm.evaluation import figures

    found = {}
    for name, place in places.items():
        small_runs.release()
        found[name] = figures.of_texts(llm.perplexity(place, [f"{directory}/{name}" for name in TEXTS]))
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("evaluated")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    found: dict[str, Any] = {"without": run_on_ranks(train, 1, str(folder), evaluated=False)[0]}
    names = list(dict.fromkeys(["one process", *requested(request, "layout")]))
    for name in names:
        ranks, layout = LAYOUTS[name]
        found[name] = run_on_ranks(train, ranks, str(folder), **layout, timeout=180)
    places = {name: found[name][0]["place"] for name in names}
    found["after"] = run_on_ranks(after, 1, places, str(folder), timeout=180)[0]
    return found


def test_training_is_the_same_as_without(runs):
    assert runs["one process"][0]["losses"] == runs["without"]["losses"]
    assert runs["without"]["metrics"] == {}


@pytest.mark.parametrize("layout", each_case(LAYOUTS, ("one process", "TP 2 with SP", "PP 2")))
def test_the_figures_are_those_of_the_checkpoint_of_that_step(runs, layout):
    expected = runs["after"][layout]
    assert len(expected) == 4
    for rank in runs[layout]:
        assert rank["metrics"] == pytest.approx(expected, rel=1e-5)
    lines = [json.loads(line) for line in (Path(runs[layout][0]["place"]) / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if any(name.startswith("evaluation/") for name in line)]
    assert [line["step"] for line in measured[:2]] == [1, 2]
    assert measured[1]["evaluation/long.txt/loss"] == pytest.approx(
        runs[layout][0]["metrics"]["evaluation/long.txt/loss"]
    )


def test_figures_stand_in_the_report_beside_the_loss(runs):
    place = Path(runs["one process"][0]["place"])
    [line] = [json.loads(line) for line in (place / "evaluations.jsonl").read_text().splitlines()]
    assert (
        line["step"] == 2
        and line["checkpoint"].startswith("step=3")
        and line.keys() >= runs["after"]["one process"].keys()
    )
    page = (place / "report.html").read_text()
    assert "Evaluation: bits per byte" in page and "Evaluation: loss" in page and "long.txt" in page


def ended(directory: str) -> dict[str, list[dict[str, Any]]]:
    """The records of runs that end in several ways after three steps, none of which Lightning logs, and the metrics
    of the last checkpoint."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Timer

    from nemo2 import llm
    from nemo2.checkpoint.directory import read_manifest

    class Stop(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            self.done = trainer.global_step + 1

        def on_validation_end(self, trainer: Any, *rest: Any) -> None:  # as early stopping does
            trainer.should_stop = self.done == 3

    class Slow(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            for timer in trainer.callbacks:
                if isinstance(timer, Timer) and trainer.global_step == 2:
                    timer._duration = 0.0  # the time is over in this step

    (Path(directory) / "text.txt").write_text("def main():\n")
    ends: dict[str, tuple[int, dict[str, Any], list[Any]]] = {
        "max_steps": (3, {}, []),
        "early_stopping": (20, {"limit_val_batches": 1, "val_check_interval": 1}, [Stop()]),
        "max_epochs": (-1, {"max_epochs": 1, "limit_train_batches": 3}, []),
        "max_time": (20, {"max_time": "00:01:00:00"}, [Slow()]),
    }
    found = {}
    for name, (max_steps, options, callbacks) in ends.items():
        small_runs.release()
        parts = small_runs.run_arguments(
            directory,
            name=name,
            data=small_runs.random_bytes(num_train_samples=160, num_val_samples=8),
            checkpoints=small_runs.keep(save_last=True, every_n_train_steps=1000),
            max_steps=max_steps,
            trainer=options | {"log_every_n_steps": 10},
            callbacks=[EvaluationCallback(texts=[f"{directory}/text.txt"]), *callbacks],
        )
        trainer, run = parts["trainer"], llm.pretrain(**parts)
        assert run.last_checkpoint is not None
        manifest = read_manifest(run.last_checkpoint)
        assert manifest is not None and manifest.step == trainer.global_step
        found[name] = [*run.records, dict(manifest.metrics)]
    return found


def test_the_last_step_is_evaluated_and_logged_whatever_ends_training(run_on_ranks, tmp_path):
    for name, (*records, saved) in run_on_ranks(ended, 1, str(tmp_path), timeout=240)[0].items():
        logged = [record for record in records if "reduced_train_loss" in record]
        measured = [record for record in records if "evaluation/text.txt/loss" in record]
        assert [record["step"] for record in logged] == [2], name
        assert logged[0]["consumed_samples"] == 24 and {"grad_norm", "lr", "global_batch_size"} <= logged[0].keys()
        assert [record["step"] for record in measured] == [2], name
        assert saved["evaluation/text.txt/loss"] == pytest.approx(measured[0]["evaluation/text.txt/loss"])
        assert (
            saved["reduced_train_loss"] == pytest.approx(logged[0]["reduced_train_loss"]) and saved["global_step"] == 2
        )


def without_text(directory: str) -> tuple[str, int]:
    """What a run on mock data without a tokenizer of its own says, and its steps until then."""
    from nemo2 import llm

    (Path(directory) / "text.txt").write_text("def main():\n")
    evaluation = EvaluationCallback(every_n_steps=2, texts=[f"{directory}/text.txt"])
    data = small_runs.random_bytes(tokenizer=None)
    parts = small_runs.run_arguments(directory, data=data, max_steps=3, callbacks=[evaluation])
    with pytest.raises(DataError) as error:
        llm.pretrain(**parts)
    return str(error.value), parts["trainer"].global_step


def test_a_tokenizer_that_reads_no_text_ends_the_run_before_its_first_step(run_on_ranks, tmp_path):
    words, steps = run_on_ranks(without_text, 1, str(tmp_path))[0]
    assert "NullTokenizer reads numbers only" in words and steps == 0
