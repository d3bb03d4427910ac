# SPDX-License-Identifier: Apache-2.0
"""Limits the capacity of experts."""

import math
from typing import Any

import lightning.pytorch as pl

from nemo2.base.counts import is_number
from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.config.provenance import adjust

_DISPATCHERS = ("alltoall", "alltoall_seq")
_BALANCING = ("seq_aux_loss", "aux_loss", "none")


@configurable
class MegatronTokenDropCallback(pl.Callback):
    """Limit the number of tokens per expert and drop the tokens beyond the limit.

    The callback sets two fields of the model's configuration before the model is built. Steps cost nothing.

    Args:
        moe_expert_capacity_factor: The capacity of an expert, as a multiple of an even share of the tokens. Below 0: no
            limit.
        moe_pad_expert_input_to_capacity: Pad each expert's input to its capacity, so that shapes are constant.

    Raises:
        ConfigError: a factor that is no number, or padding without a limit. At setup: a dispatcher or a load-balancing
            method that doesn't drop tokens, or a model without experts.
    """

    def __init__(self, moe_expert_capacity_factor: float = 1.0, moe_pad_expert_input_to_capacity: bool = True) -> None:
        if not (is_number(moe_expert_capacity_factor) and math.isfinite(moe_expert_capacity_factor)):
            raise ConfigError(
                f"MegatronTokenDropCallback.moe_expert_capacity_factor={moe_expert_capacity_factor!r}: must be a number, for "
                "example 1.0. Below 0 means no limit."
            )
        if moe_expert_capacity_factor < 0 and moe_pad_expert_input_to_capacity:
            raise ConfigError(
                "MegatronTokenDropCallback.moe_pad_expert_input_to_capacity=True requires a capacity, but "
                f"moe_expert_capacity_factor={moe_expert_capacity_factor} sets none. Set a factor of 0 or more, or "
                "set moe_pad_expert_input_to_capacity=False."
            )
        self.moe_expert_capacity_factor = moe_expert_capacity_factor
        self.moe_pad_expert_input_to_capacity = moe_pad_expert_input_to_capacity

    def check_model(self, config: Any) -> None:
        """Raise the errors of `setup` about the model's configuration."""
        if config is None or not getattr(config, "num_moe_experts", None):
            raise ConfigError("MegatronTokenDropCallback: the model has no experts. Remove the callback.")
        for field, known in (
            ("moe_token_dispatcher_type", _DISPATCHERS),
            ("moe_router_load_balancing_type", _BALANCING),
        ):
            if (value := getattr(config, field)) not in known:
                raise ConfigError(
                    f"model.config.{field}={value!r}: MegatronTokenDropCallback requires one of {', '.join(known)}. "
                    "Set one of these, or remove the callback."
                )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        config = getattr(pl_module, "config", None)
        self.check_model(config)
        factor = self.moe_expert_capacity_factor
        wanted = {
            "moe_expert_capacity_factor": factor if factor >= 0 else None,
            "moe_pad_expert_input_to_capacity": self.moe_pad_expert_input_to_capacity,
        }
        for field, value in wanted.items():
            adjust(config, field, value, why="trainer.callbacks has a MegatronTokenDropCallback")
