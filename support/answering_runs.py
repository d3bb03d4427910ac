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
    from nemo2.llm import api

    small_runs.release()
    tokenizer = small_chats.make_tokenizer(Path(directory) / "tokenizer", chat_template)
    options = {"seq_length": seq_length, "vocab_size": None, "gated_linear_unit": True}
    model = small_runs.build_llama(**options, **run.pop("config", {}))
    model.tokenizer = tokenizer
    parts = small_runs.run_arguments(
        directory,
        max_steps=1,
        model=model,
        data=small_runs.random_bytes(seq_length=seq_length, tokenizer=tokenizer, global_batch_size=4),
        checkpoints=small_runs.keep(save_last=True, save_optim_on_train_end=False),
        **run,
    )
    place = api.finetune(**parts, peft=transform) if transform is not None else api.pretrain(**parts)
    small_runs.release()
    return str(place)
