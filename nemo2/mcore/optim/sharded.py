# SPDX-License-Identifier: Apache-2.0
"""A torch optimizer for sharded parameters: it scales the loss, clips by the global norm, and updates the
parameters."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional

import torch
from megatron.core.optimizer import OptimizerConfig, _get_param_groups
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError, RuntimeFault
from nemo2.mcore.optim.base import NONFINITE_ADVICE

_WRAPPED = "_fsdp_wrapped_module."
"""The infix that torch's FSDP inserts into the names of wrapped parameters."""


def torch_optimizer(config: OptimizerConfig, chunks: list[Any], overrides: Any) -> torch.optim.Optimizer:
    """The torch optimizer for Megatron-Core's configuration and sharded parameters: Adam(W) or SGD in fp32, with
    Megatron-Core's parameter groups.

    Raises:
        ConfigError: the configuration asks for another optimizer.
    """
    whole_chunks: Any = [_Whole(chunk) for chunk in chunks]
    groups = [group for group in _get_param_groups(whole_chunks, config, overrides) if group["params"]]
    held = {id(whole): parameter for chunk in chunks for whole, parameter in _whole_and_held(chunk)}
    for group in groups:
        group["params"] = [held[id(parameter)] for parameter in group["params"]]
        group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        group.setdefault("max_lr", config.lr)
        group["lr"] = group["max_lr"]
    assert config.lr is not None
    if config.optimizer == "adam":
        kind = torch.optim.AdamW if getattr(config, "decoupled_weight_decay", True) else torch.optim.Adam
        return kind(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    raise ConfigError(unsupported_optimizer(config) or "")


def unsupported_optimizer(config: Any) -> Optional[str]:
    """Why torch can't update the sharded parameters by this configuration. None: it can, or there is none."""
    if (kind := getattr(config, "optimizer", "adam")) in ("adam", "sgd"):
        return None
    return (
        f"optim.config.optimizer={kind!r}: FSDP2Strategy and FSDPStrategy support 'adam' and 'sgd'. Set one of these, or "
        "use MegatronStrategy."
    )


class _Whole:
    """A chunk with the shapes of its unsharded parameters, which Megatron-Core's rules read."""

    def __init__(self, chunk: Any) -> None:
        self.chunk = chunk

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        whole = getattr(self.chunk, "whole", None)
        return iter(whole.items()) if whole is not None else self.chunk.named_parameters()


def _whole_and_held(chunk: Any) -> Iterator[tuple[Parameter, Parameter]]:
    """Each parameter with its unsharded shape, and the tensor that the optimizer updates for it. Both are mostly the
    same object."""
    whole = getattr(chunk, "whole", None)
    for name, parameter in chunk.module.named_parameters():
        yield (parameter if whole is None else whole[name.replace(_WRAPPED, "")]), parameter


class ShardedOptimizer(torch.optim.Optimizer):
    """Clip the gradients of parameters that are sharded over ranks, and step a torch optimizer over them.

    Args:
        optimizer: The optimizer of the sharded parameters. Its parameter groups and state are shared.
        config: Megatron-Core's configuration, for ``clip_grad``, ``grad_norm_skip_threshold``, ``log_num_zeros_in_grad`` and
            fp16's loss scale. None: no clipping, no loss scale, and no step is skipped.
        shard_group: The ranks over which gradients in plain tensors are sharded. None: all ranks hold the same
            gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: Optional[OptimizerConfig] = None,
        *,
        shard_group: Optional[torch.distributed.ProcessGroup] = None,
    ) -> None:
        # torch's __init__ would register the parameters, which the inner optimizer already holds.
        self.optimizer = optimizer
        self.config = config
        self.defaults = optimizer.defaults
        self.clip_grad = 0.0 if config is None else config.clip_grad
        # Megatron-Core has it from 0.17 on.
        self.skip_threshold: float = getattr(config, "grad_norm_skip_threshold", math.inf)
        self.shard_group = shard_group
        self.scaler = _scaler(config)
        self.grad_norm: Optional[float] = None
        """The global gradient norm of the last step before clipping. None before the first step, and after a step whose
        gradients weren't finite."""
        self.num_zeros_in_grad: Optional[int] = None
        """The number of zeros in the gradients of the last step. None: not counted (``log_num_zeros_in_grad``), or the step
        was skipped."""
        self.update_successful: bool = True
        """False if the last step was skipped because its gradients weren't finite (fp16), or were too large."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.state

    @property
    def loss_scale(self) -> Optional[float]:
        """The factor of the loss before the backward. None: the loss is not scaled."""
        return None if self.scaler is None else float(self.scaler.scale)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else loss * self.scaler.scale.to(loss.device)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Clip and update. The loss scaler skips the update if gradients aren't finite.

        Raises:
            RuntimeFault: on every rank, if gradients aren't finite and there is no loss scaler.
        """
        loss = closure() if closure is not None else None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        scale = 1.0 if self.scaler is None else float(self.scaler.scale)
        norm = global_norm(parameters, self.shard_group) / scale
        self.update_successful = math.isfinite(norm)
        self.grad_norm = norm if self.update_successful else None
        if self.scaler is not None:
            self.scaler.update(not self.update_successful)
        elif not self.update_successful:
            raise RuntimeFault(f"The gradients aren't finite (their norm is {norm}). {NONFINITE_ADVICE}")
        self.update_successful = self.update_successful and norm <= self.skip_threshold
        counted = self.update_successful and self.config is not None and self.config.log_num_zeros_in_grad
        self.num_zeros_in_grad = num_zeros(parameters, self.shard_group) if counted else None
        if not self.update_successful:
            return loss
        # Megatron-Core's formula and constant (optimizer/clip_grads.py).
        factor = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
        if factor / scale != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor / scale)
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def make_state(self) -> None:
        """Create the state of parameters that were never updated, in the shapes that a checkpoint is read into.

        Only the optimizer knows which tensors it keeps, so this runs a step with zero gradients at a learning rate of
        zero.
        """
        missing = [p for group in self.param_groups for p in group["params"] if p not in self.state and p.requires_grad]
        if not missing:
            return
        rates = [group["lr"] for group in self.param_groups]
        gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
        for group in self.param_groups:
            group["lr"] = 0.0
        for parameter in gradients:
            parameter.grad = torch.zeros_like(parameter) if parameter in set(missing) else None
        self.optimizer.step()
        for value in (value for parameter in missing for value in self.state[parameter].values()):
            if isinstance(value, Tensor):
                value.zero_()  # weight decay may be in the moments
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def global_norm(parameters: Iterable[Parameter], shard_group: Optional[torch.distributed.ProcessGroup] = None) -> float:
    """The 2-norm of all gradients together. Every rank must call it. The arguments are those of `_sum_over_gradients`."""
    return math.sqrt(_sum_over_gradients(lambda gradient: gradient.float().square().sum(), parameters, shard_group))


def num_zeros(parameters: Iterable[Parameter], shard_group: Optional[torch.distributed.ProcessGroup] = None) -> int:
    """The number of zeros in all gradients together, as Megatron-Core counts them. Every rank must call it."""
    return int(_sum_over_gradients(lambda gradient: (gradient == 0).sum(), parameters, shard_group))


@torch.no_grad()
def _sum_over_gradients(
    measure: Callable[[Tensor], Tensor],
    parameters: Iterable[Parameter],
    shard_group: Optional[torch.distributed.ProcessGroup],
) -> float:
    """The sum of ``measure`` over all gradients, with each element counted once over all ranks.

    A gradient may be a DTensor on any mesh, or a plain tensor that is sharded over the ranks of ``shard_group``.
    """
    device = get_backend().device  # of the collectives; offloaded gradients are in host memory
    parameters = list(parameters)
    sums: dict[Any, Tensor] = {}
    if shard_group is not None and parameters:
        sums[None] = measure(torch.zeros(0, device=device))  # a rank may hold no trainable parameter
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        key: Any = None
        if isinstance(gradient, DTensor):
            cut = tuple(dim for dim, placement in enumerate(gradient.placements) if placement.is_shard())
            key = (gradient.device_mesh, cut)
            if any(placement.is_partial() for placement in gradient.placements):
                gradient = gradient.full_tensor()
                key = None
            else:
                gradient = gradient.to_local()
        value = measure(gradient).to(device)
        sums[key] = sums[key] + value if key in sums else value
    total = 0.0
    for key, value in sums.items():
        if key is not None:
            mesh, cut = key
            for dim in cut:
                torch.distributed.all_reduce(value, group=mesh.get_group(dim))
        elif shard_group is not None:
            torch.distributed.all_reduce(value, group=shard_group)
        total += float(value)
    return total


def _scaler(config: Optional[OptimizerConfig]) -> Optional[Any]:
    """Megatron-Core's loss scaler for fp16, dynamic unless a scale is set."""
    if config is None or not config.fp16:
        return None
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )
