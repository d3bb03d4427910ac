# SPDX-License-Identifier: Apache-2.0
"""`rehearse`: runs a recipe for any number of GPUs in this process, one rank of each kind after the other."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nemo2.base.advice import advice
from nemo2.base.errors import CannotBuild, ConfigError
from nemo2.base.gpus import DEFAULT, GPU, HEADROOM
from nemo2.base.noise import silenced
from nemo2.mcore.parallel.cuda_graphs import kind_of
from nemo2.mcore.parallel.layout import SIZE_FIELDS, Layout
from nemo2.mcore.parallel.pipeline_schedule import schedule_of
from nemo2.mcore.settle import Machine, on, world_of
from nemo2.preflight.checks import check_recipe
from nemo2.preflight.checks.facts import Facts, read_facts
from nemo2.preflight.checks.megatron import refusals
from nemo2.preflight.rehearse.advice import smallest_change
from nemo2.preflight.rehearse.counts import RankRehearsal, Rehearsal, Verdict, parts_of, peak_of
from nemo2.preflight.rehearse.stage import computes_in_eight_bits, keeps_weights_in_eight_bits, rehearse_rank, stages_of


def rehearse(
    recipe: Any,
    *,
    name: str = "",
    gpus: str = DEFAULT,
    headroom: float = HEADROOM,
    kernels: str = "te",
    all_stages: bool = False,
    advice: bool = True,
    check: bool = True,
) -> Rehearsal:
    """Build, wrap and run one rank of every kind on meta tensors, and count its memory, messages and arithmetic.

    Args:
        recipe: A configured call of ``llm.pretrain`` with a `MegatronStrategy`. It is not changed.
        name: The name of the job.
        gpus: ``"H100x1152"``. Without a number: the recipe's nodes and devices. Nodes have 8 GPUs, or the recipe's
            devices if that number divides the GPUs.
        headroom: The fraction of the GPU that must stay free for the verdict "fits".
        kernels: ``"te"``: memory and arithmetic as with Transformer Engine's kernels. ``"plain"``: as with plain
            PyTorch layers.
        all_stages: Rehearse one rank of every pipeline stage rather than the first, the second and the last.
        advice: If the job does not fit, search for the smallest change that makes it fit.
        check: First reject recipes that `nemo2 check` rejects.

    Raises:
        ConfigError: the recipe breaks a rule, its strategy can't be rehearsed, or its ranks can't be built.
        RuntimeFault: this process sees a GPU.
    """
    started = time.perf_counter()
    if kernels not in ("te", "plain"):
        raise ConfigError(f"kernels={kernels!r}: must be 'te' or 'plain'.")
    machine = Machine.named(gpus)
    recipe, gpu = on_gpus(recipe, machine), machine.gpu
    assert gpu is not None
    if check:
        check_recipe(recipe)
    with quietly():

        def all_ranks(recipe: Any) -> tuple[RankRehearsal, ...]:
            stages = stages_of(recipe, every=all_stages)
            return tuple(rehearse_rank(recipe, stage=stage, kernels=kernels) for stage in stages)

        try:
            ranks = all_ranks(recipe)
        except CannotBuild as error:
            raise cannot_build(recipe, machine, error, all_ranks) from error
        verdict = verdict_on(ranks, gpu, headroom)
        if advice and not verdict.fits:
            verdict = smallest_change(recipe, ranks, verdict, kernels=kernels)
    layout, world = Layout.of(recipe.trainer.strategy), world_of(recipe, machine).size
    data = recipe.data
    return Rehearsal(
        recipe=name,
        gpu=gpu.name,
        num_gpus=world,
        layout=layout.describe(world),
        sizes={
            **{short: getattr(layout, short) for short in SIZE_FIELDS},
            "etp": layout.expert_tensor_size,
            "dp": layout.data_parallel_size(world),
        },
        schedule=schedule_of(
            recipe, chunks=[len(ranks[0].layers)] * layout.pp, num_microbatches=ranks[0].num_microbatches
        ),
        seq_length=data.seq_length,
        micro_batch_size=data.micro_batch_size,
        global_batch_size=data.global_batch_size,
        kernels=kernels,
        precision=str(getattr(recipe.trainer.plugins, "precision", "32")),
        ranks=ranks,
        verdict=verdict,
        seconds=time.perf_counter() - started,
        notes=notes_of(recipe, kernels),
    )


def cannot_build(recipe: Any, machine: Machine, error: CannotBuild, rehearse: Callable[[Any], Any]) -> CannotBuild:
    """The error that names the settings with which ``rehearse`` can't build a rank. ``error``: what it raised."""

    def refused(facts: Facts) -> list[str]:
        try:
            rehearse(facts.recipe)
        except CannotBuild as error:
            return [str(error)]
        except Exception:  # the rank is built, and what its step lacks is another question
            return []
        return []

    facts = read_facts(recipe, machine=machine)
    return CannotBuild("\n".join(refusals(facts, (), refused=refused, only_of_user=True)) or str(error))


def verdict_on(ranks: tuple[RankRehearsal, ...], gpu: GPU, headroom: float) -> Verdict:
    """Compare the rank with the most memory among ``ranks`` with ``gpu``."""
    parts = parts_of(ranks)
    return Verdict(gpu=gpu.name, capacity=gpu.memory, ranks=parts, needed=peak_of(parts), headroom=headroom)


def on_gpus(recipe: Any, machine: Machine) -> Any:
    """A copy of ``recipe`` for the GPUs of ``machine``, which can be built on a machine without GPUs.

    Raises:
        ConfigError: the strategy is not a configured `MegatronStrategy`.
    """
    refuse_unrehearsable(recipe)
    recipe = on(recipe, machine)
    trainer = recipe.trainer
    # The rank is built on this machine, which may have no GPU, and a rehearsal writes no logs.
    trainer.accelerator = "cpu"
    trainer.logger = None
    return recipe


def refuse_unrehearsable(recipe: Any) -> None:
    """Refuse a recipe whose strategy can't be rehearsed.

    Raises:
        ConfigError: the strategy is not a configured `MegatronStrategy`, or it shards by FSDP.
    """
    from nemo2.training.strategy import MegatronStrategy

    trainer = recipe.trainer
    kind = getattr(trainer.strategy, "__fn_or_cls__", None)
    if not (isinstance(kind, type) and issubclass(kind, MegatronStrategy)) or getattr(trainer.strategy, "fsdp", None):
        raise ConfigError(
            f"trainer.strategy={getattr(kind, '__name__', type(trainer.strategy).__name__)}"
            f"{' with fsdp set' if getattr(trainer.strategy, 'fsdp', None) else ''} can't be rehearsed: a rehearsal needs "
            "MegatronStrategy without fsdp. `nemo2 plan` estimates the memory of FSDP by formula."
        )


def notes_of(recipe: Any, kernels: str) -> tuple[str, ...]:
    """The assumptions behind the numbers of this recipe."""
    notes = []
    if kernels == "te":
        notes.append(
            "memory and arithmetic are those of Transformer Engine's kernels; "
            f"{advice('--kernels plain', 'kernels=plain')} counts plain PyTorch layers"
        )
    model = recipe.model.config
    if getattr(model, "num_moe_experts", None):
        notes.append("every expert gets an equal share of the tokens; an uneven router needs more memory")
    if computes_in_eight_bits(recipe):
        notes.append("8-bit matrix products are counted in 16 bits, so the saved activations are an upper bound")
    if keeps_weights_in_eight_bits(recipe):
        notes.append("buffers include the 8-bit copies of weights, which are kept between micro-batches")
    if getattr(model, "cpu_offloading", False) or getattr(model, "fine_grained_activation_offloading", False):
        notes.append("activations that are offloaded to the host are counted as if they stayed on the GPU")
    if kind_of(model) != "none":
        notes.append(
            "the separate memory in which CUDA graphs keep the inputs and outputs of captured modules is not counted"
        )
    if getattr(model, "attn_logit_softcapping", None) is not None:
        notes.append(
            "soft-capped attention scores are counted as kept; a GPU on which flex_attention compiles keeps none and needs "
            "less memory"
        )
    return tuple(notes)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress messages about this machine, which don't apply to the job's machine, and garbage collection during
    imports."""
    names = (
        "nemo2.models",
        "nemo2.callbacks",
        "nemo2.training.strategies",
        "lightning.pytorch",
        "lightning.fabric",
        "megatron",
    )
    gc.freeze()
    try:
        with silenced(*names), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()
