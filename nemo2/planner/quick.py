# SPDX-License-Identifier: Apache-2.0
"""Predicts in milliseconds whether a recipe fits its GPUs, for `nemo2 check`, `list` and `launch`.

`nemo2.planner.peaks` has the rehearsed peak of every shipped recipe. For a shipped recipe the formula is scaled to that
peak. The prediction of an unchanged recipe therefore equals its rehearsal, and a changed recipe differs from it as the
formula does.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Optional

from nemo2.errors import CheckpointError, ConfigError
from nemo2.gpus import DEFAULT, GIB, HEADROOM, OUTSIDE_TORCH, gpu
from nemo2.planner.memory import predict_memory
from nemo2.planner.peaks import rehearsed
from nemo2.planner.recipe import read_recipe
from nemo2.settle import Machine, on

MARGIN = 0.2
"""The formula's error margin. 19 of 20 shipped recipes are within it (tests/nemo2/planner/test_quick.py)."""
SCALED_MARGIN = 0.1
"""The error margin for a change to a recipe whose rehearsal is known."""

Answer = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, kw_only=True)
class Quick:
    """The prediction. ``needed`` and ``capacity`` are bytes on the GPU with the most memory, including memory
    outside torch."""

    gpu: str
    gpus: int
    needed: float
    capacity: int
    margin: float
    """The error margin of ``needed``, as a fraction of it. 0.0: it was rehearsed."""
    assumed: bool = False
    """Whether the kind of the machine's GPUs is unknown, so that ``gpu`` is an assumption."""

    @property
    def answer(self) -> Answer:
        """ "tight": the job fits or not depending on the error, or it leaves less than `HEADROOM` of the GPU free."""
        if self.needed * (1 + self.margin) <= self.capacity * (1 - HEADROOM):
            return "fits"
        return "does not fit" if self.needed * (1 - self.margin) > self.capacity else "tight"

    def sentence(self, name: str = "") -> str:
        """The prediction as a sentence. ``name`` is the recipe to rehearse."""
        about = "rehearsed" if self.margin == 0 else f"by formula, within {self.margin:.0%}"
        told = (
            f"{self.answer}: {self.needed / GIB:.1f} of the {self.capacity / GIB:.1f} GiB of one {self.gpu}"
            f"{' (assumed)' if self.assumed else ''}, {about}"
        )
        if self.answer == "fits" or not name:
            return told
        return f"{told}; `nemo2 rehearse {name}` counts the memory to the byte" + (
            " and looks for a change that makes the job fit" if self.answer == "does not fit" else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "answer": self.answer}


def quick_verdict(recipe: Any, machine: Machine, *, name: str = "") -> Optional[Quick]:
    """Whether ``recipe`` fits. None: the machine has no GPUs, or the planner has no formula for the model or strategy.

    Args:
        recipe: A configured call of ``llm.pretrain`` or ``llm.finetune``. It is not changed.
        machine: The machine of the run. GPUs of an unknown kind count as `DEFAULT`, and the prediction is marked
            ``assumed``.
        name: The shipped recipe that ``recipe`` is derived from. "": unknown.
    """
    if machine.accelerator != "cuda":
        return None
    chip = machine.gpu or gpu(DEFAULT)
    try:
        subject = read_recipe(on(recipe, machine), chip)
        needed = predict_memory(subject.shape, subject.job, teacher=subject.teacher).allocated + OUTSIDE_TORCH
    except (ConfigError, CheckpointError, AttributeError, TypeError, ZeroDivisionError):
        return None  # the rules report broken settings, and a user's own model has no formula
    margin, known = MARGIN, rehearsed().get(name)
    if known is not None:
        margin = 0.0 if round(needed / GIB, 3) == known["formula"] else SCALED_MARGIN
        needed *= known["peak"] / known["formula"]
    return Quick(
        gpu=chip.name,
        gpus=subject.job.gpus,
        needed=needed,
        capacity=chip.memory,
        margin=margin,
        assumed=machine.gpu is None,
    )
