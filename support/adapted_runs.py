# SPDX-License-Identifier: Apache-2.0
"""Small runs with PEFT methods in every layout, from the weights of one process."""

from typing import Any

import torch

from support import transformed_runs

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    **transformed_runs.LAYOUTS,
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"expert_model_parallel_size": 2},
    "etp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2},
}


def method(kind: str, **changes: Any) -> Any:
    """The method of a run. Its second factors don't start at zero, so that every gradient is nonzero from the first
    step on."""
    from nemo2.models import peft

    made = getattr(peft, kind)
    factors = {"dim": 4, "alpha": 8, "lora_B_init_method": "normal", "lora_A_init_method": "uniform"}
    return made(**((factors if issubclass(made, peft.LoRA) else {}) | changes))


def train(directory: str, kind: str, name: str = "", *, options: Any = None, **run: Any) -> dict[str, Any]:
    """Train ``STEPS`` steps with a method, in a layout by its name."""
    torch.manual_seed(1234)
    if not name.startswith("fsdp"):
        run.setdefault("strategy", (LAYOUTS | OF_EXPERTS).get(name))
    return transformed_runs.train(directory, name, transform=method(kind, **(options or {})), **run)
