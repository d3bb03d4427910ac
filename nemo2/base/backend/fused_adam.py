# SPDX-License-Identifier: Apache-2.0
"""Adam with the state layout that Megatron-Core expects of Transformer Engine's and Apex's FusedAdam.

torch.optim.AdamW keeps one `step` tensor per parameter. Megatron-Core's distributed optimizer has a branch for that
which cannot load a checkpoint (0.16.1 and 0.19.2: it asserts one step before any state exists). FusedAdam keeps an
integer `step` in each parameter group and only the two moments per parameter, and so does this class. The arithmetic
is torch's own functional Adam and AdamW.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba, arXiv:1412.6980); with `adam_w_mode` AdamW (Loshchilov & Hutter, arXiv:1711.05101).

    Decoupled decay multiplies a parameter by `1 - lr * weight_decay`. Otherwise the decay is added to the gradient.
    `capturable` is for CUDA graphs. It is accepted because Megatron-Core passes it, and must be False.

    Raises:
        ValueError: a hyperparameter is out of range, `capturable` is set, or `bias_correction` is not.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ):
        if capturable:
            raise ValueError(
                "capturable=True is for CUDA graphs of the optimizer's step, which need Transformer Engine. Set capturable=False."
            )
        if not bias_correction:
            raise ValueError("bias_correction=False needs Transformer Engine. Set bias_correction=True.")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas={betas}: both must be at least 0 and less than 1.")
        if eps <= 0.0:
            raise ValueError(f"eps={eps}: must be above 0.")
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. As in Transformer Engine, a group without parameters keeps its
        step unset, because Megatron-Core aligns such groups when it saves."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if "exp_avg" not in self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        update = adamw if self.adam_w_mode else adam
        update(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            # The functional form counts each of these up before it uses it.
            list(torch.full((len(params),), float(group["step"] - 1), device=params[0].device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
