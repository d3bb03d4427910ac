# SPDX-License-Identifier: Apache-2.0
"""Settings of overlapped communication that exclude each other, as rows. The reasons are Megatron-LM's (arguments.py)."""

from typing import Any

from nemo2.config.derivations import Conflict

RULE = "overlap-is-asked-for-once"
_MODEL = "model.config"


def _pair(first: tuple[str, Any], second: tuple[str, Any], why: str) -> Conflict:
    return Conflict(RULE, (first, second), why, "Remove one of them.")


_ONLY_SHARDED = "only the distributed optimizer has parameters to gather"

GATHER_AHEAD = Conflict(
    "gather-starts-from-reduction",
    (("overlap_param_gather", True), ("overlap_grad_reduce", False)),
    "without overlapped reduction there is only one bucket, so no bucket can be gathered ahead",
    "Set overlap_grad_reduce=True, or overlap_param_gather=False.",
)
"""For every run, once the callback has decided."""

PAIRS = (
    GATHER_AHEAD,
    _pair(("overlap_param_gather", True), ("use_distributed_optimizer", False), _ONLY_SHARDED),
    _pair(("align_param_gather", True), ("overlap_param_gather", False), "there is no overlapped gather to align"),
    _pair(
        ("overlap_param_gather_with_optimizer_step", True),
        ("overlap_param_gather", False),
        "there is no overlapped gather to combine with the optimizer step",
    ),
    _pair(("overlap_param_gather_with_optimizer_step", True), ("use_distributed_optimizer", False), _ONLY_SHARDED),
)
"""For the overlap callback."""


def _two_stages(setting: tuple[str, bool]) -> Conflict:
    name, value = setting
    return Conflict(
        "two-interleaved-stages-overlap-messages",
        ((f"{_MODEL}.{name}", value), _CHUNKS),
        "with two stages, only messages that overlap, which are not batched, keep their order",
        f"Set {name}={not value}, leave it unset, use more stages, or leave virtual_pipeline_model_parallel_size unset.",
        lambda run: run.interleaved and run.pipeline_parallel == 2,
    )


_STAGES, _CHUNKS = "strategy.pipeline_model_parallel_size", "strategy.virtual_pipeline_model_parallel_size"
_OVERLAPPED = (f"{_MODEL}.overlap_p2p_comm", True)

BETWEEN_STAGES = (
    Conflict(
        "overlapped-messages-are-between-chunks",
        (_OVERLAPPED, _STAGES),
        "without virtual stages there is no computation to overlap with",
        "Leave overlap_p2p_comm unset, or set strategy.virtual_pipeline_model_parallel_size.",
        lambda run: run.pipeline_parallel > 1 and not run.interleaved,
    ),
    # Otherwise each rank posts two sends to the same peer in an order that the peer doesn't expect, and trains on the wrong
    # activations without a word. Megatron-LM's arguments.py refuses it for this reason; the core alone does not.
    _two_stages(("overlap_p2p_comm", False)),
    _two_stages(("batch_p2p_comm", True)),
    Conflict(
        "messages-overlap-or-batch",
        (_OVERLAPPED, (f"{_MODEL}.batch_p2p_comm", True)),
        "a rank cannot wait for batched sends and receives one by one",
        "Leave batch_p2p_comm unset.",
        lambda run: run.interleaved,
    ),
)
"""For every run: messages between stages. Only those between interleaved stages overlap, and they are either overlapped or
batched. Megatron-Core batches by default, and raises in the first step otherwise."""
