# SPDX-License-Identifier: Apache-2.0
"""Rules about the split of layers into pipeline stages, and the messages between stages."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nemo2.base.counts import counted, is_count
from nemo2.preflight.checks.arithmetic import divisors, indivisible
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

PIPELINE = Topic("Pipeline parallelism")
FIRST, LAST = "strategy.num_layers_in_first_pipeline_stage", "strategy.num_layers_in_last_pipeline_stage"


@PIPELINE.rule("virtual-stages-need-stages", megatron_refuses=True)
def _virtual(facts: Facts) -> Iterator[str]:
    """Virtual stages require a pipeline-parallel size of at least 2.

    Otherwise: Megatron-Core raises an error when it creates the process groups.
    """
    layout = facts.layout
    if layout.vp and layout.vp > 1 and layout.pp == 1:
        yield (
            f"strategy.virtual_pipeline_model_parallel_size={layout.vp} with pipeline_model_parallel_size=1: virtual "
            "stages require pipeline parallelism. Leave virtual_pipeline_model_parallel_size unset, or set "
            "pipeline_model_parallel_size to 2 or more."
        )


@PIPELINE.rule("mixers-are-cut-by-number")
def _cut_by_number(facts: Facts) -> Iterator[str]:
    """The pattern of a hybrid model (`|`), or the sizes of its first and last stage, split it into pipeline stages. No other
    setting does.

    Otherwise: Megatron-Core ignores the setting and builds stages with other layers than requested, or raises an error.
    """
    if facts.is_hybrid:
        from nemo2.models.hybrid_pattern import uncut_hybrid_problems

        pattern = facts.of_model("hybrid_override_pattern")
        yield from uncut_hybrid_problems(pattern, facts.layout.pp, facts.of_strategy)


@PIPELINE.rule("layers-over-stages", megatron_refuses=True)
def _layers(facts: Facts) -> Iterator[str]:
    """The pipeline-parallel size must divide the number of layers. If `account_for_embedding_in_pipeline_split` or
    `account_for_loss_in_pipeline_split` is set, the embedding or the loss counts as one layer.

    Otherwise: Megatron-Core raises an AssertionError when it builds the model. For a hybrid model with Mamba layers, it
    leaves out the last layers.
    """
    stages, layers, extra = _to_share(facts)
    if stages is None or stages < 1 or layers < 0 or (layers + extra) % stages == 0:
        return
    total = facts.of_model("num_layers")
    uneven = total - layers
    yield (
        f"model.config.num_layers={total}{f' minus {uneven}' if uneven else ''}{f' plus {extra}' if extra else ''}: "
        f"{layers + extra} layers cannot be split evenly into {stages} pipeline stages. Set the pipeline-parallel "
        f"size to a divisor of {total}: {divisors(total)}. Or set num_layers_in_first_pipeline_stage or "
        "num_layers_in_last_pipeline_stage."
    )


@PIPELINE.rule("layers-for-every-stage")
def _enough_layers(facts: Facts) -> Iterator[str]:
    """If the first and last stages have their own sizes, the remaining layers must fill the stages between them.
    Without stages between them, no layers may remain.

    Otherwise: Megatron-Core builds more layers than the model has, or builds stages without layers.
    """
    ends = _ends(facts)
    stages, layers, _ = _to_share(facts)
    if stages is not None and ends and (layers < 0 or bool(layers) != bool(stages)):
        fix = (
            "Set smaller first and last stages, or fewer of them." if stages else "Set sizes that add up to all layers."
        )
        yield (
            f"model.config.num_layers={facts.of_model('num_layers')} leaves {layers} layers for {stages} pipeline stages "
            f"after the first and last stages' {[*ends.values()]}. {fix}"
        )


@PIPELINE.rule("layers-over-virtual-stages", megatron_refuses=True)
def _virtual_layers(facts: Facts) -> Iterator[str]:
    """The virtual-pipeline size must divide the number of layers of the first and the last stage, where they are set.

    Otherwise: Megatron-Core raises an AssertionError when it builds the model.
    """
    vp = facts.layout.vp or 1
    for name, size in _ends(facts).items() if facts.layout.interleaved else ():
        yield from indivisible(name, size, "strategy.virtual_pipeline_model_parallel_size", vp)


@PIPELINE.rule("written-stages-are-built")
def _written(facts: Facts) -> Iterator[str]:
    """`pipeline_model_parallel_layout` must have as many stages as the pipeline-parallel size times the virtual-pipeline
    size. So must the pattern of a hybrid (`|`), which only a pattern splits into virtual stages.

    Otherwise: The run doesn't build the other stages, and trains without their layers.
    """
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    written, pp = facts.of_strategy("pipeline_model_parallel_layout"), facts.layout.pp
    if facts.is_hybrid:
        from nemo2.models.hybrid_pattern import unbuilt_stages

        if problem := unbuilt_stages(facts.of_model("hybrid_override_pattern"), pp, facts.layout.vp):
            yield problem
    if written is None or (pp > 1 and facts.layout.vp is not None):
        return
    with suppress(AssertionError):  # Megatron-Core's own about the letters, which the last rule tells
        stages = (
            PipelineParallelLayerLayout.get_num_stages_from_str(written) if isinstance(written, str) else len(written)
        )
        if stages > pp and stages % pp == 0:
            size, name = (stages, "") if pp == 1 else (stages // pp, "virtual_")
            yield (
                f"strategy.pipeline_model_parallel_layout={written!r} has {stages} stages, but the layout has {pp}. Set "
                f"strategy.{name}pipeline_model_parallel_size={size}, or write {counted(pp, 'stage')}."
            )


@PIPELINE.settled("stages-send-what-they-hold")
def _stages_send_what_they_hold() -> None:
    """`pipeline_dtype` must be the dtype of the activations between layers. This is the dtype of the parameters, or
    float32 if Megatron-Core keeps an fp32 residual (`fp32_residual_connection`).

    Otherwise: The first message has a size that its receiver does not expect, so the ranks fail or hang. Or the
    receiver reads the bits of one format as another format.
    """


@PIPELINE.settled("two-interleaved-stages-overlap-messages")
def _two_interleaved_stages_overlap_messages() -> None:
    """A pipeline of two interleaved stages must overlap its messages.

    Otherwise: Each stage posts two sends in an order that the other stage does not expect. The model trains on wrong
    activations, without an error.
    """


@PIPELINE.settled("overlapped-messages-are-between-chunks")
def _overlapped_messages_are_between_chunks() -> None:
    """`overlap_p2p_comm` on the model requires virtual stages.

    Otherwise: Megatron-Core raises an error in the first step.
    """


@PIPELINE.settled("messages-overlap-or-batch")
def _messages_overlap_or_batch() -> None:
    """Messages between interleaved stages can be overlapped or batched, but not both.

    Otherwise: Megatron-Core raises an error in the first step.
    """


def _ends(facts: Facts) -> dict[str, Any]:
    """The layers of the first and the last stage by field, where they are set."""
    sizes = {name: facts.of_strategy(name.removeprefix("strategy.")) for name in (FIRST, LAST)}
    return {name: size for name, size in sizes.items() if size is not None}


def _to_share(facts: Facts) -> tuple[int | None, int, int]:
    """The number of stages that get equal numbers of layers, the number of these layers, and the other parts that count
    as layers. None for the stages: the layout is written out."""
    total, pp = facts.of_model("num_layers"), facts.layout.pp
    is_written = "|" in str(facts.of_model("hybrid_override_pattern"))
    if not is_count(total) or is_written or facts.of_strategy("pipeline_model_parallel_layout") is not None:
        return None, 0, 0
    uneven = [size for size in _ends(facts).values() if isinstance(size, int)]
    extra = sum(bool(facts.of_strategy(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
    return pp - len(uneven), total - sum(uneven), 0 if uneven else extra
