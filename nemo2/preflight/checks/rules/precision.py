# SPDX-License-Identifier: Apache-2.0
"""Rules of number formats, and of the GPUs that support them."""

from collections.abc import Iterator

from nemo2.mcore.precision import BLOCKS, format_problems
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

PRECISION = Topic("Precision", needs_sizes=False)


@PRECISION.rule("gpu-has-the-format")
def _generation(facts: Facts) -> Iterator[str]:
    """The GPU and Transformer Engine must support the number format: fp8 and fp4 require both. On GPUs: bf16 requires
    Ampere or newer, fp8 requires Ada, Hopper or newer, and mxfp8 and fp4 require Blackwell. The blockwise recipe
    requires Hopper or newer, and mxfp8 does not run on compute capability 12.0. In Transformer Engine: the blockwise
    recipe requires 2.3 (2.9 on Blackwell), and fp4 requires 2.8.

    Otherwise: Transformer Engine raises an error on every rank. bf16 is emulated and slow.
    """
    config, capability = facts.precision, facts.machine.capability
    if config is None:
        return
    yield from format_problems(config, facts.machine)
    if config.bf16 and capability is not None and capability < (8, 0):
        yield (
            "trainer.plugins.precision='bf16-mixed' requires a GPU of compute capability 8.0 or newer, but this GPU "
            f"has {capability[0]}.{capability[1]}. Set trainer.plugins.precision='16-mixed' on this GPU."
        )


@PRECISION.rule("products-in-whole-blocks")
def _blocks(facts: Facts) -> Iterator[str]:
    """With fp8 and fp4, the number of tokens in a rank's micro-batch and the widths of its layers must be multiples
    of the block size of the format.

    Otherwise: Transformer Engine raises an error in the first step.
    """
    config, layout = facts.precision, facts.layout
    if config is None or not facts.sizes or not (config.fp8 or config.fp4):
        return
    format_, recipe = ("fp8", config.fp8_recipe) if config.fp8 else ("fp4", config.fp4_recipe)
    of_tokens, of_width = BLOCKS.get(recipe, (1, 1))
    cuts = layout.cp * (layout.tp if facts.of_strategy("sequence_parallel") is True else 1)
    if facts.seq_length and facts.micro_batch_size:
        tokens = facts.seq_length * facts.micro_batch_size
        if tokens % cuts == 0 and tokens // cuts % of_tokens:
            yield (
                f"data.seq_length={facts.seq_length} * data.micro_batch_size={facts.micro_batch_size} over {cuts} "
                f"sequence ranks gives {tokens // cuts} tokens per rank, but "
                f"trainer.plugins.{format_}_recipe={recipe!r} multiplies blocks of {of_tokens}. Set lengths that are "
                f"a multiple of {of_tokens * cuts}."
            )
    for name, cut in (("hidden_size", 1), ("ffn_hidden_size", layout.tp)):
        width = facts.of_model(name)
        if isinstance(width, int) and width % cut == 0 and width // cut % of_width:
            over = f" over {cut} tensor-parallel ranks" if cut > 1 else ""
            yield (
                f"model.config.{name}={width}{over} is not a multiple of {of_width}, the block size of "
                f"trainer.plugins.{format_}_recipe={recipe!r}. Set it to a multiple of {of_width * cut}."
            )


@PRECISION.settled("megatron-fsdp-has-no-loss-scaler")
def _no_loss_scaler() -> None:
    """fp16 cannot be used with Megatron-FSDP.

    Otherwise: The first step ends in an AttributeError, in Megatron-Core 0.16.1 and 0.19.2 alike.
    """


@PRECISION.settled("scales-go-into-the-checkpoint")
def _scales_go_into_the_checkpoint() -> None:
    """Delayed scaling cannot be used with Megatron-FSDP, because its checkpoints hold parameters but no history of
    scales.

    Otherwise: A resumed run starts with an empty history and computes different values than the original run.
    """


@PRECISION.rule("shared-buffer-needs-fp8-parameters")
def _shared_buffer(facts: Facts) -> Iterator[str]:
    """`reuse_grad_buf_for_mxfp8_param_ag` requires fp8 parameters and the mxfp8 recipe.

    Otherwise: Megatron-Core raises an AssertionError when it configures the gradient buffers.
    """
    config = facts.precision
    if config is None or not config.reuse_grad_buf_for_mxfp8_param_ag:
        return
    if not config.fp8_param or config.fp8_recipe != "mxfp8":
        yield (
            f"trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag=True with fp8_param_gather={config.fp8_param} and "
            f"fp8_recipe={config.fp8_recipe!r}: only MXFP8 parameters can be gathered into the gradient buffers. Set "
            "fp8_param_gather=True and fp8_recipe='mxfp8', or set reuse_grad_buf_for_mxfp8_param_ag=False."
        )


@PRECISION.rule("loss-scale-starts-at-its-minimum")
def _loss_scale(facts: Facts) -> Iterator[str]:
    """A dynamic loss scale of fp16 must start at its minimum or above.

    Otherwise: The loss scaler raises an AssertionError.
    """
    config = facts.precision
    if config is None or not config.fp16 or config.loss_scale:
        return
    if 0 < config.initial_loss_scale < config.min_loss_scale:
        yield (
            f"trainer.plugins.fp16_initial_loss_scale={config.initial_loss_scale:g} is below "
            f"fp16_min_loss_scale={config.min_loss_scale:g}. Set the initial scale to the minimum or above."
        )
