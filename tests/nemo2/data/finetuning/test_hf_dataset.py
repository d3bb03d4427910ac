# SPDX-License-Identifier: Apache-2.0
"""Records from objects, folders and streams."""

import numpy as np
import pytest
import torch

from nemo2.base.errors import ConfigError, DataError
from nemo2.config import notices
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
from nemo2.data.finetuning.open import open_split
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.tokenizer import ByteTokenizer
from support import small_chats
from support.small_chats import questions, say, texts_of, trained_batches, trained_text, write_lines

SEQ = 48


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_DATASETS_CACHE", str(tmp_path / "cache"))


def module(held, **changes):
    settings = {"seq_length": SEQ, "tokenizer": ByteTokenizer(), "num_workers": 0, "global_batch_size": 4}
    return HFDatasetDataModule(held, **{**settings, **changes})


EXPECTED = sorted(f"{record['input']} {record['output']}" for record in questions(24))


def records(count=24):
    return questions(count)


def trained_texts(data, steps=6):
    return sorted(texts_of(trained_batches(data, steps)))


def test_records_by_split_and_by_other_names():
    data = module({"training": records(), "dev": records(4)})
    assert trained_texts(data) == EXPECTED
    assert len(data.val_dataloader().dataset) == 4
    assert trained_texts(module({"mine": records()}, split="mine")) == EXPECTED
    assert trained_texts(module({"a": records()}, train_aliases=["a"])) == EXPECTED


@pytest.mark.parametrize(
    ("split", "kept"),
    [("train[:2]", [0, 1]), ("validation", [2, 3]), ("valid[1:]", [3]), ("mine", [4]), ("other", None)],
)
def test_a_part_is_read_from_the_files_of_its_split_alone(tmp_path, split, kept):
    for name, some in (("training", records()[:2]), ("val", records()[2:4]), ("mine", records()[4:5])):
        write_lines(tmp_path / f"{name}.jsonl", some)
    data = module(str(tmp_path), split=split)
    if kept is None:
        (tmp_path / "mine.jsonl").unlink()
        with pytest.raises(ConfigError, match="has no split 'other'"):
            data.source("train")
    else:
        assert data.train == [records()[place] for place in kept]


@pytest.mark.parametrize("split", [[], ["validation"]])
def test_a_list_of_splits_without_one_to_train_on_is_refused(split):
    """Lightning would end the fit before its first step, as if it had succeeded."""
    data = module({"train": records(), "validation": records(8)}, split=split)
    data.setup("fit")
    with pytest.raises(ConfigError, match="names no part of the train split") as caught:
        data.train_dataloader()
    assert caught.value.rule == "splits-have-data"
    assert data.no_samples("train") and bool(data.no_samples("validation")) == (not split)


BOTH = {**say(("user", "asked"), ("assistant", "told")), "instruction": "do", "output": "done"}


@pytest.mark.parametrize(
    ("record", "settings", "unread"),
    [
        (questions(1)[0], {"turns": "last", "add_eos": False}, "turns='last'"),
        (say(("user", "a"), ("assistant", "b")), {"answer_only_loss": False}, "answer_only_loss=False"),
        (
            {"input_ids": [1, 2, 3]},
            {"truncation_method": "left", "turns": "last"},
            "truncation_method='left', turns='last'",
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_settings_that_no_record_reads_are_refused(tmp_path, record, settings, unread, streaming):
    tokenizer = small_chats.make_tokenizer(tmp_path)
    data = module([record] * 8, tokenizer=tokenizer, dataset_kwargs=settings, streaming=streaming)
    with pytest.raises(DataError, match=rf"has {unread}, which no record of this data reads"):
        data.setup("fit")
        list(data.train_dataloader())
    with pytest.raises(DataError, match=unread):
        data.check_records(tokenizer, encodes=True)
    with pytest.raises(DataError, match=unread):
        data.check_records(tokenizer, encodes=False)


def test_a_setting_that_some_records_read_is_none_of_them(tmp_path):
    held = [questions(1)[0], say(("user", "a"), ("assistant", "b"))] * 4
    data = module(
        held, tokenizer=small_chats.make_tokenizer(tmp_path), dataset_kwargs={"turns": "last", "add_eos": False}
    )
    assert data.samples("train").report.samples == 8


@pytest.mark.parametrize("template", [None, "{instruction} {output}"])
def test_a_prompt_template_of_ones_own_decides_for_records_that_have_its_fields(tmp_path, template):
    tokenizer = small_chats.make_tokenizer(tmp_path)
    data = module([BOTH] * 4, tokenizer=tokenizer, dataset_kwargs={"prompt_template": template})
    text = tokenizer.ids_to_text(data.samples("train").arrays(0)[0])
    assert ("told" in text, "done" in text) == (template is None, template is not None)


def test_a_chat_template_that_no_tokenizer_renders_ends_no_save():
    assert module(records(), dataset_kwargs={"chat_template": "plain"}).chat_template is None


def test_ids_outside_the_vocabulary_are_malformed():
    with pytest.raises(DataError, match=r"input_ids\[2\]=257: must be at least 0 and below the vocabulary's 257"):
        module([{"input_ids": [1, 256, 257]}]).setup("fit")


def test_long_arrays_that_differ_anywhere_are_other_records():
    ids = [np.arange(2000), np.arange(2000)]
    ids[1][1000] = 7
    first, other = (module([{"input_ids": one}]).source("train").fingerprint for one in ids)
    assert first != other


COLUMNS = {"input": [record["input"] for record in questions(24)], "output": ["x"] * 24}


def columns(**more):
    settings = {"seq_length": SEQ, "tokenizer": ByteTokenizer(), "num_workers": 0, "global_batch_size": 4}
    return HFDatasetDataModule.from_dict({**COLUMNS, **more}, "train", **settings)


def test_functions_over_records_of_columns():
    data = columns()
    data.map(lambda record: {**record, "output": "mapped"}, "train")
    assert all(text.endswith("mapped") for text in trained_texts(data))
    data, seen = columns(note=["n"] * 24), []
    data.map(lambda record: {"output": "over it"}, remove_columns=["note"], batched=False, batch_size=2)
    data.map(lambda record: seen.append(sorted(record)) or record, "train")
    assert all(text.endswith("over it") for text in trained_texts(data))
    assert seen[0] == ["input", "output"]
    data = columns()
    data.map(lambda record: record.update(output=f"{record['output']}!") or record)  # in place
    assert all(text.endswith(" x!") for text in trained_texts(data))


@pytest.mark.parametrize(
    ("source", "why"),
    [(".", r"files of several types for one split \(\.csv, \.jsonl\)"), ("notes.txt", "no data file")],
)
def test_files_of_several_types_and_of_none_are_refused(tmp_path, source, why):
    (tmp_path / "train.csv").write_text("input,output\na,b\n")
    (tmp_path / "train.jsonl").write_text('{"input": "a", "output": "b"}\n')
    (tmp_path / "notes.txt").write_text("a\n")
    with pytest.raises(DataError, match=why):
        open_split(str(tmp_path / source), ("train",), whole=True)


def test_a_folder_of_lines_in_the_hubs_names(tmp_path):
    folder = tmp_path / "set"
    write_lines(folder / "data" / "train-00000-of-00002.jsonl", records()[:12])
    write_lines(folder / "data" / "train-00001-of-00002.jsonl", records()[12:])
    write_lines(folder / "data" / "test-00000-of-00001.jsonl", records(4))
    data = module(str(folder))
    assert trained_texts(data) == EXPECTED
    assert data.val_dataloader() == [] and len(data.test_dataloader().dataset) == 4
    assert (folder / "index_cache").is_dir()
    assert trained_texts(module(str(write_lines(tmp_path / "one.jsonl", records())))) == EXPECTED
    with pytest.raises(DataError, match="this file or folder does not exist"):
        module(str(tmp_path / "none")).setup("fit")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_are_read_by_the_package_datasets(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    table, folder = datasets.Dataset.from_list(records()), tmp_path / "tables"
    folder.mkdir()
    if kind == "parquet":
        table.to_parquet(str(folder / "train.parquet"))
    else:
        table.save_to_disk(str(folder / "train"))
    for held in (
        module(str(folder)),
        module(str(folder), streaming=True),
        module(table),
        module(table.to_iterable_dataset()),
    ):
        assert trained_texts(held) == EXPECTED


def test_without_the_package_datasets_the_message_says_what_to_install(tmp_path, monkeypatch):
    for reader in ("nemo2.data.finetuning.open.has", "nemo2.base.backend.extras.has"):
        monkeypatch.setattr(reader, lambda module: False)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ConfigError, match=r"requires the package datasets: datasets is not installed.*pip install 'datasets"
    ):
        module(str(tmp_path)).setup("fit")


def test_chats_and_ready_token_ids(tmp_path):
    tokenizer = small_chats.make_tokenizer(tmp_path / "tokenizer")
    chats = [say(("user", "red"), ("assistant", "blue"))] * 4
    [batch] = trained_batches(module(chats, tokenizer=tokenizer), 1)
    kept = batch["labels"][0][batch["loss_mask"][0].bool()].tolist()
    assert tokenizer.tokenizer.decode(kept) == "blue<|im_end|>"
    ready = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
        {"input_ids": [8, 9]},
        {"input_ids": [8, 9, 10, 11, 12]},
    ]
    [batch] = trained_batches(module(ready, tokenizer=None, pad_token_id=77), 1)
    rows = {int(row[0]): mask.tolist()[:4] for row, mask in zip(batch["tokens"], batch["loss_mask"], strict=True)}
    assert rows[1] == [0, 1, 1, 0] and rows[5] == [0, 1, 0, 0] and int(batch["tokens"][0][-1]) == 77


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_masks_of_tokenized_records_are_those_of_transformers_and_trl(tmp_path, side):
    tokenizer = small_chats.make_tokenizer(tmp_path, small_chats.MARKED)
    options = {"padding": "max_length", "max_length": 64, "padding_side": side}
    messages = say(("user", "Name three colours."), ("assistant", "It returns zero."))["messages"]
    padded = tokenizer.tokenizer.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True, **options
    )
    record = {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}
    text = tokenizer.tokenizer.apply_chat_template(messages, return_dict=False)
    encode = module([record], tokenizer=tokenizer).encoder().encode
    assert encode(record).ids == text and all(encode(record).trained)
    masked = encode({**record, "assistant_masks": padded["assistant_masks"]})
    assert masked.ids == text and trained_text(tokenizer, masked) == "It returns zero."
    several = {
        "input_ids": [5, 6, 7, 8],
        "labels": [-100, 6, 7, 8],
        "loss_mask": [1, 1, 1, 0],
        "completion_mask": [0, 0, 1, 1],
    }
    assert encode(several).trained == [False, False, True, False]


@pytest.mark.parametrize(
    "record, why",
    [
        (
            {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
            r"labels\[0\]=2 and input_ids\[0\]=1.*Do not shift labels by one",
        ),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "'loss_mask' has 1 entries for 2 tokens"),
        ({"input_ids": ["a"]}, "not a list of whole numbers"),
        ({"input_ids": [1, -100]}, r"input_ids\[1\]=-100"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "'attention_mask' hides tokens between"),
        ({"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]}, "several samples in one record"),
        ({"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 2]}, "several samples in one record"),
        ({"input": "a", "output": "b"}, "data.tokenizer is None"),
        ("text", "a str, not a record"),
    ],
)
def test_records_that_are_malformed(record, why):
    with pytest.raises(DataError, match=rf"train\[0\]: .*{why}"):
        module([record], tokenizer=None).setup("fit")


def test_batches_by_a_function_of_ones_own_and_to_a_multiple(monkeypatch):
    def collate(items):
        return {"tokens": torch.stack([item["tokens"][:1] for item in items])}

    for options, width in (({"collate_fn": collate}, 1), ({"pad_seq_len_divisible": 48}, 48)):
        [batch] = trained_batches(module(records(), **options), 1)
        assert batch["tokens"].shape == (4, width)
    # Stages would wait for each other forever.
    sizes = {"tp": 1, "cp": 1, "pp": 2, "ep": 1}
    monkeypatch.setattr("nemo2.data.finetuning.base._sizes", lambda: sizes)
    with pytest.raises(DataError, match=f"a batch of 1 tokens, .*seq_length={SEQ}"):
        trained_batches(module(records(), collate_fn=collate), 1)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: module(records(), pad_seq_len_divisible=5), "not a multiple of pad_seq_len_divisible=5"),
        (lambda: module(records(), use_dist_sampler=True), "use_dist_sampler=True"),
        (lambda: module({"a": records()}).setup("fit"), "no split 'train' or 'training'"),
        (lambda: columns().map(len, batched=True), "one record at a time"),
        (lambda: columns().map(str, "training"), "the splits are train, validation, test"),
        (lambda: columns(output=[]), "different lengths"),
        *[
            (lambda split=split: module(SPLITS, split=split), "")
            for split in ("train+validation", ["train", "train[:1]"], ["train", "odd"], "train[a:b]")
        ],
    ],
)
def test_settings_that_cannot_be_meant(call, why):
    with pytest.raises(ConfigError, match=why):
        call()


# Streams


@pytest.mark.parametrize(
    "specs",
    [None, PackedSequenceSpecs(SEQ), PackedSequenceSpecs(SEQ, pad_cu_seqlens=True)],
    ids=["plain", "packed", "lists of one length"],
)
def test_a_stream_gives_each_sample_once_per_pass_and_resumes_where_it_was(specs):
    given = {"streaming": True, "packed_sequence_specs": specs, "micro_batch_size": 1 if specs else 2}
    whole = trained_batches(module(records(), **given), 9)
    if specs is None:
        assert sorted(texts_of(whole[:6])) == EXPECTED and set(texts_of(whole[6:])) != set(texts_of(whole[:3]))
        larger = module(records(), **given, global_batch_size=8)
        larger.load_state_dict({"consumed_samples": 4, "global_step": 1})
        assert texts_of(trained_batches(larger, 2)) == texts_of(whole[1:5])
    else:
        assert all(torch.equal(batch["cu_seqlens"].amax(1), (~batch["padding_mask"]).sum(1)) for batch in whole)
        assert (len({batch["cu_seqlens"].shape for batch in whole}) == 1) == specs.pad_cu_seqlens
    for done in (1, 4, 7):
        resumed = module(records(), **given)
        resumed.load_state_dict({"consumed_samples": 4 * done, "global_step": done})
        for batch, same in zip(trained_batches(resumed, 9 - done), whole[done:], strict=True):
            assert batch.keys() == same.keys() and all(torch.equal(batch[name], same[name]) for name in same)


@pytest.mark.parametrize("done", [3, 6, 8])
def test_a_stream_that_resumes_with_another_batch_size_goes_on_in_its_pass(done):
    """Passes of 26 rows: six steps of 4, which leave out 2."""
    passes = [
        texts_of(trained_batches(module(records(26), streaming=True, global_batch_size=2), 39)[n : n + 13])
        for n in (0, 13, 26)
    ]
    before, after = (module(records(26), streaming=True, global_batch_size=size) for size in (4, 10))
    trained_batches(before, done)
    after.load_state_dict(before.state_dict())
    rest = passes[0][4 * done :] if done < 6 else passes[1][4 * (done - 6) :]
    first, then = len(rest) // 10 * 10, passes[1 if done < 6 else 2]
    assert texts_of(trained_batches(after, first // 10 + 2)) == rest[:first] + then[:20]


def test_a_stream_is_shared_out_over_the_replicas(monkeypatch):
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    for name in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel", "expert_model_parallel"):
        monkeypatch.setattr(parallel_state, f"get_{name}_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    batches = []
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        batches += trained_batches(module(records(), streaming=True, micro_batch_size=1), 6)
    assert sorted(texts_of(batches)) == EXPECTED


def test_a_stream_tells_what_it_leaves_out_and_stops_at_what_is_malformed(caplog):
    some = records()
    some[3]["output"] = ""
    trained_batches(module(some, streaming=True), 7)
    assert "Pass 1 over train: 23 samples of 24 records" in caplog.text and "train[3]: the answer" in caplog.text
    some[5] = {"input": "x"}
    with pytest.raises(DataError, match=r"train\[5\]: no field 'output'; its fields are: input"):
        trained_batches(module(some, streaming=True), 2)
    with pytest.raises(DataError, match="gives 2 rows, fewer than one global batch of 4"):
        trained_batches(module(records(2), streaming=True), 1)


def test_validation_of_a_stream_begins_anew_each_time():
    data = module({"train": records(), "validation": records(9)}, streaming=True)
    data.setup("fit")
    loader = data.data_sampler.transform_dataloader(data.val_dataloader())
    first, again = list(loader), list(loader)
    assert len(first) == 2 and all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(first, again, strict=True))


SPLITS = {"train": records(6), "validation": records(2), "odd": records(1)}


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, (6, 2, None)),
        ("train", (6, None, None)),
        ("odd", (1, None, None)),
        ("train[:4]", (4, None, None)),
        ("train[2:5]", (3, None, None)),
        ("train[50%:]", (3, None, None)),
        (["train", "validation"], (6, 2, None)),
        (["validation[1:]", "train[:1]"], (1, 1, None)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["lists", "datasets"])
def test_splits_in_use_and_parts_of_them(kind, split, expected):
    from datasets import Dataset

    held = SPLITS if kind == "lists" else {name: Dataset.from_list(part) for name, part in SPLITS.items()}
    data = module(held, split=split)
    assert tuple(None if part is None else len(part) for part in data.dataset_splits.values()) == expected
    assert data.val is None or type(data.val) is type(held["validation"])


def test_parts_of_a_file(tmp_path):
    file = write_lines(tmp_path / "records.jsonl", records())
    assert module(str(file), split="train[1:3]").train == records()[1:3]
    with pytest.raises(ConfigError):
        module(str(file), split="train[10%:]").source("train")


def test_settings_of_stored_samples_are_told_for_a_stream(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_announced", set())
    settings = {"memmap_workers": 3, "dataset_kwargs": {"index_mapping_dir": "samples"}}
    module(records(), streaming=True, **settings)
    assert "memmap_workers=3 has no effect" in caplog.text and "index_mapping_dir='samples'" in caplog.text
    caplog.clear()
    module(records(), **settings)
    assert not caplog.text
