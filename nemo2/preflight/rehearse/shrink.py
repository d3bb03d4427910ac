# SPDX-License-Identifier: Apache-2.0
"""Shrinks a recipe so that it trains on a few CPU processes, and keeps its features.

Parallelism stays parallel (tensor parallel 8 becomes 2, never 1), experts stay experts, grouped queries stay grouped,
and a hybrid keeps every kind of layer. Callbacks, data module, logger, checkpoints, optimizer and schedule are the
recipe's own.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo2.config.walk import peft_of
from nemo2.mcore.parallel.layout import SIZE_FIELDS, Layout
from nemo2.mcore.settle import Machine, world_of

HIDDEN, HEADS, HEAD_WIDTH, FFN, EXPERT_FFN, VOCABULARY, SEQUENCE = 64, 4, 16, 128, 32, 512, 64
EXPERTS = 4
RANK = 8
"""Of adapters: below the smallest width, which latent attention has."""


@dataclass(frozen=True)
class Shrunk:
    """A small recipe, the number of its processes, and notes on the features that it had to drop."""

    recipe: Any
    processes: int
    notes: tuple[str, ...]


def shrink(recipe: Any, *, max_processes: int = 8, steps: int = 5, transformer_engine: bool = False) -> Shrunk:
    """A copy of ``recipe`` for at most ``max_processes`` CPU processes and ``steps`` optimizer steps.

    Parallel sizes larger than one become 2. If their product exceeds ``max_processes``, context, expert, pipeline and
    tensor parallelism are dropped, in this order, each with a note. A data-parallel size above one becomes 2 if enough
    processes remain. ``transformer_engine``: the processes have it, so what needs it stays.
    """
    recipe = copy.deepcopy(recipe)
    notes: list[str] = []
    strategy, model = recipe.trainer.strategy, recipe.model.config
    wide = Layout.of(strategy)
    small = _cut(wide, max_processes, notes)
    model_parallel, processes = small.model_parallel_size, small.smallest_world
    if (
        world_of(recipe, Machine()).size > wide.model_parallel_size
        and processes == model_parallel
        and 2 * processes <= max_processes
    ):
        processes *= 2
    _set(
        strategy,
        **small.fields(),
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        pipeline_model_parallel_layout=None,
    )
    chunks = small.pp * (small.vp or 1)
    extra = int(bool(strategy.account_for_embedding_in_pipeline_split)) + int(
        bool(strategy.account_for_loss_in_pipeline_split)
    )
    for name, value in small_sizes(model, tp=small.tp, chunks=chunks, extra=extra).items():
        setattr(model, name, value)
    _shrink_data(recipe, processes // model_parallel, small, notes)
    if hasattr(method := peft_of(recipe)[1], "dim"):
        _set(method, dim=min(method.dim, EXPERTS if _adapts_routers(recipe, method) else RANK))
    _shrink_run(recipe, processes, steps)
    if not transformer_engine:
        _leave_transformer_engine_out(recipe, notes)
    return Shrunk(recipe, processes, tuple(notes))


def small_sizes(config: Any, *, tp: int = 1, chunks: int = 1, extra: int = 0) -> dict[str, Any]:
    """Small values for the size fields that a model configuration, or its config node, has and uses.

    Args:
        config: The configuration, which determines the kind of model.
        tp: The number of tensor-parallel ranks, which must divide heads and query groups.
        chunks: The number of pipeline chunks, over which the layers are split evenly.
        extra: The number of stages that count as layers (the embedding, the loss).
    """
    get = lambda name: getattr(config, name, None)  # noqa: E731
    kinds = _kinds_of_layers(config)
    layers = _multiple(max(_layers_of_all_kinds(config), len(kinds)) + extra, chunks) - extra
    groups, heads = get("num_query_groups"), get("num_attention_heads")
    grouped = HEADS if groups in (None, heads) else 1 if groups == 1 and tp == 1 else 2
    sizes: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
    }
    sizes |= {
        name: small
        for name, small in {
            "num_query_groups": grouped,
            "kv_channels": HEAD_WIDTH,
            "vocab_size": VOCABULARY,
            "seq_length": SEQUENCE,
            "old_context_len": 16,
            "attention_chunk_size": 16,
            "moe_ffn_hidden_size": EXPERT_FFN,
            "moe_shared_expert_intermediate_size": EXPERT_FFN,
            "interleaved_attn_pattern": (1, 1),
            "no_rope_freq": 2,
            "mamba_num_groups": 2,
            "mamba_head_dim": 8,
            "mamba_state_dim": 16,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 16,
        }.items()
        if get(name) is not None
    }
    if get("num_moe_experts"):
        sizes |= {"num_moe_experts": EXPERTS, "moe_router_topk": min(2, get("moe_router_topk") or 2)}
        if get("moe_router_num_groups"):
            sizes |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    frequency = get("moe_layer_freq")
    if get("num_moe_experts") and not isinstance(frequency, int) and frequency is not None:
        sizes["moe_layer_freq"] = [0] + [1] * (layers - 1)
    if get("mamba_num_heads") is not None:
        sizes["mamba_num_heads"] = 2 * HIDDEN // 8
    if get("experimental_attention_variant") == "gated_delta_net":
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": HEAD_WIDTH, "linear_value_head_dim": 2 * HEAD_WIDTH}
        if not isinstance(get("linear_attention_freq"), int):
            sizes["linear_attention_freq"] = [1] * (layers - 1) + [0]
    stretching = get("rope_stretching")
    if stretching is not None and hasattr(stretching, "short_factors"):
        smaller = sizes["rope_stretching"] = copy.deepcopy(stretching)
        pairs = int(HEAD_WIDTH * (get("rotary_percent") or 1.0)) // 2
        for name in ("short_factors", "long_factors"):
            setattr(smaller, name, getattr(stretching, name)[:pairs])
    window = get("window_size")
    if window is not None:
        sizes["window_size"] = 16 if isinstance(window, int) else (15, 0)
    pattern = get("hybrid_override_pattern")
    if kinds and pattern:
        letters, size = "".join(kinds[index % len(kinds)] for index in range(layers)), layers // chunks
        stages = [letters[start : start + size] for start in range(0, layers, size)] if "|" in pattern else [letters]
        sizes["hybrid_override_pattern"] = "".join(["|".join(stages), *pattern.partition("/")[1:]])
    if get("heterogeneous_layers_config_encoded_json"):
        sizes["heterogeneous_layers_config_encoded_json"] = json.dumps({"block_configs": _blocks(layers, grouped)})
    return {name: value for name, value in sizes.items() if hasattr(config, name)}


def _layers_of_all_kinds(config: Any) -> int:
    """The number of layers after which a model with a repeating pattern of layers has one of each kind."""
    turns = [
        getattr(config, name, None) for name in ("moe_layer_freq", "window_attn_skip_freq", "linear_attention_freq")
    ]
    blocks = 3 if getattr(config, "heterogeneous_layers_config_encoded_json", None) else 2
    return max([blocks, *(turn for turn in turns if isinstance(turn, int))])


def _kinds_of_layers(config: Any) -> str:
    """One letter for each kind of layer in a hybrid, in order of appearance. "" for models with one kind."""
    from nemo2.models.hybrid_pattern import hybrid_pattern

    pattern = hybrid_pattern(config) if getattr(config, "hybrid_override_pattern", None) else None
    return "".join(dict.fromkeys(pattern.decoder)) if pattern is not None else ""


def _blocks(layers: int, groups: int) -> list[Mapping[str, Any]]:
    """The layers of a heterogeneous model, in turn: complete, without attention, without feed-forward."""
    whole = {"attention": {"num_query_groups": groups}, "mlp": {"ffn_hidden_size": FFN}}
    no_attention = {"attention": {"no_op": True, "num_query_groups": None}, "mlp": {"ffn_hidden_size": FFN // 2}}
    no_mlp = {"attention": {"num_query_groups": groups}, "mlp": {"no_op": True, "ffn_hidden_size": None}}
    return [(whole, no_attention, no_mlp)[index % 3] for index in range(layers)]


def _cut(wide: Layout, max_processes: int, notes: list[str]) -> Layout:
    sizes = {short: min(2, size) for short in SIZE_FIELDS if (size := getattr(wide, short)) is not None}

    def small() -> Layout:
        tp, etp = sizes["tp"], sizes.get("etp")
        cut_otherwise = etp is not None and sizes["ep"] > 1 and min(etp, tp) != tp
        vp = 2 if sizes["pp"] > 1 and sizes.get("vp", 1) > 1 else None
        return Layout(**{**sizes, "vp": vp, "etp": etp if cut_otherwise else None, "sp": wide.sp and tp > 1})

    for size, name in {"cp": "context", "ep": "expert", "pp": "pipeline", "tp": "tensor"}.items():
        if small().smallest_world <= max_processes:
            break
        if sizes[size] > 1:
            sizes[size] = 1
            few = "1 process is" if max_processes == 1 else f"{max_processes} processes are"
            notes.append(f"{name} parallelism is dropped, because {few} too few")
    return small()


def _adapts_routers(recipe: Any, method: Any) -> bool:
    """Whether adapters stand beside routers, which have an output for each expert."""
    from nemo2.models.peft.targets import ModuleMatcher

    patterns: list[list[str]] = [
        list(getattr(method, name, None) or ()) for name in ("target_modules", "exclude_modules")
    ]
    has_experts = getattr(recipe.model.config, "num_moe_experts", None)
    return bool(has_experts and ModuleMatcher(*patterns).match("decoder.layers.0.mlp.router"))


def _shrink_data(recipe: Any, replicas: int, layout: Layout, notes: list[str]) -> None:
    from nemo2.config import Config
    from nemo2.data.finetuning.base import SampleDataModule
    from nemo2.data.mock import MockDataModule
    from nemo2.data.tokenizer import NullTokenizer

    kind = getattr(recipe.data, "__fn_or_cls__", None)
    if isinstance(kind, type) and issubclass(kind, SampleDataModule):
        # The data's tokens exceed the small model's vocabulary, and its files may be on another machine.
        notes.append(
            f"data is random tokens instead of {kind.__name__}: the loss counts every token, and no sequences are packed"
        )
        recipe.data = Config(MockDataModule)
    data = recipe.data
    data.seq_length = SEQUENCE
    data.micro_batch_size = 1
    data.global_batch_size = replicas * (2 * layout.pp if layout.pp > 1 else 2)
    _set(data, rampup_batch_size=None, num_workers=0, persistent_workers=False, pin_memory=False)
    kind = getattr(data, "__fn_or_cls__", None)
    if isinstance(kind, type) and issubclass(kind, MockDataModule):
        data.tokenizer = Config(NullTokenizer, VOCABULARY - 1)
        _set(data, num_train_samples=256, num_val_samples=16, num_test_samples=16, vocab_file=None, merges_file=None)


def _shrink_run(recipe: Any, processes: int, steps: int) -> None:
    trainer = recipe.trainer
    trainer.num_nodes, trainer.devices, trainer.accelerator = 1, processes, "auto"
    trainer.max_steps, trainer.log_every_n_steps = steps, 1
    trainer.val_check_interval, trainer.limit_val_batches, trainer.limit_test_batches = steps, 1, 1
    scheduler = getattr(recipe.optim, "lr_scheduler", None)
    if scheduler is not None:
        _set(scheduler, warmup_steps=1, constant_steps=0)
    if getattr(recipe.log, "ckpt", None) is not None:
        _set(recipe.log.ckpt, every_n_train_steps=steps, train_time_interval=None)
    model = recipe.model.config
    if getattr(model, "recompute_num_layers", None):
        model.recompute_num_layers = 1


def _leave_transformer_engine_out(recipe: Any, notes: list[str]) -> None:
    plugins, optim = recipe.trainer.plugins, recipe.optim
    if getattr(plugins, "fp8", None):
        from nemo2.preflight.rehearse.stage import leave_out_eight_bits

        notes.append("trainer.plugins.fp8 is dropped: it needs a GPU with Transformer Engine")
        leave_out_eight_bits(plugins)
    if getattr(optim.config, "use_precision_aware_optimizer", False):
        notes.append("optim.config.use_precision_aware_optimizer is dropped: it needs Transformer Engine")
        import torch

        wide = dict.fromkeys(
            ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), torch.float32
        )
        _set(optim.config, use_precision_aware_optimizer=False, **wide)


def _set(node: Any, **values: Any) -> None:
    """Set those of the fields that the node has and that differ from ``values``."""
    for name, value in values.items():
        if hasattr(node, name) and getattr(node, name) != value:
            setattr(node, name, value)


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of
