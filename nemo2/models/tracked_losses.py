# SPDX-License-Identifier: Apache-2.0
"""Losses beside the one that is reported, which Megatron-Core adds up in trackers of the process: the routers' and those of
multi-token prediction."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

try:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
except ImportError:  # up to 0.16 a plain dictionary
    get_moe_metrics_tracker = None

_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def forget_tracked_losses() -> None:
    """Drop all that was added up: to be called before a model is built.

    The trackers keep the number of layers of the first model of the process; further layers of another model would be out of
    their bounds.
    """
    MTPLossLoggingHelper.tracker.clear()
    if get_moe_metrics_tracker is not None:
        get_moe_metrics_tracker()._metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def report_tracked_losses(config: Any, *, microbatches: int) -> dict[str, float]:
    """The sums over ``microbatches`` training micro-batches of this rank since the last call, which are then reset.
    Every rank must call it.

    They are means over micro-batches, replicas and, for the routers' losses, layers of experts, before any coefficient:
    "load_balancing_loss" (1 is perfect balance; Switch Transformers, arXiv:2101.03961, equation 4), with the prefix
    "seq_" or "global_" for the unit that is balanced, "z_loss" (ST-MoE, arXiv:2202.08906, equation 5), "mtp_1_loss" and
    so on. Empty for models without such losses.
    """
    routers = _router_names(config)
    further = [f"mtp_{depth + 1}_loss" for depth in range(getattr(config, "mtp_num_layers", None) or 0)]
    names = [*routers, *further]
    if not names or not microbatches:
        return {}
    losses: dict[str, torch.Tensor] = {}
    if routers:
        _report_routers(config, routers, 1 / microbatches, losses)
    if further:
        # A function of the class, without `staticmethod` in 0.16.
        MTPLossLoggingHelper.track_mtp_metrics(1 / microbatches, 0, None, None, losses)  # pyright: ignore[reportArgumentType]
    losses = {name.replace(" ", "_"): value for name, value in losses.items()}
    device = _device()
    values = torch.stack([losses[name].float() if name in losses else torch.zeros((), device=device) for name in names])
    # Stages without such layers know less of a loss than those that have them, and none is negative.
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)
    return dict(zip(names, values.tolist(), strict=True))


def _device() -> torch.device:
    from nemo2.base.backend import get_backend

    return get_backend().device


def _router_names(config: Any) -> list[str]:
    """Names of the auxiliary losses of this model's routers."""
    if not getattr(config, "num_moe_experts", None):
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = kinds if isinstance(kinds, list) else [kinds]
    weights = weights if isinstance(weights, list) else [weights] * len(kinds)
    names = [_BALANCING[kind] for kind, weight in zip(kinds, weights, strict=False) if kind in _BALANCING and weight]
    return names + (["z_loss"] if config.moe_z_loss_coeff is not None else [])


def _report_routers(config: Any, names: list[str], scale: float, losses: dict[str, torch.Tensor]) -> None:
    mtp = config.mtp_num_layers or 0
    pattern = getattr(config, "hybrid_override_pattern", None)
    layers: dict[str, Any] = {"num_layers": config.num_layers, "moe_layer_freq": config.moe_layer_freq}
    if pattern is not None:
        layers = {"num_layers": max(1, pattern.count("E")), "moe_layer_freq": None}
    if mtp:
        layers["mtp_num_layers"] = mtp
    # Pipeline stages without experts have recorded nothing, and take part in the sum.
    size, device = config.num_layers + mtp, _device()
    if get_moe_metrics_tracker is not None:
        tracker = get_moe_metrics_tracker()
        for name in names:
            tracker.ensure_initialized(name, size, device)
        tracker.report(scale, 0, total_loss_dict=losses, track_names=names, **layers)
        return
    entries = moe_utils.get_moe_layer_wise_logging_tracker()
    for name in names:
        nothing = {"values": torch.zeros(size, device=device), "reduce_group": None, "avg_group": None}
        entries.setdefault(name, {**nothing, "reduce_group_has_dp": False})
    moe_utils.track_moe_metrics(scale, 0, total_loss_dict=losses, track_names=names, **layers)
