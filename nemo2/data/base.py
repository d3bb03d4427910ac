# SPDX-License-Identifier: Apache-2.0
"""The base class of nemo2's data modules: the sampler, the loaders and the position in the data."""

import inspect
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from nemo2.base import ranks
from nemo2.base.advice import own_data
from nemo2.base.errors import ConfigError, DataError, Nemo2Error, RuntimeFault
from nemo2.config.domains import Domain, out_of_range
from nemo2.config.notices import warn_without_effect
from nemo2.config.value_types import nones
from nemo2.config.walk import class_of
from nemo2.data.blend import SPLITS
from nemo2.data.inputs import Input, with_hashes
from nemo2.data.sampler import MegatronDataSampler, WrappedDataLoader
from nemo2.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nemo2.data.input_changes import Comparison

_log = logging.getLogger(__name__)
_NEEDED = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}
NUM_SAMPLES = dict.fromkeys(
    ("num_train_samples", "num_val_samples", "num_test_samples"), Domain("[0, inf)", "a number of samples", "whole")
)
"""The valid sizes of splits, for the data modules that have such fields."""
SOME_SAMPLES = Domain("[1, inf)", "a number of samples", "whole")
_BATCH: Mapping[str, Domain] = {
    **dict.fromkeys(("micro_batch_size", "global_batch_size"), SOME_SAMPLES),
    "seq_length": Domain("[1, inf)", "Megatron-Core's index builder divides by this number", "whole"),
}
"""The valid numbers of every data module, including a user's own, which may use other names with another meaning."""


def no_files() -> str:
    """Why a data module that makes its own data has no ``paths``."""
    return f"it makes its own data. To train on yours, {own_data()}"


def arguments_of(base: type, scope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a base class's ``__init__`` among the ``locals()`` of a subclass's, which has the same names for
    them."""
    return {name: scope[name] for name in inspect.signature(base).parameters if name in scope}


def number_problems(data: Any) -> list[str]:
    """A sentence for each number of a data module, or of its node in a recipe, that its class does not accept."""
    kind = class_of(data)
    ours = isinstance(kind, type) and issubclass(kind, MegatronDataModule)
    problems = list(out_of_range(data, "data", kind.valid_numbers if ours else _BATCH))
    if getattr(kind, "__module__", "").startswith("nemo2."):  # whose annotations are exact
        absent = nones(kind, getattr(data, "__arguments__", vars(data)))
        problems += [f"data.{name}=None: takes {wanted}. Leave it out for its default." for name, wanted in absent]
    return problems


@contextmanager
def explaining_changed_inputs(data: Any) -> Iterator[None]:
    """A context for code that reads a data module's files.

    Raises:
        DataError: the code failed after a file had changed. A memory map of a truncated file fails with a signal, which
            torch reports as a lack of shared memory.
    """
    try:
        yield
    except Exception as error:
        changed = data.changed_inputs() if isinstance(data, MegatronDataModule) else []
        # An error of nemo2 that isn't about data or a lost rank has its own reason.
        if not changed or (isinstance(error, Nemo2Error) and not isinstance(error, DataError | RuntimeFault)):
            raise
        raise DataError(
            f"{'; '.join(changed)}. The run was reading it, and failed ({' '.join(str(error).split())[:400]}). Restore "
            "the file, and resume the run. To use other data, write them to another path."
        ) from error


class MegatronDataModule(LightningDataModule):
    """Provide loaders of steps. The ``data_sampler`` turns loaders of single samples into loaders of steps.

    Subclasses build datasets in `build_datasets`; this class does everything about batches. Before the strategy
    transforms the loaders, they are plain torch loaders over single samples.

    Attributes:
        seq_length: Tokens per sample.
        micro_batch_size: Samples per forward pass of a rank.
        global_batch_size: Samples per optimizer step, over all ranks.
        tokenizer: The tokenizer of the samples. None until it is set.
        collate_fn: The function that makes a batch of samples. None: torch's, which stacks them.
        data_sampler: The `MegatronDataSampler` that splits the data into steps and counts consumed samples.

    Args:
        rampup_batch_size: See `MegatronDataSampler`.
        num_workers: See `torch.utils.data.DataLoader`.
        pin_memory: See `torch.utils.data.DataLoader`.
        persistent_workers: See `torch.utils.data.DataLoader`.
        dataloader_type: See `MegatronDataSampler`.
        init_consumed_samples: See `MegatronDataSampler`.
        init_global_step: See `MegatronDataSampler`.
        output_log: See `MegatronDataSampler`.
        seed: See `MegatronDataSampler`.
    """

    tokenizer: Optional[Tokenizer]
    carried_over: ClassVar[tuple[str, ...]] = (
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "rampup_batch_size",
        "tokenizer",
    )
    """Fields that an override keeps when it replaces this data by other data that doesn't set them."""
    valid_numbers: ClassVar[Mapping[str, Domain]] = {
        **_BATCH,
        "num_workers": Domain(
            "[0, inf)", "a number of processes; with 0, the training process loads the data", "whole"
        ),
        "init_consumed_samples": NUM_SAMPLES["num_val_samples"],
        "init_global_step": Domain("[0, inf)", "a number of steps", "whole"),
        "seed": Domain("[0, inf)", "NumPy's generators accept no negative seed", "whole"),
    }
    """The valid numbers of the fields."""

    def __init__(
        self,
        *,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        rampup_batch_size: Optional[list[int]] = None,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        dataloader_type: Literal["single", "cyclic", "batch"] = "single",
        init_consumed_samples: int = 0,
        init_global_step: int = 0,
        output_log: bool = True,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.rampup_batch_size = rampup_batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.dataloader_type = dataloader_type
        self.init_consumed_samples = init_consumed_samples
        self.init_global_step = init_global_step
        self.output_log = output_log
        self.seed = seed
        if problems := number_problems(self):
            raise ConfigError("\n".join(problems))
        self.data_sampler = MegatronDataSampler(seq_len=seq_length, **arguments_of(MegatronDataSampler, locals()))
        self.collate_fn: Optional[Callable[[Any], Any]] = None
        self._datasets: dict[str, Optional[Dataset]] = {}
        self._inputs: Optional[list[Input]] = None
        self._order_before: Optional[list[int]] = None
        """The `order` of the checkpoint that the run resumes from. None: it doesn't resume, or the checkpoint doesn't tell."""
        self._rewritten: set[str] = set()
        """The paths of inputs that changed during the run, as was reported."""

    @abstractmethod
    def build_datasets(self, splits: Sequence[str]) -> dict[str, Optional[Dataset]]:
        """The datasets of `splits`, some of "train", "validation" and "test". None: the split is empty by choice."""

    def inputs(self) -> list[Input]:
        """The inputs that `setup` has opened, with the hashes that are known or soon computed. Checkpoints store them,
        so that a resumed run notices an input with other contents. Called on rank 0."""
        if self._inputs is None:
            self._inputs = with_hashes(self.opened_inputs())
        for item in self._inputs:
            if item.path not in self._rewritten and item.was_rewritten():
                self._rewritten.add(item.path)
                _log.warning("%s was written to during this run, which may have read old and new contents.", item.path)
        return self._inputs

    def compare_inputs(self, records: Mapping[str, Any]) -> "list[Comparison]":
        """Compare the inputs with the records of a checkpoint, by path. May read whole files. Called on rank 0."""
        from nemo2.data.input_changes import compare_all

        compared = compare_all(records, self.opened_inputs())
        self._inputs = with_hashes(one.now for one in compared)
        return compared

    def no_samples(self, split: str) -> Optional[str]:
        """Why the settings leave no samples for a split, as a sentence. None: they leave some, or only the data tells."""
        del split
        return None

    def opened_inputs(self) -> list[Input]:
        """The inputs that `setup` has opened. Empty: unknown."""
        return []

    def changed_inputs(self) -> list[str]:
        """A sentence for each file that has changed since `setup` opened it."""
        return []

    def setup(self, stage: str = "") -> None:
        """Build the datasets that `stage` needs ("fit", "validate", "test"; all for any other value), each once.

        Called on every rank.
        """
        if self.trainer is not None:
            self.data_sampler.connect(self.trainer)
        missing = [split for split in _NEEDED.get(stage, SPLITS) if split not in self._datasets]
        if missing:
            self._datasets.update(self.build_datasets(missing))

    def train_dataloader(self) -> DataLoader:
        """A loader of single training samples."""
        return self._loader("train")

    def val_dataloader(self) -> Any:
        """A loader of single validation samples. An empty list without any."""
        return self._loader("validation")

    def test_dataloader(self) -> Any:
        """A loader of single test samples. An empty list without any."""
        return self._loader("test")

    def state_dict(self) -> dict[str, Any]:
        """The position of training: ``consumed_samples`` and the corresponding ``global_step``. ``order`` tells whether the
        same data is in the same order."""
        built = self._datasets.get("train") is not None
        return {**self.data_sampler.state_dict(), **({"order": self.order()} if built else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the samples that a checkpoint had consumed."""
        self.data_sampler.load_state_dict(state_dict)
        self._order_before = state_dict.get("order")

    def order(self) -> list[int]:
        """Sizes on which the order of the training samples depends, beside the data and the seed: the samples of each
        dataset, which differ if Megatron-Core needs more passes over it."""
        dataset: Any = self._datasets["train"]
        return [len(one) for one in getattr(dataset, "datasets", [dataset]) if hasattr(one, "__len__")]

    def _loader(self, mode: str) -> Any:
        if mode not in self._datasets:
            self._datasets.update(self.build_datasets([mode]))
        dataset = self._datasets[mode]
        if dataset is None:
            reason = self.no_samples(mode) or f"data: this {type(self).__name__} has no {mode} samples."
            if mode == "train":  # Lightning would end the fit before its first step, as if it had succeeded
                raise ConfigError(reason, rule="splits-have-data")
            if mode == "validation" and self.trainer is not None:
                limit = self.trainer.limit_val_batches
                warn_without_effect(
                    reason, **{"trainer.limit_val_batches": (limit, 1.0)}
                )  # Lightning's for all batches
            return []
        before = self._order_before
        # Checkpoints of former releases tell less.
        if mode == "train" and before is not None and before != self.order()[: len(before)] and ranks.is_rank_zero():
            _log.warning(
                "The training samples have another order than before the resume, because the samples of a dataset's passes or "
                "the packed rows differ (%s before, %s now): the data, trainer.max_steps, the batch size or "
                "context_parallel_size has changed. In the current pass, some samples are repeated and others left out.",
                before,
                self.order(),
            )
        return self._loader_of(dataset, mode)

    def _loader_of(self, dataset: Dataset, mode: str) -> DataLoader:
        return WrappedDataLoader(
            mode=mode,
            dataset=dataset,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            # Without a GPU pinning has no use, and torch would warn on every loader.
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            persistent_workers=self.persistent_workers and self.num_workers > 0,
        )
