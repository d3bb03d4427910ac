# SPDX-License-Identifier: Apache-2.0
"""PreTrainingDataModule against Megatron-Core's own builder, on one rank and on two, and what it refuses."""

import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from nemo2.base.errors import ConfigError, DataError
from nemo2.config import notices
from nemo2.data.megatron_datasets import TokenReader
from nemo2.data.pretraining import PreTrainingDataModule
from nemo2.data.tokenizer import BPETokenizer, ByteTokenizer, NullTokenizer
from support.small_corpora import SEQ, VOCAB, corpus, datasets, first_samples, module, trainer


def megatron(sizes, tmp_path, **kwargs):
    """The same splits from upstream's builder, with a cache of its own."""
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ,
        tokenizer=NullTokenizer(VOCAB),
        path_to_cache=str(tmp_path / "upstream"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **kwargs,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def same(ours, theirs):
    assert len(ours) == len(theirs)
    return all(
        torch.equal(ours[i][key], theirs[i][key]) for i in range(len(ours)) for key in ("tokens", "labels", "loss_mask")
    )


def steps_of(data):
    data.setup("fit")
    return list(data.data_sampler.transform_dataloader(data.train_dataloader()))


def test_one_corpus_is_split_as_megatron_splits_it(tmp_path):
    prefix = corpus(tmp_path / "a")
    ours = datasets(module(prefix, split="70,20,10"))
    # 10 steps of 4; (10 // 5 + 1) evaluations of 2 batches of 4; 1 test batch of 4
    theirs = megatron([40, 24, 4], tmp_path, blend=([prefix], None), split="70,20,10")
    for name, dataset in zip(("train", "validation", "test"), theirs, strict=True):
        assert same(ours[name], dataset), name


def test_each_split_may_have_its_own_corpus(tmp_path):
    paths = {"train": corpus(tmp_path / "a"), "validation": corpus(tmp_path / "b", seed=1)}
    ours = datasets(module(paths))
    blends = [([paths["train"]], None), ([paths["validation"]], None), None]
    theirs = megatron([40, 24, 0], tmp_path, blend_per_split=blends)
    assert same(ours["train"], theirs[0]) and same(ours["validation"], theirs[1])
    assert ours["test"] is None


@pytest.mark.parametrize("weighted", [False, True])
def test_a_blend_draws_from_its_datasets_by_weight_or_by_size(tmp_path, weighted):
    a, b = corpus(tmp_path / "a"), corpus(tmp_path / "b", documents=20, seed=1)
    data = module([3, a, 1, b] if weighted else [a, b], split="1,0,0", num_train_samples=80)
    train = datasets(data, "fit")["train"]
    drawn = np.bincount([int(train[i]["dataset_id"]) for i in range(80)])
    sizes = [len(dataset) for dataset in train.datasets]
    shares = np.array([0.75, 0.25]) if weighted else np.array(sizes) / sum(sizes)
    assert np.abs(drawn - 80 * shares).max() <= 1


def test_an_item_is_a_step_of_consecutive_tokens(tmp_path):
    data = module(corpus(tmp_path / "a"), split="1,0,0")
    items = steps_of(data)
    assert len(items) >= 10
    assert {k: tuple(v.shape) for k, v in items[0].items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (4, SEQ)
    )
    assert all(torch.equal(item["tokens"][:, 1:], item["labels"][:, :-1]) for item in items)
    dataset = data.train_dataloader().dataset
    assert torch.equal(items[2]["tokens"], torch.stack([dataset[i]["tokens"] for i in range(8, 12)]))


def test_training_resumes_at_the_sample_it_had_reached(tmp_path):
    prefix = corpus(tmp_path / "a")
    first = module(prefix, split="1,0,0")
    whole = steps_of(first)
    first.trainer.global_step = 3
    state = first.state_dict()
    assert state == {"consumed_samples": 12, "global_step": 3, "place": [12, 0, 0], "order": first.order()}
    again = module(prefix, split="1,0,0")
    again.load_state_dict(state)
    again.trainer.global_step = 3
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(steps_of(again), whole[3:], strict=True))


def test_the_seed_decides_the_cyclic_order(tmp_path):
    prefix = corpus(tmp_path / "a")
    orders = []
    for seed in (7, 7, 1234):
        batches = steps_of(module(prefix, split="1,0,0", dataloader_type="cyclic", seed=seed))
        orders.append([batch["tokens"].tolist() for batch in batches])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("before", "after", "told", "same_order"),
    [
        (10, 12, None, True),
        (10, 12, 2, True),  # the checkpoint of a former release, which tells the sizes only
        (10, 400, None, False),
        # As many passes: but Megatron-Core shuffles the last one by itself if less than 80 % of it are needed.
        (55, 60, None, True),
        (55, 80, None, False),
    ],
)
def test_a_resume_with_other_passes_over_a_corpus_tells_that_the_order_differs(
    tmp_path, caplog, before, after, told, same_order
):
    corpora = [3, corpus(tmp_path / "a"), 1, corpus(tmp_path / "b", seed=1)]
    first = module(corpora, split="1,0,0", steps=trainer(max_steps=before))
    drawn = datasets(first, "fit")["train"]
    resumed = module(corpora, split="1,0,0", steps=trainer(max_steps=after))
    state = first.state_dict()
    resumed.load_state_dict(state | {"order": state["order"][:told]})
    again = datasets(resumed, "fit")["train"]
    resumed.train_dataloader()
    assert all(torch.equal(drawn[i]["tokens"], again[i]["tokens"]) for i in range(40)) == same_order
    assert ("another order than before the resume" in caplog.text) != same_order


@pytest.mark.parametrize(
    ("mask", "positions"), [("create_attention_mask", "learned_absolute"), ("reset_attention_mask", "rope")]
)
def test_masks_and_ends_of_documents_can_be_asked_for(tmp_path, monkeypatch, caplog, mask, positions):
    monkeypatch.setattr(notices, "_announced", set())
    steps = trainer(lightning_module=SimpleNamespace(config=SimpleNamespace(position_embedding_type=positions)))
    options = {"split": "1,0,0", "eod_mask_loss": True, "reset_position_ids": True, mask: True}
    data = module(corpus(tmp_path / "a"), steps=steps, **options)
    sample = datasets(data, "fit")["train"]
    with_end = next(s for s in (sample[i] for i in range(len(sample))) if (s["tokens"][:-1] == VOCAB - 1).any())
    end = int((with_end["tokens"] == VOCAB - 1).nonzero()[0])
    assert with_end["attention_mask"].shape == (1, SEQ, SEQ)
    assert bool(with_end["attention_mask"][0, end + 1, end]) == (mask == "reset_attention_mask")
    assert with_end["loss_mask"][end] == 0 and with_end["position_ids"][end + 1] == 0
    assert ("reset_position_ids=True has no effect" in caplog.text) == (positions == "rope")


def test_only_what_a_stage_needs_is_built(tmp_path):
    prefix = corpus(tmp_path / "a", documents=10)  # 5 % of 10 documents are none: there is no test data
    data = module(prefix, split="80,20,0", steps=trainer(limit_val_batches=0))
    assert list(datasets(data, "fit")) == ["train", "validation"]
    assert data.val_dataloader() == []
    validate = module(prefix, split="0,1,0", steps=trainer(max_steps=-1))
    assert list(datasets(validate, "validate")) == ["validation"]


def test_the_whole_of_a_split_is_one_pass_over_it_and_a_number_of_samples_is_that_number(tmp_path):
    steps, prefix = trainer(max_steps=-1, limit_val_batches=1.0), corpus(tmp_path / "a")
    validation = datasets(module(prefix, split="50,50", steps=steps, num_train_samples=7), "fit")["validation"]
    tokens = int(validation.dataset.sequence_lengths[validation.indices].sum())
    assert len(validation) == (tokens - 1) // SEQ
    data = module(prefix, split="50,50", num_train_samples=7, num_val_samples=3, steps=steps)
    assert {split: len(dataset) for split, dataset in datasets(data, "fit").items()} == {"train": 7, "validation": 3}


def test_a_replaced_corpus_gets_a_new_index(tmp_path):
    prefix = corpus(tmp_path / "a", documents=60)
    before = datasets(module(prefix, split="1"), "fit")["train"]
    tokens_before = int(before.dataset.sequence_lengths.sum())
    del before
    corpus(tmp_path / "a", documents=200, seed=5)
    after = datasets(module(prefix, split="1"), "fit")["train"]
    assert len(after) > tokens_before // SEQ  # the old index would cover the old tokens only
    again = datasets(module(prefix, split="1"), "fit")["train"]
    assert same(after, again)
    assert len(list((tmp_path / "index_cache").iterdir())) == 2


def test_a_corpus_made_with_another_tokenizer_is_refused(tmp_path):
    from nemo2.data.bpe import train_bpe
    from nemo2.data.prepare import prepare_data

    (tmp_path / "t.txt").write_text("some text to learn from, and some more of it\n" * 20)
    one = train_bpe(tmp_path / "t.txt", 280, tmp_path / "one.json")
    other = train_bpe(tmp_path / "t.txt", 270, tmp_path / "other.json", ("<|endoftext|>", "<pad>"))
    prepare_data(tmp_path / "t.txt", tmp_path / "d", one)
    assert len(datasets(module(tmp_path / "d", tokenizer=one, split="1"), "fit")["train"]) > 0
    prepare_data(tmp_path / "t.txt", tmp_path / "d", other, overwrite=True)
    with pytest.raises(DataError, match="was prepared with another tokenizer"):
        module(tmp_path / "d", tokenizer=one, split="1").setup("fit")
    ends_otherwise = {"tokenizer": BPETokenizer(tmp_path / "other.json", eos_token="<pad>"), "split": "1"}
    module(tmp_path / "d", **ends_otherwise).setup("fit")
    with pytest.raises(DataError, match="data.eod_mask_loss=True would find no end of a document.* token 0.* token 1"):
        module(tmp_path / "d", eod_mask_loss=True, **ends_otherwise).setup("fit")


def test_the_token_that_pads_is_trained_on_where_it_ends_documents(tmp_path):
    """As "<|endoftext|>" of a chat model's tokenizer does in a corpus."""

    class Pads(NullTokenizer):
        pad_id = 7  # pyright: ignore[reportAssignmentType]

    prefix = corpus(tmp_path / "a", end=7)
    padded, plain = (
        datasets(module(prefix, split="1", tokenizer=one(VOCAB)), "fit")["train"] for one in (Pads, NullTokenizer)
    )
    assert same(padded, plain) and any((padded[i]["labels"] == 7).any() for i in range(len(padded)))


@pytest.mark.timeout(60)
def test_a_split_without_tokens_is_refused_and_not_counted_for_ever(tmp_path):
    """Megatron-Core's loop over such a split has no end."""
    prefix = corpus(tmp_path / "a", documents=1)
    with pytest.raises(DataError, match="The validation data of .*has 0 tokens.*at least 17"):
        module(prefix, split="90,5,5").setup("fit")


@pytest.mark.parametrize(
    ("split", "limits", "words"),
    [
        ("0,100,0", {}, "leaves no training data"),
        ("100,0,0", {}, "leaves no validation data"),
        ("100,0,0", {"limit_val_batches": 0}, None),
        ({"validation": "a"}, {}, "no datasets for 'train'"),
    ],
)
def test_a_run_from_python_refuses_splits_without_data(tmp_path, split, limits, words):
    """Through Lightning, which would train on nothing and succeed."""
    import lightning.pytorch as pl

    prefix = corpus(tmp_path / "a", documents=40)
    paths, options = (prefix, {"split": split}) if isinstance(split, str) else ({"validation": prefix}, {})
    data = module(paths, **options)
    data.trainer = pl.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path, **limits
    )
    data.trainer.state.fn = "fit"
    if words is None:
        data.setup("fit")
        return
    with pytest.raises(ConfigError, match=words) as caught:
        data.setup("fit")
    assert caught.value.rule == "splits-have-data"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"split": "abc"}, "split='abc'"),
        ({"paths": [1, "a", 0, "b"]}, "the weight of b is 0"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"seq_len": 4}, "did you mean 'seq_length'"),
    ],
)
def test_wrong_settings_are_refused_at_once(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        PreTrainingDataModule(**{"paths": "nowhere", **kwargs})


@pytest.mark.parametrize(
    ("paths", "options", "error", "words"),
    [
        (["A"], {"tokenizer": ByteTokenizer()}, DataError, "contains token id 999, but the tokenizer has 257 ids"),
        (
            ["A"],
            {"num_train_samples": 20},
            ConfigError,
            "num_train_samples=20 is less than trainer.max_steps . data.global_batch_size = 10 . 4 = 40",
        ),
        (
            [1, "A", 1, "B"],
            {"steps": trainer(limit_val_batches=1.0)},
            ConfigError,
            "validation data is a blend with weights.*limit_val_batches",
        ),
        (["A"], {"tokenizer": None}, ConfigError, "tokenizer is None"),
        (["s3://bucket/a"], {}, ConfigError, "object_storage_cache_path"),
        (
            ["A"],
            {"index_mapping_dir": __file__},
            DataError,
            "The sample index can't be written to .* Set index_mapping_dir",
        ),
    ],
)
def test_what_only_the_trainer_and_the_files_tell_is_refused_at_set_up(tmp_path, paths, options, error, words):
    corpora = {name: corpus(tmp_path / name) for name in ("A", "B")}
    with pytest.raises(error, match=words):
        module([corpora.get(path, path) for path in paths], **options).setup("fit")


def test_all_ranks_read_the_index_that_rank_0_built(tmp_path, run_on_ranks):
    a, b = corpus(tmp_path / "a"), corpus(tmp_path / "b", seed=1)
    for blend in (a, [a, b]):
        first, second = run_on_ranks(first_samples, 2, blend)
        assert first == second


def with_a_fault_on_rank_1(prefix):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        prefix += "-missing"  # as on a node that does not see the file
    try:
        module(prefix, split="1,0,0").setup("fit")
    except DataError as error:
        return str(error)
    return "no error"


def test_a_fault_that_one_rank_meets_is_raised_on_all_of_them(tmp_path, run_on_ranks):
    healthy, faulty = run_on_ranks(with_a_fault_on_rank_1, 2, corpus(tmp_path / "a"), timeout=60)
    assert "No dataset at" in faulty
    assert healthy == f"{faulty} (found by rank 1)"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corpus_that_is_truncated_while_it_is_read_is_an_error_that_names_it(tmp_path, workers):
    # A memory map would end this process.
    data = module(corpus(tmp_path / "a"), split="1,0,0", num_workers=workers)
    loader = iter(datasets(data, "fit")["train"] if workers == 0 else data.train_dataloader())
    next(loader)
    os.truncate(tmp_path / "a.bin", 10)
    with pytest.raises(DataError, match=r"a\.bin ends at byte"):
        list(loader)


def test_tokens_are_read_as_a_memory_map_reads_them(tmp_path):
    blend = module([corpus(tmp_path / "a"), corpus(tmp_path / "b", seed=1)], split="1,0,0")
    for part in datasets(blend, "fit")["train"].datasets:
        mapped = IndexedDataset(part.dataset.path_prefix, mmap=True)
        assert type(part.dataset.bin_reader) is TokenReader is not type(mapped.bin_reader)
        for index in range(len(mapped)):
            assert np.array_equal(part.dataset.get(index, 1), mapped.get(index, 1))
        copied = pickle.loads(pickle.dumps(part))
        assert np.array_equal(copied.dataset.get(0), mapped.get(0))


@pytest.mark.parametrize(
    ("paths", "field"), [("a", "blend"), (["3", "a", "7", "b"], "blend"), ({"train": ["a"]}, "blend_per_split")]
)
def test_megatrons_configuration_can_be_read_and_says_what_the_arguments_say(paths, field):
    data = PreTrainingDataModule(
        paths, seq_length=32, seed=7, eod_mask_loss=True, tokenizer=NullTokenizer(vocab_size=9)
    )
    config = data.gpt_dataset_config
    assert (config.sequence_length, config.random_seed, config.eod_mask_loss) == (32, 7, True)
    assert getattr(config, field) == data.build_kwargs[field]
    with pytest.raises(TypeError):
        data.build_kwargs[field] = None


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"split": "99,1,0"}, "split='99,1,0' has no effect"),
        ({"object_storage_cache_path": "x"}, "No path is in object"),
    ],
)
def test_settings_that_the_paths_leave_without_effect_are_told(monkeypatch, caplog, options, setting):
    monkeypatch.setattr(notices, "_announced", set())
    module({"train": "a", "validation": "b"}, **options)
    assert setting in caplog.text
    caplog.clear()
    module("a" if "split" in options else "s3://bucket/a", **options)
    assert not caplog.text


@pytest.mark.parametrize("cls", ["GPTDataset", dict])
def test_a_dataset_class_is_one_of_megatrons_kind(cls):
    with pytest.raises(ConfigError, match="data.dataset_cls="):
        module("a", dataset_cls=cls)
