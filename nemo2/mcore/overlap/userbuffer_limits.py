# SPDX-License-Identifier: Apache-2.0
"""The limits of userbuffers: formats that a version of Transformer Engine can't exchange through them, tensors of
another size, and projections without buffers.

Source: ``fill_userbuffers_buffer_for_all_gather`` and the layers that call it, for each version
(tests/transformer_engine), and the names of buffers that Megatron-Core's modules give their layers.
"""

from collections.abc import Iterator
from typing import Any, Optional

from packaging.version import Version

CARRIED_SINCE: dict[str, Optional[str]] = {
    "delayed": "0",
    "tensorwise": "0",
    "mxfp8": "2.4",
    "blockwise": None,
    "nvfp4": None,
}
"""The first version that exchanges tensors of each fp8 or fp4 recipe through userbuffers. None: no version up to the
newest."""
_TWO_SETS_SINCE = "2.8"
_DELAYS_WGRAD_SINCE = "2.3"
_MXFP8_BLOCK = 128
_OFF = "or set tp_comm_overlap=False (of MegatronCommOverlapCallback, or of model.config)"


def without_buffers(config: Any) -> Optional[str]:
    """The projections of a model that have no userbuffers, as a reason. None: all projections have them.

    At the first such projection Megatron-Core turns ``tp_comm_overlap`` off in the whole configuration, or Transformer
    Engine fails when it looks up the buffer.
    """
    if getattr(config, "multi_latent_attention", False):
        return "Transformer Engine has no buffers for the projections of multi-latent attention"
    if getattr(config, "mtp_num_layers", None):
        return "Transformer Engine has no buffer for the projection of multi-token prediction (model.config.mtp_num_layers)"
    for block in getattr(config, "per_block_parameters", None) or ():
        if block.attention.replace_with_linear or block.mlp.replace_with_linear:
            return "Transformer Engine has no buffers for layers that replace attention or an MLP"
    return None


def uncarried(config: Any, *, version: str, tokens: Optional[int]) -> Iterator[tuple[str, str]]:
    """The requirements of a model with ``tp_comm_overlap`` that userbuffers can't meet, each with its rule and a
    sentence.

    Args:
        config: The model's ``TransformerConfig`` as it runs.
        version: Transformer Engine's version.
        tokens: Tokens of a micro-batch on a tensor-parallel group, before sequence parallelism shards them. None:
            unknown.
    """
    yield from (("userbuffers-carry-the-format", sentence) for sentence in _formats(config, Version(version), tokens))
    if getattr(config, "variable_seq_lengths", False):
        yield (
            "userbuffers-have-one-size",
            "model.config.variable_seq_lengths=True with tp_comm_overlap=True: userbuffers have a fixed size, the "
            f"size of one micro-batch. Pad samples to one length and set variable_seq_lengths=False, {_OFF}.",
        )
    reason = without_buffers(config)
    if reason is not None:
        yield (
            "every-projection-has-a-userbuffer",
            f"model.config.tp_comm_overlap=True: {reason}. Set tp_comm_overlap=False.",
        )


def _formats(config: Any, version: Version, tokens: Optional[int]) -> Iterator[str]:
    for name in ("fp8", "fp4"):
        if getattr(config, name, None) is None:
            continue
        recipe = str(getattr(config, f"{name}_recipe", None))
        setting = f"trainer.plugins.{name}_recipe={recipe!r} with tp_comm_overlap=True"
        since = CARRIED_SINCE.get(recipe, "0")
        if since is None:
            yield (
                f"{setting}: Transformer Engine does not support userbuffers for this format. Set "
                f"trainer.plugins.fp8_recipe='tensorwise' with fp8, {_OFF}."
            )
        elif version < Version(since):
            yield (
                f"{setting}: Transformer Engine {version} does not support userbuffers for this format. Install {since} "
                f"or newer, {_OFF}."
            )
        elif recipe == "mxfp8" and tokens is not None:
            share = tokens // config.tensor_model_parallel_size
            if share % _MXFP8_BLOCK:
                yield (
                    f"{setting}: a micro-batch has {share} tokens per rank, but userbuffers require a multiple of "
                    f"{_MXFP8_BLOCK} tokens for MXFP8. Change data.seq_length or data.micro_batch_size, {_OFF}."
                )
    if getattr(config, "fp8", None) and version < Version(_TWO_SETS_SINCE) and some_layers_in_16_bits(config):
        yield (
            f"trainer.plugins.first_last_layers_bf16=True with tp_comm_overlap=True: Transformer Engine {version} "
            f"supports buffers of one dtype only. Install {_TWO_SETS_SINCE} or newer, or set one of the two to False."
        )
    bulk = getattr(config, "tp_comm_bulk_wgrad", False) and not getattr(config, "tp_comm_overlap_rs_dgrad", False)
    if getattr(config, "delay_wgrad_compute", False) and bulk and version >= Version(_DELAYS_WGRAD_SINCE):
        yield (
            "model.config.delay_wgrad_compute=True with tp_comm_overlap=True: a delayed weight gradient cannot "
            "overlap with the communication of the input gradient. Set "
            "MegatronCommOverlapCallback.tp_comm_overlap_cfg.qkv_wgrad and fc1_wgrad to None, or set one of the two "
            "to False."
        )


def some_layers_in_16_bits(config: Any) -> bool:
    """Whether some layers of a model in 8 or 4 bits stay in 16 bits."""
    if getattr(config, "quant_recipe", None) is not None:  # each layer may have its own recipe
        return True
    return bool(getattr(config, "first_last_layers_bf16", False)) and (
        config.num_layers_at_start_in_bf16 + config.num_layers_at_end_in_bf16 > 0
    )
