# SPDX-License-Identifier: Apache-2.0
"""Small models trained on fine-tuning data in any layout: losses, and the gradients of the first step."""

from typing import Any

import lightning.pytorch as pl
import torch

from support import small_runs

SEQ = 64


class Watch(pl.Callback):
    """Gradients of the first step, before the optimizer, and how many tokens each step counted."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.tokens: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.gradients:
            for index, core in enumerate(trainer.strategy.megatron_parallel.unwrapped):
                for name, parameter in core.named_parameters():
                    gradient = getattr(parameter, "main_grad", None)
                    gradient = parameter.grad if gradient is None else gradient
                    if gradient is not None:
                        self.gradients[f"{index}.{name}"] = gradient.detach().float().clone()

    def on_megatron_step_end(self, step: Any, reduced: Any) -> None:
        self.tokens.append(int(step.pipeline.weight))


def train(data: Any, *, max_steps: int = 2, model: dict[str, Any] | None = None, **strategy: Any) -> dict[str, Any]:
    """Losses, tokens and first gradients of this rank."""
    from nemo2.llm.set_up import connect_parts

    small_runs.release()
    watch = Watch()
    llama = small_runs.build_llama(**({"seq_length": SEQ, "vocab_size": 512} | (model or {})))
    connect_parts(llama, data, tokenizer="data")
    found = small_runs.fit(llama, data, max_steps=max_steps, callbacks=[watch], **strategy)
    return {"losses": found["losses"], "tokens": watch.tokens, "gradients": watch.gradients}
