# SPDX-License-Identifier: Apache-2.0
"""A layer of experts whose auxiliary losses count the same in every layout.

With `calculate_per_token_loss` every gradient is divided by the number of tokens in the global batch at the end of the
step, so the router's load-balancing and z-losses must be multiplied by it first. Megatron-Core 0.16 multiplies by the
tokens of one rank: under sequence or context parallelism the auxiliary gradients are too small by the number of
ranks that share a sequence (half of them with two, found by comparing the router's gradient with that of one process),
and the sequence-wise loss by the micro-batch size besides. 0.19 is right and its own layer is used.
"""

import logging
from types import SimpleNamespace
from typing import Any, Optional

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

# Only the version that is right looks at the ranks that share a sequence there.
UPSTREAM_SCALES_RIGHT = "tp_cp_group" in TopKRouter.attach_and_log_load_balancing_loss.__code__.co_names


class LocalMoELayer(MoELayer):
    """Megatron-Core's layer of experts, built and called as it is, with `ScaledRouter`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # 0.16 builds its router without asking; a second one would draw the weights again.
        self.router.__class__ = ScaledRouter


class ScaledRouter(TopKRouter):
    """A router that weighs its auxiliary losses by the tokens of all ranks that share a sequence."""

    def _apply_seq_aux_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = dict(zip(("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz"), args, strict=False))
        # Counted per sequence there; the loss is their mean.
        self._sequences = (bound | kwargs)["bsz"]
        try:
            return super()._apply_seq_aux_loss(*args, **kwargs)
        finally:
            self._sequences = 1

    def attach_and_log_load_balancing_loss(self, activation: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attach the loss as the original does, multiplied by `valid_token_count` (None: all tokens of this rank)."""
        tokens = kwargs.pop("valid_token_count", None)
        tokens = activation.shape[0] if tokens is None else tokens * getattr(self, "_sequences", 1)
        ranks = self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(activation, *args, valid_token_count=tokens * ranks, **kwargs)

    def apply_z_loss(self, logits: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """`[tokens, experts]` in and out."""
        if not self.calculate_per_token_loss:
            return super().apply_z_loss(logits, padding_mask)
        # The original divides by the ranks; the factor that is missing is their number.
        groups, self.tp_cp_group = self.tp_cp_group, SimpleNamespace(size=lambda: 1)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return super().apply_z_loss(logits, padding_mask)
        finally:
            self.tp_cp_group = groups


def _known_layer(record: logging.LogRecord) -> bool:
    """0.16 warns of every class of layers that it does not list; it then builds it as it should."""
    return not ("Unknown MLP type" in record.getMessage() and LocalMoELayer.__name__ in record.getMessage())


logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_known_layer)
