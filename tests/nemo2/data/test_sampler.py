# SPDX-License-Identifier: Apache-2.0
"""MegatronDataSampler: what it does to loaders, and its count of consumed samples."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from nemo2.base.errors import ConfigError
from nemo2.data.sampler import MegatronDataSampler, WrappedDataLoader


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"tokens": torch.full((3,), index)}


def make(**kwargs):
    return MegatronDataSampler(**{"seq_len": 3, "micro_batch_size": 2, "global_batch_size": 8, **kwargs})


def rows(item):
    return item["tokens"][:, 0].tolist()


@pytest.fixture
def calculator_after():
    yield calculator
    calculator.destroy_num_microbatches_calculator()


@pytest.mark.parametrize(("consumed", "first"), [(0, 0), (16, 16)])
def test_an_item_is_the_collated_share_of_one_global_batch_from_the_consumed_samples_on(consumed, first):
    sampler = make()
    items = list(sampler.transform_dataloader(DataLoader(Numbers(32)), consumed_samples=consumed))
    assert {item["tokens"].shape for item in items} == {(8, 3)}
    assert [rows(item) for item in items] == [list(range(start, start + 8)) for start in range(first, 32, 8)]
    assert sampler.consumed_samples == consumed


def test_data_parallel_ranks_share_out_the_global_batch(monkeypatch):
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        shares.append([rows(item) for item in make().transform_dataloader(DataLoader(Numbers(8)))])
    assert shares == [[[0, 1, 4, 5]], [[2, 3, 6, 7]]]


@pytest.mark.parametrize("rampup", [None, [4, 4, 12]])
def test_consumed_samples_follow_the_trainers_steps(rampup):
    sampler = make(rampup_batch_size=rampup)
    trainer = SimpleNamespace(global_step=0)
    sampler.connect(trainer)
    consumed = 0
    for item in sampler.transform_dataloader(DataLoader(Numbers(60))):
        assert sampler.consumed_samples == sampler.compute_consumed_samples(trainer.global_step) == consumed
        assert sampler.current_global_batch_size == len(rows(item))
        assert sampler.num_microbatches == len(rows(item)) // 2
        consumed += len(rows(item))
        trainer.global_step += 1
    assert sampler.consumed_samples == consumed > 48


@pytest.mark.parametrize("stop", range(8))
def test_a_restored_sampler_continues_the_ramp_up_and_the_data(stop):
    def start(global_step=0, state=None):
        sampler = make(rampup_batch_size=[4, 4, 12])
        if state is not None:
            sampler.load_state_dict(state)  # Lightning restores data modules before the trainer's step
        trainer = SimpleNamespace(global_step=global_step)
        sampler.connect(trainer)
        return sampler, trainer, sampler.transform_dataloader(DataLoader(Numbers(100)))

    _, _, loader = start()
    whole = [rows(item) for item in loader]
    sampler, trainer, loader = start()
    for _ in range(stop):
        trainer.global_step += 1
    restored, later, loader = start(trainer.global_step, sampler.state_dict())
    assert [rows(item) for item in loader] == whole[stop:]
    later.global_step += 2
    assert restored.consumed_samples == sum(len(step) for step in whole[: stop + 2])


@pytest.mark.parametrize("size", [4, 20, 28])
@pytest.mark.parametrize("stop", [2, 9, 12, 13])
def test_a_resume_with_another_batch_size_goes_on_in_its_pass_and_begins_the_next_ones_with_their_first_samples(
    stop, size
):
    """Passes of 70 samples: eight steps of 8, which leave out 6."""
    before = make()
    before.connect(SimpleNamespace(global_step=stop))
    before.transform_dataloader(DataLoader(Numbers(70)))
    after, trainer = make(global_batch_size=size), SimpleNamespace(global_step=stop)
    after.connect(trainer)
    loader = after.transform_dataloader(DataLoader(Numbers(70)))
    after.load_state_dict(before.state_dict())
    passes = []
    for _ in range(3):
        passes.append([rows(item) for item in loader])
        trainer.global_step += len(passes[-1])
    reached = stop % 8 * 8
    expected = [[*range(first, first + size)] for first in range(reached, 71 - size, size)]
    whole = [[*range(first, first + size)] for first in range(0, 71 - size, size)]
    assert passes == ([expected] if expected else []) + [whole] * (2 if expected else 3)


def test_validation_starts_at_zero_with_full_batches_whatever_training_has_consumed():
    sampler = make(rampup_batch_size=[4, 4, 12], init_consumed_samples=4)
    by_attribute = sampler.transform_dataloader(WrappedDataLoader(mode="validation", dataset=Numbers(20)))
    by_argument = sampler.transform_dataloader(DataLoader(Numbers(20)), mode="test")
    for loader, mode in ((by_attribute, "validation"), (by_argument, "test")):
        assert [rows(item) for item in loader] == [list(range(8)), list(range(8, 16))]
        assert loader.mode == mode


def test_a_shuffled_loader_stays_shuffled():
    plain = sum((rows(i) for i in make().transform_dataloader(DataLoader(Numbers(64)))), [])
    shuffled = sum((rows(i) for i in make().transform_dataloader(DataLoader(Numbers(64), shuffle=True))), [])
    assert plain == list(range(64)) != shuffled
    assert sorted(shuffled) == plain


def test_the_loaders_own_settings_survive():
    def collate(samples):
        return [int(sample["tokens"][0]) for sample in samples]

    settings = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "timeout": 7, "collate_fn": collate}
    before = DataLoader(Numbers(16), batch_size=5, **settings)
    after = make().transform_dataloader(before)
    assert next(iter(after)) == list(range(8))
    for name in (*settings, "pin_memory"):
        assert getattr(after, name) == getattr(before, name), name


def test_loaders_with_their_own_order_come_back_as_they_are():
    class Backwards(Sampler):
        def __iter__(self):
            return iter(range(15, -1, -1))

        def __len__(self):
            return 16

    class OwnBatches(BatchSampler):
        pass

    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    data = Numbers(16)
    for loader in (
        DataLoader(data, sampler=Backwards()),
        DataLoader(data, batch_sampler=OwnBatches(SequentialSampler(data), 8, False)),
        DataLoader(Stream()),
    ):
        assert make().transform_dataloader(loader) is loader


def test_set_up_initialises_megatrons_calculator_and_may_be_repeated(calculator_after):
    for size in (8, 16):
        make(global_batch_size=size).setup(global_rank=0)
        assert calculator_after.get_num_microbatches() == size // 2


def test_the_calculator_follows_the_ramp_up(calculator_after):
    sampler = make(rampup_batch_size=[4, 4, 12])
    trainer = SimpleNamespace(global_step=0)
    sampler.connect(trainer)
    sampler.setup(global_rank=0)
    seen = []
    for trainer.global_step in range(5):
        sampler.update_num_microbatches()
        seen.append(calculator_after.get_num_microbatches())
        assert seen[-1] == sampler.num_microbatches
    assert seen == [2, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"dataloader_type": "random"}, "dataloader_type='random': must be 'single', 'cyclic' or 'batch'"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"global_batch_size": -8}, "global_batch_size=-8"),
        ({"micro_batch": 2}, "did you mean 'micro_batch_size'"),
        ({"micro_batch_size": 3}, "nearest: 6 or 9"),
    ],
)
def test_wrong_settings_are_refused_in_words(calculator_after, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        make(**kwargs).setup(global_rank=0)


def test_data_that_begins_after_the_trainers_step_is_refused():
    """Its samples would not be counted, and a resume would repeat them."""
    sampler = make(init_global_step=3)
    for step in (3, 5, 2):
        sampler.connect(SimpleNamespace(global_step=step, limit_train_batches=None, overfit_batches=0))
        if step >= 3:
            assert sampler.transform_dataloader(DataLoader(Numbers(64))) is not None
    with pytest.raises(ConfigError, match="data.init_global_step=3 is more than the trainer's step, 2"):
        sampler.transform_dataloader(DataLoader(Numbers(64)))
