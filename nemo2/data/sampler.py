# SPDX-License-Identifier: Apache-2.0
"""`MegatronDataSampler`: turns a plain DataLoader into a loader of steps and counts the consumed samples."""

import logging
from dataclasses import dataclass
from typing import Any, Literal, Optional, Protocol

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.base.names import check_choice
from nemo2.config.capture import configurable
from nemo2.data.batch_sampler import (
    BEGINNING,
    EvalBatchSampler,
    Order,
    PaddedDataset,
    Place,
    StepBatchSampler,
)
from nemo2.data.batch_size import BatchSizeSchedule, setup_microbatch_calculator

_log = logging.getLogger(__name__)
Mode = Literal["train", "validation", "test", "predict"]


class Positioned(Protocol):
    """What knows the position of training in its data."""

    def place(self) -> Place:
        """See `StepBatchSampler.place`."""
        ...


class DataSampler:
    """The interface between a strategy and a data module's ``data_sampler``. Subclass it to split batches in another
    way."""

    trainer: Any

    def connect(self, trainer: Any) -> None:
        """Store `trainer`, whose ``global_step`` is the position of training."""
        self.trainer = trainer

    def setup(self, global_rank: int) -> None:
        """Called once on every rank after Megatron's process groups are created."""

    def transform_dataloader(
        self, dataloader: DataLoader, consumed_samples: int = 0, mode: Optional[str] = None
    ) -> DataLoader:
        """`dataloader`, or a replacement, whose items are steps."""
        return dataloader


class WrappedDataLoader(DataLoader):
    """A DataLoader with a purpose: "train", "validation", "test" or "predict".

    Args:
        mode: The purpose.
    """

    def __init__(self, mode: str = "train", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mode = mode


class StepDataLoader(WrappedDataLoader):
    """A loader whose items are steps, made by `MegatronDataSampler`.

    The sampler's count of consumed samples gives its position, so the loader has no state. It defines the state methods
    all the same, because they tell Lightning that a resume within an epoch is exact.
    """

    def state_dict(self) -> dict[str, Any]:
        """An empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""


@configurable
@dataclass(eq=False, repr=False)
class MegatronDataSampler(DataSampler):
    """Split samples into Megatron's batches. Each item of a transformed loader is this rank's shard of one global
    batch.

    An item has the shape ``[num_microbatches * micro_batch_size, ...]``, ordered by micro-batch (see
    `nemo2.data.batch_sampler`).

    Args:
        seq_len: Tokens per sample. Other code reads it, but loading doesn't need it.
        micro_batch_size: Samples in one forward pass of one data-parallel rank.
        global_batch_size: Samples in one optimizer step, over all ranks.
        rampup_batch_size: ``[start, increment, samples]``, Megatron's linear batch-size ramp-up. None: constant.
        dataloader_type: "single": the dataset's order. "cyclic": shuffled anew in every pass. "batch": the same as
            "single".
        init_consumed_samples: Samples that training had consumed when this run began.
        init_global_step: The trainer's global step when this run began.
        output_log: Whether the strategy logs ``consumed_samples`` and ``global_batch_size``.
        decoder_seq_len: Decoder tokens of encoder-decoder models.
        seed: The seed of the order of each pass, with "cyclic".

    Raises:
        ConfigError: a size or type that can't work with any number of ranks.
    """

    seq_len: int
    micro_batch_size: int = 4
    global_batch_size: int = 8
    rampup_batch_size: Optional[list[int]] = None
    dataloader_type: Order = "single"
    init_consumed_samples: int = 0
    init_global_step: int = 0
    output_log: bool = True
    decoder_seq_len: Optional[int] = None
    seed: int = 1234

    def __post_init__(self) -> None:
        check_choice("dataloader_type", self.dataloader_type, Order)
        require_counts("", seq_len=self.seq_len, micro_batch_size=self.micro_batch_size)
        self.trainer: Any = None
        self.steps: Optional[Positioned] = None
        """What gives the training data by steps."""
        self.begun: Place = BEGINNING
        """Where the run resumed. The beginning, if it didn't, or the checkpoint doesn't tell the pass."""
        self._schedule = BatchSizeSchedule(self.global_batch_size, self.rampup_batch_size)

    def setup(self, global_rank: int) -> None:
        """Set Megatron-Core's micro-batch calculator to this sampler's batch sizes. Needs Megatron's process groups.

        Raises:
            ConfigError: the global batch is not a whole number of micro-batches on every data-parallel rank.
        """
        _, size = data_parallel()
        self._schedule.check(self.micro_batch_size, size)
        setup_microbatch_calculator(
            self._schedule,
            micro_batch_size=self.micro_batch_size,
            data_parallel_size=size,
            rank=global_rank,
            consumed_samples=self.consumed_samples,
        )

    def transform_dataloader(
        self,
        dataloader: DataLoader,
        consumed_samples: int = 0,
        mode: Optional[str] = None,
        drop_last: bool = True,
    ) -> DataLoader:
        """A loader over the same dataset whose items are steps.

        The loader keeps its collate_fn, workers, pinning, prefetching, timeouts and generator. This sampler decides its
        batch size and order. A loader made with ``shuffle=True`` trains as "cyclic".

        A loader is returned unchanged if it has the user's own batch sampler or sampler (any kind except torch's
        sequential, random and distributed samplers), or an IterableDataset. Each of its items must already be this
        rank's shard of one global batch.

        Args:
            consumed_samples: The position of training. 0: this sampler's own position (0, or a restored position).
            mode: "train", "validation", "test" or "predict". None: the loader's own ``mode``, else "train". Only
                training advances through the dataset and ramps up the batch size. The other modes start at sample 0
                with full global batches.
            drop_last: Leave out the samples after the last whole global batch. False: fill that batch with samples
                whose loss mask is empty. Training always leaves them to its next pass.
        """
        mode = str(mode or getattr(dataloader, "mode", "train"))
        check_choice("mode", mode, Mode)
        if not _replaceable(dataloader):
            return dataloader
        rank, size = data_parallel()
        share: dict[str, int] = {
            "total_samples": len(dataloader.dataset),  # pyright: ignore[reportArgumentType]
            "micro_batch_size": self.micro_batch_size,
            "data_parallel_rank": rank,
            "data_parallel_size": size,
        }
        if mode == "train":
            if self.init_global_step > self._global_step():
                raise ConfigError(
                    f"data.init_global_step={self.init_global_step} is more than the trainer's step, {self._global_step()}: "
                    "it is the step at which this data begins, so the samples of the steps before would not be counted, "
                    "and a resume would repeat them. Set it to 0."
                )
            if consumed_samples and consumed_samples != self.consumed_samples:
                self.init_consumed_samples, self.init_global_step = consumed_samples, self._global_step()
            limit = getattr(self.trainer, "limit_train_batches", None)
            overfit = getattr(self.trainer, "overfit_batches", 0) > 0
            order = "cyclic" if isinstance(dataloader.sampler, RandomSampler) else self.dataloader_type
            # The part of `steps` that Lightning takes with this limit of batches.
            steps = self._schedule.steps_within(0, share["total_samples"])
            part = int(steps * limit) if isinstance(limit, float) else limit
            sampler = self.steps = StepBatchSampler(
                **share,
                schedule=self._schedule,
                order="single" if overfit else order,
                position=lambda: self.consumed_samples,
                begun=lambda: self.begun,
                seed=self.seed,
                epoch_steps=part if part and part < steps else None,
                overfit=overfit,
            )
        else:
            sampler = EvalBatchSampler(**share, global_batch_size=self.global_batch_size, drop_last=drop_last)
            if mode == "predict" and (left_out := share["total_samples"] % self.global_batch_size):
                _log.warning("The last %d samples fill no global batch, so there is no prediction for them.", left_out)
            if isinstance(dataloader.batch_sampler, _IndexBatchSamplerWrapper):
                sampler = _IndexBatchSamplerWrapper(sampler)  # Lightning asks it which samples were predicted
        return _rebuilt(dataloader, sampler, mode, padded=mode != "train" and not drop_last)

    def compute_consumed_samples(self, steps_since_resume: int = 0) -> int:
        """The samples consumed after `steps_since_resume` more steps than ``init_global_step``."""
        return self._schedule.after(self.init_consumed_samples, int(steps_since_resume))

    def update_num_microbatches(self) -> None:
        """Set Megatron-Core's calculator to the next step. Has an effect only during a ramp-up."""
        if self._schedule.thresholds:
            from megatron.core.num_microbatches_calculator import update_num_microbatches

            update_num_microbatches(self.consumed_samples, consistency_check=False)

    @property
    def consumed_samples(self) -> int:
        """The samples consumed by all steps so far, including those before a resume."""
        return self.compute_consumed_samples(self._global_step() - self.init_global_step)

    @property
    def current_global_batch_size(self) -> int:
        """The global batch size of the next step."""
        return self._schedule.at(self.consumed_samples)

    @property
    def num_microbatches(self) -> int:
        """The micro-batches per data-parallel rank in the next step."""
        _, size = data_parallel()
        return self.current_global_batch_size // (self.micro_batch_size * size)

    def state_dict(self) -> dict[str, Any]:
        """The position of training, for a checkpoint."""
        place = {} if self.steps is None else {"place": list(self.steps.place())}
        return {"consumed_samples": self.consumed_samples, "global_step": self._global_step(), **place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the samples that a checkpoint had consumed, in the pass that it had reached."""
        self.begun = tuple(state_dict.get("place", BEGINNING))
        self.init_consumed_samples = int(state_dict["consumed_samples"])
        self.init_global_step = int(state_dict.get("global_step", self._global_step()))

    def _global_step(self) -> int:
        return self.init_global_step if self.trainer is None else int(self.trainer.global_step)


def data_parallel() -> tuple[int, int]:
    """This rank and the number of ranks along the data-parallel axis. Context-parallel peers read the same data."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def _replaceable(dataloader: Any) -> bool:
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
        return False
    batch_sampler = dataloader.batch_sampler
    if isinstance(batch_sampler, _IndexBatchSamplerWrapper):  # Lightning's, around that of every loader for prediction
        batch_sampler = batch_sampler._batch_sampler
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return False
    return isinstance(dataloader.sampler, (SequentialSampler, RandomSampler, DistributedSampler))


def _rebuilt(dataloader: DataLoader, batch_sampler: Any, mode: str, *, padded: bool) -> StepDataLoader:
    arguments: dict[str, Any] = {
        "dataset": PaddedDataset(dataloader.dataset) if padded else dataloader.dataset,
        "batch_sampler": batch_sampler,
        "num_workers": dataloader.num_workers,
        "collate_fn": dataloader.collate_fn,
        "pin_memory": dataloader.pin_memory,
        "timeout": dataloader.timeout,
        "worker_init_fn": dataloader.worker_init_fn,
        "generator": dataloader.generator,
        "persistent_workers": dataloader.persistent_workers,
    }
    if dataloader.num_workers > 0:  # torch rejects these two without workers
        arguments["multiprocessing_context"] = dataloader.multiprocessing_context
        arguments["prefetch_factor"] = dataloader.prefetch_factor
    return StepDataLoader(mode=mode, **arguments)
