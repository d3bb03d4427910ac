# SPDX-License-Identifier: Apache-2.0
"""The table of settings that exist in several configurations, or follow from others, or exclude others.

`nemo2.mcore.settle.settling` applies the groups of rows in order. If the user set a shared value in one configuration, it
applies to all; different values in two are a conflict. Reasons without a source are Megatron-LM's (arguments.py).
"""

import math
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import _bias_dropout_add_func

from nemo2.config.derivations import Condition, Conflict, Derivation, Row
from nemo2.config.provenance import adjustments
from nemo2.mcore.parallel.cuda_graphs import modules_of
from nemo2.mcore.parallel.ddp_config import NOTHING_TO_GATHER_AHEAD
from nemo2.mcore.parallel.layout import ParallelismConfig
from nemo2.mcore.settle.run_settings import DDP, MODEL, OPTIM, STRATEGY, RunSettings

_OPTIM_GATHER, _DDP_GATHER = f"{OPTIM}.overlap_param_gather", f"{DDP}.overlap_param_gather"
_OPTIM_SWITCH, _DDP_SWITCH = f"{OPTIM}.use_distributed_optimizer", f"{DDP}.use_distributed_optimizer"
UNSHARDED_OPTIMIZERS = ("sgd", "lion", "muon")
"""Megatron-Core's optimizers besides Adam whose state nemo2 saves and loads. The last two exist from 0.19 on."""


def _decided_by_buffers(run: RunSettings) -> bool:
    """Megatron-FSDP always uses the distributed optimizer."""
    return run.explicit(_DDP_SWITCH) or bool(run[f"{DDP}.use_megatron_fsdp"])


OPTIMIZER: tuple[Row, ...] = (
    Conflict(
        "one-switch-for-the-distributed-optimizer",
        (_OPTIM_SWITCH, _DDP_SWITCH),
        "both are the same switch",
        "Remove one of them, or set both to the same value.",
        lambda run: run.explicit(_OPTIM_SWITCH) and _decided_by_buffers(run) and run[_OPTIM_SWITCH] != run[_DDP_SWITCH],
    ),
    Derivation(
        _OPTIM_SWITCH,
        _DDP_SWITCH,
        when=lambda run: _decided_by_buffers(run) and not run.explicit(_OPTIM_SWITCH),
    ),
    Derivation(_DDP_SWITCH, _OPTIM_SWITCH),
    Conflict(
        "distributed-optimizer-is-adams",
        (f"{OPTIM}.optimizer", _OPTIM_SWITCH),
        "Megatron-Core shards only the state of Adam",
        "Set optim.config.optimizer='adam', or set optim.config.use_distributed_optimizer=False.",
        lambda run: run[_OPTIM_SWITCH] and run[f"{OPTIM}.optimizer"] in UNSHARDED_OPTIMIZERS,
    ),
    Derivation(
        _DDP_GATHER,
        _OPTIM_SWITCH,
        False,
        f"{OPTIM}.use_distributed_optimizer is off",
        lambda run: not run[_OPTIM_SWITCH],
        rule="gathered-parameters-are-sharded",
        fix="It gathers the parameters of the distributed optimizer. Set "
        "optim.config.use_distributed_optimizer=True, or set overlap_param_gather=False.",
    ),
    Derivation(_OPTIM_GATHER, _DDP_GATHER, when=lambda run: not run.explicit(_OPTIM_GATHER)),
)
"""For runs with a configuration of Megatron-Core's optimizer."""

_IN_HOST_MEMORY = "there is no second memory to move the optimizer's states to"
ON_CPU: tuple[Row, ...] = (
    Derivation(
        f"{OPTIM}.use_precision_aware_optimizer",
        f"{OPTIM}.optimizer_cpu_offload",
        False,
        f"{_IN_HOST_MEMORY}, and its kernel needs a GPU",
        lambda run: run[f"{OPTIM}.optimizer_cpu_offload"],
    ),
    Derivation(f"{OPTIM}.optimizer_cpu_offload", f"{OPTIM}.optimizer_cpu_offload", False, _IN_HOST_MEMORY),
    Derivation(f"{DDP}.nccl_ub", f"{DDP}.nccl_ub", False, "NCCL registers the memory of GPUs"),
)
"""For runs without GPUs. Megatron-Core's class for offloading needs a GPU."""

_FP32_SUMS, _REDUCED = f"{DDP}.reduce_scatter_with_fp32_accumulation", f"{DDP}.overlap_grad_reduce"


def _fp32_sums(why: str, fix: str, when: Condition) -> Conflict:
    return Conflict(
        "fp32-sums-are-of-one-optimizers-shards",
        (_FP32_SUMS,),
        why,
        f"Set reduce_scatter_with_fp32_accumulation=False, {fix}.",
        lambda run: run[_FP32_SUMS] and when(run),
    )


REDUCTION: tuple[Row, ...] = (
    Derivation(
        f"{DDP}.average_in_collective",
        f"{MODEL}.calculate_per_token_loss",
        False,
        # Where the user set both, a rule rejects them.
        when=lambda run: "calculate_per_token_loss" in adjustments(run.model_config),
    ),
    Derivation(
        f"{DDP}.average_in_collective",
        f"{DDP}.use_megatron_fsdp",
        False,
        "Megatron-FSDP divides by the size of the experts' group for it, which a dense model doesn't have; it divides "
        "before it sums, to the same mean",
        lambda run: (
            run[f"{DDP}.use_megatron_fsdp"]
            and run[f"{DDP}.average_in_collective"]
            and not run[f"{MODEL}.num_moe_experts"]
        ),
    ),
    _fp32_sums(
        "Megatron-Core sums in fp32 only where it reduces gradients to the shards of one instance of the distributed optimizer",
        "or set optim.config.use_distributed_optimizer=True, strategy.num_distributed_optimizer_instances=1 and "
        "strategy.fsdp=None",
        lambda run: (
            not run[_DDP_SWITCH]
            or run[f"{DDP}.num_distributed_optimizer_instances"] > 1
            or run[f"{DDP}.use_megatron_fsdp"]
        ),
    ),
    Derivation(
        f"{DDP}.average_in_collective",
        _FP32_SUMS,
        False,
        "the collective of reduce_scatter_with_fp32_accumulation only sums; gradients are divided before, to the same mean",
        lambda run: run[_FP32_SUMS] and run[f"{DDP}.average_in_collective"],
    ),
)
"""Gradients that are divided by the tokens of the global batch must not be averaged before. Megatron-Core 0.19.2 ends a run of
Megatron-FSDP on a dense model with an AttributeError otherwise (``_init_fsdp_param_and_grad_buffer``), and any run that averages
where it sums in fp32 with an AssertionError."""

LOSS_SCALING: tuple[Row, ...] = (
    Derivation(
        f"{DDP}.check_for_nan_in_grad",
        "trainer.plugins.fp16",
        False,
        "fp16's loss scaler handles gradients that aren't finite",
        lambda run: run.dtypes is not None and run.dtypes.fp16 and run.dtypes.loss_scale is None,
    ),
)


def _megatron_fsdp(field: str, why: str, fix: str, when: Callable[[RunSettings], Any]) -> Conflict:
    return Conflict(
        "megatron-fsdp-runs-what-is-requested",
        (field,),
        f"with strategy.fsdp='megatron', {why}",
        f"Set {fix}, or set strategy.fsdp=None to shard only the optimizer state.",
        lambda run: run[f"{DDP}.use_megatron_fsdp"] and run[field] and when(run),
    )


MEGATRON_FSDP: tuple[Row, ...] = (
    Conflict(
        "megatron-fsdp-has-no-loss-scaler",
        ("trainer.plugins.fp16",),
        "with strategy.fsdp='megatron', Megatron-Core looks for gradients to unscale where a rank has none, and ends in the "
        "first step",
        "Set trainer.plugins.precision='bf16-mixed', or set strategy.fsdp=None to shard only the optimizer state.",
        lambda run: run[f"{DDP}.use_megatron_fsdp"] and run.dtypes is not None and run.dtypes.fp16,
    ),
    Conflict(
        "scales-go-into-the-checkpoint",
        ("trainer.plugins.fp8",),
        "with fp8_recipe='delayed' and strategy.fsdp='megatron', checkpoints do not contain the history of scales, so a "
        "resumed run would compute different values",
        "Set fp8_recipe='tensorwise', which has no history, or set strategy.fsdp=None to shard only the optimizer state.",
        lambda run: (
            run[f"{DDP}.use_megatron_fsdp"]
            and run.dtypes is not None
            and run.dtypes.fp8
            and run.dtypes.fp8_recipe == "delayed"
        ),
    ),
    _megatron_fsdp(
        f"{MODEL}.distribute_saved_activations",
        "Megatron-Core can't restore them in the first backward where parameters are sharded, in 0.16.1 and 0.19.2 alike",
        "distribute_saved_activations=False or strategy.ddp_config.data_parallel_sharding_strategy='optim_grads'",
        lambda run: run[f"{DDP}.data_parallel_sharding_strategy"] == "optim_grads_params",
    ),
    _megatron_fsdp(
        f"{MODEL}.mtp_detach_heads",
        "Megatron-Core clips gradients of detached heads by a norm of their own, but here by one norm for the whole model",
        "mtp_detach_heads=False or optim.config.clip_grad=0.0",
        lambda run: run[f"{MODEL}.mtp_num_layers"] and run[f"{OPTIM}.clip_grad"],
    ),
    _megatron_fsdp(
        f"{OPTIM}.grad_norm_skip_threshold",
        "Megatron-Core skips no step, because only its chains of optimizers do",
        "grad_norm_skip_threshold=inf",
        lambda run: run[f"{OPTIM}.grad_norm_skip_threshold"] < math.inf,
    ),
    _megatron_fsdp(
        f"{DDP}.num_distributed_optimizer_instances",
        "Megatron-Core reduces no gradients between instances of the optimizer unless it overlaps the reduction",
        "strategy.ddp_config.overlap_grad_reduce=True or num_distributed_optimizer_instances=1",
        lambda run: run[f"{DDP}.num_distributed_optimizer_instances"] > 1 and not run[f"{DDP}.overlap_grad_reduce"],
    ),
)

_IMPL = f"{MODEL}.cuda_graph_impl"


def _graphs(settings: tuple[str, ...], why: Any, fix: str, when: Any) -> Conflict:
    return Conflict("graphs-go-with-the-rest", settings, why, fix, when)


GRAPHS: tuple[Row, ...] = (
    _graphs(
        (f"{OPTIM}.optimizer_cuda_graph",),
        "nemo2 cannot capture the optimizer step, because Python reads its learning rate and gradient norm",
        "Set optimizer_cuda_graph=False. To capture forward and backward passes, set model.config.cuda_graph_impl.",
        lambda run: run[f"{OPTIM}.optimizer_cuda_graph"],
    ),
    _graphs(
        (_IMPL,),
        lambda run: run.machine.te_missing,
        "Set cuda_graph_impl='local', which does not need Transformer Engine.",
        lambda run: (
            run.graphs == "transformer_engine"
            and run.machine.accelerator == "cuda"
            and run.machine.transformer_engine is None
        ),
    ),
    _graphs(
        (_IMPL,),
        "Megatron-Core creates the inputs of these graphs in bf16",
        "Set trainer.plugins.precision='bf16-mixed', or set cuda_graph_impl='local'.",
        lambda run: run.graphs == "transformer_engine" and not run[f"{MODEL}.bf16"],
    ),
    _graphs(
        (_IMPL,),
        "it cannot be used with Megatron-FSDP, which moves parameters in every step",
        "Set cuda_graph_impl='none', or shard only the optimizer state (strategy.fsdp=None, "
        "optim.config.use_distributed_optimizer=True).",
        lambda run: run.graphs != "none" and run[f"{DDP}.use_megatron_fsdp"],
    ),
    Derivation(
        f"{STRATEGY}.use_te_rng_tracker",
        _IMPL,
        True,
        "model.config.cuda_graph_impl: a graph advances its random streams",
        lambda run: run.graphs != "none",
    ),
    _graphs(
        (_IMPL, f"{STRATEGY}.pipeline_model_parallel_size"),
        "Megatron-Core counts the uses of the rotary frequencies, which all micro-batches share, when it captures the first of "
        "them, and ends in an AssertionError",
        "Set cuda_graph_impl='transformer_engine' or 'full_iteration', or pipeline_model_parallel_size=1.",
        lambda run: (
            run.graphs == "local"
            and run.layout.pp > 1
            and run[f"{MODEL}.position_embedding_type"] in ("rope", "yarn")
            and not run[f"{MODEL}.multi_latent_attention"]  # which turns positions inside
            and "attn" in (modules_of(run.model_config) or ("attn",))
        ),
    ),
    Derivation(
        f"{MODEL}.deallocate_pipeline_outputs",
        _IMPL,
        False,
        "a stage's output is a buffer of its last layer's graph, which each step fills again",
        lambda run: run.graphs == "local" and run.layout.pp > 1,
    ),
    Derivation(
        f"{MODEL}.batch_p2p_sync",
        _IMPL,
        False,
        "a graph of the whole step can't wait for the messages between stages, and its streams keep their order",
        lambda run: run.graphs == "full_iteration" and run.layout.pp > 1,
    ),
    Derivation(
        f"{DDP}.check_for_nan_in_grad",
        _IMPL,
        False,
        "a graph of the whole step can't wait for its gradients",
        lambda run: run.graphs == "full_iteration",
        rule="graphs-go-with-the-rest",
        fix="The check waits for the GPU inside the captured step. Set check_for_nan_in_grad=False, or capture layers with "
        "cuda_graph_impl='transformer_engine'.",
    ),
)
"""What CUDA graphs need and exclude (Megatron-LM's arguments.py, and what a capture can't hold)."""


def _dtype_between_layers(run: RunSettings) -> torch.dtype:
    """The dtype of a layer's output after Megatron-Core adds it to an fp32 residual. Newer versions keep fp32."""
    dtype: torch.dtype = run[f"{MODEL}.params_dtype"]
    if not run[f"{MODEL}.fp32_residual_connection"]:
        return dtype
    output, residual = (torch.zeros(1, dtype=one, device="cpu") for one in (dtype, torch.float32))
    return _bias_dropout_add_func((output, None), residual, 0.0, True).dtype


def _source_of_dtype(run: RunSettings) -> str:
    same = _dtype_between_layers(run) == run[f"{MODEL}.params_dtype"]
    return "the precision" if same else "model.config.fp32_residual_connection"


_SENT = f"{STRATEGY}.pipeline_dtype"

ACTIVATIONS: tuple[Row, ...] = (
    Derivation(
        _SENT,
        f"{MODEL}.params_dtype",
        _dtype_between_layers,
        lambda run: f"the dtype of activations between layers, by {_source_of_dtype(run)}",
        lambda run: run[_SENT] is None or (run[_SENT] == run[f"{MODEL}.params_dtype"] and not run.explicit(_SENT)),
    ),
    Conflict(
        "stages-send-what-they-hold",
        (_SENT,),
        lambda run: (
            f"activations between layers are {_dtype_between_layers(run)} (from {_source_of_dtype(run)}), but the next "
            f"pipeline stage would read them as {run[_SENT]}"
        ),
        lambda run: f"Set strategy.pipeline_dtype={_dtype_between_layers(run)}, or leave it unset.",
        lambda run: run.layout.pp > 1 and run[_SENT] != _dtype_between_layers(run),
    ),
)
"""Stages send activations unchanged, and the receiver allocates memory by ``pipeline_dtype``."""

ONE_BUCKET = "overlap_grad_reduce is off, so Megatron-Core puts all gradients into one bucket"

_IN_STEP = f"{OPTIM}.overlap_param_gather_with_optimizer_step"


def _has_one_bucket(run: RunSettings) -> bool:
    return not run[_REDUCED] and not run[f"{DDP}.use_megatron_fsdp"]


GATHER_AHEAD = Conflict(
    "gather-starts-from-reduction",
    ((_DDP_GATHER, True), (_REDUCED, False)),
    NOTHING_TO_GATHER_AHEAD,
    "Set overlap_grad_reduce=True, or overlap_param_gather=False.",
)
BUCKETS: tuple[Row, ...] = (
    GATHER_AHEAD._replace(settings=((_DDP_GATHER, True), _REDUCED), when=_has_one_bucket),
    # The optimizer's copies parameters for the gathers of the buffers, and starts none.
    Derivation(
        _OPTIM_GATHER,
        _DDP_GATHER,
        rule="one-switch-for-the-gather",
        fix="Both are the same switch. Set strategy.ddp_config.overlap_param_gather, and leave "
        "optim.config.overlap_param_gather unset.",
    ),
    _fp32_sums(
        "Megatron-Core reduces the gradients of a later model chunk in one collective, and those of an embedding that stages "
        "share are a bucket of their own",
        "overlap_grad_reduce=False, or leave virtual_pipeline_model_parallel_size unset",
        lambda run: (
            run[_REDUCED]
            and run.layout.interleaved
            and (run[f"{MODEL}.share_embeddings_and_output_weights"] or run[f"{MODEL}.mtp_num_layers"])
        ),
    ),
    Conflict(
        "gather-in-the-step-needs-virtual-stages",
        (_IN_STEP,),
        "it updates the first model chunk of a rank and gathers its parameters while it updates the others, which requires "
        "virtual stages, the distributed optimizer and overlap_param_gather",
        "Set it to False, or set strategy.virtual_pipeline_model_parallel_size to 2 or more, "
        "optim.config.use_distributed_optimizer=True and strategy.ddp_config.overlap_param_gather=True.",
        lambda run: run[_IN_STEP] and not (run.layout.interleaved and run[_DDP_SWITCH] and run[_DDP_GATHER]),
    ),
    Derivation(f"{DDP}.bucket_size", _REDUCED, None, ONE_BUCKET, _has_one_bucket),
)
"""For every run, once the overlap callback has decided: what Megatron-Core does when it makes the buffers."""


_PP, _VP = f"{STRATEGY}.pipeline_model_parallel_size", f"{STRATEGY}.virtual_pipeline_model_parallel_size"
_OVERLAPPED, _BATCHED = (f"{MODEL}.overlap_p2p_comm", True), (f"{MODEL}.batch_p2p_comm", True)


def _two_stages(setting: tuple[str, bool]) -> Conflict:
    name, value = setting[0].rpartition(".")[2], setting[1]
    return Conflict(
        "two-interleaved-stages-overlap-messages",
        (setting, _VP),
        "with two stages, only messages that overlap, which are not batched, keep their order",
        f"Set {name}={not value}, leave it unset, use more stages, or leave virtual_pipeline_model_parallel_size unset.",
        lambda run: run.layout.interleaved and run.layout.pp == 2,
    )


BETWEEN_STAGES = (
    Conflict(
        "overlapped-messages-are-between-chunks",
        (_OVERLAPPED, _PP),
        "without virtual stages there is no computation to overlap with",
        "Leave overlap_p2p_comm unset, or set strategy.virtual_pipeline_model_parallel_size.",
        lambda run: run.layout.pp > 1 and not run.layout.interleaved,
    ),
    # Otherwise each rank posts two sends to the same peer in an order that the peer doesn't expect, and trains on the wrong
    # activations without a word. Megatron-LM's arguments.py refuses it for this reason; the core alone does not.
    _two_stages((_OVERLAPPED[0], False)),
    _two_stages(_BATCHED),
    Conflict(
        "messages-overlap-or-batch",
        (_OVERLAPPED, _BATCHED),
        "a rank cannot wait for batched sends and receives one by one",
        "Leave batch_p2p_comm unset.",
        lambda run: run.layout.interleaved,
    ),
)
"""Messages between stages. Only those between interleaved stages overlap, and they are either overlapped or batched.
Megatron-Core batches by default, and raises in the first step otherwise."""


def _size(name: str) -> Derivation:
    return Derivation(
        f"{MODEL}.{name}",
        f"{STRATEGY}.{name}",
        rule="sizes-on-the-strategy",
        fix=f"Parallel sizes are set on the strategy, which copies them to the model. Remove model.config.{name}.",
    )


SIZES: tuple[Row, ...] = (
    *(_size(field.name) for field in fields(ParallelismConfig)),
    *(
        Derivation(
            f"{MODEL}.{name}", _PP, None, "strategy.pipeline_model_parallel_size is 1", lambda run: run.layout.pp == 1
        )
        for name in ("pipeline_dtype", "virtual_pipeline_model_parallel_size")
    ),
    Derivation(
        f"{MODEL}.microbatch_group_size_per_vp_stage",
        _PP,
        why="strategy.pipeline_model_parallel_size, as Megatron-Core's default is",
        when=lambda run: run[f"{MODEL}.microbatch_group_size_per_vp_stage"] is None,
    ),
    *BETWEEN_STAGES,
    Derivation(
        f"{MODEL}.overlap_p2p_comm",
        _PP,
        True,
        "two interleaved stages keep their messages in order only where these overlap",
        lambda run: run.layout.interleaved and run.layout.pp == 2,
    ),
    Derivation(
        f"{MODEL}.batch_p2p_comm",
        f"{MODEL}.overlap_p2p_comm",
        False,
        "overlapped sends and receives aren't batched",
        lambda run: run.layout.interleaved and run[f"{MODEL}.overlap_p2p_comm"],
    ),
)
"""The strategy's sizes in the model's configuration, and the messages between its stages."""

_FUSED_LOSS = f"{MODEL}.cross_entropy_loss_fusion"
IN_FP32: tuple[Row, ...] = (
    # It returns its gradient in bf16, whatever the model's dtype (calculate_gradients in fusions/fused_cross_entropy.py).
    Derivation(
        _FUSED_LOSS,
        f"{MODEL}.params_dtype",
        False,
        "the fused kernel rounds gradients to bf16, and the model is fp32",
        lambda run: (
            run[_FUSED_LOSS] and run[f"{MODEL}.params_dtype"] is torch.float32 and not run.explicit(_FUSED_LOSS)
        ),
    ),
)

_DELAYED, _DELAYED_IN_BUFFERS = f"{MODEL}.delay_wgrad_compute", f"{DDP}.delay_wgrad_compute"
_FUSED_ACCUMULATION = f"{MODEL}.gradient_accumulation_fusion"
LAYERS: tuple[Row, ...] = (
    *IN_FP32,
    Derivation(
        _DELAYED_IN_BUFFERS,
        _DELAYED,
        why="this machine computes weight gradients with the inputs' gradients",
        when=lambda run: "delay_wgrad_compute" in adjustments(run.model_config),
    ),
    # Otherwise the buffers wait for gradients at the parameter, where the layers' later pass doesn't bring them.
    Derivation(
        _DELAYED_IN_BUFFERS,
        _DELAYED,
        rule="one-switch-for-delayed-gradients",
        fix=f"Both are the same switch. Set {_DELAYED}, and leave {_DELAYED_IN_BUFFERS} unset.",
    ),
    Derivation(
        f"{MODEL}.cp_comm_type",
        f"{STRATEGY}.context_parallel_size",
        "p2p",
        "Transformer Engine's attention exchanges keys and values in a ring",
        lambda run: run.layout.cp > 1 and run[f"{MODEL}.cp_comm_type"] is None and run.machine.te_missing is None,
    ),
    # Possible from Transformer Engine 2.10 on. Megatron-LM asks its users to verify it.
    Derivation(
        _FUSED_ACCUMULATION,
        f"{DDP}.use_megatron_fsdp",
        False,
        "Megatron-FSDP keeps gradients in pieces",
        lambda run: run[f"{DDP}.use_megatron_fsdp"] and not run.explicit(_FUSED_ACCUMULATION),
    ),
)


def sizes_beyond(strategy: type) -> tuple[Row, ...]:
    """The rows of a strategy that lets torch shard the model, for the sizes that it has no parameter for."""
    return tuple(
        Conflict(
            "sizes-on-the-strategy",
            (f"{MODEL}.{field.name}",),
            f"{strategy.__name__} has no such size",
            f"Remove model.config.{field.name}, or use MegatronStrategy with strategy.{field.name}.",
            lambda run, name=field.name: (
                run.requested(f"{MODEL}.{name}") and run[f"{MODEL}.{name}"] != run[f"{STRATEGY}.{name}"]
            ),
        )
        for field in fields(ParallelismConfig)
        if field.name not in signature(strategy).parameters
    )


def without_gradient_buffers(strategy: str) -> tuple[Row, ...]:
    """The rows of a strategy without Megatron-Core's gradient buffers, to which matrix products could add gradients."""
    return (
        *IN_FP32,
        Derivation(_FUSED_ACCUMULATION, _FUSED_ACCUMULATION, False, f"{strategy} has no gradient buffers"),
    )
