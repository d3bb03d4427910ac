# SPDX-License-Identifier: Apache-2.0
"""`SampleDataModule`: the base of all fine-tuning data modules, which makes samples once, stores them, packs them,
and splits them into batches."""

import contextlib
import json
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import lcm
from pathlib import Path
from typing import Any, ClassVar, Optional

import numpy as np
from torch.utils.data import Dataset

from nemo2.base import ranks
from nemo2.base.errors import ConfigError, DataError, Nemo2Error
from nemo2.base.files import replaceable_file, replacing
from nemo2.base.variables import replaced
from nemo2.config.aliases import register_gone
from nemo2.config.domains import Domain
from nemo2.data.base import MegatronDataModule, arguments_of
from nemo2.data.finetuning.check import check_records
from nemo2.data.finetuning.encode import BadRecords, Report, encode_whole, not_read
from nemo2.data.finetuning.packing import Fullness, PackedSequenceSpecs, pack
from nemo2.data.finetuning.rows import Collate, PackedRows, SampleRows
from nemo2.data.finetuning.sample import Encoder
from nemo2.data.finetuning.settings import DatasetSettings
from nemo2.data.finetuning.sources import RecordFiles, Source
from nemo2.data.finetuning.store import Samples, key_of, path_of, write_samples
from nemo2.data.finetuning.template import TemplateEncoder
from nemo2.data.index_cache import DamagedIndex, private_directory, read_array, write_array
from nemo2.data.inputs import Input
from nemo2.data.tokenizer import Tokenizer
from nemo2.mcore.parallel.cuda_graphs import kind_of

_log = logging.getLogger(__name__)
_FORMAT = 4
_KERNEL_MULTIPLE = 16
"""Low-precision kernels need lengths that are multiples of 16."""


class SampleDataModule(MegatronDataModule):
    """Provide samples with a loss mask, one per row or packed. Subclasses define the source of records and their
    conversion to samples.

    Rank 0 tokenizes all records of a split before the first step and stores them. A later run with the same data,
    tokenizer and settings reuses them. Each pass over the training samples has its own order, drawn from ``seed``.
    """

    calculate_per_token_loss = True
    """The default of this setting for models trained on this data. Samples have different numbers of tokens that
    count, and each token counts the same, in whichever micro-batch it is."""

    encodes: ClassVar[Optional[type[Encoder]]] = None
    """The encoder of all records. None: a record decides by its fields."""

    valid_numbers = {
        **MegatronDataModule.valid_numbers,
        "memmap_workers": Domain("[1, inf)", "a number of threads that tokenize", "whole"),
    }

    def __init__(
        self,
        *,
        seq_length: int,
        tokenizer: Optional[Tokenizer],
        micro_batch_size: int,
        global_batch_size: int,
        rampup_batch_size: Optional[list[int]],
        seed: int,
        memmap_workers: int,
        num_workers: int,
        pin_memory: bool,
        persistent_workers: bool,
        packed_sequence_specs: Optional[PackedSequenceSpecs],
        dataset_kwargs: Optional[Mapping[str, Any]],
    ) -> None:
        self.memmap_workers = memmap_workers
        super().__init__(dataloader_type="cyclic", **arguments_of(MegatronDataModule, locals()))
        self.tokenizer = tokenizer
        self.packed_sequence_specs = packed_sequence_specs
        self.dataset_kwargs = dataset_kwargs
        if not isinstance(packed_sequence_specs, PackedSequenceSpecs | None):
            raise ConfigError(
                f"data.packed_sequence_specs={packed_sequence_specs!r}: must be a PackedSequenceSpecs, or None."
            )
        self.settings = DatasetSettings.of(dataset_kwargs)
        if self.encodes is not None and (unread := self.settings.unread_by(self.encodes)):
            raise ConfigError(not_read(unread, f"{type(self).__name__} does not read"))
        self.prepare_data_per_node = False  # rank 0 prepares, because all ranks see its files
        self.reports: dict[str, Report] = {}
        """What happened to the records of each split that was built."""
        self.fullness: dict[str, Fullness] = {}
        """How full the rows of each packed split are."""
        self._failure: Optional[Nemo2Error] = None
        self._samples: dict[str, Optional[Samples]] = {}
        self._sources: dict[str, Input] = {}
        if self.packed and micro_batch_size != 1:
            raise ConfigError(
                f"data.micro_batch_size={micro_batch_size} with packed sequences: a packed row of several samples is "
                "already a micro-batch. Set data.micro_batch_size=1.",
                rule="packs-one-by-one",
            )
        if self.packed and self.packed_sequence_size != seq_length:
            raise ConfigError(
                f"data.packed_sequence_specs.packed_sequence_size={self.packed_sequence_size} "
                f"differs from data.seq_length={seq_length}, but a packed row is one sequence of the model. Set both "
                "to the same value.",
                rule="packs-are-as-long-as-sequences",
            )

    @property
    def packed_sequence_size(self) -> int:
        """Tokens of a packed row. -1 or 0: samples aren't packed."""
        return self._packing.packed_sequence_size

    @property
    def pad_cu_seqlens(self) -> bool:
        """Whether all rows of a split have equally long lists of sequences."""
        return self._packing.pad_cu_seqlens

    @property
    def packed(self) -> bool:
        """Whether rows hold several samples."""
        return self._packing.active

    @property
    def _packing(self) -> PackedSequenceSpecs:
        return self.packed_sequence_specs or PackedSequenceSpecs()

    @abstractmethod
    def source(self, split: str) -> Optional[Source]:
        """The records of "train", "validation" or "test". None: the split is empty by choice.

        Raises:
            DataError: the records are missing.
        """

    @abstractmethod
    def encoder(self) -> Encoder:
        """The encoder that converts records to samples.

        Raises:
            ConfigError: it needs a tokenizer, and none is set.
        """

    @property
    def chat_template(self) -> Optional[str]:
        """The template that conversations are rendered with, as Jinja text. None: the tokenizer's own, or there are none."""
        return None

    @property
    def tokenizer_of_the_model(self) -> Tokenizer:
        """``tokenizer``, after a check that it is set."""
        if self.tokenizer is None:
            raise ConfigError(f"{type(self).__name__}.tokenizer is None. Set it to the tokenizer of the model.")
        return self.tokenizer

    def reads_text(self) -> bool:
        """Whether the training records certainly need a tokenizer. Reads at most the first line of a local file."""
        return True

    @classmethod
    def take_over(cls, old: Any, new: Any) -> None:
        """Keep ``add_bos`` of the data that the config ``new`` replaces: it is the model's need, whichever its data."""
        settings = new.dataset_kwargs or {}
        needed = (getattr(old, "dataset_kwargs", None) or {}).get("add_bos")
        if needed and "add_bos" not in settings and not cls.has_bos(new):
            new.dataset_kwargs = {**settings, "add_bos": True}

    @classmethod
    def has_bos(cls, config: Any) -> bool:
        """Whether the records of this configured data begin their samples, as far as that is known."""
        del config
        return cls.encodes not in (None, TemplateEncoder)

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """Whether this machine has the records."""

    def no_samples(self, split: str) -> Optional[str]:
        if split != "train" and self.is_here:
            with contextlib.suppress(Nemo2Error):  # `check_records` reports it
                if self.source_to_check(split) is None:
                    return f"data: this {type(self).__name__} has no {split} samples."
        return None

    @property
    @abstractmethod
    def cache_root(self) -> Path:
        """The folder of stored samples, unless the user names one."""

    # Set-up

    def prepare_data(self) -> None:
        """Called by Lightning on rank 0, while other ranks wait. An error is stored for `setup`, which raises it on
        every rank."""
        try:
            self.fetch()
            for split in ("train", "validation"):
                self.samples(split)
        except Nemo2Error as error:
            self._failure = error

    def order(self) -> list[int]:
        return [*super().order(), *([self._align] if self.packed else [])]

    def fetch(self) -> None:
        """Download missing files. Does nothing for the user's own files."""

    def opened_inputs(self) -> list[Input]:
        return list(self._sources.values())  # known on rank 0, which makes the samples

    def build_datasets(self, splits: Sequence[str]) -> dict[str, Optional[Dataset]]:
        ranks.on_rank_zero(self._raise_failure, error=DataError)
        datasets = {split: self._dataset(split) for split in splits}
        self.collate_fn = self._collate()
        return datasets

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _dataset(self, split: str) -> Optional[Dataset]:
        written = ranks.on_rank_zero(lambda: self._stored(split), error=DataError)
        if written is None:
            return None
        folder, name, packs = written
        samples = ranks.together(lambda: Samples(folder, name), error=DataError)
        self.reports[split] = samples.report
        if packs is None:
            return SampleRows(samples)
        members, ends = (read_array(path_of(folder, packs, part), by_hash=False) for part in ("members", "ends"))
        rows = PackedRows(samples, members, ends, align=self._align, pad_id=self._pad_id)
        self.fullness[split] = _fullness(samples, members, ends, self.seq_length)
        return rows

    def _stored(self, split: str) -> Optional[tuple[Path, str, Optional[str]]]:
        """The location of a split's samples, and of its packs if there are any. Both are made if they don't exist."""
        samples = self.samples(split)
        if samples is None:
            return None
        return samples.folder, samples.name, self._packs(samples, split) if self.packed else None

    def samples(self, split: str) -> Optional[Samples]:
        """The samples of a split, made if they don't exist. For a single process: the ranks of a run call `setup`.

        Raises:
            DataError: a record is malformed, no sample remains, or the source is missing.
        """
        if split not in self._samples:
            self._samples[split] = self._opened(split)
        return self._samples[split]

    def source_to_check(self, split: str) -> Optional[Source]:
        """As `source`, which may prepare the records for many passes."""
        return self.source(split)

    def check_records(self, tokenizer: Any, *, encodes: bool, validates: bool = True, align: int = 1) -> None:
        """Check the records of training and validation as far as `check_records` does. Nothing is stored or downloaded.

        Args:
            tokenizer: The run's tokenizer.
            encodes: Whether it is known. False: records are checked and not encoded.
            validates: Whether the run validates, which takes a global batch.
            align: See `nemo2.data.finetuning.packing.pack`.

        Raises:
            ConfigError: a setting of the samples does not fit the tokenizer, or a download needs a missing package.
            DataError: the source is missing, a record is malformed, or there are fewer rows than in a global batch.
        """
        self._refuse_metadata_path()
        with replaced(self, tokenizer=tokenizer):
            for split in ("train", "validation"):
                if (source := self.source_to_check(split)) is not None:
                    check_records(
                        source,
                        self.encoder(),
                        self.settings.limits(self.seq_length + 1),
                        encodes=encodes,
                        rows=self.global_batch_size if split == "train" or validates else 1,
                        capacity=self.seq_length if self.packed else None,
                        align=align,
                    )

    def _opened(self, split: str) -> Optional[Samples]:
        source = self.source(split)
        if source is None:
            return None
        self._refuse_metadata_path()  # before the work of an hour
        encoder, limits = self.encoder(), self.settings.limits(self.seq_length + 1)
        facts = {
            "format": _FORMAT,
            "data": source.fingerprint,
            "encoder": dict(encoder.identity),
            "limits": vars(limits),
        }
        self._sources[split] = Input(
            path=f"{source.name} ({split})",
            sha256=facts["data"],
            trains=split == "train",
            exact=isinstance(source, RecordFiles),
        )
        self._inputs = None
        folder = self._folder(split, key_of(facts))
        try:
            samples = Samples(folder, "samples", by_hash=True)
        except DamagedIndex:
            _log.info("Tokenizing the %s samples of %s.", split, source.name)
            bad = BadRecords(limits)
            encoded = encode_whole(source, encoder, bad, threads=self.memmap_workers)
            write_samples(folder, "samples", encoded, bad.into)
            samples = Samples(folder, "samples")
        summary = samples.report
        (_log.warning if summary.places else _log.info)("%s samples (%s): %s", split, source.name, summary)
        return samples

    def _refuse_metadata_path(self) -> None:
        """Raise ConfigError if the file about the packs can't be written there."""
        if self.packed and self._packing.packed_metadata_path is not None:
            replaceable_file(self._packing.packed_metadata_path)

    def _folder(self, split: str, key: str) -> Path:
        if self.packed:
            specs = self._packing
            own = {"train": specs.packed_train_data_path, "validation": specs.packed_val_data_path}.get(split)
            if own is not None:
                return private_directory(Path(own).expanduser(), key)
            if specs.tokenizer_model_name:
                key = f"{specs.tokenizer_model_name.replace('/', '--')}-{key}"
        root = self.settings.index_mapping_dir
        return private_directory(self.cache_root if root is None else Path(root).expanduser(), key)

    def _packs(self, samples: Samples, split: str) -> str:
        """The name of the files of a split's packs, which are made if they don't exist."""
        packs = f"packs-{self.seq_length}-{self._align}-{self.seed}"
        lengths = samples.lengths - 1
        try:
            members, ends = (
                read_array(path_of(samples.folder, packs, part), by_hash=True) for part in ("members", "ends")
            )
        except DamagedIndex:
            rows = pack(lengths, self.seq_length, align=self._align, seed=self.seed)
            members, ends = np.concatenate(rows).astype(np.int64), np.cumsum([len(row) for row in rows])
            write_array(path_of(samples.folder, packs, "members"), members)
            write_array(path_of(samples.folder, packs, "ends"), ends)
        fullness = _fullness(samples, members, ends, self.seq_length)
        _log.info("%s: %s.", split, fullness)
        if split == "train" and (place := self._packing.packed_metadata_path) is not None:
            facts = {"packed_sequence_size": self.seq_length, **vars(fullness)}
            with replacing(place) as unfinished:
                unfinished.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        return packs

    # Batches

    @property
    def _pad_id(self) -> int:
        tokenizer = self.tokenizer
        pad_id = None if tokenizer is None else (tokenizer.pad_id if tokenizer.pad_id is not None else tokenizer.eos_id)
        return 0 if pad_id is None else pad_id

    @property
    def _align(self) -> int:
        cp = _sizes()["cp"]
        return 2 * cp if cp > 1 else 1

    @property
    def _pipelined(self) -> bool:
        return _sizes()["pp"] > 1

    @property
    def _captured(self) -> bool:
        """Whether the model's kernels or Transformer Engine's buffers have a fixed length."""
        config = getattr(getattr(self.trainer, "lightning_module", None), "config", None)
        return config is not None and (bool(getattr(config, "tp_comm_overlap", False)) or kind_of(config) != "none")

    def _collate(self) -> Collate:
        sizes = _sizes()
        multiple = lcm(_KERNEL_MULTIPLE, 2 * sizes["cp"] * sizes["tp"])
        most_ends = None
        # Pipeline stages, and experts that receive tokens of other replicas, must know the length beforehand.
        fixed = self.packed or self.settings.pad_to_max_length or sizes["pp"] > 1 or sizes["ep"] > 1 or self._captured
        if self.pad_cu_seqlens:
            # The rows of a stream aren't known beforehand, but none has more samples than tokens.
            most_ends = 1 + max((fullness.most for fullness in self.fullness.values()), default=self.seq_length)
        return Collate(
            pad_id=self._pad_id,
            length=self.seq_length if fixed else None,
            multiple=multiple,
            at_most=self.seq_length,
            most_ends=most_ends,
        )


_NESTED = {
    **{field.name: f"dataset_kwargs={{'{field.name}': ...}}" for field in fields(DatasetSettings)},
    **{one.name: f"packed_sequence_specs=PackedSequenceSpecs({one.name}=...)" for one in fields(PackedSequenceSpecs)},
}
"""Settings inside an argument, which NeMo's first data modules had as arguments of their own."""
register_gone(
    "nemo2.data.finetuning.base:SampleDataModule", **{name: f"set {place}." for name, place in _NESTED.items()}
)


def _fullness(samples: Samples, members: np.ndarray, ends: np.ndarray, capacity: int) -> Fullness:
    return Fullness.of(samples.lengths - 1, np.split(members, ends[:-1]), capacity)


def _sizes() -> dict[str, int]:
    """The parallel sizes of this run. All are 1 without process groups."""
    from megatron.core import parallel_state as groups

    if not groups.model_parallel_is_initialized():
        return dict.fromkeys(("tp", "cp", "pp", "ep"), 1)
    return {
        "tp": groups.get_tensor_model_parallel_world_size(),
        "cp": groups.get_context_parallel_world_size(),
        "pp": groups.get_pipeline_model_parallel_world_size(),
        "ep": groups.get_expert_model_parallel_world_size(),
    }
