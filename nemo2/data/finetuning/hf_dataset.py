# SPDX-License-Identifier: Apache-2.0
"""`HFDatasetDataModule`: fine-tunes on a ``datasets`` object, a folder of tables or JSON lines, or plain lists."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import lcm
from pathlib import Path
from typing import Any, Optional, Union

from torch.utils.data import DataLoader, Dataset

from nemo2.base.errors import ConfigError, DataError
from nemo2.config.capture import configurable
from nemo2.config.domains import Domain
from nemo2.config.notices import warn_without_effect
from nemo2.data.base import SPLITS, arguments_of
from nemo2.data.documents import BadInput, first_record, holds_records
from nemo2.data.finetuning.base import SampleDataModule
from nemo2.data.finetuning.dialects import has_messages
from nemo2.data.finetuning.open import ALIASES, datasets_package, on_hub, open_split
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.finetuning.sample import Encoder
from nemo2.data.finetuning.sources import Part, Records, Source
from nemo2.data.finetuning.stream import StreamedSteps, streamed_rows
from nemo2.data.finetuning.tokens import AnyEncoder
from nemo2.data.home import datasets_home
from nemo2.data.sampler import WrappedDataLoader, data_parallel
from nemo2.data.tokenizer import Tokenizer


@configurable
class HFDatasetDataModule(SampleDataModule):
    """Fine-tune on existing records.

    The fields of a record decide its treatment: ``input_ids`` (with ``labels`` or ``loss_mask``), ``messages`` or
    ``conversations`` for the chat template, or the fields of the prompt template.

    Args:
        path_or_dataset: A folder or file of parquet, arrow or JSON lines; a dataset's name on the hub; a ``datasets``
            object; a list of records; or a mapping of these by split. All except JSON lines and plain records need the
            package ``datasets``.
        split: Train on this split only, or use the splits of this list. ``train[:100]`` and ``train[5%:10%]`` name a part
            of a split. None: find the splits by their names.
        collate_fn: A function that makes a batch of items (tensors of one sample or pack each, of different lengths). In a
            pipeline its batches must be ``seq_length`` tokens long. None: pad the items.
        num_workers, pin_memory, persistent_workers: See `torch.utils.data.DataLoader`. A stream is read in the training
            process.
        seq_length: The length of the longest sample: ``seq_length + 1`` tokens.
        micro_batch_size, global_batch_size: See `MegatronDataSampler`.
        pad_token_id: The id that pads batches. It doesn't count in the loss.
        use_dist_sampler: Must be False, because this data module's own sampler distributes samples over replicas.
        train_aliases, test_aliases, val_aliases: Names that a split may have. None: those in
            `nemo2.data.finetuning.open.ALIASES`.
        pad_seq_len_divisible: Pad batches to a multiple of this. None: as the layout needs.
        tokenizer: The model's tokenizer. None: ``tokenizer`` must be set, unless all records have ``input_ids``.
        seed, memmap_workers, packed_sequence_specs, dataset_kwargs: See `FineTuningDataModule`.
        streaming: Read the training and validation records during training, and store nothing. Records are shuffled or
            packed within a buffer. A resumed run reads the stream again up to its position.

    Raises:
        ConfigError: an invalid setting, or a missing package.
        DataError: at setup (for a stream: when a record is read), if records are malformed or missing, or no sample
            remains.
    """

    valid_numbers = {
        **SampleDataModule.valid_numbers,
        "pad_token_id": Domain("[0, inf)", "an id of the vocabulary", "whole"),
        "pad_seq_len_divisible": Domain("[1, inf)", "a divisor", "whole"),
    }

    def __init__(
        self,
        path_or_dataset: Any,
        split: Union[str, list[str], None] = None,
        collate_fn: Optional[Callable[..., Any]] = None,
        num_workers: int = 2,
        pin_memory: bool = True,
        persistent_workers: bool = True,
        seq_length: int = 1024,
        micro_batch_size: int = 2,
        pad_token_id: int = 0,
        use_dist_sampler: bool = False,
        train_aliases: Optional[list[str]] = None,
        test_aliases: Optional[list[str]] = None,
        val_aliases: Optional[list[str]] = None,
        pad_seq_len_divisible: Optional[int] = None,
        tokenizer: Optional[Tokenizer] = None,
        global_batch_size: int = 8,
        seed: int = 1234,
        memmap_workers: int = 1,
        packed_sequence_specs: Optional[PackedSequenceSpecs] = None,
        dataset_kwargs: Optional[dict[str, Any]] = None,
        streaming: bool = False,
    ) -> None:
        self.pad_token_id, self.pad_seq_len_divisible = pad_token_id, pad_seq_len_divisible
        super().__init__(rampup_batch_size=None, **arguments_of(SampleDataModule, locals()))
        if use_dist_sampler:
            raise ConfigError(
                "use_dist_sampler=True: this data module's own sampler already distributes samples over replicas. Set "
                "use_dist_sampler=False."
            )
        if pad_seq_len_divisible is not None and seq_length % pad_seq_len_divisible:
            raise ConfigError(
                f"seq_length={seq_length} is not a multiple of pad_seq_len_divisible={pad_seq_len_divisible}, so the "
                "longest batch could not be padded. Set seq_length to a multiple."
            )
        self.path_or_dataset = path_or_dataset
        self.split = split
        self.streaming = streaming or type(path_or_dataset).__name__ in ("IterableDataset", "IterableDatasetDict")
        if self.streaming:
            unread = ("packed_metadata_path", "packed_train_data_path", "packed_val_data_path", "tokenizer_model_name")
            warn_without_effect(
                "A stream is read in the training process, and its samples are not stored.",
                memmap_workers=(memmap_workers, 1),
                index_mapping_dir=((dataset_kwargs or {}).get("index_mapping_dir"), None),
                **{name: (getattr(self._packing, name), None) for name in unread},
            )
        self.aliases = {
            "train": train_aliases or ALIASES["train"],
            "validation": val_aliases or ALIASES["validation"],
            "test": test_aliases or ALIASES["test"],
        }
        self._parts = self._parts_of(split)
        self._collate_fn_of_user = collate_fn
        self._maps: list[tuple[Callable[[Any], Any], Optional[frozenset[str]]]] = []

    def _parts_of(self, split: Union[str, list[str], None]) -> dict[str, Part]:
        """The part of the records for each split that is in use."""
        if split is None or isinstance(split, str):
            return {} if split is None else {"train": Part.parse(split)}
        parts: dict[str, Part] = {}
        for part in map(Part.parse, split):
            own = next((name for name, aliases in self.aliases.items() if part.name in aliases), None)
            if own is None or own in parts:
                raise ConfigError(
                    f"data.split={split!r}: {part.name!r} is not the name of {'a' if own is None else 'another'} split. Name "
                    "splits by data.train_aliases, data.val_aliases and data.test_aliases, each once."
                )
            parts[own] = part
        return parts

    def no_samples(self, split: str) -> Optional[str]:
        if self.split is None or split in self._parts:
            return super().no_samples(split)
        return (
            f"data.split={self.split!r} names no part of the {split} split. Add one, such as "
            f"{self.aliases[split][0]!r}, or set data.split=None to use all splits."
        )

    @classmethod
    def has_bos(cls, config: Any) -> bool:
        """Whether the first record is a conversation, whose template begins it, or already token ids."""
        if not isinstance(held := config.path_or_dataset, str | Path):
            return False
        path = Path(held).expanduser()
        file = min(filter(holds_records, path.iterdir()), default=path) if path.is_dir() else path
        record = first_record(file)
        return has_messages(record) or (record or {}).get("input_ids") is not None

    @property
    def is_here(self) -> bool:
        held = self.path_or_dataset
        return not isinstance(held, str | Path) or Path(held).expanduser().exists()

    def reads_text(self) -> bool:
        file = Path(self.path_or_dataset).expanduser() if isinstance(self.path_or_dataset, str | Path) else None
        if file is None or file.suffix != ".jsonl" or not file.is_file():
            return False  # unknown before it is opened
        try:
            with file.open(encoding="utf-8") as lines:
                record = json.loads(lines.readline())
        except (OSError, ValueError):
            return False
        return isinstance(record, dict) and "input_ids" not in record

    @classmethod
    def from_dict(cls, dataset_dict: Mapping[str, Sequence[Any]], split: str, **settings: Any) -> "HFDatasetDataModule":
        """Create a data module from columns: ``{"input": [...], "output": [...]}``."""
        names = list(dataset_dict)
        lengths = {name: len(dataset_dict[name]) for name in names}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"from_dict: the columns have different lengths: {lengths}.")
        records = [dict(zip(names, row, strict=True)) for row in zip(*dataset_dict.values(), strict=True)]
        return cls({split: records}, split=split, **settings)

    def map(
        self,
        function: Callable[[Any], Any],
        split_names: Union[str, Sequence[str], None] = None,
        *,
        remove_columns: Union[str, Sequence[str], None] = None,
        batched: bool = False,
        batch_size: Optional[int] = None,
        num_proc: Optional[int] = None,
    ) -> None:
        """Let ``function`` change each record before it becomes a sample. Call this before setup.

        As in `datasets.Dataset.map`, the returned fields overwrite the record's.

        Args:
            split_names: The splits to change: "train", "validation" or "test". None: all.
            remove_columns: Fields of the record to drop.
            batched: Must be False, because records are changed one by one.
            batch_size, num_proc: Accepted without effect. Records are changed one by one where they are read.

        Raises:
            ConfigError: an unknown split, or ``batched``.
        """
        if batched:
            raise ConfigError(
                "map(batched=True): nemo2 passes one record at a time. Write a function of one record, and set "
                "batched=False."
            )
        names = [split_names] if isinstance(split_names, str) else split_names
        if unknown := set(names or ()) - set(SPLITS):
            raise ConfigError(f"split_names={sorted(unknown)}: the splits are {', '.join(SPLITS)}.")
        dropped = frozenset([remove_columns] if isinstance(remove_columns, str) else remove_columns or ())
        self._maps.append((partial(_changed, function, dropped), None if names is None else frozenset(names)))

    def check_records(self, tokenizer: Any, **how: Any) -> None:
        if on_hub(self.path_or_dataset):
            datasets_package(f"The dataset {str(self.path_or_dataset)!r}")
        else:
            super().check_records(tokenizer, **how)

    def source(self, split: str) -> Optional[Source]:
        return self._open(split, streaming=self.streaming)

    def source_to_check(self, split: str) -> Optional[Source]:
        return self._open(split, streaming=True)

    def _open(self, split: str, *, streaming: bool) -> Optional[Source]:
        names, part = self.aliases[split], None
        if self.split is not None:
            if (part := self._parts.get(split)) is None:
                return None
            aliases = [name for known in self.aliases.values() if part.name in known for name in known]
            names = tuple(dict.fromkeys((part.name, *aliases)))
        held = self.path_or_dataset
        source = open_split(held, names, whole=split == "train", streaming=streaming)
        if source is not None and part is not None:
            source = part.of(source)
        if source is None and split == "train":
            raise ConfigError(
                f"data.path_or_dataset{f'={str(held)!r}' if isinstance(held, str | Path) else ''} has no split "
                f"{' or '.join(map(repr, names))}. Name the split with "
                "data.split=..., or data.train_aliases."
            )
        functions = [function for function, splits in self._maps if splits is None or split in splits]
        return Mapped(source, functions) if source is not None and functions else source

    @property
    def dataset_splits(self) -> dict[str, Any]:
        """The records under "train", "val" and "test", as `datasets` or Python holds them. None: there is no such split."""
        return {"train": self.train, "val": self.val, "test": self.test}

    @property
    def train(self) -> Any:
        """The training records. None: there are none."""
        return self._held("train")

    @property
    def val(self) -> Any:
        """The validation records. None: there are none."""
        return self._held("validation")

    @property
    def test(self) -> Any:
        """The test records. None: there are none."""
        return self._held("test")

    def _held(self, split: str) -> Any:
        source = self.source(split)
        if source is None or isinstance(source, Records):
            return source and source.held
        return [record for _, record in source.records(BadInput())]

    def encoder(self) -> Encoder:
        return AnyEncoder(self.tokenizer, self.settings)

    @cached_property
    def chat_template(self) -> Optional[str]:
        try:
            return None if self.tokenizer is None else self.settings.chat(self.tokenizer).explicit_template
        except (ConfigError, ImportError):
            return None  # the tokenizer renders no template, so no record was a conversation

    @cached_property
    def cache_root(self) -> Path:
        held = self.path_or_dataset
        place = Path(held).expanduser() if isinstance(held, str | Path) else None
        if place is not None and place.exists():
            return (place if place.is_dir() else place.parent).absolute() / "index_cache"
        return datasets_home() / "index_cache"

    @property
    def _pad_id(self) -> int:
        return self.pad_token_id

    def _collate(self) -> Any:
        own = self._collate_fn_of_user
        if own is not None:
            return partial(_of_length, own, self.seq_length) if self._pipelined else own
        collate = super()._collate()
        multiple = self.pad_seq_len_divisible
        return collate if multiple is None else replace(collate, multiple=lcm(collate.multiple, multiple))

    # Streams

    def prepare_data(self) -> None:
        if not self.streaming:
            super().prepare_data()

    def build_datasets(self, splits: Sequence[str]) -> dict[str, Optional[Dataset]]:
        if not self.streaming:
            return super().build_datasets(splits)
        return {split: self._stream(split) for split in splits}

    def _stream(self, split: str) -> Optional[Dataset]:
        source = self.source(split)
        if source is None:
            return None
        encoder, limits = self.encoder(), self.settings.limits(self.seq_length + 1)
        train, sampler = split == "train", self.data_sampler
        rows = partial(
            streamed_rows,
            source,
            encoder,
            limits,
            capacity=self.seq_length if self.packed else None,
            align=self._align,
            pad_id=self._pad_id,
            seed=self.seed if train else None,
        )
        steps = StreamedSteps(
            rows,
            self._collate(),
            global_batch_size=self.global_batch_size,
            share=(self.micro_batch_size, *data_parallel()),
            position=(lambda: sampler.consumed_samples) if train else None,
            begun=lambda: sampler.begun,
        )
        if train:
            sampler.steps = steps
        return steps

    def _loader_of(self, dataset: Dataset, mode: str) -> DataLoader:
        if not self.streaming:
            return super()._loader_of(dataset, mode)
        return WrappedDataLoader(mode=mode, dataset=dataset, batch_size=None, collate_fn=_as_it_is)


def _of_length(collate: Callable[..., Any], length: int, items: Sequence[Any]) -> Any:
    """A batch of the user's function for pipeline stages, which would wait forever for tensors of another length."""
    batch = collate(items)
    tokens = batch["tokens"].shape[1]
    if tokens != length:
        raise DataError(
            f"data.collate_fn returned a batch of {tokens} tokens, but pipeline stages exchange sequences of "
            f"data.seq_length={length}. Pad to that length, or set strategy.pipeline_model_parallel_size=1."
        )
    return batch


def _changed(function: Callable[[Any], Any], dropped: frozenset[str], record: Any) -> Any:
    # A copy, because a function may change its record in place, and records in memory are read more than once.
    changed = function(copy.deepcopy(record))
    if not isinstance(record, dict) or not isinstance(changed, dict):
        return changed
    return {name: value for name, value in record.items() if name not in dropped} | changed


class Mapped(Source):
    """The records of a source after some functions."""

    def __init__(self, source: Source, functions: Sequence[Callable[[Any], Any]]) -> None:
        self.held, self.functions, self.name = source, functions, source.name

    def records(self, bad: Any) -> Iterable[tuple[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for where, record in self.held.records(bad):
            for function in self.functions:
                record = function(record)
            yield where, record

    @property
    def fingerprint(self) -> str:
        # A function has no hash, but its records do.
        skip = BadInput(policy="skip", limit=1 << 62)
        return Records([record for _, record in self.records(skip)], self.name).fingerprint


def _as_it_is(batch: Any) -> Any:
    return batch
