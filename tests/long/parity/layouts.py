# SPDX-License-Identifier: Apache-2.0
"""The rows of the parity table, as data: a model, a layout, and the settings the layout is run with.

The name of a layout says its settings (`settings`). A row that must be refused names the words of the refusal; it is part of the
table like any other.
"""

import re
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


RING, GATHER, HEADS = {"cp_comm_type": "p2p"}, {"cp_comm_type": "all_gather"}, {"cp_comm_type": "a2a"}
# Several buckets per model, so that reductions really run beside the backward pass.
OVERLAP_GRADS: dict[str, Any] = {"overlap_grad_reduce": True, "bucket_size": 5000}
OVERLAP = OVERLAP_GRADS | {"overlap_param_gather": True}
# One sample at a time, where samples are packed, or where so many ranks share out a global batch.
ONE = {"micro_batch_size": 1}
BF16 = {"precision": "bf16-mixed"}
CONFIGS: dict[str, dict[str, Any]] = {
    "ring": RING,
    "all-gather(?! dispatch)": GATHER,
    "a2a": HEADS,
    "full recomputation": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective recomputation": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp", "layernorm"],
    },
    "all-gather dispatch": {"moe_token_dispatcher_type": "allgather"},
    "grouped products": {"moe_grouped_gemm": True},
    "shared experts beside the dispatch": {"moe_shared_expert_overlap": True},
}
"""Settings of the model, by words of a layout's name."""


def settings(layout: str) -> dict[str, Any]:
    """What a layout's name says, as arguments of `Run`."""
    sizes = {axis.lower(): int(size) for axis, size in re.findall(r"(?<!\()\b(TP|PP|VP|CP|EP|ETP) (\d)", layout)}
    if sizes.get("etp") == sizes.get("tp"):
        sizes.pop("etp", None)  # as it is unless set
    cut: dict[str, Any] = {LAYOUT_FIELDS[axis]: size for axis, size in sizes.items()}
    cut |= {"sequence_parallel": True} if "+ SP" in layout else {}
    config = {name: value for words, own in CONFIGS.items() if re.search(words, layout) for name, value in own.items()}
    zero, ddp = "ZeRO-1" in layout, {}
    if layout.startswith("FSDP"):
        cut["kind"] = f"{re.split('[, ]', layout)[0]}Strategy"
    elif layout.startswith("Megatron-FSDP"):
        sharded = "optim" if zero else "optim_grads" if "ZeRO-2" in layout else "optim_grads_params"
        cut, zero, ddp = cut | {"fsdp": "megatron"}, True, {"data_parallel_sharding_strategy": sharded}
    elif "overlapped" in layout:
        ddp = OVERLAP if zero else OVERLAP_GRADS
    return {"strategy": cut, "config": config, "zero": zero, "ddp": ddp}


def _rows(ranks: int, model: str, layouts: str, *, refused: str | None = None, **own: Any) -> list[Row]:
    """A row for each of ``layouts``, which semicolons separate. One with a star runs in the default test run, too. ``own``:
    settings that the names don't say."""
    if "packed" in model:
        own |= ONE
    rows = []
    for name in layouts.split("; "):
        layout = name.removeprefix("*")
        said = settings(layout)
        for field, value in own.items():
            said[field] = said.get(field, {}) | value if isinstance(value, dict) else value
        run = Run(model=model, **said)
        rows.append(Row(layout=layout, ranks=ranks, run=run, quick=name.startswith("*"), refused=refused))
    return rows


TWO = [
    *_rows(2, "llama", "DP 2; DP 2, overlapped reduction; DP 2, ZeRO-1; *DP 2, ZeRO-1 overlapped"),
    *_rows(2, "llama", "DP 2, micro-batches of 1", zero=True, **ONE),
    *_rows(2, "llama", "TP 2; *TP 2 + SP; PP 2; *PP 2 x VP 2"),
    *_rows(
        2, "llama",
        "PP 2, uneven: 3 layers and 1",
        strategy={"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1},
    ),
    *_rows(2, "llama", "PP 2, layout Et\\|tttL", strategy={"pipeline_model_parallel_layout": "Et|tttL"}),
    *_rows(
        2, "llama",
        "PP 2, embedding and loss count as layers",
        strategy={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    ),
    *_rows(
        2, "llama",
        "CP 2, all-gather; *CP 2, ring; CP 2, heads shared out (a2a); TP 2 + SP, full recomputation; "
        "TP 2 + SP, selective recomputation; PP 2, full recomputation; CP 2 ring, selective recomputation",
    ),
    *_rows(2, "llama, mean over tokens", "DP 2, ZeRO-1; TP 2 + SP; CP 2, ring"),
    *_rows(2, "llama, padded vocabulary", "TP 2; *TP 2 + SP; PP 2"),
    *_rows(2, "llama, sgd", "DP 2", ddp=OVERLAP_GRADS),
    *_rows(2, "llama, sgd", "TP 2 + SP; PP 2"),
    *_rows(2, "llama, dropout", "TP 2"),
    *_rows(2, "llama, packed", "DP 2, ZeRO-1; TP 2 + SP; PP 2; CP 2, all-gather; CP 2, ring"),
    *_rows(
        2, "llama, LoRA",
        "DP 2, ZeRO-1 overlapped; TP 2; *TP 2 + SP; TP 2 + SP, full recomputation; PP 2 x VP 2; CP 2, ring; FSDP2",
    ),
    *_rows(2, "llama, canonical LoRA", "TP 2 + SP"),
    *_rows(2, "llama, DoRA", "TP 2 + SP; PP 2 x VP 2; CP 2, ring; FSDP2"),
    *_rows(2, "mixtral, LoRA", "EP 2; TP 2 + SP, experts cut too (ETP 2)"),
    *_rows(2, "mixtral, DoRA", "EP 2"),
    *_rows(2, "gpt, tied", "DP 2, ZeRO-1; TP 2 + SP; *PP 2; PP 2 x VP 2; CP 2, ring"),
    *_rows(2, "gpt, tied, padded vocabulary", "TP 2 + SP; PP 2"),
    *_rows(2, "gemma2", "TP 2 + SP; PP 2; CP 2, ring; CP 2, all-gather"),
    *_rows(2, "mixtral", "DP 2, every expert on every rank", zero=True),
    *_rows(2, "mixtral", "*EP 2, all-to-all; EP 2, all-gather dispatch"),
    *_rows(2, "mixtral", "EP 2, grouped products", zero=True),
    *_rows(
        2, "mixtral",
        "TP 2 + SP, experts cut too (ETP 2); TP 2 + SP, EP 2, ETP 1; PP 2; CP 2 ring; CP 2 ring, EP 2",
    ),
    *_rows(
        2, "deepseek",
        "DP 2, ZeRO-1; TP 2 + SP; TP 2 + SP, EP 2, ETP 1; EP 2; EP 2, shared experts beside the dispatch; PP 2; "
        "PP 2 x VP 2; CP 2, all-gather; CP 2, ring; CP 2, heads shared out (a2a)",
    ),
    *_rows(2, "deepseek", "TP 2 without SP", refused="needs sequence_parallel=True"),
    *_rows(2, "deepseek, multi-token", "TP 2 + SP; PP 2; EP 2; *CP 2, ring; CP 2, all-gather"),
    *_rows(2, "deepseek, multi-token, mean over tokens", "CP 2, ring"),
    *_rows(2, "deepseek, multi-token, padded vocabulary", "TP 2 + SP"),
]  # fmt: skip
FOUR = [
    *_rows(4, "llama", "DP 4, ZeRO-1 overlapped", **ONE),
    *_rows(4, "llama", "DP 4, ZeRO-1 in 2 instances", strategy={"num_distributed_optimizer_instances": 2}, ddp=OVERLAP),
    *_rows(4, "llama", "TP 4 + SP; PP 4"),
    *_rows(4, "llama, 8 layers", "PP 4 x VP 2"),
    *_rows(
        4, "llama",
        "PP 4, stages of their own for embedding and loss", strategy={"pipeline_model_parallel_layout": "E|tt|tt|L"},
    ),
    *_rows(
        4, "llama",
        "CP 4, ring; CP 4, all-gather; TP 2 + SP, DP 2, ZeRO-1 overlapped; TP 2 + SP, PP 2; "
        "TP 2 + SP, PP 2 x VP 2; PP 2 x VP 2, DP 2, ZeRO-1 overlapped; CP 2 ring, TP 2 + SP; "
        "CP 2 all-gather, PP 2; CP 2 ring, DP 2, ZeRO-1",
    ),
    *_rows(4, "llama, sgd", "TP 2 + SP, PP 2"),
    *_rows(4, "llama, packed", "CP 2 ring, TP 2 + SP"),
    *_rows(4, "gpt, tied", "TP 2 + SP, PP 2"),
    *_rows(4, "gpt, tied, padded vocabulary", "TP 2 + SP, PP 2"),
    *_rows(4, "gpt, tied", "PP 4; PP 2 x VP 2, DP 2, ZeRO-1 overlapped"),
    *_rows(4, "mixtral", "EP 4"),
    *_rows(4, "mixtral", "EP 2, DP 2 of experts, ZeRO-1", ddp=OVERLAP),
    *_rows(
        4, "mixtral",
        "EP 2, PP 2; TP 2 + SP, EP 2, ETP 2; TP 2 + SP, EP 4, ETP 1, ZeRO-1; CP 2 ring, TP 2 + SP, EP 4, ETP 1",
    ),
    *_rows(
        4, "deepseek",
        "TP 2 + SP, PP 2; TP 2 + SP, EP 2, ETP 1, PP 2; CP 2 ring, TP 2 + SP, EP 2, ETP 1; "
        "EP 2, PP 2, shared experts beside the dispatch",
    ),
    *_rows(4, "deepseek, multi-token", "TP 2 + SP, PP 2; CP 2 ring, TP 2 + SP"),
]  # fmt: skip
EIGHT = [
    *_rows(8, "llama", "DP 8, ZeRO-1 overlapped", **ONE),
    *_rows(
        8, "llama",
        "TP 2 + SP, PP 2, DP 2, ZeRO-1 overlapped; TP 2 + SP, PP 2 x VP 2, DP 2, ZeRO-1; "
        "TP 2 + SP, CP 2 ring, PP 2; TP 2 + SP, CP 2 ring, DP 2, ZeRO-1 overlapped; "
        "PP 2, CP 2 all-gather, DP 2, ZeRO-1; TP 4 + SP, PP 2; TP 2 + SP, PP 4, full recomputation",
    ),
    *_rows(8, "gpt, tied", "TP 2 + SP, PP 2, DP 2, ZeRO-1 overlapped"),
    *_rows(
        8, "mixtral",
        "TP 2 + SP, EP 2, ETP 2, DP 2 of experts, ZeRO-1; EP 4, PP 2, ZeRO-1 overlapped; "
        "TP 2 + SP, PP 2, EP 2, ETP 1, DP 2, ZeRO-1",
    ),
    *_rows(8, "deepseek", "TP 2 + SP, CP 2 ring, PP 2, EP 4, ETP 1"),
    *_rows(8, "deepseek", "EP 4, PP 2 x VP 2", **ONE),
]  # fmt: skip
IN_BF16 = [
    *_rows(2, "llama", "DP 2, ZeRO-1 overlapped; TP 2 + SP; PP 2; CP 2, ring", **BF16),
    *_rows(2, "gpt, tied", "TP 2 + SP", **BF16),
    *_rows(4, "gpt, tied", "TP 2 + SP, PP 2", **BF16),
    *_rows(2, "mixtral", "EP 2", **BF16),
    *_rows(4, "mixtral", "TP 2 + SP, EP 4, ETP 1, ZeRO-1", **BF16),
    *_rows(2, "deepseek", "TP 2 + SP; EP 2", **BF16),
    *_rows(4, "deepseek", "TP 2 + SP, EP 2, ETP 1, PP 2", **BF16),
    *_rows(8, "llama", "TP 2 + SP, PP 2, DP 2, ZeRO-1 overlapped", **BF16),
]  # fmt: skip
SHARDED = [
    *_rows(
        2, "llama",
        "FSDP2; FSDP2, CP 2 all-gather; FSDP2, full recomputation; FSDP; Megatron-FSDP; Megatron-FSDP, ZeRO-2; "
        "Megatron-FSDP, ZeRO-1; Megatron-FSDP, CP 2 ring; Megatron-FSDP, full recomputation",
    ),
    *_rows(
        2, "llama",
        "Megatron-FSDP, PP 2", refused="lays its mesh over tensor-, context- and data-parallel ranks only",
    ),
    *_rows(2, "llama, mean over tokens", "FSDP2; FSDP; Megatron-FSDP"),
    *_rows(2, "llama, packed", "FSDP2; Megatron-FSDP"),
    *_rows(2, "gpt, tied", "FSDP2; FSDP; Megatron-FSDP"),
    *_rows(2, "llama, padded vocabulary", "FSDP2; FSDP; Megatron-FSDP"),
    *_rows(2, "mixtral", "FSDP2; FSDP; Megatron-FSDP"),
    *_rows(2, "mixtral", "Megatron-FSDP, EP 2", refused="leaves one rank per expert"),
    *_rows(2, "deepseek", "*FSDP2; FSDP; Megatron-FSDP"),
    *_rows(2, "deepseek, multi-token", "FSDP2; Megatron-FSDP"),
    *_rows(
        4, "llama",
        "FSDP2, DP 4; FSDP2, CP 2 ring, DP 2; Megatron-FSDP, TP 2 + SP, DP 2; "
        "Megatron-FSDP, ZeRO-2, TP 2 + SP, DP 2; Megatron-FSDP, ZeRO-1, TP 2 + SP, DP 2",
    ),
    *_rows(4, "gpt, tied", "Megatron-FSDP, TP 2 + SP, DP 2"),
    *_rows(4, "mixtral", "Megatron-FSDP, EP 2, DP 2 of experts; Megatron-FSDP, TP 2 + SP, EP 2, ETP 1"),
    *_rows(4, "deepseek", "Megatron-FSDP, TP 2 + SP, DP 2; Megatron-FSDP, EP 2, DP 2 of experts"),
    *_rows(8, "llama", "FSDP2, DP 8; Megatron-FSDP, DP 8", **ONE),
    *_rows(8, "llama", "Megatron-FSDP, TP 2 + SP, CP 2 ring, DP 2"),
]  # fmt: skip
SHARDED_IN_BF16 = [
    *_rows(2, "llama", "FSDP2; FSDP; Megatron-FSDP", **BF16),
]  # fmt: skip
ROWS: list[Row] = TWO + FOUR + EIGHT + SHARDED + IN_BF16 + SHARDED_IN_BF16
