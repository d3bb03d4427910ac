# SPDX-License-Identifier: Apache-2.0
"""Converts a recipe to the planner's input: the shape of its model, and its job, with the settings that its run would
settle on."""

from dataclasses import dataclass
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.gpus import GPU
from nemo2.config.walk import class_of
from nemo2.mcore.parallel.cuda_graphs import kind_of
from nemo2.mcore.settle.machine import Machine
from nemo2.models.parts import LatentAttention
from nemo2.models.peft import DoRA, LoRA
from nemo2.models.shape import ModelShape
from nemo2.models.walker import linear_layers
from nemo2.models.walker import shape_of as read_shape
from nemo2.preflight.checks.facts import Facts, read_facts
from nemo2.preflight.checks.tokenizers import tokenizer_of
from nemo2.preflight.planner.job import Adapters, Job
from nemo2.training.strategies.distillation import teachers_recipe

_FUSED = ("silu", "gelu", "quick_gelu")
"""Gates for which Megatron-Core's feed-forward block has one kernel (``megatron/core/transformer/mlp.py``)."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a plan.

    Attributes:
        facts: the recipe's facts, for the rules that judge its other layouts.
        teacher: the shape of a distillation's teacher. None: no teacher.
    """

    facts: Facts
    shape: ModelShape
    job: Job
    teacher: Optional[ModelShape] = None


def read_recipe(recipe: Any, chip: GPU) -> Subject:
    """The shape and the job of a recipe, on the number of GPUs of its trainer.

    Raises:
        ConfigError: the planner has no formula for the recipe's model, or the batch sizes aren't set.
    """
    facts = read_facts(recipe, machine=Machine.named(chip.name))
    if facts.config is None:
        why = " ".join(facts.settled.refused("megatron-core-agrees")) or "model.config cannot be built."
        raise ConfigError(f"`nemo2 plan` needs the model's sizes: {why}")
    missing = [name for name in ("seq_length", "global_batch_size", "micro_batch_size") if getattr(facts, name) is None]
    if missing:
        raise ConfigError(f"`nemo2 plan` needs whole numbers: set data.{', data.'.join(missing)}.")
    shape = shape_of(facts)
    alone = teachers_recipe(recipe)
    teacher = None if alone is None else shape_of(read_facts(alone, machine=Machine.named(chip.name)))
    return Subject(facts=facts, shape=shape, job=job_of(facts, chip), teacher=teacher)


def shape_of(facts: Facts) -> ModelShape:
    """The shape of a recipe's model.

    Raises:
        ConfigError: the planner has no formula for a layer of the model.
    """
    shape = read_shape(facts.config, vocabulary_of(facts))
    for part in shape.parts:
        if isinstance(part, LatentAttention) and part.index_heads:
            raise ConfigError(
                "`nemo2 plan` has no formula for sparse attention (model.config.experimental_attention_variant, or a letter of "
                "model.config.hybrid_override_pattern). To count the model's memory, use `nemo2 rehearse`."
            )
    return shape


def vocabulary_of(facts: Facts) -> int:
    """The rows of the embedding with padding.

    Raises:
        ConfigError: neither the model nor a tokenizer on this machine states the size.
    """
    config: Any = facts.sized_config
    tokenizer = tokenizer_of(facts) if config.vocab_size is None else None
    if config.vocab_size is None and tokenizer is None:
        raise ConfigError(
            "`nemo2 plan` needs the vocabulary size, which no tokenizer on this machine states: set "
            "model.config.vocab_size."
        )
    return config.padded_vocab_size(tokenizer)


def job_of(facts: Facts, chip: GPU) -> Job:
    """The job of a recipe on GPUs of this kind."""
    sharded = getattr(class_of(facts.strategy), "sharded_by_torch", False) or bool(facts.of_strategy("fsdp"))
    layout, precision = facts.layout, facts.precision
    fused = facts.of_model("bias_activation_fusion") and facts.of_model("activation_func").__name__ in _FUSED
    sharding = "fsdp" if sharded else "zero1" if facts.distributed_optimizer else "replicated"
    return Job(
        gpu=chip,
        gpus=facts.world_size,
        seq=facts.seq_length or 0,
        global_batch=facts.global_batch_size or 0,
        micro_batch=facts.micro_batch_size or 0,
        precision=_precision(precision),
        **Job.sizes_of(layout),
        sp=layout.sp or layout.tp == 1,
        sharding=sharding,
        **_recomputation(facts),
        # Soft-capped scores are counted as kept, kernel by kernel: the compiled kernel hasn't been measured on a GPU.
        attention="flash" if facts.of_model("attn_logit_softcapping") is None else "eager",
        cuda_graphs=kind_of(facts.written_config) != "none",
        low_attention=bool(facts.of_model("fp8_dot_product_attention")),
        gate_kept=bool(facts.of_model("gated_linear_unit")) and not fused,
        dropout=bool(facts.of_model("hidden_dropout")),
        grad_bytes=4 if getattr(precision, "grad_reduce_in_fp32", True) or sharded else 2,
        state_bytes=_state_bytes(facts),
        lora=facts.parts.get("peft") is not None,
        adapters=_adapters(facts),
        **_experts(facts),
        **_overlaps(facts, tp=layout.tp),
    )


def _adapters(facts: Facts) -> Optional[Adapters]:
    """The adapters of a nemo2 LoRA. None: another method, or the model's layers are unknown."""
    method, linears = facts.parts.get("peft"), linear_layers(facts.config)
    if not isinstance(method, LoRA) or not linears:
        return None
    firsts: dict[str, list[int]] = {}
    for name in linears:
        firsts.setdefault(name.rpartition(".")[2], []).append(method.num_first_factors(name))
    with_adapters = {name: [count for count in counts if count] for name, counts in sorted(firsts.items())}
    return Adapters(
        rank=method.dim,
        beside=tuple(
            (name, len(counts) / len(firsts[name]), sum(counts) / len(counts))
            for name, counts in with_adapters.items()
            if counts
        ),
        lengths=isinstance(method, DoRA),
        dropped=method.dropout_position if method.dropout else None,
    )


def _recomputation(facts: Facts) -> dict[str, Any]:
    """Settings of recomputation and of activations offloaded to the host."""
    return {
        "recompute": facts.of_model("recompute_granularity") or "none",
        "recomputed": tuple(facts.of_model("recompute_modules") or ("core_attn",)),
        "recompute_method": facts.of_model("recompute_method") or "uniform",
        "recompute_layers": facts.of_model("recompute_num_layers") or 1,
        "offloaded_layers": _offloaded(facts),
    }


def _offloaded(facts: Facts) -> int:
    """The number of layers whose activations Megatron-Core's ``cpu_offloading`` moves to the host."""
    moves = facts.of_model("cpu_offloading") and facts.of_model("cpu_offloading_activations", True)
    return (facts.of_model("cpu_offloading_num_layers") or 0) if moves else 0


def notes_of(facts: Facts) -> tuple[str, ...]:
    """A note for each setting that the plan has no formula for, with the plan's assumption."""
    model = facts.of_model
    notes = []
    if model("cpu_offloading"):
        notes.append(
            f"model.config.cpu_offloading: the activations of {_offloaded(facts)} layers are counted as moved to the host, by "
            "formula; the time of the copies is not counted"
        )
        if model("cpu_offloading_weights"):
            notes.append("model.config.cpu_offloading_weights: weights are counted as if they stayed on the GPU")
    if model("fine_grained_activation_offloading"):
        notes.append("model.config.fine_grained_activation_offloading: counted as if activations stayed on the GPU")
    if facts.of_optimizer("optimizer_cpu_offload"):
        notes.append("optim.config.optimizer_cpu_offload: counted as if the optimizer's states stayed on the GPU")
    if facts.of_strategy("cpu_offload"):
        notes.append("strategy.cpu_offload: counted as if shards stayed on the GPU")
    if model("recompute_granularity") == "full" and model("recompute_method") == "block" and model("mtp_num_layers"):
        notes.append(
            "model.config.recompute_method=block: Megatron-Core keeps the activations of multi-token prediction layers, and "
            "the plan counts them as kept"
        )
    return tuple(notes)


def _experts(facts: Facts) -> dict[str, Any]:
    """The settings that decide how tokens reach their experts."""
    padded = facts.of_model("moe_pad_expert_input_to_capacity")
    once = facts.of_model("moe_token_dispatcher_type") == "flex" or facts.of_model("moe_enable_deepep")
    return {
        "dispatch": "once" if once else "alltoall",
        "overlap_ep": bool(facts.of_model("overlap_moe_expert_parallel_comm")),
        "capacity": bool(padded) and facts.of_model("moe_expert_capacity_factor") is not None,
        "graphed_experts": kind_of(facts.written_config) == "full_iteration",
    }


def _precision(dtypes: Any) -> str:
    if dtypes is None or dtypes.fp32:
        return "fp32"
    return "fp4" if dtypes.fp4 else "fp8" if dtypes.fp8 else "bf16"


def _state_bytes(facts: Facts) -> int:
    """The bytes per weight of the fp32 copy and both moments. A run in fp32 has no copy."""
    import torch

    moments = 8
    if facts.of_optimizer("use_precision_aware_optimizer"):
        kinds = [facts.of_optimizer(name, torch.float32) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
        moments = sum(kind.itemsize for kind in kinds)
    return moments + (0 if facts.precision is None or facts.precision.fp32 else 4)


def _overlaps(facts: Facts, *, tp: int) -> dict[str, Any]:
    """The communication that overlaps with computation in the settled run. torch overlaps the collectives of FSDP."""

    def on(path: str, name: str) -> bool:
        return bool(facts.settled.value(path, name)[1])

    return {
        "overlap_grad": not facts.sizes or on("trainer.strategy.ddp", "overlap_grad_reduce"),
        "overlap_param": not facts.sizes or on("trainer.strategy.ddp", "overlap_param_gather"),
        "overlap_tp": tp > 1 and on("model.config", "tp_comm_overlap"),
        "overlap_pp": on("model.config", "overlap_p2p_comm"),
    }
