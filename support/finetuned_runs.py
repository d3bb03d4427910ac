# SPDX-License-Identifier: Apache-2.0
"""Trains small models on fine-tuning data in any layout, and with transformers in a plain loop."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from support import small_runs

SEQ, LR = 96, 0.5
Pair = tuple[list[int], list[bool]]
"""Token ids, and a flag for each trained token."""


class Watch(pl.Callback):
    """Weights before the first step, gradients in it, and how many tokens each step counted."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.tokens: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = small_runs.parameters(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.gradients:
            [core] = trainer.strategy.megatron_parallel.unwrapped
            self.gradients = {f"0.{name}": p.main_grad.detach().clone() for name, p in core.named_parameters()}

    def on_megatron_step_end(self, step: Any) -> None:
        if step.pipeline.weight is not None:
            self.tokens.append(int(step.pipeline.weight))


def train(data: Any, *, max_steps: int = 3, **strategy: Any) -> dict[str, Any]:
    """Train with plain gradient descent. Returns losses, tokens, initial weights and first gradients of this rank."""
    from nemo2.config.provenance import adjust
    from nemo2.training.connecting import connect_parts

    small_runs.release()
    watch = Watch()
    model = small_runs.build_llama(lr=LR, seq_length=SEQ, vocab_size=512)
    for name, value in {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}.items():
        adjust(model.optim.config, name, value, why="plain gradient descent is easy to repeat")
    connect_parts(model, data, tokenizer="data")
    found = small_runs.fit(model, data, max_steps=max_steps, callbacks=[watch], **strategy)
    return {"losses": found["losses"], "weights": watch.weights, "gradients": watch.gradients, "tokens": watch.tokens}


def in_transformers(weights: dict[str, Tensor], samples: Sequence[Pair], steps: int = 3) -> dict[str, Any]:
    """The same training with transformers' Llama: one sample at a time, with the summed cross-entropy divided by all
    tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = small_runs.MODEL
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["ffn_hidden_size"],
            num_hidden_layers=sizes["num_layers"],
            num_attention_heads=sizes["num_attention_heads"],
            num_key_value_heads=sizes["num_query_groups"],
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            attn_implementation="eager",
            pad_token_id=None,
        )
    )
    model.load_state_dict(_names_of_transformers(weights))
    losses, tokens = [], 0
    for _ in range(steps):
        model.zero_grad()
        total, tokens = torch.zeros(()), sum(sum(trained[1:]) for _, trained in samples)
        for ids, trained in samples:
            logits = model(torch.tensor([ids[:-1]])).logits[0]
            each = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            total = total + (each * torch.tensor(trained[1:])).sum()
        loss = total / tokens
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad  # pyright: ignore[reportOperatorIssue]
    return {"losses": losses, "tokens": tokens}


def _names_of_transformers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    sizes = small_runs.MODEL
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    width = sizes["hidden_size"] // heads
    found = {
        "model.embed_tokens.weight": weights["0.embedding.word_embeddings.weight"],
        "model.norm.weight": weights["0.decoder.final_layernorm.weight"],
        "lm_head.weight": weights["0.output_layer.weight"],
    }
    for layer in range(sizes["num_layers"]):
        ours = {
            name.split(f"0.decoder.layers.{layer}.")[-1]: w
            for name, w in weights.items()
            if f".layers.{layer}." in name
        }
        theirs = f"model.layers.{layer}"
        qkv = ours["self_attention.linear_qkv.weight"].view(groups, heads // groups + 2, width, -1)
        for name, part in (("q", qkv[:, :-2]), ("k", qkv[:, -2]), ("v", qkv[:, -1])):
            found[f"{theirs}.self_attn.{name}_proj.weight"] = part.reshape(-1, sizes["hidden_size"])
        gate, up = ours["mlp.linear_fc1.weight"].chunk(2)
        found[f"{theirs}.mlp.gate_proj.weight"], found[f"{theirs}.mlp.up_proj.weight"] = gate, up
        found[f"{theirs}.mlp.down_proj.weight"] = ours["mlp.linear_fc2.weight"]
        found[f"{theirs}.self_attn.o_proj.weight"] = ours["self_attention.linear_proj.weight"]
        norms = {name: w for name, w in ours.items() if "norm" in name}
        [first] = [w for name, w in norms.items() if "input" in name or "linear_qkv" in name]
        [second] = [w for name, w in norms.items() if "pre_mlp" in name or "linear_fc1" in name]
        found[f"{theirs}.input_layernorm.weight"], found[f"{theirs}.post_attention_layernorm.weight"] = first, second
    return found
