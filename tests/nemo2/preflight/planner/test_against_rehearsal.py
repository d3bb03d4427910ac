# SPDX-License-Identifier: Apache-2.0
"""The planner's arithmetic, messages and memory against what the real code does in a rehearsal.

On a made-up GPU where a FLOP or a byte takes a second and everything else nothing, the planner's seconds are its counts.
"""

import dataclasses
import math
from typing import Any

import pytest

from support.nightly import each_case, requested

INTERLEAVED = (
    "strategy.pipeline_model_parallel_size=2 strategy.virtual_pipeline_model_parallel_size=2 strategy.pipeline_dtype=bfloat16"
    " data.micro_batch_size=4"
)
FULL = "model.config.recompute_granularity=full model.config.recompute_method"
ONE_STAGE = "strategy.pipeline_model_parallel_size=1 strategy.virtual_pipeline_model_parallel_size=None"
RUNS = {
    "tensor parallel": ("llama_tiny", "", 2),
    "two replicas": ("llama_tiny", "data.micro_batch_size=4", 4),
    "interleaved": ("llama_tiny", INTERLEAVED, 8),
    "recomputed": ("llama_tiny", f"{FULL}=uniform model.config.recompute_num_layers=1", 2),
    "groups": (
        "llama_tiny",
        f"model.config.num_layers=6 {FULL}=uniform model.config.recompute_num_layers=3 data.micro_batch_size=4",
        2,
    ),
    "blocks": (
        "llama_tiny",
        f"model.config.num_layers=12 {INTERLEAVED} {FULL}=block model.config.recompute_num_layers=1",
        8,
    ),
    "selected": (
        "llama_tiny",
        'model.config.recompute_granularity=selective model.config.recompute_modules=["mlp","layernorm"]',
        2,
    ),
    "8B": ("llama3_8b", "", 8),
    "hybrid": ("nemotronh_8b", "model.config.num_layers=4 model.config.hybrid_override_pattern=M-M*", 8),
    "8x7B": ("mixtral_8x7b", f"model.config.num_layers=4 {ONE_STAGE}", 64),
    "8B by LoRA": ("llama3_8b:lora", "", 8),
    "8B by LoRA, attention only": ("llama3_8b:lora", "peft.target_modules=[linear_qkv] peft.dim=32", 8),
    "8B by DoRA, tensor parallel": (
        "llama3_8b:dora",
        "strategy.tensor_model_parallel_size=2 strategy.sequence_parallel=True",
        8,
    ),
    "8B by LoRA, dropout": ("llama3_8b:lora", "peft.dropout=0.1 peft.dim=32", 8),
    "8B by LoRA, dropout behind": ("llama3_8b:lora", "peft.dropout=0.1 peft.dropout_position=post", 8),
    "8x7B by LoRA": ("mixtral_8x7b:lora", "model.config.num_layers=4", 8),
}
"""A recipe, changes to it, and GPUs."""
FROZEN = [name for name in RUNS if "RA" in name]
"""In the first layer nothing before its first additions needs gradients, and the planner counts them in each."""
DAILY = (
    "tensor parallel",
    "interleaved",
    "groups",
    "selected",
    "hybrid",
    "8x7B",
    "8B by DoRA, tensor parallel",
    "8B by LoRA, dropout",
)


def counted(names: list[str]) -> dict[str, dict[str, float]]:
    """Counts of the rehearsal and of the planner for each run, per step and summed over its pipeline stages."""
    from nemo2.base.gpus import gpu
    from nemo2.cli.sources import configured
    from nemo2.mcore.settle import Machine, on
    from nemo2.preflight.planner.memory import predict_memory
    from nemo2.preflight.planner.recipe import read_recipe
    from nemo2.preflight.rehearse.job import on_gpus, quietly
    from nemo2.preflight.rehearse.stage import rehearse_rank

    results = {}
    for name in names:
        recipe_name, changes, gpus = RUNS[name]
        recipe = configured(recipe_name, changes.split())
        recipe = on(recipe, Machine(count=gpus))
        subject = read_recipe(recipe, gpu("H100"))
        with quietly():
            ranks = [rehearse_rank(on_gpus(recipe, Machine()), stage=stage) for stage in range(subject.job.pp)]
        found = results[name] = rehearsed(ranks)
        found |= planned_flops(subject) | planned_bytes(subject)
        memory = predict_memory(subject.shape, subject.job, stage=0)
        found |= {
            f"planned {part}": memory.parts.get(part, 0.0)
            for part in ("weights", "gradients", "optimizer", "activations")
        }
    return results


def rehearsed(ranks: list[Any]) -> dict[str, float]:
    flops = [one for rank in ranks for one in rank.flops]
    messages = [one for rank in ranks for one in rank.collectives]
    memory = ranks[0].memory
    return {
        # The rehearsal's experts run one product after another, which it can't tell from other products.
        "products": sum(one.flops for one in flops if one.kind in ("gemm", "grouped_gemm")),
        "tensor": sum(
            one.bytes for one in messages if one.group == "tensor" and one.kind in ("all_gather", "reduce_scatter")
        ),
        "weights": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.main_parameters + memory.optimizer_states,
        "activations": sum(memory.activations.values()),
    }


def unit_gpu(**rates: float) -> Any:
    from nemo2.base.gpus import GPU

    # The rate of large products is held below 85 %.
    flops = {"bf16": rates.get("flops", math.inf) / 0.85, "fp8": math.inf}
    nvlink = rates.get("nvlink", math.inf)
    return GPU(
        name="unit",
        memory=1,
        capability=(9, 0),
        hbm=math.inf,
        flops=flops,
        nvlink=nvlink,
        domain=1024,
        network=nvlink,
        power=1.0,
        generation="hopper",
    )


def unit_constants() -> Any:
    from nemo2.preflight.planner.constants import PRIORS, Constants

    ones = {"nvlink", "network", "expert_gemm", "power", "gemm_fp8", "gemm_fp4", "flash1", "flash2", "tp_exposed"}
    ones |= {"exchange", "flash_fp8"}
    return Constants.of({name: 1.0 if name.split(".")[0] in {*ones, "gemm", "flash"} else 0.0 for name in PRIORS})


def planned_flops(subject: Any) -> dict[str, float]:
    from nemo2.preflight.planner.layer_time import Kernels, again

    job = dataclasses.replace(subject.job, gpu=unit_gpu(flops=1.0))
    kernels, counts = Kernels(subject.shape, job, unit_constants()), subject.shape.parts
    repeated = again(subject.shape, job) if job.recompute == "full" else {}
    products = kernels.output_layer()
    for part, count in counts.items():
        for name, passes in kernels.of(part):
            if name != "core attention":
                products += count * passes.total
                products += repeated.get(part, 0) * passes.forward
        products += count * kernels.recomputed(part, 0.0) if job.recompute == "selective" else 0.0
    return {"planned products": products * job.micro_batches}


def planned_bytes(subject: Any) -> dict[str, float]:
    """The messages themselves, of which a ring moves (tp - 1) / tp, and with them what the planner leaves out: the half of
    gathering inputs again that runs beside a product, and the first and the last layer's five messages."""
    from nemo2.models.parts import MLP, Experts
    from nemo2.preflight.planner.layer_time import Kernels, again

    job, shape = dataclasses.replace(subject.job, gpu=unit_gpu(nvlink=1.0), overlap_tp=False), subject.shape
    if job.tp == 1:
        return {"planned tensor": 0.0}
    message = job.tokens * shape.hidden * 2
    passes = Kernels(shape, job, unit_constants()).tensor_parallel()
    blocks = sum(count for part, count in shape.parts.items() if not isinstance(part, Experts))
    repeated = sum(again(shape, job).values()) if job.recompute == "full" else 0
    if job.recomputes("mlp"):
        repeated += sum(count for part, count in shape.parts.items() if isinstance(part, MLP))
    planned = ((blocks + repeated) * passes.forward + blocks * passes.backward) * job.tp / (job.tp - 1)
    left_out = (0.5 * blocks + 5) * message
    if job.lora:
        # Inputs are gathered once, gradients end before the embedding and the first layer, and what crosses ranks between the
        # factors of an addition is as wide as their rank.
        added = [linear for part, count in shape.parts.items() for linear in part.linears * count]
        left_out = 2 * message + 2 * len(added) * job.adapters.rank * job.tokens * 2
    return {"planned tensor": (planned + left_out) * job.micro_batches}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, run_on_ranks: Any) -> dict[str, dict[str, float]]:
    return run_on_ranks(counted, 1, requested(request, "name"), init_process_group=False)[0]


@pytest.mark.parametrize("name", each_case(RUNS, DAILY))
def test_flops_messages_and_bytes_are_those_of_the_real_code(name: str, runs: dict[str, dict[str, float]]) -> None:
    # The router's products, below a thousandth, are left out.
    near = {"products": 2e-2 if name in FROZEN else 1e-3, "tensor": 1e-6}
    near |= dict.fromkeys(("weights", "gradients", "optimizer"), 2e-3)
    if name != "recomputed":
        # A rehearsed mixer scans in plain PyTorch, and the formula is of the kernels.
        near["activations"] = 0.2 if name == "hybrid" else 0.12
    for part, tolerance in near.items():
        assert math.isclose(runs[name][f"planned {part}"], runs[name][part], rel_tol=tolerance), part
