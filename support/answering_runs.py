# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for chats: tiny models with a transformers tokenizer and a chat template, and adapters for one of
them."""

from pathlib import Path
from typing import Any

from support import small_chats, small_runs

SEQ = 96


def save(
    directory: str,
    *,
    chat_template: str | None = small_chats.CHATML,
    transform: Any = None,
    seq_length: int = SEQ,
    **run: Any,
) -> str:
    """A checkpoint, trained for a step. Returns its path."""
    from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from nemo2.data.mock import MockDataModule
    from nemo2.llm import api
    from nemo2.training.run_dir.logger import NeMoLogger

    small_runs.release()
    small_runs.quiet()
    tokenizer = small_chats.make_tokenizer(Path(directory) / "tokenizer", chat_template)
    options = {"seq_length": seq_length, "vocab_size": None, "gated_linear_unit": True}
    model = small_runs.build_llama(**options, **run.pop("config", {}))
    model.tokenizer = tokenizer
    data = MockDataModule(
        seq_length=seq_length, tokenizer=tokenizer, micro_batch_size=2, global_batch_size=4, num_workers=0
    )
    keep = ModelCheckpoint(filename="{step}", verbose=False)
    base = run.pop("base", None)
    parts = {
        "model": model,
        "data": data,
        "trainer": small_runs.build_trainer(max_steps=1, trainer={"limit_val_batches": 0}, **run),
        "log": NeMoLogger(name="tiny", log_dir=directory, ckpt=keep, use_datetime_version=False),
        "resume": AutoResume(restore_config=RestoreConfig(path=base) if base else None),
    }
    place = api.finetune(**parts, peft=transform) if transform is not None else api.pretrain(**parts)
    small_runs.release()
    return str(place)
