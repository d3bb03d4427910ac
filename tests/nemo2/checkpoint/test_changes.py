# SPDX-License-Identifier: Apache-2.0
"""A run that goes on with another recipe than its checkpoint's is told what has changed."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from support import small_runs


def parts(
    directory: str, *, max_steps: int = 4, model: Any = None, data: Any = None, optim: Any = None, precision: str = "32",
    **resume: Any,
):  # fmt: skip
    from nemo2.checkpoint.auto_resume import AutoResume
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from nemo2.data.mock import MockDataModule
    from nemo2.data.tokenizer import ByteTokenizer
    from nemo2.optim.megatron import MegatronOptimizerModule
    from nemo2.run_dir.logger import NeMoLogger

    built = small_runs.build_llama(**{"vocab_size": None, **(model or {})})
    if optim:
        built.optim = MegatronOptimizerModule(dataclasses.replace(built.optim.config, **optim))
    given = {
        "seq_length": small_runs.SEQ,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "num_train_samples": 64,
        "num_val_samples": 16,
        "num_workers": 0,
    }
    return {
        "model": built,
        "data": MockDataModule(tokenizer=ByteTokenizer(), **given | (data or {})),
        "trainer": small_runs.build_trainer(max_steps=max_steps, precision=precision),
        "log": NeMoLogger(
            name="tiny", log_dir=directory, use_datetime_version=False,
            ckpt=ModelCheckpoint(every_n_train_steps=2, save_optim_on_train_end=True, save_top_k=-1, verbose=False),
        ),
        "resume": AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True, **resume),
    }  # fmt: skip


def resumed_with_changes(directory: str) -> dict[str, Any]:
    import torch

    from nemo2.errors import CheckpointError
    from nemo2.llm.api import pretrain

    small_runs.quiet()
    run = Path(pretrain(**parts(directory, max_steps=2)))
    found: dict[str, Any] = {}
    changed = {
        "nothing": {},
        "batch and seed of the data": {"data": {"global_batch_size": 16, "seed": 99}},
        "rotary base": {"model": {"rotary_base": 500}},
        "optimizer": {"optim": {"adam_beta1": 0.5, "adam_eps": 1e-6}},
        "recomputation": {"model": {"recompute_granularity": "selective"}},
        "sequence length": {"model": {"seq_length": 32}, "data": {"seq_length": 32}},
        "activation": {"model": {"activation_func": torch.nn.functional.gelu}},
        "precision": {"precision": "bf16-mixed"},
    }
    for number, (name, options) in enumerate(changed.items()):
        small_runs.release()
        given = parts(directory, max_steps=3 + number, **options)
        pretrain(**given)
        found[name] = json.loads((run / "changes.json").read_text())
        if name == "optimizer":
            groups = given["trainer"].strategy.optimizers[0].param_groups
            found["betas"] = {(group["betas"][0], group["eps"]) for group in groups}
    small_runs.release()
    with pytest.raises(CheckpointError) as caught:
        pretrain(**parts(directory, max_steps=20, model={"vocab_size": 1024}))
    found["vocabulary"] = str(caught.value)
    small_runs.release()
    accepted = parts(directory, max_steps=3 + len(changed), model={"vocab_size": 1024}, accept_changes=True)
    pretrain(**accepted)
    found["accepted"] = accepted["trainer"].global_step
    found["report"] = (run / "report.html").read_text()
    return found


def test_what_has_changed_is_sorted_told_and_refused_where_it_does_not_fit(run_on_ranks, tmp_path):
    found = run_on_ranks(resumed_with_changes, 1, str(tmp_path), timeout=400)[0]
    assert found["nothing"]["unfit"] == found["nothing"]["result"] == [], "the same recipe is no change"
    data = found["batch and seed of the data"]
    assert sorted(line.partition(":")[0] for line in data["result"]) == ["data.global_batch_size", "data.seed"]
    for name, words in (
        ("sequence length", "data.seq_length: 16 -> 32"), ("activation", "model.config.activation_func: silu -> gelu"),
        ("precision", "trainer.precision: 32 -> bf16-mixed"),
    ):  # fmt: skip
        assert any(words in line for line in found[name]["result"]), found[name]
    assert found["accepted"] == 11 and "doesn't fit the checkpoint: model.config.vocab_size" in found["report"]
    assert "<td class='number'>11</td>" in found["report"], (
        "the report lists the checkpoint that the end of training saves"
    )
    assert any("rotary_base" in line and "-> 500" in line for line in found["rotary base"]["result"])
    assert any("adam_beta1: 0.9 -> 0.5" in line for line in found["optimizer"]["result"])
    assert found["betas"] == {(0.5, 1e-6)}, "what the recipe says takes effect"
    recompute = found["recomputation"]
    assert any("recompute_granularity" in line for line in recompute["harmless"])
    assert not any("recompute" in line for line in recompute["result"])
    assert "vocab_size" in found["vocabulary"] and "resume.accept_changes=True" in found["vocabulary"]


def test_another_corpus_under_the_same_name_changes_the_result(tmp_path):
    from types import SimpleNamespace

    from nemo2.checkpoint.changes import changes_since, settings_of
    from nemo2.checkpoint.directory import Manifest, publish, temporary_name
    from nemo2.data.prepare import prepare_data
    from nemo2.data.pretraining import PreTrainingDataModule
    from nemo2.data.tokenizer import ByteTokenizer
    from nemo2.errors import DataError

    def corpus(text: str) -> Any:
        (tmp_path / "corpus.txt").write_text(text)
        prepare_data(tmp_path / "corpus.txt", tmp_path / "corpus", ByteTokenizer())
        data = PreTrainingDataModule(
            str(tmp_path / "corpus"), seq_length=16, tokenizer=ByteTokenizer(), split="1,0,0", num_train_samples=4,
            num_workers=0,
        )  # fmt: skip
        data.setup("fit")
        return data

    def trainer(data: Any) -> Any:
        strategy = SimpleNamespace(precision_plugin=None)
        return SimpleNamespace(
            datamodule=data, lightning_module=None, strategy=strategy, max_steps=4, is_global_zero=True
        )

    temporary = temporary_name(tmp_path / "step=2")
    temporary.mkdir()
    settings = settings_of(trainer(corpus("one text " * 100)))
    publish(temporary, tmp_path / "step=2", Manifest(step=2, consumed_samples=0, layout={}, settings=settings))
    assert not changes_since(tmp_path / "step=2", trainer(corpus("one text " * 100)))
    other = corpus("two texts" * 100)  # of the same length, with the same index
    found = changes_since(tmp_path / "step=2", trainer(other))
    assert (
        found.result == [f"data: {tmp_path / 'corpus'} has other contents"] and not found.unfit and not found.harmless
    )
    from nemo2.data.base import explaining_changed_inputs

    with pytest.raises(ZeroDivisionError), explaining_changed_inputs(other):
        raise ZeroDivisionError
    os.truncate(tmp_path / "corpus.bin", 100)
    with (
        pytest.raises(DataError, match=r"corpus\.bin had 1802 bytes .*, 100 bytes now"),
        explaining_changed_inputs(other),
    ):
        raise RuntimeError("DataLoader worker is killed by signal: Bus error. Raise your shared memory limit.")


def test_another_tokenizer_of_the_same_size_is_noticed_by_its_files(tmp_path):
    from nemo2.checkpoint.changes import Changes, _compare_files
    from nemo2.data.tokenizer import GPT2BPETokenizer
    from nemo2.data.tokenizer_files import files_of

    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (kept / name).write_text("a")
        (tmp_path / name).write_text("a")
    tokenizer = GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    same, other, gone = Changes(), Changes(), Changes()
    _compare_files(same, kept, files_of(tokenizer))
    (tmp_path / "vocab.json").write_text("b")
    _compare_files(other, kept, files_of(tokenizer))
    (tmp_path / "vocab.json").unlink()
    _compare_files(gone, kept, {"a": tmp_path / "a", "merges.txt": tmp_path / "merges.txt"})
    assert not same and "is not the file" in other.unfit[0] and "no longer exists in" in gone.unfit[0]
