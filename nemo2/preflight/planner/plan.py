# SPDX-License-Identifier: Apache-2.0
"""`plan`: predicts a recipe's speed, whether it fits its GPUs, and the duration and cost of a token budget."""

import dataclasses
from typing import Any, Optional

from nemo2.base.advice import advice
from nemo2.base.errors import ConfigError
from nemo2.base.gpus import DEFAULT, GPU, HEADROOM, gpu
from nemo2.mcore.settle import Machine, on
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.error_band import Band, band
from nemo2.preflight.planner.fit import fit_of
from nemo2.preflight.planner.goodput import Failures, Goodput, goodput
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.recipe import Subject, notes_of, read_recipe
from nemo2.preflight.planner.step_time import StepTime, predict, teaching_time
from nemo2.preflight.rehearse.counts import Verdict

HOUR = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The prediction of a recipe's training on its GPUs.

    Attributes:
        layout: in words.
        step: the seconds of one optimizer step, by part.
        band: the range of measured over predicted speeds of similar jobs.
        mfu: model FLOPs (causal half of attention) over the data-sheet rate of ``precision``. `mfu_full_attention`
            counts the whole score matrix, as PaLM and NeMo 2.0 do.
        fit: the memory of each kind of rank, and whether it fits (`nemo2.preflight.planner.fit`).
        tokens: the token budget. None: no budget; then `hours` and `cost` are None too. A `cost` of None: no price.
        goodput: with failures and checkpoints. None without a token budget.
        notes: settings of the recipe that the prediction leaves out.
    """

    recipe: str
    gpu: GPU
    gpus: int
    layout: str
    shape: ModelShape
    job: Job
    step: StepTime
    band: Band
    fit: Verdict
    tokens: Optional[float] = None
    cost_per_gpu_hour: Optional[float] = None
    goodput: Optional[Goodput] = None
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.step.tokens_per_second_per_gpu

    @property
    def fits(self) -> bool:
        return self.fit.fits

    def flops_per_second(self, *, causal: bool = True) -> float:
        """Model FLOP/s of a GPU."""
        return self.shape.flops_per_token(self.job.seq, causal=causal) * self.tokens_per_second_per_gpu

    @property
    def mfu(self) -> float:
        return self.flops_per_second() / self.gpu.rate(self.job.precision)

    @property
    def mfu_full_attention(self) -> float:
        return self.flops_per_second(causal=False) / self.gpu.rate(self.job.precision)

    @property
    def hours(self) -> Optional[float]:
        """Hours of uninterrupted training for the budget of tokens."""
        if self.tokens is None:
            return None
        return self.tokens / (self.tokens_per_second_per_gpu * self.gpus) / HOUR

    @property
    def cost(self) -> Optional[float]:
        """Price of the expected hours, failures included, in the currency of the hourly price."""
        if self.cost_per_gpu_hour is None or self.goodput is None:
            return None
        return self.goodput.hours * self.gpus * self.cost_per_gpu_hour

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, including the properties."""
        result = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("gpu", "shape", "job", "step", "band", "fit", "goodput")
        }
        result |= {
            "gpu": self.gpu.name,
            "job": {**dataclasses.asdict(self.job), "gpu": self.gpu.name},
            "shape": self.shape.to_dict(),
            "step_seconds": self.step.total,
            "step_parts": self.step.parts,
            "band": self.band._asdict(),
            "memory": {kind: {**parts, "total": sum(parts.values())} for kind, parts in self.fit.ranks.items()},
            "needed": self.fit.needed,
            "counted": not self.fit.why,
            "answer": self.fit.answer,
            "headroom": self.fit.headroom,
            "goodput": None if self.goodput is None else dataclasses.asdict(self.goodput),
        }
        names = ("tokens_per_second_per_gpu", "mfu", "mfu_full_attention", "fits", "hours", "cost")
        return result | {name: getattr(self, name) for name in names}


def plan(
    recipe: Any,
    *,
    name: str = "",
    gpus: str = DEFAULT,
    tokens: Optional[float] = None,
    cost_per_gpu_hour: Optional[float] = None,
    failures: Optional[Failures] = None,
    headroom: float = HEADROOM,
    check: bool = True,
) -> Plan:
    """Predict the training of ``recipe``, which is not changed, on ``gpus``.

    Args:
        recipe: A configured call of ``llm.pretrain``.
        name: The recipe's name, for the output.
        gpus: ``"H100x64"``. Without a number: the recipe's nodes and devices.
        tokens: The token budget. None: no hours, no cost.
        cost_per_gpu_hour: The price of a GPU hour, in any currency. None: no cost.
        failures: The rate and the cost of interruptions. None: those of Llama 3 405B's run.
        headroom: The fraction of the GPU's memory that must stay free for the verdict "fits".
        check: First reject recipes that `nemo2 check` rejects.

    Raises:
        ConfigError: the recipe breaks a rule, the GPU is unknown, or the planner has no formula for the model.
    """
    if tokens is not None and tokens <= 0:
        raise ConfigError(f"{advice('--tokens ', 'tokens=')}{tokens:g}: the token budget must be above 0.")
    machine = Machine.named(gpus)
    chip, recipe = gpu(gpus), on(recipe, machine)
    if check:
        from nemo2.preflight.checks import check_recipe

        check_recipe(recipe)
    subject = read_recipe(recipe, chip)
    step = predict(subject.shape, subject.job)
    if subject.teacher is not None:
        step = dataclasses.replace(step, parts=step.parts | {"teacher": teaching_time(subject.teacher, subject.job)})
    fit = fit_of(recipe, machine, headroom=headroom)
    assert fit is not None  # the planner has a formula for this model
    prediction = Plan(
        recipe=name,
        gpu=chip,
        gpus=subject.job.gpus,
        layout=_layout(subject),
        shape=subject.shape,
        job=subject.job,
        step=step,
        band=band(subject.shape, subject.job),
        fit=fit,
        notes=notes_of(subject.facts),
        tokens=tokens,
        cost_per_gpu_hour=cost_per_gpu_hour,
    )
    if prediction.hours is None:
        return prediction
    failures = failures or Failures.of_llama3()
    return dataclasses.replace(prediction, goodput=goodput(prediction.hours, gpus=prediction.gpus, failures=failures))


def _layout(subject: Subject) -> str:
    if subject.job.sharding != "fsdp":
        return subject.facts.layout.describe(subject.facts.world_size)
    job = subject.job
    parts = [f"{name} {size}" for name, size in (("TP", job.tp), ("CP", job.cp)) if size > 1]
    return " · ".join([*parts, f"FSDP {job.dp * job.cp}"])
