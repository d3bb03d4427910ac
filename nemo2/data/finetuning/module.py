# SPDX-License-Identifier: Apache-2.0
"""The fine-tuning data modules for files: `FineTuningDataModule` and `ChatDataModule`."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

from nemo2.base.errors import DataError
from nemo2.config.capture import configurable
from nemo2.data.base import arguments_of
from nemo2.data.documents import RECORD_SUFFIXES
from nemo2.data.finetuning.base import SampleDataModule
from nemo2.data.finetuning.chat import NEMO_TEMPLATE, ChatEncoder
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.finetuning.sample import Encoder
from nemo2.data.finetuning.sources import RecordFiles, Source
from nemo2.data.finetuning.template import TemplateEncoder
from nemo2.data.tokenizer import Tokenizer

FILES = {"train": "training.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"}


@configurable
@dataclass(eq=False, repr=False)
class FineTuningDataModule(SampleDataModule):
    """Fine-tune on ``training.jsonl``, ``validation.jsonl`` and ``test.jsonl`` in a folder.

    Each line is a JSON object of text fields, which a prompt template turns into a prompt and an answer. Only the
    answer is trained on. A file may also be a JSON array (``training.json``) or a table (``.csv``, ``.tsv``), and each
    may be compressed (``.gz``): see `nemo2.data.documents`.

    An item of a loader has ``tokens``, ``labels`` (one token ahead), ``loss_mask``, ``padding_mask`` and ``position_ids``,
    ``[samples, length]``, and with packing ``cu_seqlens``; see `nemo2.data.finetuning.rows`.

    Args:
        dataset_root: The folder. Only the file of training samples is required.
        seq_length: The length of the longest sample: ``seq_length + 1`` tokens, of which the last is only a label.
        tokenizer: The model's tokenizer. None: ``tokenizer`` must be set before setup.
        micro_batch_size, global_batch_size, rampup_batch_size: See `MegatronDataSampler`. With packing, a sample
            is a packed row.
        seed: The seed for the order of each pass, and for the choice of samples that share a row.
        memmap_workers: Threads that tokenize.
        num_workers, pin_memory, persistent_workers: See `torch.utils.data.DataLoader`.
        packed_sequence_specs: How samples are packed. None: one sample per row.
        dataset_kwargs: How records become samples, with the names of `nemo2.data.finetuning.settings.DatasetSettings`.

    Raises:
        ConfigError: an invalid setting, or two settings that contradict each other.
        DataError: at setup, if a file is missing, a line is malformed, or no sample remains.
    """

    encodes = TemplateEncoder

    dataset_root: Union[str, Path]
    seq_length: int = 2048
    tokenizer: Optional[Tokenizer] = None
    micro_batch_size: int = 4
    global_batch_size: int = 8
    rampup_batch_size: Optional[list[int]] = None
    seed: int = 1234
    memmap_workers: int = 1
    num_workers: int = 8
    pin_memory: bool = True
    persistent_workers: bool = False
    packed_sequence_specs: Optional[PackedSequenceSpecs] = None
    dataset_kwargs: Optional[dict[str, Any]] = None

    def __post_init__(self) -> None:
        super().__init__(**arguments_of(SampleDataModule, vars(self)))
        self.dataset_root = str(self.dataset_root)

    @cached_property
    def root(self) -> Path:
        """The folder of the files."""
        return Path(self.dataset_root).expanduser()

    @property
    def train_path(self) -> Path:
        """The file of training samples."""
        return self.root / FILES["train"]

    @property
    def validation_path(self) -> Path:
        """The file of validation samples, which need not exist."""
        return self.root / FILES["validation"]

    @property
    def test_path(self) -> Path:
        """The file of test samples, which need not exist."""
        return self.root / FILES["test"]

    @property
    def cache_root(self) -> Path:
        return self.root.absolute() / "index_cache"

    @property
    def is_here(self) -> bool:
        return bool(self._files("train"))

    def _files(self, split: str) -> list[Path]:
        names = (Path(FILES[split]).with_suffix(suffix) for suffix in RECORD_SUFFIXES)
        files = (self.root / f"{name}{packed}" for name in names for packed in ("", ".gz"))
        return list(filter(Path.is_file, files))

    def source(self, split: str) -> Optional[Source]:
        files = self._files(split)
        if len(files) > 1:
            raise DataError(
                f"data.dataset_root={self.dataset_root} has {' and '.join(file.name for file in files)}, and the records of a "
                "split are one file. Join them, or move one to another folder."
            )
        if files:
            return RecordFiles(*files)
        if split == "train":
            raise DataError(
                f"data.dataset_root={self.dataset_root}: this folder has no {FILES['train']}. Create it with one JSON object per "
                'line, such as {"input": "...", "output": "..."}, or set dataset_root to another folder.'
            )
        return None

    def encoder(self) -> Encoder:
        return self.settings.template(self.tokenizer_of_the_model)


@configurable
@dataclass(eq=False, repr=False)
class ChatDataModule(FineTuningDataModule):
    """Fine-tune on conversations in ``training.jsonl``, ``validation.jsonl`` and ``test.jsonl``, one per line.

    A conversation is a list of messages under ``messages`` (role and content) or ``conversations`` (from and value),
    with ``tools`` if it uses them. All tokens that the assistant writes are trained on, including the token that ends
    its turn. The arguments and errors that are not listed here are those of `FineTuningDataModule`.

    Args:
        use_hf_tokenizer_chat_template: Use the tokenizer's own chat template, or that of
            ``dataset_kwargs={"chat_template": ...}``. False: use NeMo's format with the tokens ``<extra_id_0>`` and
            ``<extra_id_1>``.
    """

    encodes = ChatEncoder

    use_hf_tokenizer_chat_template: bool = False

    def encoder(self) -> ChatEncoder:
        return self.settings.chat(
            self.tokenizer_of_the_model, None if self.use_hf_tokenizer_chat_template else NEMO_TEMPLATE
        )

    @cached_property
    def chat_template(self) -> Optional[str]:
        return self.encoder().explicit_template
