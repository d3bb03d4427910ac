# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of the same small model on gloo ranks and in a rehearsal, with different code."""

import math
from typing import Any

import lightning.pytorch as pl
import torch

from support import adapted_runs, small_runs, transforms

WORLD = 4
DISTRIBUTED = {"use_distributed_optimizer": True}

Case = dict[str, Any]


def case(
    strategy: Any = None,
    *,
    optimizer: bool = True,
    precision: str = "bf16-mixed",
    ddp: Any = None,
    model: Any = None,
    transform: Any = None,
) -> Case:
    return {
        "transform": transform,
        "strategy": strategy or {},
        "distributed": optimizer,
        "precision": precision,
        "ddp": ddp,
        "model": model or {},
    }


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
DEEP = {"num_layers": 4}
TP, PP, VP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, SP = "context_parallel_size", "expert_model_parallel_size", "sequence_parallel"
ETP = "expert_tensor_parallel_size"

CASES: dict[str, Case] = {
    "data 4": case(optimizer=False, precision="32"),
    "data 4, bf16": case(optimizer=False),
    "data 4, sharded": case(),
    "data 4, sharded, overlapped": case(
        ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}
    ),
    "tensor 4, sequence parallel": case({TP: 4, SP: True}, model={"num_query_groups": 4}),
    "pipeline 2": case({PP: 2}),
    "pipeline 4": case({PP: 4}, model=DEEP),
    "pipeline 2 in 2 chunks": case({PP: 2, VP: 2}, model=DEEP),
    "tensor 2, pipeline 2": case({TP: 2, PP: 2, SP: True}, optimizer=False),
    "context 2, tensor 2": case({CP: 2, TP: 2, SP: True}),
    "experts 2": case({EP: 2}, model=EXPERTS),
    "experts 2, tensor 2": case({EP: 2, TP: 2, SP: True}, model=EXPERTS),
    "experts 4 whole, tensor 2": case({EP: 4, ETP: 1, TP: 2, SP: True}, model=EXPERTS),
    "experts 2, gathered": case({EP: 2}, model=EXPERTS | {"moe_token_dispatcher_type": "allgather"}),
    "experts 2 beside shared ones, pipeline 2 in 2 chunks": case(
        {EP: 2, PP: 2, VP: 2}, model=EXPERTS | DEEP | {"moe_shared_expert_intermediate_size": 32}
    ),
    "experts 2, recomputed": case(
        {EP: 2}, model=EXPERTS | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    ),
    "norms only": case(optimizer=False, transform=transforms.freeze_all_but_norms),
    "low-rank additions, tensor 2": case(
        {TP: 2}, transform=transforms.FreezeAndAdd("linear_qkv"), model={"num_query_groups": 4}
    ),
    "LoRA, data 4": case(optimizer=False, precision="32", transform="LoRA"),
    "LoRA, data 4, sharded": case(transform="LoRA"),
    "LoRA, tensor 4, sequence parallel": case({TP: 4, SP: True}, model={"num_query_groups": 4}, transform="LoRA"),
    "LoRA, pipeline 2 in 2 chunks": case({PP: 2, VP: 2}, model=DEEP, transform="LoRA"),
    "LoRA, context 2, tensor 2": case({CP: 2, TP: 2, SP: True}, transform="LoRA"),
    "LoRA, experts 2": case({EP: 2}, model=EXPERTS, transform="LoRA"),
    "DoRA, tensor 2, pipeline 2": case({TP: 2, PP: 2, SP: True}, transform="DoRA"),
    "full recomputation": case(
        model={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
}


def _parts(case: Case, callbacks: Any = ()) -> tuple[Any, Any, Any]:
    ddp, sizes = case["ddp"], case["strategy"]
    if ddp is not None:
        from megatron.core.distributed import DistributedDataParallelConfig

        ddp = {"ddp": DistributedDataParallelConfig(**DISTRIBUTED, **ddp)}
    model = small_runs.build_llama(distributed=case["distributed"], **case["model"])
    transform = case["transform"]
    model.model_transform = adapted_runs.method(transform) if isinstance(transform, str) else transform
    trainer = small_runs.build_trainer(
        max_steps=2,
        precision=case["precision"],
        callbacks=list(callbacks),
        trainer={"accelerator": "cpu"},
        **case["strategy"],
        **(ddp or {}),
    )
    # Stages hold several microbatches at once; elsewhere the second shows what a step keeps of the first.
    microbatches = 4 if sizes.get(PP, 1) > 1 else 2
    replicas = WORLD // math.prod(sizes.get(name, 1) for name in (TP, PP, CP))
    batch = small_runs.MBS * replicas * microbatches
    return model, small_runs.TokenData(global_batch_size=batch), trainer


class SavedBytes(pl.Callback):
    """Measures the bytes that autograd keeps during the second step, by storage; written without nemo2's tracker."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.counts: dict[int, int] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            state = [p.data for p in trainer.strategy.megatron_parallel.parameters()]
            state += list(batch.values())
            self.state = {t.untyped_storage().data_ptr() for t in state}
            self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor)
            self.hooks.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.hooks.__exit__(None, None, None)

    def keep(self, tensor: torch.Tensor) -> "Kept":
        return Kept(tensor, self)


class Kept:
    def __init__(self, tensor: torch.Tensor, owner: SavedBytes) -> None:
        self.tensor, self.owner = tensor, owner
        storage = tensor.untyped_storage()
        self.key, self.bytes = storage.data_ptr(), storage.nbytes()
        if self.key in owner.state:
            self.bytes = 0
        owner.counts[self.key] = owner.counts.get(self.key, 0) + 1
        if owner.counts[self.key] == 1:
            owner.now += self.bytes
            owner.peak = max(owner.peak, owner.now)

    def __del__(self) -> None:
        owner = self.owner
        owner.counts[self.key] -= 1
        if not owner.counts[self.key]:
            owner.now -= self.bytes


def state_of_real_rank(trainer: Any) -> dict[str, int]:
    """The bytes of the storages of parameters, their gradients, and the optimizer's groups and state."""
    seen: set[int] = set()

    def count(tensors: Any) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    parallel = trainer.strategy.megatron_parallel
    whole = trainer.strategy.optimizers[0].mcore_optimizer
    optimizers = [part.optimizer for part in getattr(whole, "chained_optimizers", [whole])]
    parameters = list(parallel.parameters())
    return {
        "parameters": count(p.data for p in parameters),
        "gradients": count(p.main_grad for p in parameters if p.requires_grad),
        "main_parameters": count(p.data for o in optimizers for group in o.param_groups for p in group["params"]),
        "optimizer_states": count(
            v for o in optimizers for s in o.state.values() for v in s.values() if torch.is_tensor(v)
        ),
    }


def route_evenly() -> None:
    """Route tokens to experts in turn, because a rehearsal assumes equal shares. Saves nothing for the backward
    pass."""
    from megatron.core.transformer.moe.router import TopKRouter

    gating = TopKRouter.gating

    def evenly(self: Any, input: torch.Tensor) -> torch.Tensor:
        scores = gating(self, input)
        flat = scores.view(-1, scores.size(-1))
        turns = torch.arange(flat.size(0) * self.topk).view(-1, self.topk) % flat.size(1)
        return scores * 0 + torch.zeros_like(flat).scatter_(1, turns, 1.0).view_as(scores)

    TopKRouter.gating = evenly


def real(names: list[str]) -> dict[str, Any]:
    """Train two steps of each case, on a rank of the gloo world."""
    small_runs.quiet()
    route_evenly()
    results = {}
    for name in names:
        saved = SavedBytes()
        model, data, trainer = _parts(CASES[name], [saved])
        trainer.fit(model, data)
        results[name] = state_of_real_rank(trainer) | {"saved": saved.peak}
        del model, data, trainer, saved
        small_runs.release()
    return results


def rehearsed(names: list[str], ranks: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """Rehearse the same cases in one process, as ranks of a world that does not exist."""
    from nemo2.preflight.rehearse.kernels import plain_kernels
    from nemo2.preflight.rehearse.rank import run_rank

    small_runs.quiet()
    results: dict[int, dict[str, Any]] = {}
    for rank in ranks:
        results[rank] = {
            name: run_rank(
                lambda name=name: _parts(CASES[name]),
                rank=rank,
                world_size=WORLD,
                as_on_gpu=False,
                patches=plain_kernels(),
                inspect=lambda ran: ran.state | {"saved": ran.saved_peak},
            )
            for name in names
        }
    return results
