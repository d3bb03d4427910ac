# SPDX-License-Identifier: Apache-2.0
"""Which rank trains on which sample, against an enumeration written from Megatron-LM's rule and nothing of ours."""

import itertools

import pytest

from nemo2.base.errors import ConfigError, DataError
from nemo2.data.batch_sampler import EvalBatchSampler, StepBatchSampler
from nemo2.data.batch_size import BatchSizeSchedule
from support.small_corpora import megatron_batch_size

RAMP = [4, 4, 40]  # 4, 8, 12 and 16 samples a step


def megatron_steps(indices, consumed, *, micro_batch_size, ranks, global_batch_size, rampup=None):
    """Per step: per rank: list of micro-batches, as Megatron-LM's sampler hands them out one by one."""
    indices = iter(indices)
    steps = []
    while True:
        batch = megatron_batch_size(consumed, global_batch_size, rampup)
        shares = [[] for _ in range(ranks)]
        for _ in range(batch // (micro_batch_size * ranks)):
            together = list(itertools.islice(indices, micro_batch_size * ranks))
            if len(together) < micro_batch_size * ranks:
                return steps
            for rank in range(ranks):
                shares[rank].append(together[rank * micro_batch_size : (rank + 1) * micro_batch_size])
        steps.append(shares)
        consumed += batch


def micro_batches(item, size):
    return [item[i : i + size] for i in range(0, len(item), size)]


def sampler(total, *, consumed=0, mbs=2, ranks=1, rank=0, gbs=16, rampup=None, order="single"):
    return StepBatchSampler(
        total_samples=total,
        schedule=BatchSizeSchedule(gbs, rampup),
        micro_batch_size=mbs,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        order=order,
        position=lambda: consumed,
    )


@pytest.mark.parametrize("rampup", [None, RAMP])
@pytest.mark.parametrize(("mbs", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)])
def test_each_rank_takes_megatrons_micro_batches_in_megatrons_order(mbs, ranks, rampup):
    expected = megatron_steps(range(150), 0, micro_batch_size=mbs, ranks=ranks, global_batch_size=16, rampup=rampup)
    for rank in range(ranks):
        got = [micro_batches(i, mbs) for i in sampler(150, mbs=mbs, ranks=ranks, rank=rank, rampup=rampup)]
        assert got == [step[rank] for step in expected]
        assert len(got) == len(sampler(150, mbs=mbs, ranks=ranks, rank=rank, rampup=rampup))


@pytest.mark.parametrize("rampup", [None, RAMP])
@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_a_resume_at_any_step_of_any_pass_continues_as_if_never_stopped(rampup, order):
    schedule = BatchSizeSchedule(16, rampup)
    endless = StepBatchSampler(total_samples=70, schedule=schedule, micro_batch_size=2, order=order)
    whole = [item for _ in range(3) for item in endless]  # three passes without a stop
    consumed = 0
    for step in range(len(whole)):
        rest = list(sampler(70, consumed=consumed, rampup=rampup, order=order))
        assert rest == whole[step : step + len(rest)]
        assert 1 <= len(rest) <= len(sampler(70, consumed=consumed, rampup=rampup, order=order))
        consumed += len(whole[step])


@pytest.mark.parametrize(
    ("order", "overfit"), [("single", False), ("cyclic", False), ("single", True)], ids=["order", "shuffled", "overfit"]
)
def test_an_epoch_shorter_than_a_pass_has_all_its_steps(order, overfit):
    options = {"total_samples": 70, "schedule": BatchSizeSchedule(16), "micro_batch_size": 2, "order": order}
    endless = StepBatchSampler(**options)
    whole = [item for _ in range(6) for item in endless]  # four steps a pass
    short = StepBatchSampler(**options, epoch_steps=3, overfit=overfit)
    epochs = [list(short) for _ in range(5)]
    assert epochs == [whole[:3] if overfit else whole[3 * epoch : 3 * epoch + 3] for epoch in range(5)]
    assert len(short) == 4, "Lightning takes its share of the whole pass"
    assert short.samples_of_step(16 * 4) == (whole[1] if overfit else whole[4])


def test_cyclic_passes_differ_have_each_sample_once_and_are_the_same_in_every_process():
    first, second = (list(sampler(64, consumed=c, order="cyclic")) for c in (0, 64))
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(64))
    assert first == list(sampler(64, order="cyclic"))
    assert sum(first, []) != list(range(64))


def test_passes_differ_during_a_ramp_up_that_is_longer_than_a_pass():
    ramp = [4, 4, 200]
    loader = StepBatchSampler(
        total_samples=70, schedule=BatchSizeSchedule(16, ramp), micro_batch_size=2, order="cyclic"
    )
    passes = [sum(loader, []) for _ in range(4)]
    assert all(len(set(taken)) == len(taken) > 54 for taken in passes)
    assert len({tuple(taken[:20]) for taken in passes}) == 4


def test_the_order_of_the_global_batches_does_not_depend_on_the_number_of_ranks():
    def global_batches(ranks):
        per_rank = [list(sampler(64, mbs=1, ranks=ranks, rank=r, order="cyclic")) for r in range(ranks)]
        return [sorted(sum(shares, ())) for shares in zip(*[[tuple(i) for i in s] for s in per_rank], strict=True)]

    assert global_batches(1) == global_batches(2) == global_batches(4)


def test_the_next_pass_begins_where_training_is_and_not_where_prefetching_was():
    consumed = 0
    loader = StepBatchSampler(
        total_samples=64, schedule=BatchSizeSchedule(16), micro_batch_size=2, position=lambda: consumed
    )
    ahead = iter(loader)
    prefetched = [next(ahead) for _ in range(3)]
    consumed = 16  # only one of the three was trained on
    assert next(iter(loader)) == prefetched[1]


def test_the_length_counts_the_whole_pass_also_after_a_resume():
    assert len(sampler(70, consumed=32)) == len(sampler(70)) == 4  # Lightning adds the steps done before
    assert len(list(sampler(70, consumed=32))) == 2


def test_an_older_versions_checkpoint_and_another_batch_size_begin_at_the_sample_reached():
    items = list(sampler(66, consumed=20, gbs=8))
    assert items[0] == list(range(20, 28))
    assert max(max(item) for item in items) < 66


@pytest.mark.parametrize("ranks", [1, 4])
def test_validation_starts_at_sample_zero_every_time_and_shares_whole_batches_over_the_ranks(ranks):
    expected = megatron_steps(range(70), 0, micro_batch_size=2, ranks=ranks, global_batch_size=16)
    for rank in range(ranks):
        share = EvalBatchSampler(
            total_samples=70,
            global_batch_size=16,
            micro_batch_size=2,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
        )
        for _ in range(2):
            assert [micro_batches(item, 2) for item in share] == [step[rank] for step in expected]
        assert len(share) == len(expected) == 4


@pytest.mark.parametrize(("total", "sizes"), [(15, [15]), (16, [16]), (17, [16, 1])])
def test_validation_that_drops_nothing_has_every_sample(total, sizes):
    kept = EvalBatchSampler(total_samples=total, global_batch_size=16, micro_batch_size=2, drop_last=False)
    assert [kept.samples_in(step) for step in range(len(kept))] == sizes
    assert sum(kept, []) == list(range(16 * len(sizes)))


def test_a_dataset_smaller_than_a_step_is_refused():
    with pytest.raises(DataError, match="has 15 samples, fewer than one global batch of 16"):
        sampler(15)
    with pytest.raises(DataError, match="fewer than one global batch of 16, so there is nothing to evaluate"):
        EvalBatchSampler(total_samples=15, global_batch_size=16, micro_batch_size=2)


def test_a_global_batch_that_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(ConfigError, match=r"global_batch_size=16 .* = 3 \* 2 = 6\. .*nearest: 12 or 18"):
        sampler(64, mbs=3, ranks=2)
    with pytest.raises(ConfigError, match=r"every batch size must be .* = 8 \* 1 = 8\. Set start"):
        sampler(64, mbs=8, rampup=RAMP)
