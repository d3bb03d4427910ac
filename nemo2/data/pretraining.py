# SPDX-License-Identifier: Apache-2.0
"""`PreTrainingDataModule`: Megatron's token files, which Megatron-Core blends, splits, shuffles and divides into
samples."""

import hashlib
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Optional, Union

from torch.utils.data import Dataset, Subset

from nemo2.base import ranks
from nemo2.base.backend.extras import have_te
from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError, DataError
from nemo2.config.capture import configurable
from nemo2.config.domains import Domain
from nemo2.config.notices import warn_without_effect
from nemo2.data.base import NUM_SAMPLES, SOME_SAMPLES, SPLITS, MegatronDataModule, arguments_of
from nemo2.data.blend import Blend, empty_share, parse_paths, parse_split
from nemo2.data.index_cache import private_directory
from nemo2.data.indexed import TokenFile, check_token_ids, open_token_file
from nemo2.data.inputs import Input
from nemo2.data.megatron_datasets import build_datasets
from nemo2.data.token_files import read_sidecar
from nemo2.data.tokenizer import Tokenizer

_SPLIT = "900,50,50"
SHUFFLE_SEED = Domain(
    "[0, 4294967295]",
    "NumPy's RandomState, which shuffles in Megatron-Core, accepts only unsigned 32-bit seeds",
    "whole",
)
_COMPARED = 1024
"""The samples of each dataset by which two orders are told apart: a few pages of an index that may have billions. Two
shuffles never begin with the same ones by chance."""


@configurable
@dataclass(eq=False, repr=False)
class PreTrainingDataModule(MegatronDataModule):
    """Pre-train on token files (``PREFIX.bin/.idx``) with Megatron-Core's dataset classes.

    An item has ``tokens`` and ``labels`` (int64, ``[seq_length]``), ``loss_mask`` (float32), ``position_ids`` (int64),
    optionally ``attention_mask``, and ``dataset_id`` in a blend.

    Setup checks all files on every rank before it builds any index. If one rank finds a fault, all ranks raise it. Rank
    0 builds the sample index and the other ranks read it. The key of the index cache contains the files' contents, so a
    corpus that was replaced under its old name gets a new index.

    Args:
        paths: A dataset's path without suffix; a list of paths; ``[weight, path, weight, path, ...]``; or a dictionary
            of these under "train", "validation" and "test". Without weights every dataset of a list is used once, in
            proportion to its size, and then again from the start.
        seq_length: Tokens per sample.
        tokenizer: The tokenizer that the data was written with. None: ``tokenizer`` must be set before setup.
        micro_batch_size, global_batch_size, rampup_batch_size: See `MegatronDataSampler`.
        dataloader_type, init_consumed_samples, init_global_step, output_log: See `MegatronDataSampler`.
        num_workers, pin_memory, persistent_workers: See `torch.utils.data.DataLoader`.
        reset_position_ids: Restart positions after each end of a document. Only learned positions are read from the data:
            another ``position_embedding_type`` of the model is reported.
        reset_attention_mask: Restrict attention to the tokens of the same document, by a mask in each item. Transformer
            Engine's attention takes no such mask, which is reported.
        eod_mask_loss: Leave the prediction after each end of a document out of the loss.
        create_attention_mask: Whether items hold a mask. Attention kernels make causal masks themselves.
        seed: The seed of Megatron's shuffling, and of the order of each pass with ``dataloader_type="cyclic"``.
        split: The shares of train, validation and test. Ignored if `paths` is a dictionary.
        index_mapping_dir: The folder for cached sample indices. Only this user may write to it, and all ranks must see
            it. None: ``index_cache`` beside the first dataset.
        num_dataset_builder_threads: Threads that build the indices of a blend.
        num_train_samples, num_val_samples, num_test_samples: Samples per split. None: as many as the trainer's
            ``max_steps`` and its limits of validation and test batches need.
        dataset_cls: A Megatron dataset class. None: ``GPTDataset``.
        mmap_bin_files: Accepted for Megatron's signature, without effect. Files are read by position, so that a file
            that is truncated meanwhile is an error that names it. A memory map would end the process.
        object_storage_cache_path: For ``s3://`` and ``msc://`` paths: the folder for their .idx files. Such paths are
            not checked beforehand.

    Raises:
        ConfigError: an invalid value of `paths`, `split` or a number.
        DataError: at setup, if a file is missing, corrupt, made with another tokenizer, or too small for its split.
    """

    valid_numbers = {
        **MegatronDataModule.valid_numbers,
        **NUM_SAMPLES,
        "num_train_samples": SOME_SAMPLES,
        "num_dataset_builder_threads": Domain("[1, inf)", "a number of threads", "whole"),
        "seed": SHUFFLE_SEED,
    }

    paths: Union[str, Path, list[Any], dict[str, Any]]
    seq_length: int = 2048
    tokenizer: Optional[Tokenizer] = None
    micro_batch_size: int = 4
    global_batch_size: int = 8
    rampup_batch_size: Optional[list[int]] = None
    num_workers: int = 8
    pin_memory: bool = True
    persistent_workers: bool = False
    reset_position_ids: bool = False
    create_attention_mask: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    seed: int = 1234
    split: str = _SPLIT
    index_mapping_dir: Optional[str] = None
    num_dataset_builder_threads: int = 1
    num_train_samples: Optional[int] = None
    num_val_samples: Optional[int] = None
    num_test_samples: Optional[int] = None
    dataloader_type: Literal["single", "cyclic", "batch"] = "single"
    init_consumed_samples: int = 0
    init_global_step: int = 0
    output_log: bool = True
    dataset_cls: Optional[type] = None
    mmap_bin_files: bool = True
    object_storage_cache_path: Optional[str] = None

    def __post_init__(self) -> None:
        warn_without_effect(
            "Token files are read by position, without a memory map.", mmap_bin_files=(self.mmap_bin_files, True)
        )
        super().__init__(**arguments_of(MegatronDataModule, vars(self)))
        self._blends = parse_paths(self.paths)
        self._split = parse_split(self.split)
        if isinstance(self._blends, Mapping):
            warn_without_effect("data.paths names the datasets of each split.", split=(self.split, _SPLIT))
        if not any("://" in prefix for blend in self._every_blend() for prefix in blend.prefixes):
            warn_without_effect(
                "No path is in object storage.", object_storage_cache_path=(self.object_storage_cache_path, None)
            )
        if self.dataset_cls is not None and not hasattr(self.dataset_cls, "build_low_level_dataset"):
            raise ConfigError(
                f"data.dataset_cls={self.dataset_cls!r}: must be a class such as Megatron-Core's GPTDataset, or None."
            )
        self._files: dict[str, TokenFile] = {}

    def order(self) -> list[int]:
        # Megatron-Core shuffles a last pass by itself if less than 80 % of it are needed, in an index of the same size.
        train: Any = self._datasets["train"]
        indices = (getattr(one, "shuffle_index", None) for one in getattr(train, "datasets", [train]))
        return [*super().order(), *(zlib.crc32(index[:_COMPARED].tobytes()) for index in indices if index is not None)]

    def opened_inputs(self) -> list[Input]:
        train = self._blend_of("train")
        trained = () if train is None else train.prefixes
        return [
            replace(item, trains=prefix in trained)
            for prefix, file in self._files.items()
            for item in file.described_inputs()
        ]

    def changed_inputs(self) -> list[str]:
        opened = [item for file in self._files.values() for item in file.inputs]
        return [difference for item in opened if (difference := item.difference())]

    def build_datasets(self, splits: Sequence[str]) -> dict[str, Optional[Dataset]]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ConfigError(
                "PreTrainingDataModule.tokenizer is None. Set it to the tokenizer that the data was prepared with."
            )
        self._refuse_empty(splits)
        if have_te():
            warn_without_effect(
                "Transformer Engine's attention makes a causal mask over the whole sample.",
                reset_attention_mask=(self.reset_attention_mask, False),
            )
        model = getattr(getattr(self.trainer, "lightning_module", None), "config", None)
        positions = getattr(model, "position_embedding_type", "learned_absolute")
        if positions != "learned_absolute":
            warn_without_effect(
                f"Models with position_embedding_type={positions!r} read no positions from the data. Distances between tokens "
                "are the same in every document; reset_attention_mask keeps documents apart.",
                reset_position_ids=(self.reset_position_ids, False),
            )
        sizes = {split: size for split, size in self._sizes().items() if split in splits and size != 0}
        if not sizes:
            return dict.fromkeys(splits)
        files = ranks.together(lambda: self.check_files(sizes, tokenizer), error=DataError)
        cache = ranks.on_rank_zero(lambda: self._cache_directory(files), error=DataError)
        config = self.gpt_dataset_config
        config.path_to_cache = cache
        built = build_datasets(config, sizes, self.dataset_cls)
        return {split: self._cut(split, built.get(split)) for split in splits}

    def _cut(self, split: str, dataset: Optional[Dataset]) -> Optional[Dataset]:
        """``dataset`` without what Megatron-Core makes beyond the requested samples: it fills whole passes over the data."""
        limits = {"train": self.num_train_samples, "validation": self.num_val_samples, "test": self.num_test_samples}
        limit = limits[split]
        if split == "train" and self.trainer is not None and self.trainer.max_steps > 0:
            return dataset  # the run ends before
        return dataset if dataset is None or limit is None else Subset(dataset, range(min(limit, len(dataset))))  # pyright: ignore[reportArgumentType]

    def no_samples(self, split: str) -> Optional[str]:
        if isinstance(self._blends, Mapping):
            return None if self._blends[split] is not None else f"data.paths has no datasets for {split!r}."
        return empty_share(self.split, split)

    def _refuse_empty(self, splits: Sequence[str]) -> None:
        """Raise ConfigError if a split that the trainer needs has no data. Otherwise it would train on nothing, with
        exit code 0."""
        trainer = self.trainer
        running = getattr(getattr(trainer, "state", None), "fn", None)
        if trainer is None or running is None:
            return
        needed = ["train"] if "train" in splits and running == "fit" and trainer.limit_train_batches != 0 else []
        # A dictionary may leave out the validation.
        if "validation" in splits and trainer.limit_val_batches != 0 and not isinstance(self._blends, Mapping):
            needed.append("validation")
        if errors := [reason for split in needed if (reason := self.no_samples(split))]:
            raise ConfigError("\n".join(errors), rule="splits-have-data")

    # Sizes

    def _sizes(self) -> dict[str, Optional[int]]:
        """The samples of each split. None: all of the data once. 0: the split doesn't exist."""
        sizes = {
            "train": self._train_size(),
            "validation": self._evaluation_size("validation", self.num_val_samples),
            "test": self._evaluation_size("test", self.num_test_samples),
        }
        for split in SPLITS:
            blend = self._blend_of(split)
            if blend is None:
                sizes[split] = 0
            elif sizes[split] is None and blend.weights is not None:
                fields = {
                    "train": "num_train_samples, or trainer.max_steps",
                    "validation": "num_val_samples, or trainer.limit_val_batches to a whole number",
                    "test": "num_test_samples, or trainer.limit_test_batches to a whole number",
                }
                raise ConfigError(
                    f"The {split} data is a blend with weights, which has no end, but the trainer asks for all of it. "
                    f"Set {fields[split]}, or give the datasets without weights."
                )
        return sizes

    def _train_size(self) -> Optional[int]:
        max_steps = -1 if self.trainer is None else self.trainer.max_steps
        needed = max_steps * self.global_batch_size
        if self.num_train_samples is None:
            return needed if needed > 0 else None
        if problem := self.train_samples_problem(max_steps):
            raise ConfigError(problem)
        return self.num_train_samples

    def train_samples_problem(self, max_steps: int) -> Optional[str]:
        """Why ``num_train_samples`` isn't enough for ``max_steps`` steps. None: it is, or it isn't set."""
        samples, needed = self.num_train_samples, max_steps * self.global_batch_size
        if samples is None or samples >= needed:
            return None
        return (
            f"data.num_train_samples={samples} is less than trainer.max_steps * data.global_batch_size = {max_steps} * "
            f"{self.global_batch_size} = {needed}. Set it to {needed} or more, or to None."
        )

    def _evaluation_size(self, split: str, explicit: Optional[int]) -> Optional[int]:
        if explicit is not None or self.trainer is None:
            return explicit
        limit = self.trainer.limit_val_batches if split == "validation" else self.trainer.limit_test_batches
        if limit is None or (isinstance(limit, float) and limit > 0):
            return None
        # As in NeMo and Megatron-LM: an evaluation after every interval and one at the end.
        evaluations = 1
        if split == "validation" and self.trainer.max_steps > 0:
            interval = self.trainer.val_check_interval
            if isinstance(interval, int) and interval > 0:
                evaluations = self.trainer.max_steps // interval + 1
        return evaluations * int(limit) * self.global_batch_size

    def _every_blend(self) -> list[Blend]:
        blends = self._blends.values() if isinstance(self._blends, Mapping) else [self._blends]
        return [blend for blend in blends if blend is not None]

    def _blend_of(self, split: str) -> Optional[Blend]:
        if isinstance(self._blends, Mapping):
            return self._blends[split]
        first, last = self._share_of(split)
        return self._blends if first < last else None

    def _share_of(self, split: str) -> tuple[float, float]:
        """The part of each dataset that makes up a split, as the two ends of a range of its sequences, from 0 to 1."""
        if isinstance(self._blends, Mapping):
            return 0.0, 1.0
        from megatron.core.datasets.blended_megatron_dataset_config import (
            convert_split_vector_to_split_matrix,
            parse_and_normalize_split,
        )

        # Megatron's own arithmetic, so that the counted tokens are those that it draws from.
        share = convert_split_vector_to_split_matrix(parse_and_normalize_split(self._split))[SPLITS.index(split)]
        return share or (0.0, 0.0)

    # Checks

    def check_files(
        self, splits: Iterable[str], tokenizer: Optional[Tokenizer], *, max_index_bytes: float = math.inf
    ) -> list[TokenFile]:
        """The files of these splits, after all checks.

        Args:
            splits: "train", "validation" and "test", or some of them.
            tokenizer: The run's tokenizer. None: it is unknown, and isn't compared.
            max_index_bytes: Files with a larger index are left out.

        Raises:
            ConfigError: a file is in object storage, and no directory for its index is set.
            DataError: a file is missing, corrupt, too short, or of another tokenizer.
        """
        files: dict[str, TokenFile] = {}
        for split in splits:
            blend = self._blend_of(split)
            for prefix in blend.prefixes if blend is not None else ():
                if "://" in prefix:
                    if self.object_storage_cache_path is None:
                        raise ConfigError(
                            f"{prefix} is in object storage. Set object_storage_cache_path to a local directory for its "
                            "index."
                        )
                    continue
                index = Path(f"{prefix}.idx")
                if index.is_file() and index.stat().st_size > max_index_bytes:
                    continue
                if prefix not in files:
                    files[prefix] = open_token_file(prefix)
                    if tokenizer is not None:
                        self._check_tokenizer(files[prefix], tokenizer)
                self._check_amount(files[prefix], split)
        self._files |= files
        self._inputs = None
        return list(files.values())

    def _check_amount(self, file: TokenFile, split: str) -> None:
        first, last = self._share_of(split)
        tokens = file.tokens_between(first, last)
        # Megatron would count passes over an empty split forever, and over a tiny split almost forever. A sample needs
        # one token more than its length, for the last label.
        needed = self.seq_length + 1
        if tokens >= needed:
            return
        share = "" if isinstance(self._blends, Mapping) else f" (split={self.split!r})"
        raise DataError(
            f"The {split} data of {file.prefix}{share} has {counted(tokens, 'token')} in its part of "
            f"{counted(len(file.lengths), 'document')} ({counted(file.tokens, 'token')}); at least {needed} are needed. "
            f"Use more data, another split, or set the trainer's limit of {split} batches to 0."
        )

    def _check_tokenizer(self, file: TokenFile, tokenizer: Tokenizer) -> None:
        """Check that the ids fit, and that this is the tokenizer that the files name, if they name one."""
        check_token_ids(file, tokenizer.vocab_size)
        sidecar = read_sidecar(file.prefix)
        if sidecar is None:
            return
        made_with, current = sidecar.tokenizer, dict(tokenizer.unique_identifiers)
        if "sha256" in made_with and "sha256" in current and made_with["sha256"] != current["sha256"]:
            raise DataError(
                f"{file.prefix} was prepared with another tokenizer (sha256 {made_with['sha256'][:12]}..., but "
                f"{tokenizer!r} has {current['sha256'][:12]}...), so its ids stand for other text. Use that tokenizer, or "
                "prepare the data again."
            )
        of_ends = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        name = next((end for end in of_ends if getattr(self, end)), None)
        if name is not None and sidecar.eod != tokenizer.eod:
            raise DataError(
                f"data.{name}=True would find no end of a document: those of {file.prefix} end with "
                f"{'no token' if sidecar.eod is None else f'token {sidecar.eod}'}, and {tokenizer!r} ends documents with "
                f"token {tokenizer.eod}. Set the tokenizer's eos_token to that of the data, or data.{name}=False."
            )

    # Building

    def _cache_directory(self, files: Sequence[TokenFile]) -> str:
        """A directory for the indices of these files' contents. It is created and checked to be writable."""
        contents = "\n".join(sorted(file.fingerprint for file in files))
        key = hashlib.sha256(contents.encode()).hexdigest()[:16]
        return str(private_directory(self._cache_root([file.prefix for file in files]), key))

    @property
    def cache_root(self) -> Path:
        """The folder of the indices."""
        blends = (self._blend_of(split) for split in SPLITS)
        return self._cache_root(
            [prefix for blend in blends if blend for prefix in blend.prefixes if "://" not in prefix]
        )

    def _cache_root(self, prefixes: Sequence[str]) -> Path:
        if self.index_mapping_dir is not None:
            return Path(self.index_mapping_dir).expanduser()
        own = prefixes[0] if prefixes else None
        place = Path(own).absolute().parent if own else Path(str(self.object_storage_cache_path)).expanduser()
        return place / "index_cache"

    @property
    def build_kwargs(self) -> Mapping[str, Any]:
        """The arguments of Megatron's configuration that say where the data is. They follow from this module's own, which a
        change must be made to."""
        arguments: dict[str, Any] = {
            # The reader of local files is replaced (`nemo2.data.megatron_datasets`), except in spawned workers.
            "mmap_bin_files": self.object_storage_cache_path is None,
            "num_dataset_builder_threads": self.num_dataset_builder_threads,
        }
        if isinstance(self._blends, Mapping):
            blends = [self._blends[split] for split in SPLITS]
            arguments["blend_per_split"] = [None if blend is None else blend.for_megatron() for blend in blends]
        else:
            arguments["blend"] = self._blends.for_megatron()
            arguments["split"] = self._split
        if self.object_storage_cache_path is not None:
            arguments["object_storage_cache_path"] = os.path.expanduser(self.object_storage_cache_path)
        return MappingProxyType(arguments)

    @property
    def gpt_dataset_config(self) -> Any:
        """Megatron's configuration of the datasets. `setup` adds the folder of their indices."""
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        return GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.seq_length,
            tokenizer=self.tokenizer,  # pyright: ignore[reportArgumentType]  # any class with Megatron's names will do
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_mask_loss=self.eod_mask_loss,
            # Otherwise there would be no mask to reset.
            create_attention_mask=self.create_attention_mask or self.reset_attention_mask,
            **self.build_kwargs,
        )
