# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Transformer Engine's FusedAdam that only allocates its states, in the requested dtypes.

Megatron-Core's precision-aware optimizer exists only with Transformer Engine, because it reads the arguments of the
installed FusedAdam. `transformer_engine_stub` replaces it for questions about another machine, such as a rehearsal.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch


class FusedAdam(torch.optim.Optimizer):
    """Two moments per parameter, and with `master_weights` the optimizer's copy of 16-bit parameters. No arithmetic.

    The dtypes and names of the states are those of Transformer Engine, ``pytorch/optimizers/fused_adam.py``. With
    `store_param_remainders` the copy of a bf16 parameter holds only the 16 bits that bf16 drops from fp32.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ):
        del bias_correction, adam_w_mode, capturable, use_decoupled_grad
        self.moments = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.master_dtype = master_weight_dtype if master_weights else None
        self.store_param_remainders = store_param_remainders
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Allocate the states in the first step."""
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)

    def initialize_state(self, parameter: Any, store_param_remainders: Optional[bool] = None) -> None:
        """Allocate the states of one parameter."""
        state = self.state[parameter]
        for name, dtype in self.moments.items():
            state[name] = torch.empty_like(parameter, dtype=dtype)
        if self.master_dtype is not None and parameter.dtype != torch.float32:
            remainders = self.store_param_remainders and parameter.dtype == torch.bfloat16
            state["master_param"] = torch.empty_like(parameter, dtype=torch.int16 if remainders else self.master_dtype)


@contextmanager
def transformer_engine_stub() -> Iterator[None]:
    """A context in which ``transformer_engine.pytorch.optimizers`` has only this FusedAdam. If Transformer Engine is already
    imported, nothing changes."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    if names[0] in sys.modules:
        yield
        return
    modules = [types.ModuleType(name) for name in names]
    modules[0].__path__ = modules[1].__path__ = []  # pyright: ignore[reportAttributeAccessIssue]
    modules[2].FusedAdam = FusedAdam  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules.update(zip(names, modules, strict=True))
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
