# SPDX-License-Identifier: Apache-2.0
"""The rows of the parity table, as data: a model, a layout, and the settings the layout is run with.

A row that must be refused names the words of the refusal; it is part of the table like any other.
"""

from dataclasses import dataclass
from typing import Any

from nemo2.mcore.parallel.layout import LAYOUT_FIELDS
from tests.long.parity.measure import Run


@dataclass(frozen=True, kw_only=True)
class Row:
    layout: str
    """The layout's name in the table."""
    ranks: int
    run: Run
    quick: bool = False
    """Also in the default test run."""
    refused: str | None = None
    """Words of the `ConfigError` that must come instead of a run."""

    @property
    def name(self) -> str:
        """Unique, and short enough to type: ``llama: TP 2 + SP``."""
        precision = "" if self.run.precision == "32" else f" {self.run.precision.removesuffix('-mixed')}"
        return f"{self.run.model}{precision}: {self.layout}"


def _row(ranks: int, model: str, layout: str, **settings: Any) -> Row:
    options = {name: settings.pop(name) for name in ("quick", "refused") if name in settings}
    strategy: dict[str, Any] = {LAYOUT_FIELDS.get(name, name): value for name, value in settings.pop("cut", {}).items()}
    return Row(layout=layout, ranks=ranks, run=Run(model=model, strategy=strategy, **settings), **options)


TP2 = {"tp": 2, "sp": True}
TP4 = {"tp": 4, "sp": True}
RING, GATHER, HEADS = {"cp_comm_type": "p2p"}, {"cp_comm_type": "all_gather"}, {"cp_comm_type": "a2a"}
# Several buckets per model, so that reductions really run beside the backward pass.
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}
OVERLAP_GRADS = {"overlap_grad_reduce": True, "bucket_size": 5000}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]}
# One sample at a time, where samples are packed, or where so many ranks share out a global batch.
ONE = {"micro_batch_size": 1}
BF16 = {"precision": "bf16-mixed"}
FSDP, FSDP2 = {"kind": "FSDPStrategy"}, {"kind": "FSDP2Strategy"}


def _megatron_fsdp(sharded: str = "optim_grads_params") -> dict[str, Any]:
    """Settings of a row of Megatron-FSDP beside its layout: what is sharded, by `nemo2.mcore.parallel.fsdp.STRATEGIES`."""
    return {"zero": True, "ddp": {"data_parallel_sharding_strategy": sharded}}


MEGATRON = {"fsdp": "megatron"}
ALL, GRADS, STATE = (_megatron_fsdp(what) for what in ("optim_grads_params", "optim_grads", "optim"))

TWO = [
    _row(2, "llama", "DP 2"),
    _row(2, "llama", "DP 2, overlapped reduction", ddp=OVERLAP_GRADS),
    _row(2, "llama", "DP 2, ZeRO-1", zero=True),
    _row(2, "llama", "DP 2, ZeRO-1 overlapped", zero=True, ddp=OVERLAP, quick=True),
    _row(2, "llama", "DP 2, micro-batches of 1", zero=True, micro_batch_size=1),
    _row(2, "llama", "TP 2", cut={"tp": 2}),
    _row(2, "llama", "TP 2 + SP", cut=TP2, quick=True),
    _row(2, "llama", "PP 2", cut={"pp": 2}),
    _row(2, "llama", "PP 2 x VP 2", cut={"pp": 2, "vp": 2}, quick=True),
    _row(
        2,
        "llama",
        "PP 2, uneven: 3 layers and 1",
        cut={"pp": 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1},
    ),
    _row(2, "llama", "PP 2, layout Et\\|tttL", cut={"pp": 2, "pipeline_model_parallel_layout": "Et|tttL"}),
    _row(
        2,
        "llama",
        "PP 2, embedding and loss count as layers",
        cut={
            "pp": 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    _row(2, "llama", "CP 2, all-gather", cut={"cp": 2}, config=GATHER),
    _row(2, "llama", "CP 2, ring", cut={"cp": 2}, config=RING, quick=True),
    _row(2, "llama", "CP 2, heads shared out (a2a)", cut={"cp": 2}, config=HEADS),
    _row(2, "llama", "TP 2 + SP, full recomputation", cut=TP2, config=FULL),
    _row(2, "llama", "TP 2 + SP, selective recomputation", cut=TP2, config=SELECTIVE),
    _row(2, "llama", "PP 2, full recomputation", cut={"pp": 2}, config=FULL),
    _row(2, "llama", "CP 2 ring, selective recomputation", cut={"cp": 2}, config=RING | SELECTIVE),
    _row(2, "llama, mean over tokens", "DP 2, ZeRO-1", zero=True),
    _row(2, "llama, mean over tokens", "TP 2 + SP", cut=TP2),
    _row(2, "llama, mean over tokens", "CP 2, ring", cut={"cp": 2}, config=RING),
    _row(2, "llama, padded vocabulary", "TP 2", cut={"tp": 2}),
    _row(2, "llama, padded vocabulary", "TP 2 + SP", cut=TP2, quick=True),
    _row(2, "llama, padded vocabulary", "PP 2", cut={"pp": 2}),
    _row(2, "llama, sgd", "DP 2", ddp=OVERLAP_GRADS),
    _row(2, "llama, sgd", "TP 2 + SP", cut=TP2),
    _row(2, "llama, sgd", "PP 2", cut={"pp": 2}),
    _row(2, "llama, dropout", "TP 2", cut={"tp": 2}),
    _row(2, "llama, packed", "DP 2, ZeRO-1", zero=True, **ONE),
    _row(2, "llama, packed", "TP 2 + SP", cut=TP2, **ONE),
    _row(2, "llama, packed", "PP 2", cut={"pp": 2}, **ONE),
    _row(2, "llama, packed", "CP 2, all-gather", cut={"cp": 2}, config=GATHER, **ONE),
    _row(2, "llama, packed", "CP 2, ring", cut={"cp": 2}, config=RING, **ONE),
    _row(2, "llama, LoRA", "DP 2, ZeRO-1 overlapped", zero=True, ddp=OVERLAP),
    _row(2, "llama, LoRA", "TP 2", cut={"tp": 2}),
    _row(2, "llama, LoRA", "TP 2 + SP", cut=TP2, quick=True),
    _row(2, "llama, LoRA", "TP 2 + SP, full recomputation", cut=TP2, config=FULL),
    _row(2, "llama, LoRA", "PP 2 x VP 2", cut={"pp": 2, "vp": 2}),
    _row(2, "llama, LoRA", "CP 2, ring", cut={"cp": 2}, config=RING),
    _row(2, "llama, LoRA", "FSDP2", cut=FSDP2),
    _row(2, "llama, canonical LoRA", "TP 2 + SP", cut=TP2),
    _row(2, "llama, DoRA", "TP 2 + SP", cut=TP2),
    _row(2, "llama, DoRA", "PP 2 x VP 2", cut={"pp": 2, "vp": 2}),
    _row(2, "llama, DoRA", "CP 2, ring", cut={"cp": 2}, config=RING),
    _row(2, "llama, DoRA", "FSDP2", cut=FSDP2),
    _row(2, "mixtral, LoRA", "EP 2", cut={"ep": 2}),
    _row(2, "mixtral, LoRA", "TP 2 + SP, experts cut too (ETP 2)", cut=TP2),
    _row(2, "mixtral, DoRA", "EP 2", cut={"ep": 2}),
    _row(2, "gpt, tied", "DP 2, ZeRO-1", zero=True),
    _row(2, "gpt, tied", "TP 2 + SP", cut=TP2),
    _row(2, "gpt, tied", "PP 2", cut={"pp": 2}, quick=True),
    _row(2, "gpt, tied", "PP 2 x VP 2", cut={"pp": 2, "vp": 2}),
    _row(2, "gpt, tied", "CP 2, ring", cut={"cp": 2}, config=RING),
    _row(2, "gpt, tied, padded vocabulary", "TP 2 + SP", cut=TP2),
    _row(2, "gpt, tied, padded vocabulary", "PP 2", cut={"pp": 2}),
    _row(2, "gemma2", "TP 2 + SP", cut=TP2),
    _row(2, "gemma2", "PP 2", cut={"pp": 2}),
    _row(2, "gemma2", "CP 2, ring", cut={"cp": 2}, config=RING),
    _row(2, "gemma2", "CP 2, all-gather", cut={"cp": 2}, config=GATHER),
    _row(2, "mixtral", "DP 2, every expert on every rank", zero=True),
    _row(2, "mixtral", "EP 2, all-to-all", cut={"ep": 2}, quick=True),
    _row(2, "mixtral", "EP 2, all-gather dispatch", cut={"ep": 2}, config={"moe_token_dispatcher_type": "allgather"}),
    _row(2, "mixtral", "EP 2, grouped products", cut={"ep": 2}, config={"moe_grouped_gemm": True}, zero=True),
    _row(2, "mixtral", "TP 2 + SP, experts cut too (ETP 2)", cut=TP2),
    _row(2, "mixtral", "TP 2 + SP, EP 2, ETP 1", cut=TP2 | {"ep": 2, "etp": 1}),
    _row(2, "mixtral", "PP 2", cut={"pp": 2}),
    _row(2, "mixtral", "CP 2 ring", cut={"cp": 2}, config=RING),
    _row(2, "mixtral", "CP 2 ring, EP 2", cut={"cp": 2, "ep": 2}, config=RING),
    _row(2, "deepseek", "DP 2, ZeRO-1", zero=True),
    _row(2, "deepseek", "TP 2 + SP", cut=TP2),
    _row(2, "deepseek", "TP 2 + SP, EP 2, ETP 1", cut=TP2 | {"ep": 2, "etp": 1}),
    _row(2, "deepseek", "EP 2", cut={"ep": 2}),
    _row(
        2,
        "deepseek",
        "EP 2, shared experts beside the dispatch",
        cut={"ep": 2},
        config={"moe_shared_expert_overlap": True},
    ),
    _row(2, "deepseek", "PP 2", cut={"pp": 2}),
    _row(2, "deepseek", "PP 2 x VP 2", cut={"pp": 2, "vp": 2}),
    _row(2, "deepseek", "CP 2, all-gather", cut={"cp": 2}, config=GATHER),
    _row(2, "deepseek", "CP 2, ring", cut={"cp": 2}, config=RING),
    _row(2, "deepseek", "CP 2, heads shared out (a2a)", cut={"cp": 2}, config=HEADS),
    _row(2, "deepseek", "TP 2 without SP", cut={"tp": 2}, refused="needs sequence_parallel=True"),
    _row(2, "deepseek, multi-token", "TP 2 + SP", cut=TP2),
    _row(2, "deepseek, multi-token", "PP 2", cut={"pp": 2}),
    _row(2, "deepseek, multi-token", "EP 2", cut={"ep": 2}),
    _row(2, "deepseek, multi-token", "CP 2, ring", cut={"cp": 2}, config=RING, quick=True),
    _row(2, "deepseek, multi-token", "CP 2, all-gather", cut={"cp": 2}, config=GATHER),
    _row(2, "deepseek, multi-token, mean over tokens", "CP 2, ring", cut={"cp": 2}, config=RING),
    _row(2, "deepseek, multi-token, padded vocabulary", "TP 2 + SP", cut=TP2),
]
FOUR = [
    _row(4, "llama", "DP 4, ZeRO-1 overlapped", zero=True, ddp=OVERLAP, **ONE),
    _row(
        4,
        "llama",
        "DP 4, ZeRO-1 in 2 instances",
        zero=True,
        cut={"num_distributed_optimizer_instances": 2},
        ddp=OVERLAP,
    ),
    _row(4, "llama", "TP 4 + SP", cut=TP4),
    _row(4, "llama", "PP 4", cut={"pp": 4}),
    _row(4, "llama, 8 layers", "PP 4 x VP 2", cut={"pp": 4, "vp": 2}),
    _row(
        4,
        "llama",
        "PP 4, stages of their own for embedding and loss",
        cut={"pp": 4, "pipeline_model_parallel_layout": "E|tt|tt|L"},
    ),
    _row(4, "llama", "CP 4, ring", cut={"cp": 4}, config=RING),
    _row(4, "llama", "CP 4, all-gather", cut={"cp": 4}, config=GATHER),
    _row(4, "llama", "TP 2 + SP, DP 2, ZeRO-1 overlapped", cut=TP2, zero=True, ddp=OVERLAP),
    _row(4, "llama", "TP 2 + SP, PP 2", cut=TP2 | {"pp": 2}),
    _row(4, "llama", "TP 2 + SP, PP 2 x VP 2", cut=TP2 | {"pp": 2, "vp": 2}),
    _row(4, "llama", "PP 2 x VP 2, DP 2, ZeRO-1 overlapped", cut={"pp": 2, "vp": 2}, zero=True, ddp=OVERLAP),
    _row(4, "llama", "CP 2 ring, TP 2 + SP", cut=TP2 | {"cp": 2}, config=RING),
    _row(4, "llama", "CP 2 all-gather, PP 2", cut={"cp": 2, "pp": 2}, config=GATHER),
    _row(4, "llama", "CP 2 ring, DP 2, ZeRO-1", cut={"cp": 2}, config=RING, zero=True),
    _row(4, "llama, sgd", "TP 2 + SP, PP 2", cut=TP2 | {"pp": 2}),
    _row(4, "llama, packed", "CP 2 ring, TP 2 + SP", cut=TP2 | {"cp": 2}, config=RING, **ONE),
    _row(4, "gpt, tied", "TP 2 + SP, PP 2", cut=TP2 | {"pp": 2}),
    _row(4, "gpt, tied, padded vocabulary", "TP 2 + SP, PP 2", cut=TP2 | {"pp": 2}),
    _row(4, "gpt, tied", "PP 4", cut={"pp": 4}),
    _row(4, "gpt, tied", "PP 2 x VP 2, DP 2, ZeRO-1 overlapped", cut={"pp": 2, "vp": 2}, zero=True, ddp=OVERLAP),
    _row(4, "mixtral", "EP 4", cut={"ep": 4}),
    _row(4, "mixtral", "EP 2, DP 2 of experts, ZeRO-1", cut={"ep": 2}, zero=True, ddp=OVERLAP),
    _row(4, "mixtral", "EP 2, PP 2", cut={"ep": 2, "pp": 2}),
    _row(4, "mixtral", "TP 2 + SP, EP 2, ETP 2", cut=TP2 | {"ep": 2}),
    _row(4, "mixtral", "TP 2 + SP, EP 4, ETP 1, ZeRO-1", cut=TP2 | {"ep": 4, "etp": 1}, zero=True),
    _row(4, "mixtral", "CP 2 ring, TP 2 + SP, EP 4, ETP 1", cut=TP2 | {"cp": 2, "ep": 4, "etp": 1}, config=RING),
    _row(4, "deepseek", "TP 2 + SP, PP 2", cut=TP2 | {"pp": 2}),
    _row(4, "deepseek", "TP 2 + SP, EP 2, ETP 1, PP 2", cut=TP2 | {"ep": 2, "etp": 1, "pp": 2}),
    _row(4, "deepseek", "CP 2 ring, TP 2 + SP, EP 2, ETP 1", cut=TP2 | {"cp": 2, "ep": 2, "etp": 1}, config=RING),
    _row(
        4,
        "deepseek",
        "EP 2, PP 2, shared experts beside the dispatch",
        cut={"ep": 2, "pp": 2},
        config={"moe_shared_expert_overlap": True},
    ),
    _row(4, "deepseek, multi-token", "TP 2 + SP, PP 2", cut=TP2 | {"pp": 2}),
    _row(4, "deepseek, multi-token", "CP 2 ring, TP 2 + SP", cut=TP2 | {"cp": 2}, config=RING),
]
EIGHT = [
    _row(8, "llama", "DP 8, ZeRO-1 overlapped", zero=True, ddp=OVERLAP, **ONE),
    _row(8, "llama", "TP 2 + SP, PP 2, DP 2, ZeRO-1 overlapped", cut=TP2 | {"pp": 2}, zero=True, ddp=OVERLAP),
    _row(8, "llama", "TP 2 + SP, PP 2 x VP 2, DP 2, ZeRO-1", cut=TP2 | {"pp": 2, "vp": 2}, zero=True),
    _row(8, "llama", "TP 2 + SP, CP 2 ring, PP 2", cut=TP2 | {"cp": 2, "pp": 2}, config=RING),
    _row(
        8,
        "llama",
        "TP 2 + SP, CP 2 ring, DP 2, ZeRO-1 overlapped",
        cut=TP2 | {"cp": 2},
        config=RING,
        zero=True,
        ddp=OVERLAP,
    ),
    _row(8, "llama", "PP 2, CP 2 all-gather, DP 2, ZeRO-1", cut={"pp": 2, "cp": 2}, config=GATHER, zero=True),
    _row(8, "llama", "TP 4 + SP, PP 2", cut=TP4 | {"pp": 2}),
    _row(8, "llama", "TP 2 + SP, PP 4, full recomputation", cut=TP2 | {"pp": 4}, config=FULL),
    _row(8, "gpt, tied", "TP 2 + SP, PP 2, DP 2, ZeRO-1 overlapped", cut=TP2 | {"pp": 2}, zero=True, ddp=OVERLAP),
    _row(8, "mixtral", "TP 2 + SP, EP 2, ETP 2, DP 2 of experts, ZeRO-1", cut=TP2 | {"ep": 2}, zero=True),
    _row(8, "mixtral", "EP 4, PP 2, ZeRO-1 overlapped", cut={"ep": 4, "pp": 2}, zero=True, ddp=OVERLAP),
    _row(8, "mixtral", "TP 2 + SP, PP 2, EP 2, ETP 1, DP 2, ZeRO-1", cut=TP2 | {"pp": 2, "ep": 2, "etp": 1}, zero=True),
    _row(
        8,
        "deepseek",
        "TP 2 + SP, CP 2 ring, PP 2, EP 4, ETP 1",
        cut=TP2 | {"cp": 2, "pp": 2, "ep": 4, "etp": 1},
        config=RING,
    ),
    _row(8, "deepseek", "EP 4, PP 2 x VP 2", cut={"ep": 4, "pp": 2, "vp": 2}, **ONE),
]
IN_BF16 = [
    _row(2, "llama", "DP 2, ZeRO-1 overlapped", zero=True, ddp=OVERLAP, **BF16),
    _row(2, "llama", "TP 2 + SP", cut=TP2, **BF16),
    _row(2, "llama", "PP 2", cut={"pp": 2}, **BF16),
    _row(2, "llama", "CP 2, ring", cut={"cp": 2}, config=RING, **BF16),
    _row(2, "gpt, tied", "TP 2 + SP", cut=TP2, **BF16),
    _row(4, "gpt, tied", "TP 2 + SP, PP 2", cut=TP2 | {"pp": 2}, **BF16),
    _row(2, "mixtral", "EP 2", cut={"ep": 2}, **BF16),
    _row(4, "mixtral", "TP 2 + SP, EP 4, ETP 1, ZeRO-1", cut=TP2 | {"ep": 4, "etp": 1}, zero=True, **BF16),
    _row(2, "deepseek", "TP 2 + SP", cut=TP2, **BF16),
    _row(2, "deepseek", "EP 2", cut={"ep": 2}, **BF16),
    _row(4, "deepseek", "TP 2 + SP, EP 2, ETP 1, PP 2", cut=TP2 | {"ep": 2, "etp": 1, "pp": 2}, **BF16),
    _row(8, "llama", "TP 2 + SP, PP 2, DP 2, ZeRO-1 overlapped", cut=TP2 | {"pp": 2}, zero=True, ddp=OVERLAP, **BF16),
]
SHARDED = [
    _row(2, "llama", "FSDP2", cut=FSDP2),
    _row(2, "llama", "FSDP2, CP 2 all-gather", cut=FSDP2 | {"cp": 2}, config=GATHER),
    _row(2, "llama", "FSDP2, full recomputation", cut=FSDP2, config=FULL),
    _row(2, "llama", "FSDP", cut=FSDP),
    _row(2, "llama", "Megatron-FSDP", cut=MEGATRON, **ALL),
    _row(2, "llama", "Megatron-FSDP, ZeRO-2", cut=MEGATRON, **GRADS),
    _row(2, "llama", "Megatron-FSDP, ZeRO-1", cut=MEGATRON, **STATE),
    _row(2, "llama", "Megatron-FSDP, CP 2 ring", cut=MEGATRON | {"cp": 2}, config=RING, **ALL),
    _row(2, "llama", "Megatron-FSDP, full recomputation", cut=MEGATRON, config=FULL, **ALL),
    _row(
        2,
        "llama",
        "Megatron-FSDP, PP 2",
        cut=MEGATRON | {"pp": 2},
        refused="lays its mesh over tensor-, context- and data-parallel ranks only",
        **ALL,
    ),
    _row(2, "llama, mean over tokens", "FSDP2", cut=FSDP2),
    _row(2, "llama, mean over tokens", "FSDP", cut=FSDP),
    _row(2, "llama, mean over tokens", "Megatron-FSDP", cut=MEGATRON, **ALL),
    _row(2, "llama, packed", "FSDP2", cut=FSDP2, **ONE),
    _row(2, "llama, packed", "Megatron-FSDP", cut=MEGATRON, **ALL, **ONE),
    _row(2, "gpt, tied", "FSDP2", cut=FSDP2),
    _row(2, "gpt, tied", "FSDP", cut=FSDP),
    _row(2, "gpt, tied", "Megatron-FSDP", cut=MEGATRON, **ALL),
    _row(2, "llama, padded vocabulary", "FSDP2", cut=FSDP2),
    _row(2, "llama, padded vocabulary", "FSDP", cut=FSDP),
    _row(2, "llama, padded vocabulary", "Megatron-FSDP", cut=MEGATRON, **ALL),
    _row(2, "mixtral", "FSDP2", cut=FSDP2),
    _row(2, "mixtral", "FSDP", cut=FSDP),
    _row(2, "mixtral", "Megatron-FSDP", cut=MEGATRON, **ALL),
    _row(2, "mixtral", "Megatron-FSDP, EP 2", cut=MEGATRON | {"ep": 2}, refused="leaves one rank per expert", **ALL),
    _row(2, "deepseek", "FSDP2", cut=FSDP2, quick=True),
    _row(2, "deepseek", "FSDP", cut=FSDP),
    _row(2, "deepseek", "Megatron-FSDP", cut=MEGATRON, **ALL),
    _row(2, "deepseek, multi-token", "FSDP2", cut=FSDP2),
    _row(2, "deepseek, multi-token", "Megatron-FSDP", cut=MEGATRON, **ALL),
    _row(4, "llama", "FSDP2, DP 4", cut=FSDP2),
    _row(4, "llama", "FSDP2, CP 2 ring, DP 2", cut=FSDP2 | {"cp": 2}, config=RING),
    _row(4, "llama", "Megatron-FSDP, TP 2 + SP, DP 2", cut=MEGATRON | TP2, **ALL),
    _row(4, "llama", "Megatron-FSDP, ZeRO-2, TP 2 + SP, DP 2", cut=MEGATRON | TP2, **GRADS),
    _row(4, "llama", "Megatron-FSDP, ZeRO-1, TP 2 + SP, DP 2", cut=MEGATRON | TP2, **STATE),
    _row(4, "gpt, tied", "Megatron-FSDP, TP 2 + SP, DP 2", cut=MEGATRON | TP2, **ALL),
    _row(4, "mixtral", "Megatron-FSDP, EP 2, DP 2 of experts", cut=MEGATRON | {"ep": 2}, **ALL),
    _row(4, "mixtral", "Megatron-FSDP, TP 2 + SP, EP 2, ETP 1", cut=MEGATRON | TP2 | {"ep": 2, "etp": 1}, **ALL),
    _row(4, "deepseek", "Megatron-FSDP, TP 2 + SP, DP 2", cut=MEGATRON | TP2, **ALL),
    _row(4, "deepseek", "Megatron-FSDP, EP 2, DP 2 of experts", cut=MEGATRON | {"ep": 2}, **ALL),
    _row(8, "llama", "FSDP2, DP 8", cut=FSDP2, **ONE),
    _row(8, "llama", "Megatron-FSDP, DP 8", cut=MEGATRON, **ALL, **ONE),
    _row(8, "llama", "Megatron-FSDP, TP 2 + SP, CP 2 ring, DP 2", cut=MEGATRON | TP2 | {"cp": 2}, config=RING, **ALL),
]
SHARDED_IN_BF16 = [
    _row(2, "llama", "FSDP2", cut=FSDP2, **BF16),
    _row(2, "llama", "FSDP", cut=FSDP, **BF16),
    _row(2, "llama", "Megatron-FSDP", cut=MEGATRON, **ALL, **BF16),
]
ROWS: list[Row] = TWO + FOUR + EIGHT + SHARDED + IN_BF16 + SHARDED_IN_BF16
