# SPDX-License-Identifier: Apache-2.0
"""Published memory peaks and out-of-memory reports as the planner's input."""

import csv
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from bench.planner.rows import EXTRA, HERE, SOFTWARE, decoder, family, number, shapes
from nemo2.base.gpus import gpu
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.job import Job

_COUNTS = ("num_gpus", "seq_len", "global_batch", "micro_batch", "tp", "pp", "vpp", "cp", "ep", "dp")
# Megatron-Bridge's pre-training recipes of these models (@600d069b, which the runs name): gradients in 16 bits, and of one the
# moments too.
_RECIPES: dict[str, dict[str, Any]] = {
    "moonlight-16b-a3b": {"grad_bytes": 2, "state_bytes": 8},
    "nemotron3-nano-30b-a3b": {"grad_bytes": 2},
}
_KERNELS = {
    "torch": "eager",
    "unfused": "softmax",
    "fused": "softmax",
    "flash": "flash",
    "flash_attentionv1.0.8": "flash1",
}


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One run, which may have run out of memory.

    Attributes: peak: The printed peak in GB. None: only the verdict is known. stage: the pipeline stage that was looked
        at; None: the fullest. used: the peak is what nvidia-smi shows, not torch's count.
    """

    source: str
    family: str
    name: str
    shape: ModelShape
    job: Job
    oom: bool
    peak: Optional[float]
    stage: Optional[int]
    used: bool
    notes: str


def memory_rows(path: Path = HERE / "memory_train.csv") -> Iterator[MemoryRow]:
    """The rows that state what the formula needs."""
    known = shapes()
    for row in csv.DictReader(path.open()):
        sizes = {key: int(number(row[key]) or 0) for key in _COUNTS}
        shape = _shape(row, known)
        gpus = sizes["num_gpus"] or sizes["dp"] * max(1, sizes["tp"]) * max(1, sizes["pp"]) * max(1, sizes["cp"])
        if shape is None or not (gpus and sizes["seq_len"] and sizes["micro_batch"]) or "offload" in row["notes"]:
            continue
        yield MemoryRow(
            source=row["source"],
            family=family(row["source"]),
            name=row["model"],
            shape=shape,
            job=_job(row, sizes, gpus),
            oom=row["oom"] == "yes",
            peak=number(row["peak_gb"]),
            stage=max(1, sizes["pp"]) - 1 if "last rank" in row["metric"] else None,
            used=any(words in row["metric"] for words in ("nvidia-smi", "max GPU RAM", "GPU memory")),
            notes=row["notes"],
        )


def _shape(row: dict[str, str], known: dict[str, ModelShape]) -> Optional[ModelShape]:
    if row["model"] in known:
        return known[row["model"]]
    if not (row["num_layers"] and row["heads"]):
        return None
    heads, hidden, experts = int(row["heads"]), int(row["hidden"]), int(number(row["num_experts"]) or 0)
    gated = "swiglu" in row["notes"].lower() or any(name in row["model"] for name in ("llama", "internlm"))
    return decoder(
        layers=int(row["num_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(number(row["kv_heads"]) or heads),
        head_dim=hidden // heads,
        ffn=int(row["ffn"]),
        vocab=int(row["vocab"]),
        gated=gated,
        tied="untied" not in row["notes"] and not gated,
        experts=experts,
        topk=int(number(row["topk"]) or 0),
        **_experts(row) if experts else {},
    )


def _experts(row: dict[str, str]) -> dict[str, int]:
    return {
        "moe_ffn": _said(row["notes"], "moe-ffn-hidden-size", int(row["ffn"])),
        "shared_ffn": _said(row["notes"], "moe-shared-expert-intermediate-size", 0),
        **EXTRA.get(row["model"], {}),
    }


def _job(row: dict[str, str], sizes: dict[str, int], gpus: int) -> Job:
    tp, pp, cp = (max(1, sizes[name]) for name in ("tp", "pp", "cp"))
    # Where the batch is not said: enough micro-batches to fill the pipeline.
    batch = sizes["global_batch"] or gpus // (tp * pp * cp) * sizes["micro_batch"] * max(8, pp)
    return Job(
        gpu=gpu(row["gpu"]),
        gpus=gpus,
        seq=sizes["seq_len"],
        global_batch=batch,
        micro_batch=sizes["micro_batch"],
        tp=tp,
        pp=pp,
        vp=max(1, sizes["vpp"]),
        cp=cp,
        ep=max(1, sizes["ep"]),
        # Megatron-Core uses the tensor-parallel size for experts if the world allows it.
        etp=_said(row["notes"], "expert-tensor-parallel-size", tp if tp * max(1, sizes["ep"]) <= gpus // pp else 1),
        precision="fp8" if row["precision"] == "fp8" else "bf16",
        **_settings(row),
    )


def _settings(row: dict[str, str]) -> dict[str, Any]:
    """The row's settings; its software's defaults where the row is silent."""
    settings: dict[str, Any] = {}
    for name, value in SOFTWARE.items():
        settings |= value if name in row["source"] else {}
    if "Megatron-Bridge" in row["source"]:
        settings |= _RECIPES.get(row["model"], {})
    kernel, notes, sharding = row["attention_kernel"], row["notes"], row["sharding"].lower()
    if kernel:
        settings["attention"] = _KERNELS.get(kernel, "flash")
    if "Aleph" in row["source"]:
        settings |= {"compiled": "RMS" in kernel, "sp": "sequence_parallel=True" in notes}
    if row["precision"] == "fp16":
        settings |= {"grad_bytes": 2, "state_bytes": 16}  # an fp32 copy of the gradients too
    if "unsharded fp32 gradient copy" in notes:
        settings["grad_bytes"] = 6
    if "Megatron-LM" in row["source"]:
        settings["sp"] = "SP" in notes.split("; ")
        settings["dropout"] = "swiglu" not in notes
    sharded = "fsdp" in sharding or "zero3" in sharding
    first = re.search(r"zero-?1|distributed", sharding)
    settings["sharding"] = "fsdp" if sharded else "zero1" if first else "replicated"
    settings["lora"] = "lora" in sharding
    kind, _, parts = row["recompute"].partition(": ")
    settings["recompute"] = next((name for name in ("full", "selective") if kind.startswith(name)), "none")
    if parts:
        settings["recomputed"] = tuple(parts.split(","))
    return settings


def _said(notes: str, name: str, default: int) -> int:
    found = re.search(rf"\b{name}=(\d+)", notes)
    return int(found[1]) if found else default
