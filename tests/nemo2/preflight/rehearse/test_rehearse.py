# SPDX-License-Identifier: Apache-2.0
"""Rehearsals against formulas: messages, arithmetic, schedules, verdicts. All of them run once, in a process of their own."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.base.gpus import GIB
from nemo2.preflight.rehearse.counts import MemoryCount

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCAB = 4, 256, 768, 8, 4, 8192
SEQ, MBS, GBS = 128, 8, 16


def small_recipe(*overrides: str) -> Any:
    from nemo2 import llm
    from nemo2.config import apply_overrides

    recipe = llm.llama_tiny.pretrain_recipe()
    sizes = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "vocab_size": VOCAB,
        "kv_channels": HIDDEN // HEADS,
        "share_embeddings_and_output_weights": False,
    }
    apply_overrides(recipe, [f"model.config.{name}={value}" for name, value in sizes.items()])
    batch = [f"data.seq_length={SEQ}", f"data.micro_batch_size={MBS}", f"data.global_batch_size={GBS}"]
    apply_overrides(recipe, [*batch, *overrides])
    return recipe


PIPELINE = (
    "strategy.tensor_model_parallel_size=1",
    "strategy.sequence_parallel=False",
    "strategy.pipeline_model_parallel_size=2",
    "strategy.virtual_pipeline_model_parallel_size=2",
    "data.global_batch_size=96",
)

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
}


def rehearse_all() -> dict[str, Any]:
    from nemo2.base.gpus import gpu
    from nemo2.config import apply_overrides
    from nemo2.mcore.settle import Machine
    from nemo2.preflight.rehearse.advice import smallest_change
    from nemo2.preflight.rehearse.job import on_gpus, rehearse, verdict_on
    from nemo2.preflight.rehearse.page import played, render_page
    from nemo2.preflight.rehearse.stage import rehearse_rank
    from nemo2.preflight.rehearse.text import render
    from tools.rehearse_recipes import described, rehearse_one, table

    experts = [*PIPELINE, *(f"model.config.{name}={value}" for name, value in EXPERTS.items())]
    experts.append("strategy.expert_model_parallel_size=2")

    def of_experts(*more: str) -> dict[str, Any]:
        recipe = on_gpus(small_recipe(*experts, *more), Machine(count=4))
        return dataclasses.asdict(rehearse_rank(recipe, stage=0)) | {"seconds": 0.0}

    results: dict[str, Any] = {"first": of_experts()}
    cut = rehearse(
        small_recipe("strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=True"), gpus="H100x2"
    )
    results["tensor"] = cut.to_dict()
    results["text"] = render(cut)
    results["replicas"] = rehearse(
        small_recipe("strategy.tensor_model_parallel_size=1", "strategy.sequence_parallel=False"), gpus="H100x2"
    ).to_dict()
    alone = ("strategy.tensor_model_parallel_size=1", "strategy.sequence_parallel=False")
    results["losses"] = {
        kind: rehearse(small_recipe(*alone, f"model.config.cross_entropy_fusion_impl={kind}"), gpus="H100x1").to_dict()
        for kind in ("native", "te")
    }
    results["rotary"] = {
        fused: rehearse(small_recipe(*alone, f"model.config.apply_rope_fusion={fused}"), gpus="H100x1").to_dict()
        for fused in (True, False)
    }
    _, row, _, results["error"] = rehearse_one(("llama_tiny", "H100"))
    results["table"] = table([row], "H100", described(10.0, 2))
    pipelined = on_gpus(small_recipe(*PIPELINE), Machine(count=2))
    whole = rehearse(small_recipe(*PIPELINE), gpus="H100x2")
    results["enough"] = [dataclasses.asdict(rank) for rank in whole.ranks]
    results["step"] = played(whole, whole.schedule)
    results["page"] = render_page(whole)
    results["scheduled"] = whole.to_dict()["schedule"]
    results["every"] = [dataclasses.asdict(rehearse_rank(pipelined, stage=stage, microbatches=12)) for stage in (0, 1)]
    overlapped = ("model.config.overlap_moe_expert_parallel_comm=True", "model.config.delay_wgrad_compute=True")
    results["exchanges"] = [of_experts(), of_experts(*overlapped)]
    one = on_gpus(small_recipe(*alone), Machine(count=1))
    rank = rehearse_rank(one, stage=0)
    toy = dataclasses.replace(gpu("H100"), name="toy", memory=2 * GIB + rank.memory.total * 9 // 10)
    verdict = verdict_on((rank,), toy, 0.0)
    advised = smallest_change(one, (rank,), verdict, kernels="te")
    changed = apply_overrides(one, advised.change or ()) or one
    results["advice"] = {
        "fits before": verdict.fits,
        "change": advised.change,
        "fits after": verdict_on((rehearse_rank(changed, stage=0),), toy, 0.0).fits,
    }
    return results


@pytest.fixture(scope="module")
def results(run_on_ranks: Any) -> dict[str, Any]:
    return run_on_ranks(rehearse_all, 1, init_process_group=False, timeout=400)[0]


def total_of(memory: dict[str, Any]) -> int:
    return MemoryCount(**memory).total


def collectives(rank: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    return {(c["kind"], c["group"]): (c["calls"], c["bytes"]) for c in rank["collectives"] if c["bytes"] > 100_000}


def test_messages_of_tensor_parallelism_are_those_of_the_papers_formula(results: Any) -> None:
    """Korthikanti et al., arXiv:2205.05198, section 4.2.2: per layer two gathers and two scatters each way, and the inputs of
    column-cut products gathered again for their weights; the embedding scatters, the output layer gathers."""
    (rank,) = results["tensor"]["ranks"]
    microbatches, buffer = GBS // MBS, SEQ * MBS * HIDDEN * 2
    found = collectives(rank)
    gathers, scatters = microbatches * (6 * LAYERS + 3), microbatches * (4 * LAYERS + 2)
    assert found["all_gather", "tensor"] == (gathers, gathers * buffer)
    assert found["reduce_scatter", "tensor"] == (scatters, scatters * buffer)


def test_replicas_reduce_every_gradient_and_gather_every_parameter_once(results: Any) -> None:
    (rank,) = results["replicas"]["ranks"]
    found = collectives(rank)
    assert found["reduce_scatter", "data"][1] == rank["memory"]["gradients"]
    assert found["all_gather", "data"][1] == rank["memory"]["parameters"]
    assert rank["memory"]["gradients"] == 2 * rank["memory"]["parameters"]  # fp32 and bf16


def test_the_compiled_loss_takes_what_torchs_allocator_counts_for_it(results: Any) -> None:
    """Measured with torch 2.15: 4 times the bf16 logits beside them. Transformer Engine's overwrites them."""
    logits = SEQ * MBS * VOCAB * 2
    of = {kind: whole["ranks"][0]["memory"]["logits"] / logits for kind, whole in results["losses"].items()}
    assert of == {"native": pytest.approx(5, rel=0.01), "te": pytest.approx(1, rel=0.01)}


def test_rotary_positions_are_counted_as_requested_and_not_as_this_machine_runs_them(results: Any) -> None:
    fused, unfused = (results["rotary"][fused]["ranks"][0]["memory"] for fused in (True, False))
    assert fused["activations"]["attention"] < unfused["activations"]["attention"]
    assert fused["total"] < unfused["total"]


def test_arithmetic_is_that_of_the_models_matrices(results: Any) -> None:
    (rank,) = results["replicas"]["ranks"]
    flops = {(f["kind"], f["phase"]): f["flops"] for f in rank["flops"]}
    tokens = SEQ * GBS // 2
    kv = HIDDEN // HEADS * GROUPS
    matrices = LAYERS * (HIDDEN * (HIDDEN + 2 * kv) + HIDDEN * HIDDEN + 3 * HIDDEN * FFN) + HIDDEN * VOCAB
    assert flops["gemm", "forward"] == 2 * tokens * matrices
    assert flops["gemm", "backward"] == 2 * flops["gemm", "forward"]
    # Scores and weighted sums, over the half of the pairs that a causal mask leaves.
    assert flops["attention", "forward"] == LAYERS * 4 * tokens * HIDDEN * (SEQ + 1) / 2


def test_as_many_microbatches_as_a_schedule_needs_tell_as_much_as_all(results: Any) -> None:
    for few, every in zip(results["enough"], results["every"], strict=True):
        assert few["num_microbatches_rehearsed"] < every["num_microbatches_rehearsed"] == 12
        small, whole = few["memory"], every["memory"]
        state = ("parameters", "gradients", "main_parameters", "optimizer_states", "buffers", "saved_peak")
        assert [small[kind] for kind in state] == [whole[kind] for kind in state]
        # A message more or less may be under way at the fullest moment.
        assert total_of(small) == pytest.approx(total_of(whole), rel=0.02)
        assert {json.dumps(f) for f in few["flops"]} == {json.dumps(f) for f in every["flops"]}
        in_schedule = [
            [c for c in rank["collectives"] if c["group"] == "pipeline" and c["per"] == "microbatch"]
            for rank in (few, every)
        ]
        assert in_schedule[0] and [c["kind"] for c in in_schedule[0]] == [c["kind"] for c in in_schedule[1]]


def test_a_rehearsal_is_the_same_first_and_after_others(results: Any) -> None:
    assert results["first"] == results["exchanges"][0]


def test_exchanges_beside_another_micro_batchs_work_are_the_same_work(results: Any) -> None:
    plain, overlapped = results["exchanges"]
    assert {json.dumps(f) for f in overlapped["flops"]} == {json.dumps(f) for f in plain["flops"]}


def test_the_passes_of_a_stage_are_as_long_as_its_arithmetic(results: Any) -> None:
    step = results["step"]
    assert dataclasses.asdict(step.schedule) == results["scheduled"]
    for stage, rank in enumerate(results["enough"]):
        assert step.busy(stage) == pytest.approx(sum(f["flops"] for f in rank["flops"]) / 1e12)
    shown, whole = step.schedule.legible.num_microbatches, step.schedule.num_microbatches
    assert shown < whole == results["enough"][0]["num_microbatches"] and f"the first {shown} of" in results["page"]
    assert f"{whole} micro-batches, {step.bubble_fraction:.1%} bubble" in results["page"]


def test_the_table_of_recipes_has_a_line_with_the_verdict(results: Any) -> None:
    assert results["error"] == ""
    assert "1 of them fit" in results["table"] and "| llama_tiny | 2 |" in results["table"]


def test_the_page_of_all_recipes_counts_its_own_rows() -> None:
    from tools.rehearse_recipes import LAST_RUN, rows_of

    page = Path(__file__).parents[4] / "docs" / "rehearsed_recipes.md"
    assert f"The table has {len(rows_of(page))} recipes" in page.read_text()
    assert any(line.startswith(LAST_RUN) for line in page.read_text().splitlines())


def test_the_change_that_is_proposed_makes_it_fit(results: Any) -> None:
    advice = results["advice"]
    assert not advice["fits before"] and advice["change"] and advice["fits after"]


def test_the_report_is_text_and_json_and_their_sums_agree(results: Any) -> None:
    (rank,) = results["tensor"]["ranks"]
    memory = dict(rank["memory"])
    total, saved = memory.pop("total"), memory.pop("saved_peak")
    assert total == sum(memory.pop("activations").values()) + sum(memory.values()) and saved > 0
    assert results["tensor"]["verdict"]["needed"] == total + 2 * GIB
    assert json.loads(json.dumps(results["tensor"])) is not None
    assert "FITS: " in results["text"] and f"{total / GIB:.2f}" in results["text"]


def test_memory_terms_are_all_of_the_total() -> None:
    memory = MemoryCount(
        parameters=1,
        gradients=2,
        main_parameters=3,
        optimizer_states=4,
        buffers=5,
        activations={"mlp": 60, "norm": 7},
        logits=8,
        messages=9,
        working=10,
        saved_peak=75,
    )
    assert sum(memory.terms().values()) == memory.total == 109
    assert next(iter(memory.terms())) == "activations"


def test_what_is_not_counted_is_noted() -> None:
    from nemo2 import llm
    from nemo2.preflight.rehearse.job import notes_of

    recipe = llm.gemma2_2b.pretrain_recipe()
    plain = notes_of(recipe, "te")
    assert any("soft-capped attention scores" in note for note in plain)
    recipe.model.config.cuda_graph_impl = "local"
    (added,) = set(notes_of(recipe, "te")) - set(plain)
    assert "CUDA graphs" in added
    assert not any("soft-capped" in note for note in notes_of(llm.llama3_8b.pretrain_recipe(), "te"))


def test_a_compiled_activation_keeps_what_torchs_partitioner_keeps() -> None:
    from megatron.core.transformer.utils import gelu_impl

    from nemo2.preflight.rehearse.kernels import te_kernels

    def kept(function: Any) -> int:
        found: list[int] = []
        x = torch.randn(64, 32, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.numel()) or t, lambda t: t):
            function(x)
        return sum(found)

    # What torch.compile would keep, without its C++ or Triton code: the graph, cut by its own partitioner.
    steps = getattr(gelu_impl, "_torchdynamo_orig_callable", gelu_impl)
    compiled = torch.compile(steps, backend="aot_eager_decomp_partition")
    [patch] = [one for one in te_kernels() if one.target.endswith(":gelu_impl")]
    assert kept(partial(patch.replacement, gelu_impl)) == kept(compiled) == 64 * 32 < kept(steps)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x * x,
        lambda x: x.long() * 2,
        lambda x: x.long() * 2.0,
        lambda x: x.long() * True,
        lambda x: x.mT.clone(),
        lambda x: x.sum(dim=0, keepdim=True),
        lambda x: x.max(dim=1).indices,
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.add_(1),
        lambda x: x.T.t_(),
        lambda x: x.set_(torch.empty_like(x)),
        lambda x: x.resize_(2, 3),
        lambda x: torch.mul(x, x, out=torch.empty(0, device="meta")),
        lambda x: torch.ops.aten._unsafe_view(x, [24]),
        lambda x: x.split(2)[1],
        lambda x: torch.full((3,), 2.0),
    ],
)
def test_a_remembered_result_is_that_of_torch(operation: Any) -> None:
    from nemo2.preflight.rehearse.tracker import Tracker

    def result() -> Any:
        x = torch.empty(4, 6, device="meta")
        before = x.untyped_storage()._cdata
        y = operation(x)
        shares = [y.untyped_storage()._cdata == one for one in (before, x.untyped_storage()._cdata)]
        values = None if y.is_meta else y.tolist()
        return y.shape, y.stride(), y.dtype, y.device, y.untyped_storage().nbytes(), shares, values

    expected = result()
    with Tracker():
        assert [result(), result()] == [expected, expected]


def rehearsed_in_a_notebook() -> bool:
    from lightning.pytorch.trainer.connectors import accelerator_connector

    from nemo2 import llm
    from nemo2.preflight.rehearse import rehearse

    accelerator_connector._IS_INTERACTIVE = True  # which Lightning looks up when it is imported
    return rehearse(llm.llama_tiny.pretrain_recipe(), gpus="H100x2").verdict.fits


def test_a_job_of_many_ranks_is_rehearsed_in_a_notebook(run_on_ranks: Any) -> None:
    """Lightning refuses trainers there that would launch processes, and a rehearsal's launches none."""
    assert run_on_ranks(rehearsed_in_a_notebook, 1, init_process_group=False) == [True]
