# SPDX-License-Identifier: Apache-2.0
"""Predicts in milliseconds whether a recipe fits its GPUs, for `nemo2 check`, `list` and `launch`.

The peaks of every shipped recipe are known (`nemo2.planner.peaks`). For a recipe of such a name the formula is scaled
to its peak. Unchanged, the recipe has exactly the rehearsal's result, and a change counts by its effect in the formula.
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
"""The formula's, for 19 of 20 shipped recipes against their rehearsals (tests/nemo2/planner/test_quick.py)."""
SCALED_MARGIN = 0.1
"""The same of a change of a recipe whose rehearsal is known."""

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
    """How far ``needed`` may be off, as a share of it; 0.0 where it was rehearsed."""
    assumed: bool = False
    """Nobody has said which GPUs these are."""

    @property
    def answer(self) -> Answer:
        """Tight is within the margin, or with less than 5 % of the GPU left free."""
        if self.needed * (1 + self.margin) <= self.capacity * (1 - HEADROOM):
            return "fits"
        return "does not fit" if self.needed * (1 - self.margin) > self.capacity else "tight"

    def sentence(self, name: str = "") -> str:
        """The prediction as a sentence. ``name`` is the recipe to rehearse."""
        about = "rehearsed" if self.margin == 0 else f"by formula, within {self.margin:.0%}"
        told = (
            f"{self.answer}: {self.needed / GIB:.1f} of {self.capacity / GIB:.1f} GiB of an {self.gpu}"
            f"{' (assumed)' if self.assumed else ''}, {about}"
        )
        if self.answer == "fits" or not name:
            return told
        return f"{told}; `nemo2 rehearse {name}` counts it to the byte" + (
            " and looks for a change that makes it fit" if self.answer == "does not fit" else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "answer": self.answer}


def quick_verdict(recipe: Any, machine: Machine, *, name: str = "") -> Optional[Quick]:
    """Whether ``recipe`` fits. None: CPUs, or a model or a strategy without a formula.

    Args:
        recipe: A configured call of ``llm.pretrain`` or ``llm.finetune``. It is not changed.
        machine: The machine of the run. GPUs of an unknown kind count as `DEFAULT`, which the prediction mentions.
        name: The shipped recipe from which this one derives. "": unknown.
    """
    if machine.accelerator != "cuda":
        return None
    chip = machine.gpu or gpu(DEFAULT)
    try:
        subject = read_recipe(on(recipe, machine), chip)
        needed = predict_memory(subject.shape, subject.job, teacher=subject.teacher).allocated + OUTSIDE_TORCH
    except (ConfigError, CheckpointError, AttributeError, TypeError, ZeroDivisionError):
        return None  # broken rules and models of the user's own are for others to tell
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
