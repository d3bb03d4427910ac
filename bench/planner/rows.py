# SPDX-License-Identifier: Apache-2.0
"""Published training speeds as the planner's input: each row's shape, job, and tokens per second and GPU.

A row states its layout. What software it ran on, and so which attention kernel and which overlaps, is said once per
source in `SOFTWARE`, from that source's own documentation; no constant of the planner depends on it.
"""

import csv
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.gpus import GPU, gpu
from nemo2.models.shape import ModelShape
from nemo2.models.walker import shape_of as read_shape
from nemo2.preflight.planner.job import Adapters, Job

_SQUAD = 250
"""Tokens of one of SQuAD's contexts with its question and answer, about."""
HERE = Path(__file__).parent

# Latent attention, dense layers and mixers, which the table of dimensions has no column for (arXiv 2412.19437, 4.2; the
# config.json of Moonlight-16B-A3B, Llama-4-Maverick-17B-128E, whose every second layer is dense, and of Nemotron 3 Nano).
EXTRA: dict[str, dict[str, Any]] = {
    "moonlight-16b-a3b": {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "dense_layers": 1},
    "deepseek-v3": {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_pos_emb_head_dim": 64,
        "dense_layers": 3,
        "mtp_num_layers": 1,
    },
    "llama4-maverick-400b-e128": {"dense_layers": 24},
    "nemotron3-nano-30b-a3b": {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "mamba_state_dim": 128,
        "mamba_num_groups": 8,
    },
}
# Megatron-LM before 2023: kept scores with one softmax kernel, nothing overlapped.
_EARLY_MEGATRON: dict[str, Any] = {
    "attention": "softmax",
    "sp": False,
    "overlap_grad": False,
    "overlap_param": False,
    "overlap_tp": False,
    "overlap_pp": False,
    "scattered_sends": True,  # SC21, section 4.1
}
_NO_MODEL_OVERLAP: dict[str, Any] = {"overlap_tp": False, "overlap_pp": False}
SOFTWARE: dict[str, dict[str, Any]] = {
    "arXiv 2104.04473": {**_EARLY_MEGATRON, "sharding": "replicated"},
    "arXiv 2205.05198": {**_EARLY_MEGATRON, "sharding": "replicated"},
    "bigscience": {**_EARLY_MEGATRON, "grad_bytes": 2},
    # Their own library: elementwise kernels unfused but for the RMS norm, where a row says so.
    # Its output layer gathers the logits of all ranks for torch's cross entropy (scaling: lm_head.py, cross_entropy.py).
    "Aleph-Alpha": {
        **_NO_MODEL_OVERLAP,
        "overlap_grad": False,
        "overlap_param": False,
        "grad_bytes": 2,
        "torch_loss": True,
    },
    "InternLM": {**_NO_MODEL_OVERLAP, "grad_bytes": 2, "sp": False, "compiled": False},
    # NeMo's recipes reduce gradients in bf16: 44.27 GB allocated of its 8B's log are 4 + 12/8 bytes a weight.
    "dgxc": {"grad_bytes": 2},
    "NeMo ": {"grad_bytes": 2},
    "litgpt": {"torch_loss": True, "attention": "flash2"},
    # PyTorch's FSDP and FlashAttention-2, without Transformer Engine.
    "mosaicml": {"sharding": "fsdp", "compiled": False, "attention": "flash2", "torch_loss": True},
    "foundation-model-stack": {"sharding": "fsdp", "attention": "flash2", "torch_loss": True},
}
_ALL_LINEAR = tuple((name, 1.0, 1.0) for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
ADAPTERS: dict[str, Adapters] = {
    # match_all_linear, dim 16: its examples/llm_finetune/llama3_1/llama3_1_8b_peft_benchmark.yaml. Parts have factors apart.
    "Automodel": Adapters(
        rank=16,
        beside=(
            ("linear_qkv", 1.0, 3.0),
            ("linear_proj", 1.0, 1.0),
            ("linear_fc1", 1.0, 2.0),
            ("linear_fc2", 1.0, 1.0),
        ),
    ),
    # Performance recipes of NeMo 2.0 narrow LoRA to linear_qkv (recipes/llama3_8b.py), as the Launcher's adapters are
    # (conf/peft/llama: attention_qkv).
    "dgxc": Adapters(rank=8, beside=_ALL_LINEAR[:1]),
    "NeMo ": Adapters(rank=32, beside=_ALL_LINEAR[:1]),
    "NeMo-Framework-Launcher": Adapters(rank=32, beside=_ALL_LINEAR[:1]),
}
"""The layers that LoRA adapted, by source. Other sources don't state them."""
PRECISION = {
    "bf16": "bf16",
    "fp16": "bf16",
    "bf16/fp16": "bf16",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "fp8_cs": "fp8",
    "nvfp4": "fp4",
}
_FAMILIES = (
    "dgxc",
    "Megatron-Bridge",
    "Megatron-LM",
    "Aleph",
    "bigscience",
    "InternLM",
    "mosaicml",
    "JAX-Toolbox",
    "nanotron",
    "foundation",
    "Automodel",
    "NeMo",
)
# Not the speed of a step: whole training runs with their restarts, one-off functional checks, regression tests of
# models so small that only the host's launching is measured.
_NOT_SPEED = ("whole-run", "latency-bound regression test", "so launch-bound")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. ``family`` names who measured. Tables of one project are left out together in
    cross-validation."""

    source: str
    family: str
    name: str
    shape: ModelShape
    job: Job
    measured: float
    notes: str


def rows(path: Path = HERE / "throughput_train.csv") -> Iterator[Row]:
    """The rows that state what the planner needs, with their tokens per second and GPU."""
    known = shapes()
    for row in csv.DictReader(path.open()):
        notes, measured = row["notes"], number(row["tokens_per_s_per_gpu"])
        functional = "functional verification" in notes and "(tuned" not in notes
        if not measured or functional or any(word in notes for word in _NOT_SPEED):
            continue
        shape, job = shape_of(row, known), job_of(row)
        if shape is None or job is None or not (row["tp"] or row["pp"] or job.sharding == "fsdp"):
            continue
        shape = _as_run(shape, job, measured, number(row["tflops_per_gpu"]))
        if shape.mixers:
            # One graph of a step, and the exchange beside another micro-batch, are for models of attention alone.
            job = dataclasses.replace(job, graphed_experts=False, fused_experts=False, overlap_ep=False)
        if job.gpus % (job.tp * job.pp * job.cp):
            continue
        yield Row(row["source"], family(row["source"]), row["model"], shape, job, measured, notes)


def _as_run(shape: ModelShape, job: Job, tokens: float, teraflops: Optional[float]) -> ModelShape:
    """The model without multi-token prediction, if the row's printed FLOPs exclude it."""
    without = dataclasses.replace(shape, further=())
    if not (shape.further and teraflops):
        return shape
    return min((shape, without), key=lambda one: abs(one.flops_per_token(job.seq) * tokens / 1e12 - teraflops))


def family(source: str) -> str:
    """The project that a source belongs to."""
    if source.startswith("arXiv"):
        return " ".join(source.split()[:2])
    return next((name for name in _FAMILIES if name in source), source[:24])


def decoder(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    gated: bool = True,
    tied: bool = False,
    experts: int = 0,
    topk: int = 0,
    moe_ffn: int = 0,
    shared_ffn: int = 0,
    dense_layers: int = 0,
    **fields: Any,
) -> ModelShape:
    """The shape of a decoder without biases, RMS-normed; ``fields``: what else its config has, by Megatron-Core's names."""
    config = SimpleNamespace(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=head_dim,
        ffn_hidden_size=ffn,
        gated_linear_unit=gated,
        share_embeddings_and_output_weights=tied,
        add_bias_linear=False,
        normalization="RMSNorm",
        position_embedding_type="rope",
        num_moe_experts=experts or None,
        moe_router_topk=topk,
        moe_ffn_hidden_size=moe_ffn or None,
        moe_shared_expert_intermediate_size=shared_ffn or None,
        moe_layer_freq=[0] * dense_layers + [1] * (layers - dense_layers),
        multi_latent_attention="kv_lora_rank" in fields,
        qk_head_dim=head_dim,
        v_head_dim=head_dim,
        **fields,
    )
    return read_shape(config, vocab)


def shapes() -> dict[str, ModelShape]:
    """Shapes of named models."""
    found = {}
    for row in csv.DictReader((HERE / "model_dims.csv").open()):
        size = {key: int(float(row[key] or 0)) for key in row if key not in ("model", "gated", "tied", "source")}
        experts = size["num_experts"]
        found[row["model"]] = decoder(
            layers=size["num_layers"],
            hidden=size["hidden"],
            heads=size["heads"],
            kv_heads=size["kv_heads"],
            head_dim=size["head_dim"],
            ffn=size["ffn"],
            vocab=size["vocab"],
            gated=row["gated"] == "yes",
            tied=row["tied"] == "yes",
            experts=experts,
            topk=size["topk"],
            moe_ffn=(size["moe_ffn"] or size["ffn"]) if experts else 0,
            shared_ffn=size["shared_ffn"],
            **EXTRA.get(row["model"], {}),
        )
    return found


def shape_of(row: dict[str, str], known: dict[str, ModelShape]) -> Optional[ModelShape]:
    """A row's model shape, by its model's name or from the sizes in its notes. None: neither determines it."""
    if row["model"] in known:
        return known[row["model"]]
    if proxy := re.fullmatch(r"(.*)-proxy-(\d+)L", row["model"]):
        return dataclasses.replace(known[proxy[1]], layers=known[proxy[1]].layers[: int(proxy[2])])
    said = _sizes(row["notes"])
    if not {"hidden", "layers"} <= set(said):
        return None
    hidden, heads = said["hidden"], said.get("heads", said["hidden"] // 128)
    if not heads or hidden % heads:
        return None
    return decoder(
        layers=said["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=said.get("ffn", 4 * hidden),
        vocab=said.get("vocab", 51200),
        gated="swiglu" in row["notes"],
        tied="untied" not in row["notes"],
    )


def job_of(row: dict[str, str]) -> Optional[Job]:
    """A row's job. None: the row lacks a size, or ran on hardware that the planner doesn't know."""
    notes = row["notes"]
    # The recipe of this comparison has micro-batches of one.
    micro = row["micro_batch"] or ("1" if "matched A/B of the 16-GPU recipe" in notes else "")
    need = [*(number(row[key]) for key in ("num_gpus", "seq_len", "global_batch")), number(micro)]
    precision = PRECISION.get(row["precision"])
    if precision is None or None in need:
        return None
    try:
        chip = gpu(row["gpu"])
    except ConfigError:
        return None
    gpus, seq, global_batch, micro_batch = (int(value or 0) for value in need)
    cut = {key: int(number(row[key]) or 1) for key in ("tp", "pp", "cp", "ep")}
    return Job(
        gpu=chip,
        gpus=gpus,
        seq=seq,
        global_batch=global_batch,
        micro_batch=micro_batch,
        precision=precision,
        vp=int(number(row["vpp"]) or 1),
        recompute=next((kind for kind in ("full", "selective") if row["recompute"].startswith(kind)), "none"),
        **cut,
        **_settings(row["source"], notes, row["precision"], chip),
    )


def _settings(source: str, notes: str, precision: str, chip: GPU) -> dict[str, Any]:
    """The software that a row's source and notes name."""
    settings: dict[str, Any] = {}
    for name, value in SOFTWARE.items():
        settings |= value if name in source else {}
    low = notes.lower()
    if stage := re.search(r"zero-(\d)", low):
        settings["sharding"] = {"0": "replicated", "3": "fsdp"}.get(stage[1], "zero1")
    if "fsdp" in low and "fsdp=0" not in low:
        settings["sharding"] = "fsdp"
    if kernel := re.search(r"kernel=([^;]*)", notes):
        name = kernel[1]
        settings["attention"] = (
            "eager"
            if name.startswith("torch")
            else "softmax"
            if name == "fused"
            else "flash1"
            if "v1" in name
            else "flash"
        )
        settings["compiled"] = "RMS" in name
        settings["sp"] = "sequence_parallel=True" in notes
    if "sequence parallel" in low:
        settings["sp"] = True
    if fabric := re.search(r"(\d+) Gbps node-node", notes):
        settings["network"] = int(fabric[1]) * 1e9 / 8 / 8  # of a machine of 8 GPUs, in bits
    if "4x100Gb" in notes:
        settings["network"] = 4 * 100e9 / 8 / 8
    settings |= _container(notes, precision, chip)
    if "deepep" in low or "hybridep" in low:
        settings["dispatch"] = "once"
    if "ep overlap" in low:
        settings["overlap_ep"] = "no ep overlap" not in low
    if "cuda graphs" in low:
        settings["cuda_graphs"] = True
    if etp := re.search(r"\betp=(\d+)", low):
        settings["etp"] = int(etp[1])
    if "task=lora" in low:
        settings["lora"] = True
        settings["adapters"] = next((one for name, one in ADAPTERS.items() if name in source), None)
    if "packed" in low or ("dgxc" in source and "ft_" in source):
        settings["document"] = _SQUAD  # NeMo's fine-tuning benchmarks pack SQuAD
    return settings


def _container(notes: str, precision: str, chip: GPU) -> dict[str, Any]:
    """Layouts of the performance recipes of a NeMo container, by Megatron-Bridge's releases v0.2.0 to v0.6.0 (25.11 to 26.08:
    scripts/performance/configs, and src/megatron/bridge/perf_recipes from v0.6.0 on)."""
    found = re.search(r"container=(\d+)\.(\d+)", notes)
    made = int(found[1]) * 100 + int(found[2]) if found else 2608 if "tuned performance recipe" in notes else 0
    if made < 2509:
        return {}
    settings: dict[str, Any] = {"grad_bytes": 2}
    if "tokendrop" in notes:
        settings |= {"capacity": True}
    elif made == 2509:
        settings |= {"dispatch": "once", "overlap_ep": True}  # DeepEP
    elif made >= 2601 or chip.domain > 8:
        settings |= {"dispatch": "once"}  # HybridEP
    if made >= 2511:
        settings |= {"cuda_graphs": True}  # of attention, router and mixers
    if made >= 2606 and precision == "mxfp8":
        # A whole step as one graph, cuDNN's fused grouped MLP, attention in 8 bits.
        settings |= {"overlap_ep": True, "graphed_experts": True, "fused_experts": True, "low_attention": True}
    return settings


def _sizes(notes: str) -> dict[str, int]:
    """``hidden=14400 vocab=250k`` as numbers. Several sources write BLOOM's 250,880 tokens as 250k."""
    found = {}
    for name, digits, thousands in re.findall(r"\b(hidden|layers|heads|vocab|ffn)[= ](\d+)(k?)\b", notes):
        found[name] = 250880 if (digits, thousands) == ("250", "k") else int(digits) * (1000 if thousands else 1)
    return found


def number(text: str) -> Optional[float]:
    return float(text) if text else None
