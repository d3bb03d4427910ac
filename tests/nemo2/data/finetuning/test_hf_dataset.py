# SPDX-License-Identifier: Apache-2.0
"""Records from objects, folders and streams."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo2.data.finetuning import open as opening
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.tokenizer import ByteTokenizer
from nemo2.errors import ConfigError, DataError
from support import small_chats
from support.small_chats import say, write_lines

SEQ = 48


def records(count=24):
    return [{"input": f"ask {i:03}" + "?" * (i % 9), "output": "answer " * (1 + i % 4)} for i in range(count)]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_DATASETS_CACHE", str(tmp_path / "cache"))


def module(held, **changes):
    settings = {"seq_length": SEQ, "tokenizer": ByteTokenizer(), "num_workers": 0, "global_batch_size": 4}
    return HFDatasetDataModule(held, **{**settings, **changes})


def trained(data, count):
    trainer = SimpleNamespace(global_step=data.data_sampler.init_global_step)
    data.setup("fit")
    data.data_sampler.connect(trainer)
    loader = data.data_sampler.transform_dataloader(data.train_dataloader())
    batches = []
    while len(batches) < count:
        for batch in loader:
            batches.append(batch)
            trainer.global_step += 1
            if len(batches) == count:
                break
    return batches


def texts(batches):
    return sorted(
        bytes(i for i in row if 0 < i < 256).decode() for batch in batches for row in batch["tokens"].tolist()
    )


EXPECTED = sorted(f"{record['input']} {record['output']}" for record in records())


def test_records_by_split_and_by_other_names():
    data = module({"training": records(), "dev": records(4)})
    assert texts(trained(data, 6)) == EXPECTED
    assert len(data.val_dataloader().dataset) == 4
    assert texts(trained(module({"mine": records()}, split="mine"), 6)) == EXPECTED
    assert texts(trained(module({"a": records()}, train_aliases=["a"]), 6)) == EXPECTED
    with pytest.raises(ConfigError, match="no split 'train' or 'training'"):
        module({"a": records()}).setup("fit")


def test_ids_outside_the_vocabulary_are_malformed():
    with pytest.raises(DataError, match=r"input_ids\[2\]=257: must be at least 0 and below the vocabulary's 257"):
        module([{"input_ids": [1, 256, 257]}]).setup("fit")


def test_long_arrays_that_differ_anywhere_are_other_records():
    ids = [np.arange(2000), np.arange(2000)]
    ids[1][1000] = 7
    first, other = (module([{"input_ids": one}]).source("train").fingerprint for one in ids)
    assert first != other


def test_columns_and_functions_over_records():
    columns = {"input": [r["input"] for r in records()], "output": ["x"] * 24}
    data = HFDatasetDataModule.from_dict(
        columns, "train", seq_length=SEQ, tokenizer=ByteTokenizer(), num_workers=0, global_batch_size=4
    )
    data.map(lambda record: {**record, "output": "mapped"}, "train")
    assert all(text.endswith("mapped") for text in texts(trained(data, 6)))
    data = HFDatasetDataModule.from_dict(
        {**columns, "note": ["n"] * 24},
        "train",
        seq_length=SEQ,
        tokenizer=ByteTokenizer(),
        num_workers=0,
        global_batch_size=4,
    )
    seen = []
    data.map(lambda record: {"output": "over it"}, remove_columns=["note"], batched=False, batch_size=2)
    data.map(lambda record: seen.append(sorted(record)) or record, "train")
    assert all(text.endswith("over it") for text in texts(trained(data, 6)))
    assert seen[0] == ["input", "output"]
    with pytest.raises(ConfigError, match="one record at a time"):
        data.map(len, batched=True)
    with pytest.raises(ConfigError, match="the splits are train, validation, test"):
        data.map(str, "training")
    with pytest.raises(ConfigError, match="different lengths"):
        HFDatasetDataModule.from_dict({"a": [1], "b": []}, "train")


def test_a_folder_of_lines_in_the_hubs_names(tmp_path):
    folder = tmp_path / "set"
    write_lines(folder / "data" / "train-00000-of-00002.jsonl", records()[:12])
    write_lines(folder / "data" / "train-00001-of-00002.jsonl", records()[12:])
    write_lines(folder / "data" / "test-00000-of-00001.jsonl", records(4))
    data = module(str(folder))
    assert texts(trained(data, 6)) == EXPECTED
    assert data.val_dataloader() == [] and len(data.test_dataloader().dataset) == 4
    assert (folder / "index_cache").is_dir()
    assert texts(trained(module(str(write_lines(tmp_path / "one.jsonl", records()))), 6)) == EXPECTED
    with pytest.raises(DataError, match="this file or folder does not exist"):
        module(str(tmp_path / "none")).setup("fit")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_are_read_by_the_package_datasets_where_it_is_installed(tmp_path, kind):
    """Where it isn't, the message says what to install."""
    folder = tmp_path / "tables"
    folder.mkdir()
    if not opening.has("datasets"):
        (folder / f"train.{kind}").write_bytes(b"PAR1")
        with pytest.raises(
            ConfigError, match=r"read by the package datasets: datasets is not installed.*pip install 'datasets"
        ):
            module(str(folder)).setup("fit")
        return
    import datasets

    table = datasets.Dataset.from_list(records())
    if kind == "parquet":
        table.to_parquet(str(folder / "train.parquet"))
    else:
        table.save_to_disk(str(folder / "train"))
    assert texts(trained(module(str(folder)), 6)) == EXPECTED
    assert texts(trained(module(str(folder), streaming=True), 6)) == EXPECTED
    assert texts(trained(module(table), 6)) == EXPECTED
    assert texts(trained(module(table.to_iterable_dataset()), 6)) == EXPECTED


def test_chats_and_ready_token_ids(tmp_path):
    tokenizer = small_chats.make_tokenizer(tmp_path / "tokenizer")
    chats = [say(("user", "red"), ("assistant", "blue"))] * 4
    [batch] = trained(module(chats, tokenizer=tokenizer), 1)
    kept = batch["labels"][0][batch["loss_mask"][0].bool()].tolist()
    assert tokenizer.tokenizer.decode(kept) == "blue<|im_end|>"
    ready = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
        {"input_ids": [8, 9]},
        {"input_ids": [8, 9, 10, 11, 12]},
    ]
    [batch] = trained(module(ready, tokenizer=None, pad_token_id=77), 1)
    rows = {int(row[0]): mask.tolist()[:4] for row, mask in zip(batch["tokens"], batch["loss_mask"], strict=True)}
    assert rows[1] == [0, 1, 1, 0] and rows[5] == [0, 1, 0, 0] and int(batch["tokens"][0][-1]) == 77


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
        ({"input": "a", "output": "b"}, "data.tokenizer is None"),
        ("text", "a str, not a record"),
    ],
)
def test_records_that_are_malformed(record, why):
    with pytest.raises(DataError, match=rf"train\[0\]: .*{why}"):
        module([record], tokenizer=None).setup("fit")


def test_batches_by_a_function_of_ones_own_and_to_a_multiple():
    def collate(items):
        return {"tokens": torch.stack([item["tokens"][:1] for item in items])}

    assert trained(module(records(), collate_fn=collate), 1)[0]["tokens"].shape == (4, 1)
    batch = trained(module(records(), pad_seq_len_divisible=48), 1)[0]
    assert batch["tokens"].shape == (4, 48)
    with pytest.raises(ConfigError, match="not a multiple of pad_seq_len_divisible=5"):
        module(records(), pad_seq_len_divisible=5)
    with pytest.raises(ConfigError, match="use_dist_sampler=True"):
        module(records(), use_dist_sampler=True)


# Streams


@pytest.mark.parametrize("specs", [None, PackedSequenceSpecs(SEQ)], ids=["plain", "packed"])
def test_a_stream_gives_each_sample_once_per_pass_and_resumes_where_it_was(specs):
    given = {"streaming": True, "packed_sequence_specs": specs, "micro_batch_size": 1 if specs else 2}
    whole = trained(module(records(), **given), 9)
    if specs is None:
        assert texts(whole[:6]) == EXPECTED and texts(whole[6:]) != texts(whole[:3])
    for done in (1, 4, 7):
        resumed = module(records(), **given)
        resumed.load_state_dict({"consumed_samples": 4 * done, "global_step": done})
        for batch, same in zip(trained(resumed, 9 - done), whole[done:], strict=True):
            assert batch.keys() == same.keys() and all(torch.equal(batch[name], same[name]) for name in same)


def test_a_stream_is_shared_out_over_the_replicas(monkeypatch):
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    for name in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel", "expert_model_parallel"):
        monkeypatch.setattr(parallel_state, f"get_{name}_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    found = []
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        found += trained(module(records(), streaming=True, micro_batch_size=1), 6)
    assert texts(found) == EXPECTED


def test_a_stream_tells_what_it_leaves_out_and_stops_at_what_is_malformed(caplog):
    some = records()
    some[3]["output"] = ""
    trained(module(some, streaming=True), 7)
    assert "Pass 1 over train: 23 samples of 24 records" in caplog.text and "train[3]: the answer" in caplog.text
    some[5] = {"input": "x"}
    with pytest.raises(DataError, match=r"train\[5\]: no field 'output'; its fields are: input"):
        trained(module(some, streaming=True), 2)
    with pytest.raises(DataError, match="gives 2 rows, fewer than one global batch of 4"):
        trained(module(records(2), streaming=True), 1)


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


@pytest.mark.parametrize("split", ["train+validation", ["train", "train[:1]"], ["train", "odd"], "train[a:b]"])
def test_splits_that_are_none(split):
    with pytest.raises(ConfigError):
        module(SPLITS, split=split)
