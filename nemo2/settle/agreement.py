# SPDX-License-Identifier: Apache-2.0
"""Keeps values that exist in several configurations equal: those of the model, the optimizer and the gradient buffers.

If the user set such a value in one configuration, it applies to all. If the user set it to different values in two, the
error names both. The functions change their arguments; `nemo2.settle.settle` passes copies.
"""

from dataclasses import fields
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import _bias_dropout_add_func
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.backend.te_version import megatron_finds
from nemo2.config.provenance import adjust, adjust_to, adjusting, adjustments
from nemo2.config.requested import at, explicit_fields
from nemo2.errors import ConfigError
from nemo2.parallel.cuda_graphs import kind_of
from nemo2.parallel.ddp_config import DistributedDataParallelConfig
from nemo2.parallel.layout import Layout, ParallelismConfig
from nemo2.precision import MegatronMixedPrecision
from nemo2.settle.machine import Machine

_DERIVED = {
    "expert_tensor_parallel_size": "tensor_model_parallel_size",
    "microbatch_group_size_per_vp_stage": "pipeline_model_parallel_size",
}


def write_parallelism(
    config: TransformerConfig, parallelism: ParallelismConfig, layout: Layout, machine: Machine
) -> None:
    """Write the strategy's sizes into the model's configuration, so that both agree. Settings that the machine doesn't
    support are left out, and Megatron-Core derives the rest.

    Raises:
        ConfigError: the user set the model's own field to another value, or Megatron-Core rejects the result.
    """
    explicit = explicit_fields(config)
    # Megatron-Core derived these fields from other sizes. A plain TransformerConfig doesn't distinguish derived fields
    # from explicit ones.
    explicit -= {name for name, other in _DERIVED.items() if getattr(config, name, None) == getattr(config, other)}
    for field in fields(parallelism):
        value = getattr(parallelism, field.name)
        if not hasattr(config, field.name):
            continue
        current = getattr(config, field.name)
        if field.name in explicit and current not in (value, None):
            raise ConfigError(
                f"model.config.{field.name}={current}{at(config, field.name)} contradicts "
                f"strategy.{field.name}={value}. Parallel sizes are set on the strategy, which copies them to the "
                f"model. Remove model.config.{field.name}.",
                rule="sizes-on-the-strategy",
            )
        adjust(config, field.name, value, why=f"strategy.{field.name}")
    if config.pipeline_model_parallel_size == 1:
        for name in ("pipeline_dtype", "virtual_pipeline_model_parallel_size"):
            adjust(config, name, None, why="strategy.pipeline_model_parallel_size is 1")
    if config.microbatch_group_size_per_vp_stage is None:
        adjust(
            config,
            "microbatch_group_size_per_vp_stage",
            config.pipeline_model_parallel_size,
            why="strategy.pipeline_model_parallel_size, as Megatron-Core's default is",
        )
    _order_messages(config, layout, explicit)
    adjust_to(config, machine.overrides)
    # Run Megatron-Core's derivations and checks again, for the new sizes.
    try:
        with (
            megatron_finds(machine.transformer_engine),
            adjusting(config, why="derived by Megatron-Core from the other fields"),
        ):
            config.__post_init__()
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"Megatron-Core rejects this model with this layout ({layout.describe()}): {error}"
        ) from error


def send_what_stages_hold(model: TransformerConfig, parallelism: ParallelismConfig) -> None:
    """Set ``pipeline_dtype`` to the dtype of the activations between stages. Stages send activations unchanged, and the
    receiver allocates memory by ``pipeline_dtype``.

    Raises:
        ConfigError: the user set another dtype.
    """
    held, asked = _dtype_between_layers(model), parallelism.pipeline_dtype
    why = "the precision" if held == model.params_dtype else "model.config.fp32_residual_connection"
    if asked is None or (asked == model.params_dtype and "pipeline_dtype" not in explicit_fields(parallelism)):
        adjust(parallelism, "pipeline_dtype", held, why=f"the dtype of activations between layers, by {why}")
    elif asked != held and parallelism.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"strategy.pipeline_dtype={asked}: activations between layers are {held} (from {why}), but the next "
            f"pipeline stage would read them as {asked}. Set strategy.pipeline_dtype={held}, or leave it unset.",
            rule="stages-send-what-they-hold",
        )


def _dtype_between_layers(model: TransformerConfig) -> torch.dtype:
    """The dtype of a layer's output after Megatron-Core adds it to an fp32 residual. Newer versions keep fp32."""
    if not model.fp32_residual_connection:
        return model.params_dtype
    output, residual = (torch.zeros(1, dtype=dtype, device="cpu") for dtype in (model.params_dtype, torch.float32))
    return _bias_dropout_add_func((output, None), residual, 0.0, True).dtype


def follow_the_data(config: Any, data: Any) -> None:
    """Copy settings from the data to the model, unless they are set on the model.

    They are the sequence length, and whether the loss is the mean over the tokens of the global batch, which samples
    with masks need.

    Args:
        data: The data module, or its node in a recipe.
    """
    explicit = explicit_fields(config)
    length = getattr(data, "seq_length", None)
    if length and hasattr(config, "seq_length") and "seq_length" not in explicit:
        adjust(config, "seq_length", length, why="data.seq_length")
    kind = getattr(data, "__fn_or_cls__", type(data))
    asked = getattr(kind, "calculate_per_token_loss", False) and hasattr(config, "calculate_per_token_loss")
    if asked and "calculate_per_token_loss" not in explicit:
        adjust(config, "calculate_per_token_loss", True, why=f"data is a {kind.__name__}: each token counts the same")


def sum_gradients_where_tokens_count(config: Any, ddp_config: DistributedDataParallelConfig) -> None:
    """Turn off ``average_in_collective`` if the loss is divided by the tokens of the global batch and only the data
    requests that division.

    Gradients that are divided by tokens must not be averaged before. If both were set explicitly, a rule rejects them.
    """
    if ddp_config.average_in_collective and "calculate_per_token_loss" in adjustments(config):
        adjust(ddp_config, "average_in_collective", False, why="model.config.calculate_per_token_loss")


def align_distributed_optimizer(
    optimizer_config: Any, ddp_config: DistributedDataParallelConfig, explicit_ddp: frozenset[str]
) -> None:
    """Align the switch in two configurations: the explicit one decides for both."""
    if optimizer_config is None:
        return
    theirs = "use_distributed_optimizer" in explicit_fields(optimizer_config)
    ours = "use_distributed_optimizer" in explicit_ddp
    optimizer, ddp = optimizer_config.use_distributed_optimizer, ddp_config.use_distributed_optimizer
    if theirs and ours and optimizer != ddp:
        one, other = (at(config, "use_distributed_optimizer") for config in (optimizer_config, ddp_config))
        raise ConfigError(
            f"optim.config.use_distributed_optimizer={optimizer}{one} contradicts "
            f"strategy.ddp_config.use_distributed_optimizer={ddp}{other}. Both are the same switch. Remove one of "
            "them, or set both to the same value.",
            rule="one-switch-for-the-distributed-optimizer",
        )
    value = ddp if ours and not theirs else optimizer
    source = "strategy.ddp_config" if ours and not theirs else "optim.config"
    for config in (optimizer_config, ddp_config):
        adjust(config, "use_distributed_optimizer", value, why=f"{source}.use_distributed_optimizer")
    if not value and ddp_config.overlap_param_gather:
        if "overlap_param_gather" in explicit_ddp:
            raise ConfigError(
                "strategy.ddp_config.overlap_param_gather=True requires the distributed optimizer, whose parameters "
                "it gathers. Set optim.config.use_distributed_optimizer=True, or set overlap_param_gather=False.",
                rule="gathered-parameters-are-sharded",
            )
        adjust(ddp_config, "overlap_param_gather", False, why="optim.config.use_distributed_optimizer is off")


def keep_states_in_the_only_memory(optimizer_config: Any, machine: Machine) -> None:
    """Turn off `optimizer_cpu_offload` on a CPU, where the optimizer's states already are in host memory.
    Megatron-Core's class for offloading needs a GPU."""
    if machine.accelerator != "cpu" or not getattr(optimizer_config, "optimizer_cpu_offload", False):
        return
    why = "there is no second memory to move the optimizer's states to"
    adjust(optimizer_config, "optimizer_cpu_offload", False, why=why)
    if optimizer_config.use_precision_aware_optimizer:
        adjust(optimizer_config, "use_precision_aware_optimizer", False, why=f"{why}, and its kernel needs a GPU")


def prepare_graphs(
    model_config: Any,
    optimizer_config: Any,
    ddp_config: DistributedDataParallelConfig,
    explicit_ddp: frozenset[str],
    parallelism: ParallelismConfig,
    machine: Machine,
) -> None:
    """Settings that CUDA graphs need, and settings that exclude them (Megatron-LM's arguments.py, and what a capture
    can't hold).

    Raises:
        ConfigError: two settings exclude each other.
    """
    if getattr(optimizer_config, "optimizer_cuda_graph", False):
        raise ConfigError(
            "optim.config.optimizer_cuda_graph=True: nemo2 cannot capture the optimizer step, because Python reads "
            "its learning rate and gradient norm. Set optimizer_cuda_graph=False. To capture forward and backward "
            "passes, set model.config.cuda_graph_impl."
        )
    kind = kind_of(model_config)
    if kind == "none":
        return
    asked = f"model.config.cuda_graph_impl={kind!r}{at(model_config, 'cuda_graph_impl')}"
    if kind == "transformer_engine" and machine.accelerator == "cuda" and machine.transformer_engine is None:
        raise ConfigError(
            f"{asked}: {machine.te_missing}. Set cuda_graph_impl='local', which does not need Transformer Engine."
        )
    if kind == "transformer_engine" and not model_config.bf16:
        raise ConfigError(
            f"{asked} requires bf16, because Megatron-Core creates the inputs of the graphs in bf16. Set "
            "trainer.plugins.precision='bf16-mixed', or set cuda_graph_impl='local'."
        )
    if ddp_config.use_megatron_fsdp:
        raise ConfigError(
            f"{asked} cannot be used with Megatron-FSDP, which moves parameters in every step. Set "
            "cuda_graph_impl='none', or shard only the optimizer state (strategy.fsdp=None, "
            "optim.config.use_distributed_optimizer=True)."
        )
    adjust(
        parallelism, "use_te_rng_tracker", True, why="model.config.cuda_graph_impl: a graph advances its random streams"
    )
    if kind == "full_iteration" and ddp_config.check_for_nan_in_grad:
        if "check_for_nan_in_grad" in explicit_ddp:
            raise ConfigError(
                f"{asked} captures the whole step, but "
                f"strategy.ddp_config.check_for_nan_in_grad=True{at(ddp_config, 'check_for_nan_in_grad')} waits for "
                "the GPU inside the step. Set check_for_nan_in_grad=False, or capture layers with "
                "cuda_graph_impl='transformer_engine'."
            )
        adjust(ddp_config, "check_for_nan_in_grad", False, why="a graph of the whole step can't wait for its gradients")


def keep_no_history_beside_pieces(precision: Any, ddp_config: DistributedDataParallelConfig) -> None:
    """Check delayed scaling under Megatron-FSDP. It needs the maxima of the last steps, but Megatron-FSDP's checkpoints
    hold parameters only.

    Raises:
        ConfigError: both are requested.
    """
    dtypes = getattr(precision, "dtype_config", None)
    if dtypes is not None and dtypes.fp8 and dtypes.fp8_recipe == "delayed" and ddp_config.use_megatron_fsdp:
        raise ConfigError(
            f"trainer.plugins.fp8={dtypes.fp8!r} with fp8_recipe='delayed' and strategy.fsdp='megatron': checkpoints "
            "of Megatron-FSDP do not contain the history of scales, so a resumed run would compute different values. "
            "Set fp8_recipe='tensorwise', which has no history, or set strategy.fsdp=None to shard only the "
            "optimizer state.",
            rule="scales-go-into-the-checkpoint",
        )


def leave_overflows_to_the_scaler(ddp_config: DistributedDataParallelConfig, precision: MegatronMixedPrecision) -> None:
    """Turn off the check for infinite gradients with dynamic loss scaling, which finds its scale by them. Megatron-LM's
    arguments.py does the same."""
    dtypes = precision.dtype_config
    if dtypes.fp16 and dtypes.loss_scale is None and ddp_config.check_for_nan_in_grad:
        why = "fp16's loss scaler handles gradients that aren't finite"
        adjust(ddp_config, "check_for_nan_in_grad", False, why=why)


def keep_gradients_in_fp32(config: TransformerConfig) -> None:
    """Turn off Megatron-Core's fused cross-entropy in an fp32 model, unless the user turned it on.

    It returns its gradient in bf16, whatever the model's dtype (calculate_gradients in fusions/fused_cross_entropy.py).
    """
    fused = getattr(config, "cross_entropy_loss_fusion", False)
    if fused and config.params_dtype is torch.float32 and "cross_entropy_loss_fusion" not in explicit_fields(config):
        why = "the fused kernel rounds gradients to bf16, and the model is fp32"
        adjust(config, "cross_entropy_loss_fusion", False, why=why)


def add_gradients_apart(config: TransformerConfig, *, why: str) -> None:
    """Turn off gradient accumulation inside matrix products for strategies without Megatron-Core's gradient buffers."""
    adjust(config, "gradient_accumulation_fusion", False, why=why)


def _order_messages(config: TransformerConfig, layout: Layout, explicit: frozenset[str]) -> None:
    """Only messages between interleaved stages overlap, and they are either overlapped or batched. Megatron-Core
    batches by default, and raises in the first step otherwise.

    Two interleaved stages exchange messages right only when these overlap: otherwise each rank posts two sends to the same
    peer in an order that the peer doesn't expect, and trains on the wrong activations without a word (Megatron-LM's
    arguments.py refuses it for this reason; the core alone does not).
    """
    if layout.pp == 1:
        return
    if not layout.vp or layout.vp == 1:
        if config.overlap_p2p_comm:
            raise ConfigError(
                f"model.config.overlap_p2p_comm=True{at(config, 'overlap_p2p_comm')} with "
                f"strategy.pipeline_model_parallel_size={layout.pp} and no virtual stages: without virtual stages "
                "there is no computation to overlap with. Leave overlap_p2p_comm unset, or set "
                "strategy.virtual_pipeline_model_parallel_size.",
                rule="overlapped-messages-are-between-chunks",
            )
        return
    off = "overlap_p2p_comm" in explicit and not config.overlap_p2p_comm
    batched = "batch_p2p_comm" in explicit and config.batch_p2p_comm
    if layout.pp == 2 and (off or batched):
        name, value = ("overlap_p2p_comm", False) if off else ("batch_p2p_comm", True)
        raise ConfigError(
            f"model.config.{name}={value}{at(config, name)} with "
            f"strategy.virtual_pipeline_model_parallel_size={layout.vp} and pipeline_model_parallel_size=2: two "
            f"interleaved stages require messages that overlap and are not batched. Set {name}={not value}, leave it "
            "unset, or use more stages.",
            rule="two-interleaved-stages-overlap-messages",
        )
    if config.overlap_p2p_comm and batched:
        raise ConfigError(
            f"model.config.overlap_p2p_comm=True and batch_p2p_comm=True{at(config, 'batch_p2p_comm')} exclude each "
            "other, because a rank cannot wait for batched sends and receives one by one. Leave batch_p2p_comm unset.",
            rule="messages-overlap-or-batch",
        )
    if layout.pp == 2:
        why = "two interleaved stages keep their messages in order only where these overlap"
        adjust(config, "overlap_p2p_comm", True, why=why)
    if config.overlap_p2p_comm:
        adjust(config, "batch_p2p_comm", False, why="overlapped sends and receives aren't batched")


def share_tokenizer(model: Any, data: Any, tokenizer: Any) -> None:
    """Let ``model`` and ``data`` share a tokenizer as `llm.train` describes its argument ``tokenizer``.

    Raises:
        ConfigError: another text.
    """
    if tokenizer is None:
        if getattr(model, "tokenizer", None) is None:
            model.tokenizer = getattr(data, "tokenizer", None)
        return
    if tokenizer == "data":
        model.tokenizer = getattr(data, "tokenizer", None)
    elif tokenizer == "model" and getattr(model, "tokenizer", None) is not None:
        data.tokenizer = model.tokenizer
    elif tokenizer == "model":
        model.tokenizer = getattr(data, "tokenizer", None)  # the only tokenizer
    elif isinstance(tokenizer, str):
        raise ConfigError(f"tokenizer={tokenizer!r}: must be 'data', 'model' or a tokenizer.")
    else:
        model.tokenizer = data.tokenizer = tokenizer
