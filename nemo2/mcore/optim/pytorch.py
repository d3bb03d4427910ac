# SPDX-License-Identifier: Apache-2.0
"""Torch's optimizers as objects of a recipe, for parameters that each rank holds whole or that torch shards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from nemo2.base.backend.extras import have_te, why_missing
from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.mcore.optim.base import OptimizerModule, ParamCondition, check_lr_mult
from nemo2.mcore.optim.lr_scheduler import LR_FACTOR, LRSchedulerModule


def is_bias(name: str, parameter: Parameter) -> bool:
    """Whether the parameter's name is that of a bias: NeMo's rule for parameters without weight decay.

    Args:
        name: The name of the parameter in its model.
        parameter: The parameter. Not used, but part of the signature of such rules.
    """
    return "bias" in name


@configurable
@dataclass(eq=False)
class PytorchOptimizerModule(OptimizerModule):
    """Train with a torch optimizer.

    With `MegatronStrategy` it requires that every rank holds whole parameters (no pipeline, no sharded matrices), and
    ``use_distributed_optimizer=False``. With `FSDP2Strategy` and `FSDPStrategy` it updates the shards.

    Raises:
        ConfigError: ``lr_mult`` is set without ``scale_lr_cond``, or no parameter is trainable.
    """

    makes_torch_optimizers = True

    optimizer_fn: Callable[..., Optimizer]
    """``(parameter groups) -> optimizer``, such as ``Partial(torch.optim.AdamW, lr=1e-4)``."""
    lr_scheduler: Optional[LRSchedulerModule] = None
    """The learning-rate schedule. None: a constant learning rate."""
    no_weight_decay_cond: Optional[ParamCondition] = is_bias
    """``(name, parameter) -> bool``. Parameters for which it returns True have no weight decay. None: weight decay for
    all."""
    scale_lr_cond: Optional[ParamCondition] = None
    """``(name, parameter) -> bool``. Parameters for which it returns True have their learning rate multiplied by
    ``lr_mult``."""
    lr_mult: float = 1.0
    """The factor for the parameters that ``scale_lr_cond`` selects."""

    def __post_init__(self) -> None:
        check_lr_mult(self.lr_mult, self.scale_lr_cond, "the learning rate of optim.optimizer_fn")

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """The optimizer of the trainable parameters of ``model``, in a list of one. The two conditions give up to
        four groups."""
        groups: dict[tuple[bool, bool], list[Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                still = self.no_weight_decay_cond is not None and self.no_weight_decay_cond(name, parameter)
                scaled = self.scale_lr_cond is not None and self.scale_lr_cond(name, parameter)
                groups.setdefault((bool(still), bool(scaled)), []).append(parameter)
        if not groups:
            raise ConfigError(
                f"All parameters of {type(model).__name__} are frozen, so there is nothing to train. Keep "
                "requires_grad=True on some parameters."
            )
        listed = [
            {"params": parameters, **({"weight_decay": 0.0} if still else {})}
            for (still, _), parameters in groups.items()
        ]
        optimizer = self.optimizer_fn(listed)
        for group, (_, scaled) in zip(optimizer.param_groups, groups, strict=True):
            if scaled:
                group["lr"] = group["lr"] * self.lr_mult
                group[LR_FACTOR] = self.lr_mult
        return [optimizer]


def fused_adam(params: Any, **settings: Any) -> Optimizer:
    """Transformer Engine's Adam, in one kernel.

    Args:
        params: Parameters or parameter groups, as for torch's optimizers.

    Raises:
        ConfigError: Transformer Engine isn't installed.
    """
    if not have_te():
        raise ConfigError(
            f"optim.optimizer_fn=fused_adam requires Transformer Engine: {why_missing('transformer_engine')}. Or use "
            "torch.optim.Adam (pytorch_adam_with_cosine_annealing)."
        )
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(params, **settings)
