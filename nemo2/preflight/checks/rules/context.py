# SPDX-License-Identifier: Apache-2.0
"""Rules of context parallelism: the sequence's chunks, and attention that supports them."""

from collections.abc import Iterator
from typing import Any, cast

from megatron.core.transformer.utils import is_layer_window_attention
from packaging.version import Version

from nemo2.models.layers import rules as layers
from nemo2.preflight.checks.arithmetic import indivisible, nearest
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

CONTEXT = Topic("Context parallelism")


@CONTEXT.rule("sequence-in-twice-the-context-ranks")
def _chunks(facts: Facts) -> Iterator[str]:
    """2 * context-parallel size must divide the sequence length.

    Otherwise: The first batch fails, because every rank takes two of 2 * context-parallel size equal chunks to balance
    the causal load.
    """
    cp, seq = facts.layout.cp, facts.seq_length
    if cp > 1 and seq and seq % (2 * cp):
        yield (
            f"data.seq_length={seq} is not a multiple of 2 * context_parallel_size = {2 * cp}, the number of chunks "
            f"that balances the causal load. Set it to a multiple; nearest: {nearest(seq, 2 * cp)}."
        )


@CONTEXT.rule("yarn-positions-in-twice-the-context-ranks")
def _yarn(facts: Facts) -> Iterator[str]:
    """With YaRN, 2 * context-parallel size must divide the original number of positions.

    Otherwise: Megatron-Core fails when it builds the first layer, because it splits its cache of these positions over
    the ranks.
    """
    latent = facts.of_model("multi_latent_attention")
    name = "original_max_position_embeddings" if latent else "yarn_original_max_position_embeddings"
    kind, positions, cp = (
        facts.of_model("rope_type" if latent else "position_embedding_type"),
        facts.of_model(name),
        facts.layout.cp,
    )
    if cp > 1 and kind == "yarn":
        yield from indivisible(f"model.config.{name}", positions, "2 * strategy.context_parallel_size", 2 * cp)


@CONTEXT.rule("exchange-is-known")
def exchanged(facts: Facts) -> Iterator[str]:
    """`cp_comm_type` must be p2p, all_gather or a2a.

    Otherwise: The attention raises an error in the first step. With 'a2a+p2p' each rank would attend only to its own
    part of the sequence, because no process groups exist for it.
    """
    kinds = facts.of_model("cp_comm_type")
    for kind in dict.fromkeys(kinds if isinstance(kinds, list) else [kinds]):
        if kind == "a2a+p2p" and facts.layout.cp == 1:
            continue
        if kind == "a2a+p2p":
            yield (
                "model.config.cp_comm_type='a2a+p2p' needs hierarchical context-parallel groups, which "
                "MegatronStrategy does not create. Set it to one of 'p2p', 'all_gather', 'a2a'."
            )
        elif kind is not None and kind not in layers.CP_COMM_TYPES:
            yield f"model.config.cp_comm_type={kind!r}: must be one of {', '.join(map(repr, layers.CP_COMM_TYPES))}."


@CONTEXT.rule("heads-over-context-ranks")
def _all_to_all(facts: Facts) -> Iterator[str]:
    """With `cp_comm_type=a2a`, tensor-parallel size * context-parallel size must divide the attention heads and the
    query groups.

    Otherwise: The attention raises an error in the first step, because it splits heads instead of the sequence.
    """
    config = facts.sized_config
    if config is None or facts.layout.cp == 1:
        return
    kinds = config.cp_comm_type
    if "a2a" in (kinds if isinstance(kinds, list) else [kinds]):
        yield from layers.heads_over_context_ranks(config)


@CONTEXT.rule("exchange-goes-with-the-attention")
def _exchange_of_attention(facts: Facts) -> Iterator[str]:
    """Over context-parallel ranks, Transformer Engine supports sliding windows with all_gather and a2a, and learned
    sinks with a2a only.

    Otherwise: Transformer Engine raises an error in the first step.
    """
    config, machine = facts.sized_config, facts.machine
    if config is None or facts.layout.cp == 1 or machine.transformer_engine is None:
        return
    if getattr(config, "attn_logit_softcapping", None):  # plain attention, also on GPUs
        return
    kinds = getattr(config, "cp_comm_type", None)
    of_layers = kinds if isinstance(kinds, list) else [kinds] * config.num_layers
    layers_by_setting: dict[tuple[str, str, str], int] = {}
    for number, kind in enumerate(of_layers, 1):
        kind = kind or "p2p"
        window, every = getattr(config, "window_size", None), cast(Any, getattr(config, "window_attn_skip_freq", None))
        softmax = getattr(config, "softmax_type", "vanilla")
        if softmax != "vanilla" and kind != "a2a":
            layers_by_setting.setdefault((f"softmax_type={softmax!r}", kind, "'a2a'"), number)
        elif (
            kind == "p2p"
            and window
            and tuple(window) not in _WHOLE
            and is_layer_window_attention(window, every, number)
        ):
            layers_by_setting.setdefault((f"window_size={tuple(window)}", kind, "'all_gather' or 'a2a'"), number)
        since = _PACKED_SINCE.get(kind)
        if since and Version(machine.transformer_engine) < Version(since) and facts.packed:
            yield (
                f"model.config.cp_comm_type={kind!r} with packed samples requires Transformer Engine {since} or "
                f"newer, but {machine.transformer_engine} is installed. Set cp_comm_type='p2p', or install {since}."
            )
            return
    for (setting, kind, instead), number in layers_by_setting.items():
        yield (
            f"model.config.{setting} in layer {number} with cp_comm_type={kind!r} and "
            f"context_parallel_size={facts.layout.cp}: Transformer Engine does not support this combination. Set "
            f"model.config.cp_comm_type={instead}, or strategy.context_parallel_size=1."
        )


_WHOLE = ((-1, -1), (-1, 0))
_PACKED_SINCE = {"all_gather": "2.18", "a2a": "2.10"}


@CONTEXT.rule("mixers-see-whole-sequences", local=True, megatron_refuses=True)
def _mixers(facts: Facts) -> Iterator[str]:
    """Without the Mamba kernels (mamba-ssm, causal-conv1d), the context-parallel size must be 1.

    Otherwise: The model raises an error when it is built.
    """
    if facts.layout.cp == 1 or not facts.is_hybrid:
        return
    if not facts.has_mamba_kernels:
        yield (
            f"strategy.context_parallel_size={facts.layout.cp}: without mamba-ssm, Mamba layers need whole sequences. "
            "Set context_parallel_size=1, or train on a GPU with mamba-ssm and causal-conv1d."
        )


@CONTEXT.rule("delta-nets-are-whole")
def _delta_nets(facts: Facts) -> Iterator[str]:
    """Gated DeltaNet layers (Qwen3-Next, Qwen 3.5) need whole sequences, whole heads on each tensor-parallel rank, and a model
    with neither multi-token prediction nor latent attention.

    Otherwise: The model raises an error when it is built.
    """
    layout = facts.layout
    for problem in layers.delta_net_problems(facts.written_config, tp=layout.tp, cp=layout.cp):
        yield f"model.config: {problem}"
