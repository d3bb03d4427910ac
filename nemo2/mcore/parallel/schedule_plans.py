# SPDX-License-Identifier: Apache-2.0
"""A chunk's forward step as a plan, for the schedule that overlaps experts' exchanges with another micro-batch's work.

With ``overlap_moe_expert_parallel_comm`` Megatron-Core runs the layers of one micro-batch's forward between those of
another's backward (`megatron.core.pipeline_parallel.combined_1f1b`). It asks the forward step for a plan of the layers,
which the model's ``build_schedule_plan`` makes from the arguments of its ``forward``.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan

from nemo2.base.errors import ConfigError


def schedule_plan(core: Any, forward_step: Callable[[Any], Any], batch: Any) -> AbstractSchedulePlan:
    """The plan of ``forward_step(batch)``, in which calling ``core`` plans its forward instead of running it.

    Raises:
        ConfigError: ``forward_step`` computes on the output of ``core``, which doesn't exist before the plan has run.
    """
    plans: list[AbstractSchedulePlan] = []

    def forward(*args: Any, **kwargs: Any) -> AbstractSchedulePlan:
        plans.append(core.build_schedule_plan(*args, **kwargs))
        return plans[-1]

    replaced = core.__dict__.get("forward")
    core.forward = forward
    try:
        output = forward_step(batch)
    except Exception as error:
        if plans:
            raise ConfigError(_COMPUTES) from error
        raise
    finally:
        del core.forward
        if replaced is not None:
            core.forward = replaced
    if not isinstance(output, AbstractSchedulePlan):
        raise ConfigError(_COMPUTES)
    return output


_COMPUTES = (
    "model.config.overlap_moe_expert_parallel_comm=True requires a forward step that returns the model's output as it is: "
    "Megatron-Core runs the layers after the forward step has returned. Move the computation into the loss reduction, or "
    "set overlap_moe_expert_parallel_comm=False."
)
