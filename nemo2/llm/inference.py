# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's model, loaded into a layout and asked to complete prompts."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.checkpoint.context import load_context
from nemo2.checkpoint.directory import LAST_SUFFIX
from nemo2.checkpoint.places import newest_in
from nemo2.config.explicit import explicit_fields
from nemo2.errors import CheckpointError
from nemo2.llm.set_up import set_up
from nemo2.models.generate import Generation, generate
from nemo2.strategy import MegatronStrategy
from nemo2.trainer import Trainer

_log = logging.getLogger(__name__)


def generate_from_checkpoint(
    path: str,
    prompts: Sequence[str],
    *,
    trainer: Optional[pl.Trainer] = None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    random_seed: int,
    output_path: Optional[str],
    trust_remote_code: bool = False,
) -> list[Generation]:
    """See `nemo2.llm.generate`."""
    checkpoint = find_checkpoint(Path(path))
    model = model_of(checkpoint, trust_remote_code=trust_remote_code)
    trainer = trainer or Trainer(
        strategy=MegatronStrategy(ckpt_async_save=False), devices=1, logger=False, enable_progress_bar=False
    )
    _without_sequence_parallelism(trainer.strategy, model)
    with set_up(trainer, model, checkpoint=checkpoint):
        results = generate(
            model,
            model.tokenizer,
            list(prompts),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=random_seed,
            max_sequence_length=model.config.seq_length,
        )
    if output_path is not None and trainer.is_global_zero:
        lines = "".join(json.dumps(asdict(result)) + "\n" for result in results)
        Path(output_path).write_text(lines)
    return results


def _without_sequence_parallelism(strategy: Any, model: Any) -> None:
    """Single tokens can't be split; the layers of experts, whose dispatchers need it, read everything again for each token."""
    if getattr(strategy, "sequence_parallel", False) and model.config.num_moe_experts is None:
        strategy.sequence_parallel = False
        _log.info(
            "Generation goes on token by token, which strategy.sequence_parallel=True can't split: it is off here."
        )


def model_of(checkpoint: Path, *, trust_remote_code: bool = False) -> Any:
    """The model that a checkpoint's ``context/`` describes, with its tokenizer and sequence length; nothing of it is built.

    ``trust_remote_code``: the tokenizer may run Python that lies beside its files.
    """
    model = load_context(checkpoint, "model")
    trusted = ["transformers:trust_remote_code"] if trust_remote_code else []
    model.tokenizer = load_context(checkpoint, "tokenizer", allowed_modules=trusted)
    if "seq_length" not in explicit_fields(model.config):
        data = load_context(checkpoint, "data", build=False)
        if getattr(data, "seq_length", None):
            model.config.seq_length = data.seq_length
    # Userbuffers have the size of a training micro-batch, and prompts have any.
    model.config.tp_comm_overlap = False
    return model


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at ``path``: itself, or the newest one in a run's directory.

    Raises:
        CheckpointError: there is none.
    """
    if (found := newest_in(path)) is not None:
        return found
    raise CheckpointError(
        f"{path} is no finished checkpoint, nor a directory with any (their names end in {LAST_SUFFIX} or carry the step). "
        "Give the path that the run printed when it saved, or the run's directory."
    )
