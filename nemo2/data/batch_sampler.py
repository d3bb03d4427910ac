# SPDX-License-Identifier: Apache-2.0
"""The samples that a data-parallel rank takes in each step.

One item is this rank's part of one global batch, ordered by micro-batch:

    global batch of step s:  positions c .. c + B - 1 of the stream, c = samples consumed before s
    micro-batch m, rank r:   positions c + m * mbs * dp + r * mbs .. + mbs - 1

Split into groups of ``mbs`` samples, the item equals the micro-batches that Megatron's own pre-training sampler gives
rank r. The union over ranks is the global batch. The rule is that of Megatron-LM's ``MegatronPretrainingSampler``; the
grouping by step is nemo2's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Optional

import numpy as np
from torch.utils.data import Dataset, Sampler

from nemo2.base.counts import counted
from nemo2.base.errors import DataError
from nemo2.data.batch_size import BatchSizeSchedule

Order = Literal["single", "cyclic", "batch"]
Place = tuple[int, int, int]
"""Samples consumed, the number of a pass, and the samples consumed at its start."""
BEGINNING: Place = (0, 0, 0)


@dataclass(kw_only=True, eq=False)
class StepBatchSampler(Sampler[list[int]]):
    """The dataset indices of this rank's part, step by step.

    The sampler passes over the dataset repeatedly. A pass has as many whole global batches as fit. One iteration of the
    sampler yields the rest of the current pass, or with ``epoch_steps`` so many steps, of the next pass too where the
    current pass ends. `len` is the number of steps in the whole current pass, because Lightning also counts the steps
    before a resume.

    Args:
        total_samples: Samples in the dataset.
        schedule: The global batch size.
        micro_batch_size, data_parallel_rank, data_parallel_size: These select this rank's part.
        order: "single": the dataset's own order in every pass (Megatron's datasets are shuffled when they are built).
            "cyclic": a permutation per pass, drawn from (seed, pass); the samples left over differ between passes.
            "batch": NeMo's name for fine-tuning, the same as "single", because a step is loaded at once in any case.
        position: A function that returns the samples consumed so far. It is called at the start of each iteration, so
            that loading resumes at the position of training rather than of prefetching. None: start at 0, then continue
            after the last whole pass.
        begun: A function that returns where a resume began (`place`). The length of a pass in samples follows from the
            batch size, which may have been another before.
        seed: The seed of "cyclic".
        epoch_steps: The steps of one iteration, where an epoch is shorter than a pass. None: the rest of the pass.
        overfit: A pass has the first ``epoch_steps`` steps only, so that every epoch trains on the same samples.

    Raises:
        DataError: the dataset has fewer samples than one global batch.
    """

    total_samples: int
    schedule: BatchSizeSchedule
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    order: Order = "single"
    position: Optional[Callable[[], int]] = None
    begun: Callable[[], Place] = lambda: BEGINNING
    seed: int = 1234
    epoch_steps: Optional[int] = None
    overfit: bool = False

    def __post_init__(self) -> None:
        self.schedule.check(self.micro_batch_size, self.data_parallel_size)
        if self.total_samples < self.schedule.global_batch_size:
            raise DataError(
                f"The dataset has {counted(self.total_samples, 'sample')}, fewer than one global batch of "
                f"{self.schedule.global_batch_size}, so it is too small for a single step. Use more data, a shorter "
                "seq_length, or a smaller global_batch_size."
            )
        self._consumed_samples = 0

    def __iter__(self) -> Iterator[list[int]]:
        consumed, steps_left = self._now(), self.epoch_steps
        while True:
            number, start, end = self._pass_at(consumed)
            order = self._permutation(number)
            while consumed < end and steps_left != 0:
                batch = self.schedule.at(consumed)
                offset = consumed - start
                if offset + batch > self.total_samples:
                    break  # the checkpoint of an older version doesn't tell the pass, and the batch size was another
                share = share_of(batch, self.micro_batch_size, self.data_parallel_rank, self.data_parallel_size)
                yield (share + offset if order is None else order[share + offset]).tolist()
                consumed += batch
                steps_left = None if steps_left is None else steps_left - 1
            if not steps_left:  # None: the pass has ended
                break
            consumed = end
        self._consumed_samples = consumed if steps_left == 0 else end

    def __len__(self) -> int:
        _, start, _ = self._pass_at(self._now())
        return self.schedule.steps_within(start, self.total_samples)

    def place(self) -> Place:
        """The position of training, for a checkpoint: the samples consumed, the number of the current pass, and the samples
        that had been consumed when it began."""
        consumed = self._now()
        return consumed, *self._pass_at(consumed)[:2]

    def samples_of_step(self, consumed: int) -> list[int]:
        """The dataset indices of the whole global batch that follows after ``consumed`` samples, in the order of training."""
        number, start, _ = self._pass_at(consumed)
        places = np.arange(self.schedule.at(consumed)) + (consumed - start)
        order = self._permutation(number)
        return (places if order is None else order[places]).tolist()

    def _now(self) -> int:
        return self._consumed_samples if self.position is None else self.position()

    def _pass_at(self, consumed: int) -> tuple[int, int, int]:
        """The pass that contains `consumed`: its number, and the samples consumed at its start and at its end."""
        reached, number, start = self.begun() if consumed >= self.begun()[0] else BEGINNING
        while True:
            end = self.schedule.after(
                reached, self.schedule.steps_within(reached, start + self.total_samples - reached)
            )
            if self.overfit and self.epoch_steps is not None:
                end = min(end, self.schedule.after(start, self.epoch_steps))
            if consumed < end:
                return number, start, end
            # Whole passes without a ramp-up ahead are equal. The rest of a pass tells nothing about the next.
            if reached == start and self.schedule.at(start) == self.schedule.global_batch_size:
                length = end - start
                passes = (consumed - start) // length
                return number + passes, start + passes * length, end + passes * length
            number, start, reached = number + 1, end, end

    def _permutation(self, number: int) -> Optional[np.ndarray]:
        if self.order != "cyclic":
            return None
        # A separate generator, because on CPU torch's global generator also feeds dropout.
        return np.random.default_rng([self.seed, number]).permutation(self.total_samples)


@dataclass(kw_only=True, eq=False)
class EvalBatchSampler(Sampler[list[int]]):
    """The dataset indices of this rank's part for validation, test and prediction. Each iteration starts at sample 0,
    with full global batches.

    Every rank must run the same number of micro-batches. With ``drop_last``, samples after the last whole global batch
    are left out. Without it, indices from ``total_samples`` on fill the last batch, and the dataset returns padding for
    them (`PaddedDataset`).

    Raises:
        DataError: there is no whole global batch.
    """

    total_samples: int
    global_batch_size: int
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    drop_last: bool = True

    def __post_init__(self) -> None:
        batch, micro_batch, replicas = self.global_batch_size, self.micro_batch_size, self.data_parallel_size
        BatchSizeSchedule(batch).check(micro_batch, replicas)
        if self.total_samples < (batch if self.drop_last else 1):
            raise DataError(
                f"The dataset has {counted(self.total_samples, 'sample')}, fewer than one global batch of {batch}, so "
                "there is nothing to evaluate. Use more data for this split, a shorter seq_length, or a smaller "
                "global_batch_size."
            )
        self.share = share_of(batch, micro_batch, self.data_parallel_rank, replicas)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            yield (self.share + step * self.global_batch_size).tolist()

    def samples_in(self, step: int) -> int:
        """The number of the dataset's samples in a global batch: less than its size if padding fills the rest."""
        return min(self.global_batch_size, self.total_samples - step * self.global_batch_size)

    def __len__(self) -> int:
        full, rest = divmod(self.total_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)


class PaddedDataset(Dataset[Any]):
    """A dataset that returns its first sample, with an empty loss mask, for indices beyond its end.

    Raises:
        DataError: at such an index, if samples have no ``loss_mask``.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index < len(self.dataset):
            return self.dataset[index]
        sample = self.dataset[0]
        if not isinstance(sample, Mapping) or sample.get("loss_mask") is None:
            raise DataError(
                f"The last global batch of {len(self.dataset)} samples is incomplete, and val_drop_last=False keeps "
                "it. Its padding would count, because the samples have no 'loss_mask'. Return a loss_mask from the "
                "dataset, or set val_drop_last=True."
            )
        return {**sample, "loss_mask": sample["loss_mask"] * 0}


def share_of(batch: int, micro_batch_size: int, rank: int, ranks: int) -> np.ndarray:
    """The positions in a global batch of `batch` samples that belong to `rank` of `ranks`, ordered by micro-batch."""
    starts = np.arange(0, batch, micro_batch_size * ranks) + rank * micro_batch_size
    return (starts[:, None] + np.arange(micro_batch_size)).reshape(-1)
