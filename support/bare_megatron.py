# SPDX-License-Identifier: Apache-2.0
"""A bare Megatron-Core training loop: the yardstick for our stack's numbers and step times.

Written as users of Megatron-Core write theirs: no Lightning, no strategy, no callbacks. Of nemo2 it uses only
`get_backend().install()`, which lets Megatron-Core run on a CPU, and the layer spec, which is a spec like any other.
The model is a Llama-like GPT (RMSNorm, SwiGLU, rotary positions, grouped queries, no biases).

    torchrun --nproc-per-node 2 support/bare_megatron.py --tp 2 --sequence_parallel True
"""

import argparse
import dataclasses
import functools
import gc
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nemo2.base.backend import get_backend

get_backend().install()

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

from nemo2.models.layers.spec import layer_spec  # noqa: E402

Batch = dict[str, torch.Tensor]

# 0.19 added an argument without a default.
_slice_for_cp = functools.partial(
    get_batch_on_this_cp_rank,
    **({"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run depends on. Sizes are in tokens, samples and layers; `vp` None means no virtual pipeline."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    groups: int = 2
    ffn: int = 128
    vocab: int = 128
    seq: int = 32
    mbs: int = 1
    gbs: int = 8
    steps: int = 4
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    cp: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    lr: float = 1e-3
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    seed: int = 1234
    dtype: str = "fp32"
    calculate_per_token_loss: bool = False
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of TransformerConfig."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]


def random_batches(settings: Settings) -> Callable[[int], Batch]:
    """`step -> global batch`, each `[gbs, seq]`, a function of the seed and the step alone."""

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(settings.seed * 100_003 + step)
        text = torch.randint(settings.vocab, (settings.gbs, settings.seq + 1), generator=generator)
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(settings.gbs, settings.seq),
            "position_ids": torch.arange(settings.seq).expand(settings.gbs, -1).contiguous(),
        }

    return batch


def train(
    settings: Settings,
    batches: Callable[[int], Batch] | None = None,
    *,
    build_model: Callable[[bool, bool, int | None], GPTModel] | None = None,
    lr_at: Callable[[int], float] | None = None,
    load_weights_from: str | Path | None = None,
    save_weights_to: str | Path | None = None,
    save_gradients_to: str | Path | None = None,
) -> dict[str, Any]:
    """Train in the process group that is up, and return what happened, the same on every rank.

    batches: step (from 0) to the global batch, `tokens labels loss_mask position_ids`, each `[gbs, seq]`; None for
        random tokens. Every rank calls it and takes its share.
    build_model: (pre_process, post_process, vp_stage) to a model chunk; None builds the one that `settings` describes.
    lr_at: step to learning rate; None keeps `settings.lr`.
    load_weights_from: a checkpoint of weights to start from, written by `save_weights_to` in any layout.
    save_weights_to: where to write the weights before the first step.
    save_gradients_to: where to write the first step's gradients, before clipping, in the form of a checkpoint of
        weights (without a distributed optimizer, which keeps only its share of them).

    Returns losses (masked token mean over the global batch), grad_norms (before clipping) and step_times in seconds.
    """
    start_parallel(settings)
    make_batch = batches or random_batches(settings)
    chunks = build_chunks(settings, build_model or functools.partial(build_gpt, settings))
    if load_weights_from is not None:
        load_weights(chunks, load_weights_from)
    if save_weights_to is not None:
        save_tensors(weights(chunks), save_weights_to)
    model = wrap(settings, chunks)
    config = model[0].config
    optimizer = build_optimizer(settings, model)
    connect(settings, config, model, optimizer)

    reports, grad_norms, step_times = [], [], []
    for step in range(settings.steps):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            # As Megatron-LM's OptimizerParamScheduler does every step; without it norms would decay as well.
            group["lr"] = lr_at(step) if lr_at else settings.lr
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        report = forward_backward(settings, model, optimizer, make_batch(step))
        if step == 0 and save_gradients_to is not None:
            save_tensors(gradients(chunks), save_gradients_to)
        _, grad_norm, _ = optimizer.step()
        reports.append(report)
        grad_norms.append(float(grad_norm or 0.0))
        get_backend().synchronize()
        step_times.append(time.perf_counter() - started)

    return {
        "losses": from_last_stage(torch.stack(reports)).tolist(),
        "grad_norms": grad_norms,
        "step_times": step_times,
    }


def stop_parallel() -> None:
    """Take Megatron-Core's groups down, and torch's with them.

    Megatron-Core only forgets its groups. Their gloo threads, some sixty for each layout, would slow every later one.
    """
    groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    parallel_state.destroy_model_parallel()
    gc.collect()
    torch.distributed.barrier()
    for group in groups:
        # A few are destroyed by Megatron-Core itself.
        if group in torch.distributed.distributed_c10d._world.pg_map:
            torch.distributed.destroy_process_group(group)


def start_parallel(settings: Settings) -> None:
    """Process groups and the generators that weights are drawn from."""
    stop_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        virtual_pipeline_model_parallel_size=settings.vp,
        context_parallel_size=settings.cp,
    )
    # Stages draw different weights, as Megatron-LM's _set_random_seed has it.
    seed = settings.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def transformer_config(settings: Settings) -> TransformerConfig:
    """The model's configuration with what this machine cannot do turned off."""
    fields: dict[str, Any] = {
        "num_layers": settings.layers,
        "hidden_size": settings.hidden,
        "num_attention_heads": settings.heads,
        "num_query_groups": settings.groups,
        "ffn_hidden_size": settings.ffn,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "tensor_model_parallel_size": settings.tp,
        "pipeline_model_parallel_size": settings.pp,
        "virtual_pipeline_model_parallel_size": settings.vp,
        "context_parallel_size": settings.cp,
        "sequence_parallel": settings.sequence_parallel,
        "pipeline_dtype": settings.torch_dtype,
        "params_dtype": settings.torch_dtype,
        "bf16": settings.dtype == "bf16",
        "fp16": settings.dtype == "fp16",
        # Megatron-LM's launcher allows a virtual pipeline of two stages only with overlapped messages.
        "overlap_p2p_comm": settings.vp is not None,
        "batch_p2p_comm": settings.vp is None,
        "calculate_per_token_loss": settings.calculate_per_token_loss,
    }
    fields |= settings.config
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    overrides = get_backend().config_overrides().items()
    fields |= {name: value for name, (value, _) in overrides if name in known}
    return TransformerConfig(**fields)


def build_gpt(settings: Settings, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
    config = transformer_config(settings)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, vp_stage=vp_stage),
        vocab_size=settings.vocab,
        max_sequence_length=settings.seq,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )


def build_chunks(settings: Settings, build: Callable[[bool, bool, int | None], GPTModel]) -> list[GPTModel]:
    """The model, or this rank's chunks of it in a virtual pipeline."""
    chunks = []
    for stage in range(settings.vp or 1):
        vp_stage = stage if settings.vp else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = build(first, last, vp_stage)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk.to(get_backend().device))
    return chunks


def wrap(settings: Settings, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """Mixed precision, then Megatron's data parallelism."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.dtype != "fp32",
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        bucket_size=settings.bucket_size,
        # With a dynamic loss scale an overflow is part of the procedure: the optimizer skips the step.
        check_for_nan_in_grad=settings.dtype != "fp16",
    )
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=ddp_config,
            module=chunk if settings.dtype == "fp32" else Float16Module(chunk.config, chunk),
            # The gradients of later chunks are reduced while earlier ones still compute.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]


def build_optimizer(settings: Settings, model: list[DistributedDataParallel]) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=settings.clip_grad,
        bf16=settings.dtype == "bf16",
        fp16=settings.dtype == "fp16",
        params_dtype=settings.torch_dtype,
        initial_loss_scale=2.0**16,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_param_gather=settings.overlap_param_gather,
    )
    return get_megatron_optimizer(config, model)  # pyright: ignore[reportArgumentType]: DDP is a MegatronModule


def connect(settings: Settings, config: Any, model: list[DistributedDataParallel], optimizer: Any) -> None:
    """Set the functions in ``config`` that the pipeline schedules call at their own time."""

    def per_chunk(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in model]
        return functions if len(functions) > 1 else functions[0]

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        config.no_sync_func = per_chunk("no_sync")
        if settings.pp > 1:
            config.grad_sync_func = per_chunk("start_grad_sync")
    if settings.overlap_param_gather and settings.pp > 1:
        config.param_sync_func = per_chunk("start_param_sync")


def forward_backward(settings: Settings, model: list[Any], optimizer: Any, global_batch: Batch) -> torch.Tensor:
    """Run one step up to the gradients. Returns the global batch's loss on the last pipeline stage, NaN on the
    others."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    num_microbatches = settings.gbs // (settings.mbs * parallel_state.get_data_parallel_world_size())
    iterators = [microbatches(settings, global_batch) for _ in model]
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=num_microbatches,
        seq_length=settings.seq,
        micro_batch_size=settings.mbs,
        forward_only=False,
    )
    if not reported:
        return torch.tensor(float("nan"), device=get_backend().device)
    loss_and_tokens = torch.stack([entry["loss_and_tokens"] for entry in reported]).sum(dim=0)
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(loss_and_tokens, group=group)
    return loss_and_tokens[0] / loss_and_tokens[1]


def microbatches(settings: Settings, global_batch: Batch) -> Iterator[Batch]:
    """This data-parallel rank's micro-batches, in the order of Megatron-LM's sampler."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for start in range(rank * settings.mbs, settings.gbs, settings.mbs * size):
        batch = {name: value[start : start + settings.mbs] for name, value in global_batch.items()}
        batch = {name: value.to(get_backend().device) for name, value in batch.items()}
        # Named, because for 0.19 no group means all ranks.
        yield _slice_for_cp(batch, cp_group=parallel_state.get_context_parallel_group())


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"])
    return output, functools.partial(masked_loss, batch["loss_mask"])


def masked_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The sum over the unmasked tokens, their number, and both for the report; the schedule divides."""
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return total, num_tokens, {"loss_and_tokens": torch.stack([total.detach(), num_tokens.float()])}


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """The last pipeline stage's value, broadcast to every stage."""
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return values


# ------------------------------------------------------------------------------- checkpoints, to compare across layouts


def weights(chunks: list[GPTModel]) -> dict[str, Any]:
    """Sharded weights by name, with names that do not depend on the layout."""
    return {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}


def gradients(chunks: list[GPTModel]) -> dict[str, Any]:
    """The sharded state with each weight replaced by its gradient; weights without a gradient are left out."""

    def exchange(node: Any) -> Any:
        gradient = getattr(getattr(node, "data", None), "main_grad", None)
        if isinstance(node, dict):
            kept = {name: exchange(value) for name, value in node.items()}
            return {name: value for name, value in kept.items() if value is not None}
        if gradient is None:
            return None
        if isinstance(node, ShardedTensor):
            return dataclasses.replace(node, data=gradient.clone(), dtype=gradient.dtype)
        if isinstance(node, ShardedTensorFactory):
            return dataclasses.replace(node, data=gradient.clone())
        return None

    return exchange(weights(chunks))


def save_tensors(sharded_state: dict[str, Any], directory: str | Path) -> None:
    if torch.distributed.get_rank() == 0:
        Path(directory).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(sharded_state, str(directory))


def load_weights(chunks: list[GPTModel], directory: str | Path) -> None:
    state: Any = dist_checkpointing.load(weights(chunks), str(directory))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{index}"])


def main() -> None:
    """Run under torchrun, with every field of `Settings` as an option."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for field in dataclasses.fields(Settings):
        if field.name != "config":
            parser.add_argument(f"--{field.name}", type=_parse, default=field.default, metavar=repr(field.default))
    settings = Settings(**vars(parser.parse_args()))
    backend = get_backend()
    backend.set_device(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
    torch.distributed.init_process_group(backend.process_group_backend)
    result = train(settings)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(result))
    torch.distributed.destroy_process_group()


def _parse(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


if __name__ == "__main__":
    main()
