# SPDX-License-Identifier: Apache-2.0
"""The data modules on files: batches, what is left out and why, the cache, a resume."""

import json
import logging
import os
import stat
from types import SimpleNamespace

import pytest
import torch

from nemo2.base.errors import ConfigError, DataError
from nemo2.data.finetuning.module import ChatDataModule, FineTuningDataModule
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.tokenizer import ByteTokenizer
from support import small_chats
from support.small_chats import questions, say, texts_of, trained_batches, write_lines

SEQ = 48


@pytest.fixture
def root(tmp_path):
    write_lines(tmp_path / "training.jsonl", questions(40))
    write_lines(tmp_path / "validation.jsonl", questions(8))
    return tmp_path


def module(root, **changes):
    sizes = {"seq_length": SEQ, "micro_batch_size": 2, "global_batch_size": 8}
    return FineTuningDataModule(root, **{"tokenizer": ByteTokenizer(), "num_workers": 0, **sizes, **changes})


def packed(root, **changes):
    return module(root, micro_batch_size=1, packed_sequence_specs=PackedSequenceSpecs(SEQ), **changes)


def steps(data):
    data.setup("fit")
    return list(data.data_sampler.transform_dataloader(data.train_dataloader()))


def test_a_step_is_padded_to_its_longest_sample_and_only_answers_count(root):
    for batch in steps(module(root)):
        width = batch["tokens"].shape[1]
        assert batch["tokens"].shape == (8, width) and width % 16 == 0
        for tokens, labels, mask in zip(batch["tokens"], batch["labels"], batch["loss_mask"], strict=True):
            kept = labels[mask.bool()].tolist()
            assert kept[-1] == 256 and bytes(kept[:-1]).decode().split() == ["answer"] * (len(kept) // 7)
            assert torch.equal(tokens[1:][mask[:-1].bool()], labels[:-1][mask[:-1].bool()])


def test_each_pass_has_an_order_of_its_own_and_the_seed_decides_which(root):
    whole = trained_batches(module(root), 10)
    first, second = texts_of(whole[:5]), texts_of(whole[5:])
    assert sorted(first) == sorted(second) and first != second and len(set(first)) == 40
    assert texts_of(steps(module(root))) == first
    assert texts_of(steps(module(root, seed=7))) != first


@pytest.mark.parametrize("make", [module, packed])
def test_a_resumed_module_goes_on_with_the_next_sample_in_any_pass(root, make):
    whole = trained_batches(make(root), 8)
    for done in (1, 3, 6):
        resumed = make(root)
        resumed.load_state_dict({"consumed_samples": done * 8, "global_step": done})
        for batch, same in zip(trained_batches(resumed, 8 - done), whole[done:], strict=True):
            assert all(torch.equal(batch[name], same[name]) for name in same)


@pytest.mark.parametrize(("cp", "same_order"), [(1, True), (4, False)])
def test_a_resume_with_other_packs_tells_that_the_order_differs(root, monkeypatch, caplog, cp, same_order):
    first = packed(root)
    first.setup("fit")
    sizes = {"tp": 1, "cp": cp, "pp": 1, "ep": 1}
    monkeypatch.setattr("nemo2.data.finetuning.base._sizes", lambda: sizes)
    resumed = packed(root)
    resumed.load_state_dict(first.state_dict())
    resumed.setup("fit")
    resumed.train_dataloader()
    assert ("another order than before the resume" in caplog.text) != same_order


def test_validation_has_its_own_file_and_a_split_without_one_is_empty(root):
    data = module(root)
    data.setup()
    assert len(data.val_dataloader().dataset) == 8 and data.test_dataloader() == []


@pytest.mark.parametrize(
    "setting, options, width",
    [
        ({}, {}, 32),
        ({"tp_comm_overlap": True}, {}, SEQ),
        ({"cuda_graph_impl": "transformer_engine"}, {}, SEQ),
        ({}, {"pad_to_max_length": True}, SEQ),
    ],
)
def test_buffers_and_graphs_that_are_made_for_one_length_get_it_and_so_does_whoever_asks(root, setting, options, width):
    write_lines(root / "training.jsonl", [{"input": "ask", "output": "answer " * 3}] * 8)
    data = module(root, dataset_kwargs=options)
    data.trainer = SimpleNamespace(global_step=0, lightning_module=SimpleNamespace(config=SimpleNamespace(**setting)))
    [batch] = steps(data)
    assert batch["tokens"].shape[1] == width


def test_packed_rows_hold_every_token_once(root):
    data = packed(root)
    batches = steps(data)
    rows = [row for batch in batches for row in batch["tokens"]]
    assert all(row.shape == (SEQ,) for row in rows)
    assert len(rows) // 8 * 8 == len(rows) < 40
    whole = module(root)
    whole.setup("fit")
    assert data.reports["train"] == whole.reports["train"]
    trained = sum(float(data._datasets["train"][i]["loss_mask"].sum()) for i in range(len(data._datasets["train"])))
    assert trained == whole.reports["train"].trained_tokens


def test_what_is_said_of_packing(root, tmp_path, caplog):
    place = tmp_path / "about" / "packing.json"
    specs = PackedSequenceSpecs(
        SEQ, tokenizer_model_name="my/tokenizer", packed_metadata_path=str(place), pad_cu_seqlens=True
    )
    with caplog.at_level(logging.INFO):
        data = module(root, micro_batch_size=1, packed_sequence_specs=specs)
        batches = steps(data)
    fullness = data.fullness["train"]
    assert f"train: {fullness}" in caplog.text and 0 < fullness.padding < fullness.padding_unpacked
    assert json.loads(place.read_text())["padding"] == fullness.padding
    assert {batch["cu_seqlens"].shape[1] for batch in batches} == {max(f.most for f in data.fullness.values()) + 1}
    assert any(folder.name.startswith("my--tokenizer-") for folder in (root / "index_cache").iterdir())


def test_a_pipe_for_what_is_said_is_refused_before_samples_are_made(root, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    specs = PackedSequenceSpecs(SEQ, packed_metadata_path=str(tmp_path / "pipe"))
    with pytest.raises(ConfigError, match="pipe is a device or pipe"):
        module(root, micro_batch_size=1, packed_sequence_specs=specs).setup("fit")
    assert not (root / "index_cache").exists()


# What is left out


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (json.dumps(questions(1)[0])[:-5], "not JSON .*'on_bad_line': 'skip'"),
        ('{"input": ' + "[" * 100_000 + "]" * 100_000 + ', "output": "b"}', "nested too deeply"),
        ('{"input": "a", "input": "c", "output": "b"}', "the name 'input' stands for two values"),
        (json.dumps({"input": "a" * (65 << 20), "output": "b"}), "a line of 65 MiB"),
    ],
    ids=["broken", "deep", "one name twice", "long"],
)
def test_a_line_that_no_sample_is_made_of_stops_before_training_and_is_named(root, line, why):
    write_lines(root / "training.jsonl", [*questions(999), line, *questions(9)])
    with pytest.raises(DataError, match=rf"training\.jsonl:1000: .*{why}"):
        module(root).setup("fit")


def test_a_missing_role_stops_before_training_and_says_where(root):
    tokenizer = small_chats.make_tokenizer(root / "tokenizer")
    good = say(("user", "red"), ("assistant", "blue"))
    bad = {"messages": [{"role": "user", "content": "red"}, {"content": "blue"}]}
    write_lines(root / "training.jsonl", [*[good] * 6, bad])
    data = ChatDataModule(root, tokenizer=tokenizer, use_hf_tokenizer_chat_template=True, num_workers=0)
    with pytest.raises(DataError, match=r"training\.jsonl:7: message 2 has no role"):
        data.setup("fit")


def test_what_is_cut_or_left_out_is_counted_by_line(root, caplog):
    some = questions(12)
    some[2]["input"] = "x" * 100
    some[4]["output"] = " "
    some[6]["output"] = "y" * 100
    some[7] = {"input": "no answer"}
    write_lines(root / "training.jsonl", [*some, "[1]"])
    data = module(root, dataset_kwargs={"on_bad_line": "skip"}, global_batch_size=2)
    with caplog.at_level(logging.WARNING):
        data.setup("fit")
    report = data.reports["train"]
    assert (report.records, report.samples) == (13, 10)
    file = root / "training.jsonl"
    malformed = report.places.pop("malformed")
    assert malformed[0].startswith(f"{file}:8: no field 'output'; its fields are: input")
    assert malformed[1] == f"{file}:13: a JSON list, not an object with named fields"
    assert report.places == {
        "truncated": [f"{file}:3: 123 tokens, and 49 fit", f"{file}:7: 115 tokens, and 49 fit"],
        "nothing to train on": [f"{file}:5: the answer, 'output', is empty"],
    }
    assert "left out, malformed" in caplog.text and "kept, but truncated" in caplog.text


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"on_too_long": "skip"}, "123 tokens, and 49 fit"),
        ({"truncation_field": None}, "which leaves nothing to train on"),
        ({"on_too_long": "fail"}, None),
    ],
    ids=["skip", "no answer is left", "fail"],
)
def test_too_long_samples_by_policy(root, settings, told):
    write_lines(root / "training.jsonl", [*questions(2), {"input": "x" * 100, "output": "answer " * 3}, *questions(9)])
    data = module(root, dataset_kwargs=settings, global_batch_size=2)
    if told is None:
        with pytest.raises(DataError, match=r"training\.jsonl:3: 123 tokens, and 49 fit \(data.seq_length \+ 1\)"):
            data.setup("fit")
        return
    data.setup("fit")
    [place] = data.reports["train"].places["too long"]
    assert told in place and len(data._datasets["train"]) == 11


def test_nothing_left_is_an_error_with_the_counts(root):
    write_lines(root / "training.jsonl", [{"input": "a", "output": ""}] * 3)
    with pytest.raises(DataError, match=r"leaves nothing to train on\. 0 samples of 3 records(.|\n)*:1: the answer"):
        module(root).setup("fit")


def test_no_training_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"this folder has no training\.jsonl"):
        module(tmp_path).setup("fit")
    with pytest.raises(ConfigError, match="tokenizer is None"):
        write_lines(tmp_path / "training.jsonl", questions(2))
        module(tmp_path, tokenizer=None).setup("fit")


def test_an_error_of_prepare_data_is_raised_at_set_up(root):
    """Lightning runs the first on one rank only, and the others wait for it without an end."""
    write_lines(root / "training.jsonl", ["{"])
    data = module(root)
    data.prepare_data()
    with pytest.raises(DataError, match="not JSON"):
        data.setup("fit")


# The cache


def cached(root):
    return {file: file.stat().st_mtime_ns for file in (root / "index_cache").rglob("*.npy")}


def test_samples_are_kept_for_the_next_run_in_a_private_folder(root):
    first = texts_of(steps(module(root)))
    before = cached(root)
    assert texts_of(steps(module(root, memmap_workers=2))) == first and cached(root) == before
    for folder in (root / "index_cache").iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "change",
    [
        {"seq_length": 32},
        {"dataset_kwargs": {"prompt_template": "{input}: {output}"}},
        {"dataset_kwargs": {"answer_only_loss": False}},
    ],
)
def test_another_setting_has_other_samples(root, change):
    steps(module(root))
    before = cached(root)
    steps(module(root, **change))
    assert len(cached(root)) == 2 * len(before)


def test_data_that_was_replaced_under_its_name_is_tokenized_again(root):
    steps(module(root))
    write_lines(root / "training.jsonl", [{"input": "other", "output": "text"}] * 40)
    assert set(texts_of(steps(module(root)))) == {"other text"}


def test_a_damaged_file_is_made_again(root):
    first = texts_of(steps(module(root)))
    for file in cached(root):
        if file.name == "samples-ids.npy":
            file.write_bytes(file.read_bytes()[:-8])
    assert texts_of(steps(module(root))) == first


def test_many_threads_give_the_same_samples(root):
    write_lines(root / "training.jsonl", questions(1500))
    settings = {"tokenizer": small_chats.make_tokenizer(root / "tokenizer"), "seq_length": 64}
    first = module(root, **settings).samples("train")
    elsewhere = {"index_mapping_dir": str(root / "b")}
    second = module(root, **settings, memmap_workers=4, dataset_kwargs=elsewhere).samples("train")
    assert first.folder != second.folder and first.report == second.report
    assert all(first[index] == second[index] for index in range(0, 1500, 97))


# Settings


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"packed_sequence_specs": PackedSequenceSpecs(SEQ)}, "micro_batch_size=2 with packed sequences"),
        (
            {"packed_sequence_specs": PackedSequenceSpecs(64), "micro_batch_size": 1},
            "packed_sequence_size=64 differs from data.seq_length=48",
        ),
        ({"dataset_kwargs": {"promt_template": "x"}}, "'promt_template'; did you mean 'prompt_template'"),
        ({"dataset_kwargs": {"prompt_template": ""}}, "the text is empty"),
        ({"dataset_kwargs": {"index_mapping_dir": ""}}, "the text is empty"),
        ({"dataset_kwargs": {"on_too_long": "drop"}}, "on_too_long takes .*, not 'drop'"),
        ({"dataset_kwargs": {"on_bad_line": "drop"}}, "on_bad_line takes .*, not 'drop'"),
        ({"dataset_kwargs": {"answer_only_loss": "no"}}, "answer_only_loss takes true or false, not 'no'"),
        ({"dataset_kwargs": {"max_bad_lines": "5"}}, "max_bad_lines takes a whole number, not '5'"),
    ],
)
def test_settings_that_cannot_be_meant(root, settings, why):
    with pytest.raises(ConfigError, match=why):
        module(root, **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "unread"),
    [
        (FineTuningDataModule, {"turns": "last", "add_bos": True}, "turns='last'"),
        (ChatDataModule, {"answer_only_loss": False, "turns": "last"}, "answer_only_loss=False"),
        (ChatDataModule, {"add_bos": False, "add_eos": True, "label_key": "output"}, None),
        (FineTuningDataModule, ["turns"], "must be settings by their names"),
    ],
)
def test_settings_of_other_records_are_refused(root, kind, settings, unread):
    """They had no effect: a chat module with answer_only_loss=False trained on answers only."""
    if unread is None:
        kind(root, dataset_kwargs=settings)
        return
    with pytest.raises(ConfigError, match=unread):
        kind(root, dataset_kwargs=settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"packed_sequence_specs": {"packed_sequence_size": SEQ}}, "data.packed_sequence_specs="),
        ({"dataset_kwargs": {"on_bad_line": "skip", "max_bad_lines": -1}}, "data.dataset_kwargs.max_bad_lines=-1"),
    ],
)
def test_values_of_another_kind_name_their_field(root, changes, words):
    with pytest.raises(ConfigError, match=words):
        module(root, **changes)


def test_a_check_refuses_a_folder_in_place_of_the_file_about_the_packs(root):
    specs = PackedSequenceSpecs(SEQ, packed_metadata_path=str(root))
    with pytest.raises(ConfigError, match="is a directory"):
        module(root, micro_batch_size=1, packed_sequence_specs=specs).check_records(ByteTokenizer(), encodes=True)
