# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a small Llama from weights, with samples and methods of every kind, as a user's script does."""

from pathlib import Path
from typing import Any, cast

import torch

from support import small_runs
from support.small_chats import make_tokenizer, say, write_lines

VOCABULARY = 320
METHODS = ("LoRA", "DoRA", "CanonicalLoRA", "CanonicalDoRA", "full")
SAMPLES = ("records", "conversations", "packed", "pairs")
"""`HFDatasetDataModule`, `ChatDataModule`, the same packed, and `FineTuningDataModule`."""


def prepare(directory: str) -> None:
    """A release, the model imported from it, and samples, in ``directory``."""
    from nemo2.checkpoint.tokenizers import read_tokenizer
    from support.released_models import import_release

    small_runs.quiet()
    root = Path(directory)
    chats = [say(("user", f"{i}?"), ("assistant", f"{i}!")) for i in range(24)]
    write_lines(root / "chats.jsonl", chats)
    write_lines(root / "conversations" / "training.jsonl", chats)
    write_lines(root / "pairs" / "training.jsonl", [{"input": f"{i}?", "output": f"{i}!"} for i in range(24)])
    write_release(root / "released")
    import_release(root / "released", root / "imported", tokenizer=read_tokenizer(root / "released"))


def write_release(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(2)
    config = LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=64
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder, vocab_size=VOCABULARY)


def finetune(
    directory: Path | str,
    *,
    path: str,
    folder: str,
    peft: Any,
    samples: str = "records",
    trainer: Any,
    every: int = 1,
    keep: int = -1,
    model: Any = None,
    checkpoint: str | None = None,
    **data: Any,
) -> Any:
    """Fine-tune in ``directory`` without a tokenizer of the run's own. Returns the model.

    Args:
        path: The weights to start from.
        folder: The folder that `prepare` has filled.
        peft, samples: Of `METHODS` and `SAMPLES`; or a method itself, and "packed pairs".
        every, keep: Steps from one save to the next, and how many of them stay.
        model: None: the Llama that `prepare` has imported.
        checkpoint: The one to resume. None: the last of ``directory``, if there is one.
        data: Arguments of the data module.
    """
    from nemo2 import AutoResume, ModelCheckpoint, NeMoLogger, RestoreConfig, llm

    methods = cast(Any, llm.peft.PEFT_STR2CLS)
    if isinstance(peft, str):
        peft = None if peft == "full" else methods[peft](dim=4, dropout=0.1)
    if model is None:
        sizes = {"ffn_hidden_size": 64, "kv_channels": 8, "layernorm_epsilon": 1e-6, "rotary_base": 10000}
        model = small_runs.build_llama(**sizes, vocab_size=None, seq_length=64, gated_linear_unit=True)
    llm.finetune(
        model,
        _data(folder, samples, **data),
        trainer,
        log=NeMoLogger(
            explicit_log_dir=str(directory),
            ckpt=ModelCheckpoint(
                monitor=None,
                every_n_train_steps=every,
                save_top_k=keep,
                save_last=False,
                save_optim_on_train_end=True,
                filename="{step}",
            ),
        ),
        resume=AutoResume(
            resume_if_exists=True,
            resume_ignore_no_checkpoint=True,
            resume_from_path=checkpoint,
            restore_config=RestoreConfig(path=path),
        ),
        peft=peft,
    )
    return model


def _data(folder: str, samples: str, **changes: Any) -> Any:
    from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
    from nemo2.data.finetuning.module import ChatDataModule, FineTuningDataModule
    from nemo2.data.finetuning.packing import PackedSequenceSpecs

    sizes: dict[str, Any] = {"seq_length": 64, "micro_batch_size": 2, "global_batch_size": 4, "num_workers": 0}
    if samples.startswith("packed"):
        sizes |= {"packed_sequence_specs": PackedSequenceSpecs(64), "micro_batch_size": 1}
    sizes |= changes
    if samples == "records":
        return HFDatasetDataModule(f"{folder}/chats.jsonl", **sizes)
    if samples.endswith("pairs"):
        return FineTuningDataModule(f"{folder}/pairs", **sizes)
    return ChatDataModule(f"{folder}/conversations", **sizes, use_hf_tokenizer_chat_template=True)
