# SPDX-License-Identifier: Apache-2.0
"""Rules of CUDA graphs, which replay captured kernels without decisions in between."""

from collections.abc import Iterator

from nemo2.mcore.parallel.cuda_graphs import kind_of, modules_of
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

GRAPHS = Topic("CUDA graphs")
_IMPL = "model.config.cuda_graph_impl"
_PARTS = "cuda_graph_scope='attn,moe_router,moe_preprocess', from Megatron-Core 0.19 on named cuda_graph_modules"


def _setting(facts: Facts) -> str:
    return f"{_IMPL}={_kind(facts)!r}"


def _kind(facts: Facts) -> str:
    return kind_of(facts.written_config)


@GRAPHS.settled("graphs-go-with-the-rest")
def _graphs_go_with_the_rest() -> None:
    """CUDA graphs cannot be used with Megatron-FSDP. Graphs of Transformer Engine require bf16. Megatron-Core's own
    graphs of layers cannot be used with rotary embeddings in a pipeline. A graph of the whole step cannot check
    gradients for NaN. The optimizer step cannot be captured.

    Otherwise: Megatron-Core raises an AssertionError on the ranks, or CUDA rejects the capture after the first steps.
    """


@GRAPHS.rule("experts-are-captured-in-part")
def _experts(facts: Facts) -> Iterator[str]:
    """A graph can capture whole expert layers only if every expert gets the same number of tokens.

    Otherwise: The host reads the number of tokens of each expert, and CUDA rejects such a read during a capture.
    """
    kind = _kind(facts)
    if kind == "none" or not facts.has_experts:
        return
    captures_experts = kind == "full_iteration" or not modules_of(facts.written_config)
    if captures_experts and not facts.of_model("moe_pad_expert_input_to_capacity"):
        instead = "" if kind == "transformer_engine" else "cuda_graph_impl='transformer_engine' and "
        yield (
            f"{_setting(facts)} captures whole layers, but the number of tokens of each of the "
            f"{facts.of_model('num_moe_experts')} experts changes from batch to batch. Capture parts of the layers "
            f"(model.config: {instead}{_PARTS}). Or give every expert the same number of tokens, which drops tokens: "
            "set moe_pad_expert_input_to_capacity=True and moe_expert_capacity_factor."
        )


@GRAPHS.rule("captured-steps-are-alike")
def _constant(facts: Facts) -> Iterator[str]:
    """A graph of the whole step, and graphs of layers with pipeline parallelism, require a constant batch size.

    Otherwise: The run stops at the first step with more micro-batches than were captured.
    """
    ramp = facts.at("data.rampup_batch_size")
    kind = _kind(facts)
    if ramp and (kind == "full_iteration" or (kind != "none" and facts.layout.pp > 1)):
        yield (
            f"data.rampup_batch_size={list(ramp)} changes the number of micro-batches, but {_setting(facts)} captures a "
            f"step with a fixed number. Leave rampup_batch_size unset, or set {_IMPL}='none'."
        )


@GRAPHS.rule("captured-segments-stay")
def _segments(facts: Facts) -> Iterator[str]:
    """CUDA graphs with expandable memory segments require `NCCL_GRAPH_REGISTER=0`.

    Otherwise: NCCL would read memory that has moved. Megatron-Core raises an AssertionError for graphs of layers.
    """
    if _kind(facts) == "none" or facts.environment.get("NCCL_GRAPH_REGISTER") == "0":
        return
    if "expandable_segments:True" in facts.environment.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        yield (
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True with {_setting(facts)} requires NCCL_GRAPH_REGISTER=0. "
            "Set this variable, or remove expandable_segments:True."
        )
