# SPDX-License-Identifier: Apache-2.0
"""The routers' auxiliary losses, which Megatron-Core adds up per layer in a tracker of the process."""

from megatron.core.transformer.moe import moe_utils

try:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
except ImportError:  # up to 0.16 a plain dictionary
    get_moe_metrics_tracker = None


def forget_router_losses() -> None:
    """Drop all that was added up: to be called before a model is built.

    The tracker keeps the number of layers of the first model of the process; further layers of another model would be out of
    its bounds.
    """
    if get_moe_metrics_tracker is not None:
        get_moe_metrics_tracker()._metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
