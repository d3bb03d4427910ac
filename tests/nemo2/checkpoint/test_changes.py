# SPDX-License-Identifier: Apache-2.0
"""A run that goes on with another recipe than its checkpoint's is told what has changed."""

import html
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import CheckpointError, DataError
from nemo2.checkpoint import changes
from support import small_runs
from support.saved_checkpoints import saved


def parts(
    directory: str,
    *,
    model: Any = None,
    data: Any = None,
    optim: Any = None,
    accept_changes: bool = False,
    **trainer: Any,
) -> dict[str, Any]:
    from nemo2.checkpoint.auto_resume import AutoResume

    return small_runs.run_arguments(
        directory,
        model=small_runs.build_llama(**{"vocab_size": None, "optimizer": optim, **(model or {})}),
        data=small_runs.random_bytes(**(data or {})),
        checkpoints=small_runs.keep(every_n_train_steps=2, save_top_k=-1),
        resume=AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True, accept_changes=accept_changes),
        **trainer,
    )


def resumed_with_changes(directory: str) -> dict[str, Any]:
    import torch

    from nemo2.llm.api import pretrain

    small_runs.quiet()
    run = Path(pretrain(**parts(directory, max_steps=2)))
    found: dict[str, Any] = {}
    changed = {
        "nothing": {},
        "batch and seed of the data": {"data": {"global_batch_size": 16, "seed": 99}},
        "rotary base": {"model": {"rotary_base": 500}},
        "optimizer": {"optim": {"adam_beta1": 0.5, "adam_eps": 1e-6, "lr": 0.003}},
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
            found["betas"] = {(group["betas"][0], group["eps"], group["lr"]) for group in groups}
    small_runs.release()
    with pytest.raises(CheckpointError) as caught:
        pretrain(**parts(directory, max_steps=20, model={"vocab_size": 1024}))
    found["vocabulary"] = str(caught.value)
    small_runs.release()
    accepted = parts(directory, max_steps=3 + len(changed), model={"vocab_size": 1024}, accept_changes=True)
    pretrain(**accepted)
    found["accepted"] = accepted["trainer"].global_step
    found["report"] = (run / "report.html").read_text()
    exact = {"activation_func": torch.nn.functional.gelu, "gated_linear_unit": False, "add_bias_linear": True}
    for max_steps, fused in ((2, True), (3, False)):
        small_runs.release()
        run = Path(
            pretrain(**parts(f"{directory}/gelu", max_steps=max_steps, model=exact | {"bias_activation_fusion": fused}))
        )
    found["exact GELU"] = json.loads((run / "changes.json").read_text())
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
    assert found["accepted"] == 11 and "doesn't fit the checkpoint: model.config.vocab_size" in html.unescape(
        found["report"]
    )
    assert "<td class='number'>11</td>" in found["report"], (
        "the report lists the checkpoint that the end of training saves"
    )
    assert any("rotary_base" in line and "-> 500" in line for line in found["rotary base"]["result"])
    assert any("adam_beta1: 0.9 -> 0.5" in line for line in found["optimizer"]["result"])
    assert found["betas"] == {(0.5, 1e-6, 0.003)}, "what the recipe says takes effect"
    recompute = found["recomputation"]
    assert any("recompute_granularity" in line for line in recompute["harmless"])
    assert not any("recompute" in line for line in recompute["result"])
    # With a bias, the fused GELU is the tanh approximation.
    assert found["exact GELU"]["result"] == ["model.config.bias_activation_fusion: True -> False"]
    assert "vocab_size" in found["vocabulary"] and "resume.accept_changes=True" in found["vocabulary"]


@pytest.mark.parametrize(
    ("part", "path", "kind"),
    [
        ("model", f"config.tp_comm_overlap_cfg.qkv_fprop.{changes.TARGET}", "harmless"),
        ("model", f"config.{changes.TARGET}", "unfit"),
        ("trainer", "max_steps", "harmless"),
        ("optim", "lr_scheduler.max_steps", "result"),  # the learning rate of every step that follows
    ],
)
def test_the_kind_of_a_change(part, path, kind):
    found = changes.Changes()
    changes._sort(found, part, path, "before", "now")
    assert [name for name, differences in vars(found).items() if differences] == [kind]


def test_other_stages_in_a_hybrid_s_pattern_are_no_change_of_the_model():
    found = changes.Changes()
    for now, differs in (("M|*", False), ("M*", False), ("*M", True)):
        changes._sort(found, "model", "config.hybrid_override_pattern", "M*", now)
        assert bool(found) == differs, now


@pytest.mark.parametrize(("path", "compared"), [("config.params_dtype", False), ("config.main_params_dtype", True)])
def test_the_precision_of_the_model_has_its_own_comparison_and_that_of_the_main_parameters_has_none(path, compared):
    assert bool(changes._DECIDED_ELSEWHERE.search(path)) != compared


@pytest.mark.parametrize(
    ("options", "unfit"),
    [
        ({"dim": 8}, ["model_transform.dim"]),
        ({"target_modules": ["linear_qkv"]}, ["model_transform.target_modules"]),
        ({"modules_to_save": ["word_embeddings"]}, ["model_transform.modules_to_save"]),
        ({"target_modules": ["linear_proj", "linear_qkv"]}, []),
        ({"alpha": 16}, []),
        ({"method": "DoRA"}, [f"model_transform.{changes.TARGET}"]),
    ],
)
def test_adapters_of_another_shape_do_not_fit_and_another_scale_of_adapters_to_start_from_is_told(
    tmp_path, caplog, options, unfit
):
    from nemo2.checkpoint.context import write_parts
    from nemo2.models import peft

    settings: dict[str, Any] = {"target_modules": ["linear_qkv", "linear_proj"], "dim": 4, "alpha": 8, "method": "LoRA"}

    def made(method: str, **arguments: Any) -> Any:
        return getattr(peft, method)(**arguments)

    model = small_runs.build_llama()
    model.model_transform = made(**settings)
    write_parts(tmp_path, {"model": model})
    now = made(**settings | options)
    found = changes.unfit_changes(tmp_path, model_config=model.config, tokenizer=None, method=now)
    assert [change.field for change in found] == unfit
    changes.warn_if_trained_otherwise(tmp_path, model.config, name="its weights", method=now)
    assert ("peft.alpha=16" in caplog.text) == ("alpha" in options)


def resumed_at_its_end(directory: str) -> list[str]:
    import logging

    from nemo2.llm.api import pretrain

    small_runs.quiet()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("nemo2.training.run_dir.resumed").addHandler(handler)
    for _ in range(2):
        small_runs.release()
        given = parts(directory, max_steps=-1)
        given["trainer"].fit_loop.max_epochs = 1
        given["trainer"].limit_train_batches = 2
        pretrain(**given)
    return told


def test_a_run_that_resumes_at_the_end_of_its_epochs_says_that_it_trains_nothing(run_on_ranks, tmp_path):
    told = run_on_ranks(resumed_at_its_end, 1, str(tmp_path), timeout=240)[0]
    assert len(told) == 1 and "step 2" in told[0] and "trainer.max_epochs=1" in told[0]


@pytest.fixture
def resuming(tmp_path):
    """The changes that a run finds when it resumes with these data from a checkpoint that the first such run wrote."""
    from types import SimpleNamespace

    from nemo2.checkpoint.changes import changes_since
    from nemo2.checkpoint.context import inputs_of, settings_of

    checkpoint = tmp_path / "step=2"

    def find(data: Any) -> Any:
        strategy = SimpleNamespace(precision_plugin=None)
        trainer: Any = SimpleNamespace(
            datamodule=data, lightning_module=None, strategy=strategy, max_steps=4, is_global_zero=True
        )
        data.setup("fit")
        if checkpoint.exists():
            return changes_since(checkpoint, trainer)
        settings = json.loads(json.dumps(settings_of(trainer) | inputs_of(trainer)))
        saved(checkpoint, 2, settings=settings)

    return find


def corpus(prefix: Path, text: str = "one text " * 40_000, **options: Any) -> Any:
    from nemo2.data.prepare import prepare_data
    from nemo2.data.pretraining import PreTrainingDataModule
    from nemo2.data.tokenizer import ByteTokenizer

    if text:
        documents = (text[: len(text) // 2], text[len(text) // 2 :])
        prefix.with_suffix(".jsonl").write_text("\n".join(json.dumps({"text": one}) for one in documents))
        prepare_data(prefix.with_suffix(".jsonl"), prefix, ByteTokenizer(), overwrite=True)
    settings = {"paths": str(prefix), "split": "1,0,0"} | options
    return PreTrainingDataModule(
        seq_length=16, tokenizer=ByteTokenizer(), num_train_samples=4, num_workers=0, **settings
    )


def other_byte(file: Path) -> None:
    """Change one byte, far from the ends, without changing the size. The time becomes an earlier one, as after a copy:
    earlier than that of the file's description, too, whose hash is not that of these contents."""
    before = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size // 4 * 2)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))


@pytest.mark.parametrize("described", [True, False])
def test_one_changed_byte_of_training_data_does_not_fit(tmp_path, resuming, described):
    data = corpus(tmp_path / "a")
    if not described:
        (tmp_path / "a.json").unlink()
    resuming(data)
    other_byte(tmp_path / "a.bin")
    found = resuming(corpus(tmp_path / "a", ""))
    assert (
        list(map(str, found.unfit)) == [f"data: {tmp_path / 'a.bin'} has other contents"]
        and not found.result
        and not found.harmless
    )


def test_documents_in_another_order_do_not_fit(tmp_path, resuming):
    resuming(corpus(tmp_path / "a"))
    index = bytearray((tmp_path / "a.idx").read_bytes())
    offsets = 34 + 2 * 4
    index[offsets : offsets + 16] = index[offsets + 8 : offsets + 16] + index[offsets : offsets + 8]
    (tmp_path / "a.idx").write_bytes(index)
    assert resuming(corpus(tmp_path / "a", "")).to_dict()["unfit"] == [f"data: {tmp_path / 'a.idx'} has other contents"]


def test_data_that_were_only_copied_have_not_changed(tmp_path, resuming):
    resuming(corpus(tmp_path / "a"))
    for suffix in ("bin", "idx"):
        (tmp_path / "copy").write_bytes((tmp_path / f"a.{suffix}").read_bytes())
        (tmp_path / "copy").rename(tmp_path / f"a.{suffix}")
    assert not resuming(corpus(tmp_path / "a", ""))
    assert not resuming(corpus(tmp_path / "a"))  # made again


def test_data_of_another_size_do_not_fit_and_data_of_unknown_contents_are_reported(tmp_path, resuming, monkeypatch):
    monkeypatch.setattr("nemo2.data.inputs._HASHED_AT_ONCE", 1000)
    data = corpus(tmp_path / "a")
    (tmp_path / "a.json").unlink()
    resuming(data)
    other_byte(tmp_path / "a.bin")
    found = resuming(corpus(tmp_path / "a", ""))
    assert not found.unfit and len(found.result) == 1 and "is unknown" in str(found.result[0])
    (tmp_path / "step=2").rename(tmp_path / "earlier")
    resuming(corpus(tmp_path / "a"))
    monkeypatch.setattr("nemo2.data.input_changes._HASHED_TO_COMPARE", 1000)  # less than the .bin file
    other_byte(tmp_path / "a.bin")
    found = resuming(corpus(tmp_path / "a", ""))
    assert not found.unfit and len(found.result) == 1 and "is unknown" in str(found.result[0])
    found = resuming(corpus(tmp_path / "a", "another text " * 40_000))
    assert {str(line).split()[1] for line in found.unfit} == {str(tmp_path / "a.bin")}


def test_other_validation_data_change_the_result(tmp_path, resuming):
    def data(text: str) -> Any:
        paths = {"train": [str(tmp_path / "a")], "validation": [str(tmp_path / "v")], "test": None}
        corpus(tmp_path / "v", text)
        return corpus(tmp_path / "a", paths=paths, split="900,50,50")

    resuming(data("one text " * 400))
    found = resuming(data("no text! " * 400))
    assert list(map(str, found.result)) == [f"data: {tmp_path / 'v.bin'} has other contents"] and not found.unfit


@pytest.mark.parametrize(("split", "kind"), [("training", "unfit"), ("validation", "result")])
def test_one_changed_record_of_fine_tuning_is_noticed(tmp_path, resuming, split, kind):
    from nemo2.data.finetuning.module import FineTuningDataModule
    from nemo2.data.tokenizer import ByteTokenizer

    def data() -> Any:
        return FineTuningDataModule(
            dataset_root=str(tmp_path), seq_length=64, tokenizer=ByteTokenizer(), micro_batch_size=1,
            global_batch_size=2, num_workers=0,
        )  # fmt: skip

    def write(name: str, answer: str) -> None:
        lines = [json.dumps({"input": f"question {index}", "output": answer}) for index in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    write("training", "yes")
    write("validation", "yes")
    module = data()
    module.prepare_data()
    resuming(module)
    write(split, "no!")
    module = data()
    module.prepare_data()
    found = resuming(module)
    (line,) = getattr(found, kind)
    assert f"{split}.jsonl" in str(line) and len(found.unfit + found.result) == 1


def test_data_that_change_while_they_are_read_are_reported_once_at_a_save(tmp_path, resuming, caplog):
    data = corpus(tmp_path / "a")
    resuming(data)
    data.inputs()
    assert not caplog.messages
    other_byte(tmp_path / "a.bin")
    data.inputs()
    data.inputs()
    assert [str(tmp_path / "a.bin") in message for message in caplog.messages] == [True]


def test_an_error_after_data_were_truncated_names_them(tmp_path):
    from nemo2.data.base import explaining_changed_inputs

    data = corpus(tmp_path / "a", "one text " * 200)
    data.setup("fit")
    with pytest.raises(ZeroDivisionError), explaining_changed_inputs(data):
        raise ZeroDivisionError
    os.truncate(tmp_path / "a.bin", 100)
    with (
        pytest.raises(DataError, match=r"a\.bin had 3604 bytes .*, 100 bytes now"),
        explaining_changed_inputs(data),
    ):
        raise RuntimeError("DataLoader worker is killed by signal: Bus error. Raise your shared memory limit.")
    with pytest.raises(CheckpointError, match="no room"), explaining_changed_inputs(data):
        raise CheckpointError("no room")  # has its own reason


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
    assert not same and "is not the file" in str(other.unfit[0]) and "no longer exists in" in str(gone.unfit[0])
