# SPDX-License-Identifier: Apache-2.0
"""Adapters that `peft` makes and trains on transformers' tiny models."""

from collections.abc import Callable
from typing import Any

from support import small_runs


def made_by_peft(folder: str, place: str, **settings: Any) -> Any:
    """Save an adapter with random values. Returns the model with the adapter."""
    import peft
    import torch
    import transformers

    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **{"r": 4, "lora_alpha": 8, **settings})
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name or "modules_to_save" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    model.save_pretrained(place)
    return model.eval()


def logits_of(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(small_runs.global_batch(0, 4)["tokens"]).logits


def our_logits_of(core: Any) -> Any:
    """Of the same tokens, by a model of Megatron-Core's."""
    import torch

    tokens = small_runs.global_batch(0, 4)["tokens"]
    with torch.no_grad():
        return core.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).clone()


def logits_of_checkpoint(checkpoint: Any) -> Any:
    """Of the same tokens, by the model that a checkpoint of ours describes."""
    from nemo2.checkpoint.context import load_context
    from nemo2.training.strategies.set_up import set_up

    small_runs.release()
    trainer = small_runs.build_trainer(max_steps=1)
    with set_up(trainer, load_context(checkpoint, "model"), checkpoint=checkpoint) as parallel:
        return our_logits_of(parallel.unwrapped[0])


def backward(logits: Callable[[Any], Any], step: int) -> float:
    """The loss of a global batch as four micro-batches of our runs have it, with its gradients. ``logits``: of tokens."""
    import torch

    batch = small_runs.global_batch(step % 8)
    total, kept = 0.0, float(batch["loss_mask"].sum())
    for start in range(0, 8, 2):
        part = {name: value[start : start + 2] for name, value in batch.items()}
        each = torch.nn.functional.cross_entropy(
            logits(part["tokens"]).flatten(0, 1), part["labels"].flatten(), reduction="none"
        )
        mask = part["loss_mask"].flatten()
        ((each * mask).sum() / mask.sum() / 4).backward()
        total += float((each * mask).sum())
    return total / kept


def steps(model: Any, count: int, *, rate: float) -> list[float]:
    """Losses of steps of Adam as `tiny_releases.model_of` has it, on what the model trains."""
    import torch

    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(count):
        losses.append(backward(lambda tokens: model(tokens).logits, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses
