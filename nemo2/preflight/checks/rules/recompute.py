# SPDX-License-Identifier: Apache-2.0
"""Rules of recomputed and offloaded activations."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Optional

from nemo2.base.counts import is_count
from nemo2.preflight.checks.arithmetic import divisors
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

RECOMPUTE = Topic("Recomputation and offloading")


def _recomputes_as_before_0_19() -> bool:
    """Whether Megatron-Core lacks its module of recomputation, whose loop ends at the last layer and knows hybrid stacks."""
    return find_spec("megatron.core.recompute") is None


@RECOMPUTE.rule("partial-checkpoints-have-a-reader")
def _partial(facts: Facts) -> Iterator[str]:
    """`num_microbatches_with_partial_activation_checkpoints` must stay None.

    Otherwise: With pipeline parallelism, the first step raises TypeError, because no model of Megatron-Core accepts the
    argument. Without pipeline parallelism, Megatron-Core ignores the setting.
    """
    name = "num_microbatches_with_partial_activation_checkpoints"
    if (value := facts.of_model(name)) is not None:
        yield (
            f"model.config.{name}={value}: no model of Megatron-Core can recompute in some micro-batches only. Set "
            f"{name}=None, and set recompute_granularity to recompute in all micro-batches."
        )


@RECOMPUTE.rule("full-recomputation-says-how", megatron_refuses=True)
def _how(facts: Facts) -> Iterator[str]:
    """Full recomputation requires a method and a number of layers.

    Otherwise: Megatron-Core rejects the model configuration.
    """
    model = facts.model
    full = getattr(model, "recompute_granularity", None) == "full"
    if full and (model.recompute_method is None or model.recompute_num_layers is None):
        yield (
            f"model.config.recompute_granularity='full' with recompute_method={model.recompute_method!r} and "
            f"recompute_num_layers={model.recompute_num_layers!r}: full recomputation requires both. Set "
            "recompute_method to 'uniform' or 'block', and set recompute_num_layers to 1 or more."
        )


@RECOMPUTE.rule("recomputation-is-asked-for")
def _without_granularity(facts: Facts) -> Iterator[str]:
    """`recompute_method` and `recompute_num_layers` require `recompute_granularity`.

    Otherwise: Nothing is recomputed, and the activations use the memory that recomputation should have saved.
    """
    if facts.model is None or getattr(facts.model, "recompute_granularity", None) is not None:
        return
    settings = {name: getattr(facts.model, name, None) for name in ("recompute_method", "recompute_num_layers")}
    for name, value in settings.items():
        if value is not None:
            yield (
                f"model.config.{name}={value!r} has no effect without model.config.recompute_granularity. Set "
                f"recompute_granularity='full', or set {name}=None."
            )


@RECOMPUTE.rule("recomputed-layers-exist")
def _exist(facts: Facts) -> Iterator[str]:
    """`recompute_num_layers` must be at most the number of layers.

    Otherwise: The first step raises IndexError, or Megatron-Core recomputes all layers instead of the requested number.
    """
    count, layers = _recomputed(facts), facts.of_model("num_layers")
    if count is not None and is_count(layers) and count > layers:
        yield (
            f"model.config.recompute_num_layers={count} is more than model.config.num_layers={layers}. Set it to "
            f"{layers} or less: recompute_num_layers counts the layers of one pipeline chunk."
        )


@RECOMPUTE.rule("recomputed-units-fill-the-chunks", in_force=_recomputes_as_before_0_19)
def _units(facts: Facts) -> Iterator[str]:
    """With `recompute_method=uniform`, `recompute_num_layers` must divide the number of layers of every pipeline
    chunk.

    Otherwise: The first step raises IndexError, because Megatron-Core's last unit continues after the last layer of the
    chunk.
    """
    count, layers = _recomputed(facts), facts.of_model("num_layers")
    if count is None or facts.model.recompute_method != "uniform" or count > layers:
        return
    for chunk in sorted(_chunk_layers(facts)):
        if chunk % count:
            yield (
                f"model.config.recompute_num_layers={count} does not divide the {chunk} layers of a pipeline chunk, "
                "but recompute_method='uniform' recomputes in units of this size. Set recompute_num_layers to one of "
                f"{divisors(chunk)}, or set recompute_method='block'."
            )


@RECOMPUTE.rule("mtp-recomputes-each-layer")
def _mtp(facts: Facts) -> Iterator[str]:
    """With `recompute_method=uniform` and multi-token prediction, `recompute_num_layers` must be 1.

    Otherwise: Megatron-Core raises an AssertionError in the first step.
    """
    count, heads = _recomputed(facts), facts.of_model("mtp_num_layers")
    if count is not None and count != 1 and heads and facts.model.recompute_method == "uniform":
        yield (
            f"model.config.recompute_num_layers={count} with recompute_method='uniform' and mtp_num_layers={heads}: "
            "Megatron-Core recomputes the layers of multi-token prediction one at a time. Set recompute_num_layers=1."
        )


@RECOMPUTE.rule("hybrid-stacks-recompute-nothing", in_force=_recomputes_as_before_0_19)
def _hybrid(facts: Facts) -> Iterator[str]:
    """Full recomputation (`recompute_granularity=full`) of a stack with Mamba layers requires Megatron-Core 0.19.

    Otherwise: Nothing is recomputed, and the activations use the memory that recomputation should have saved.
    """
    if facts.is_hybrid and getattr(facts.model, "recompute_granularity", None) == "full":
        yield (
            "model.config.recompute_granularity='full': this Megatron-Core does not recompute stacks of Mamba, "
            "attention and feed-forward layers. Set recompute_granularity, recompute_method and recompute_num_layers "
            "to None, set recompute_granularity='selective' to recompute the attention layers only, or install "
            "Megatron-Core 0.19."
        )


def _recomputed(facts: Facts) -> Optional[int]:
    """The number of layers that are recomputed at a time, or per chunk. None: whole layers aren't recomputed."""
    count = getattr(facts.model, "recompute_num_layers", None)
    return count if getattr(facts.model, "recompute_granularity", None) == "full" and is_count(count) else None


def _chunk_layers(facts: Facts) -> set[int]:
    """The different numbers of layers in a chunk. Empty: there is no valid split, which other rules report."""
    from nemo2.mcore.settle.settling import layers_per_chunk

    try:
        return set(layers_per_chunk(facts.settled.objects["model.config"]))
    except (KeyError, AssertionError, ValueError, TypeError, ZeroDivisionError):
        return set()
