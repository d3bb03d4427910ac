# SPDX-License-Identifier: Apache-2.0
"""The data modules of fine-tuning on files: `FineTuningDataModule` and `ChatDataModule`."""

from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

from nemo2.config.capture import configurable
from nemo2.data.finetuning.base import SampleDataModule
from nemo2.data.finetuning.chat import NEMO_TEMPLATE
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.finetuning.sample import Encoder
from nemo2.data.finetuning.sources import JsonLines, Source
from nemo2.data.tokenizer import Tokenizer
from nemo2.errors import DataError

FILES = {"train": "training.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"}


@configurable
class FineTuningDataModule(SampleDataModule):
    """Fine-tuning on ``training.jsonl``, ``validation.jsonl`` and ``test.jsonl`` in a folder: one JSON object of text fields per
    line, which a prompt template makes a prompt and an answer of. The answer is trained on.

    An item of a loader is ``tokens``, ``labels`` (one token ahead), ``loss_mask`` and ``position_ids``, ``[samples, length]``,
    and with packing ``cu_seqlens``; see `nemo2.data.finetuning.rows`.

    Args:
        dataset_root: The folder. Of its three files only that of the training samples must be there.
        seq_length: The longest sample: ``seq_length + 1`` tokens, the last of which is only a label.
        tokenizer: The model's. None: someone must set ``tokenizer`` before set-up.
        micro_batch_size, global_batch_size, rampup_batch_size: See `MegatronDataSampler`. Of packed rows, where they are packed.
        seed: Of the order of each pass, and of which samples share a row.
        memmap_workers: Threads that tokenize.
        num_workers, pin_memory, persistent_workers: See `torch.utils.data.DataLoader`.
        packed_sequence_specs: Whether several samples share a row. None: each has its own.
        dataset_kwargs: How records become samples; the names are those of `nemo2.data.finetuning.settings.DatasetSettings`.

    Raises:
        ConfigError: a setting can't be meant, or two contradict each other.
        DataError: at set-up, a file is missing, a line is malformed, or nothing is left to train on.
    """

    def __init__(
        self,
        dataset_root: Union[str, Path],
        seq_length: int = 2048,
        tokenizer: Optional[Tokenizer] = None,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Optional[list[int]] = None,
        seed: int = 1234,
        memmap_workers: int = 1,
        num_workers: int = 8,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        packed_sequence_specs: Optional[PackedSequenceSpecs] = None,
        dataset_kwargs: Optional[dict[str, Any]] = None,
    ) -> None:
        super().__init__(
            seq_length=seq_length,
            tokenizer=tokenizer,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            rampup_batch_size=rampup_batch_size,
            seed=seed,
            memmap_workers=memmap_workers,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            packed_sequence_specs=packed_sequence_specs,
            dataset_kwargs=dataset_kwargs,
        )
        self.dataset_root = str(dataset_root)

    @cached_property
    def root(self) -> Path:
        """The folder of the files."""
        return Path(self.dataset_root).expanduser()

    @property
    def cache_root(self) -> Path:
        return self.root.absolute() / "index_cache"

    def source(self, split: str) -> Optional[Source]:
        file = self.root / FILES[split]
        if file.is_file():
            return JsonLines(file)
        if split == "train":
            raise DataError(
                f"data.dataset_root={self.dataset_root}: there is no {FILES['train']} in it. Write one JSON object per "
                'line, such as {"input": "...", "output": "..."}, or name the folder that has it.'
            )
        return None

    def encoder(self) -> Encoder:
        return self.settings.template(self.tokenizer_of_the_model)


@configurable
class ChatDataModule(FineTuningDataModule):
    """Fine-tuning on conversations: ``training.jsonl``, ``validation.jsonl`` and ``test.jsonl`` hold one per line, a list of
    messages under ``messages`` (role and content) or ``conversations`` (from and value), and where a conversation uses them
    its ``tools``. All that the assistant writes is trained on, the token that ends its turn included.

    Args:
        use_hf_tokenizer_chat_template: True: the tokenizer's own chat template, or the one of
            ``dataset_kwargs={"chat_template": ...}``. False: NeMo's format with the tokens ``<extra_id_0>`` and ``<extra_id_1>``.

    The others are those of `FineTuningDataModule`. Raises as that.
    """

    def __init__(
        self,
        dataset_root: Union[str, Path],
        seq_length: int = 2048,
        tokenizer: Optional[Tokenizer] = None,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Optional[list[int]] = None,
        seed: int = 1234,
        memmap_workers: int = 1,
        num_workers: int = 8,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        packed_sequence_specs: Optional[PackedSequenceSpecs] = None,
        dataset_kwargs: Optional[dict[str, Any]] = None,
        use_hf_tokenizer_chat_template: bool = False,
    ) -> None:
        super().__init__(
            dataset_root=dataset_root,
            seq_length=seq_length,
            tokenizer=tokenizer,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            rampup_batch_size=rampup_batch_size,
            seed=seed,
            memmap_workers=memmap_workers,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            packed_sequence_specs=packed_sequence_specs,
            dataset_kwargs=dataset_kwargs,
        )
        self.use_hf_tokenizer_chat_template = use_hf_tokenizer_chat_template

    def encoder(self) -> Encoder:
        return self.settings.chat(
            self.tokenizer_of_the_model, None if self.use_hf_tokenizer_chat_template else NEMO_TEMPLATE
        )
