# SPDX-License-Identifier: Apache-2.0
"""Whether a recipe fits its GPUs: the one answer of `nemo2 check`, `plan`, `list` and a launch.

The figure is the rehearsal's (`nemo2.preflight.rehearse`). It is stored for shipped recipes
(`nemo2.preflight.planner.peaks`), and after a rehearsal below ``$NEMO_HOME``, under a key of all settings that it
depends on. A recipe that can't be rehearsed gets an estimate by formula, with its error.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Optional

import fiddle as fdl

from nemo2.base.backend.extras import version_of
from nemo2.base.errors import CannotBuild, CheckpointError, ConfigError, RuntimeFault
from nemo2.base.files import replacing
from nemo2.base.gpus import DEFAULT, GPU, HEADROOM, gpu
from nemo2.base.place import OF_A_RANK
from nemo2.config.serialize import to_json
from nemo2.config.walk import node_at
from nemo2.data.home import nemo_home
from nemo2.mcore.settle import Machine, on
from nemo2.preflight.planner.memory import predict_memory
from nemo2.preflight.planner.peaks import rehearsed_by_key
from nemo2.preflight.planner.recipe import read_recipe
from nemo2.preflight.rehearse.counts import Ranks, Verdict, parts_of, peak_of

MARGIN = 0.2
"""The formula's error. 19 of 20 shipped recipes are within it (tests/nemo2/preflight/planner/test_fit.py)."""
_TRAINER = ("strategy", "plugins", "precision", "callbacks", "num_nodes", "devices")
_SIZELESS = {
    "data": ("paths", "seed", "num_workers", "num_train_samples", "num_val_samples", "num_test_samples", "split"),
    "optim": ("lr_scheduler",),
    "optim.config": ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
}
"""Settings that change no tensor's size."""


def fit_of(recipe: Any, machine: Machine, *, headroom: float = HEADROOM) -> Optional[Verdict]:
    """Whether ``recipe`` fits. None: the machine has no GPUs, or there is neither a rehearsal nor a formula for it.

    Args:
        recipe: A configured call of ``llm.pretrain`` or ``llm.finetune`` that breaks no rule. It is not changed.
        machine: The machine of the run. GPUs of an unknown kind count as `DEFAULT`, and the answer is marked
            ``assumed``.
        headroom: The fraction of the GPU that must stay free.

    Raises:
        CannotBuild: Megatron-Core or nemo2 refuses to build a rank.
    """
    if machine.accelerator != "cuda":
        return None
    chip, recipe, why = machine.gpu or gpu(DEFAULT), on(recipe, machine), ""
    try:
        ranks = _rehearsed(recipe)
        needed = float(peak_of(ranks))
    except CannotBuild as error:
        from nemo2.preflight.rehearse.job import cannot_build

        raise cannot_build(recipe, machine, error, rehearse_ranks) from error
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        try:
            ranks, needed = _estimated(recipe, chip)
        except (ConfigError, CheckpointError, AttributeError, TypeError, ZeroDivisionError):
            return None  # a user's own model has no formula
    return Verdict(
        gpu=chip.name,
        capacity=chip.memory,
        ranks=ranks,
        needed=needed,
        headroom=headroom,
        margin=MARGIN if why else 0.0,
        why=why,
        assumed=machine.gpu is None,
    )


def _rehearsed(recipe: Any) -> Ranks:
    """The bytes of the ranks by a rehearsal, now or before.

    Raises:
        Exception: the recipe can't be rehearsed. Megatron-Core and a user's model may raise anything.
    """
    config = getattr(recipe.model, "config", None)
    if getattr(config, "cpu_offloading", False) and getattr(config, "cpu_offloading_activations", True):
        raise ConfigError("model.config.cpu_offloading: a rehearsal doesn't model activations on the host.")
    key = key_of(recipe)
    if key is None:
        return rehearse_ranks(recipe)
    if (shipped := rehearsed_by_key().get(key)) is not None:
        return shipped
    file = nemo_home() / "rehearsed" / _installed() / f"{key}.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ranks = rehearse_ranks(recipe)
    with contextlib.suppress(OSError):  # a home that can't be written costs the next answer its time only
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, by_user=False) as written:
            written.write_text(json.dumps(ranks), encoding="utf-8")
    return ranks


def rehearse_ranks(recipe: Any) -> Ranks:
    """The bytes of one rank of each kind, rehearsed in this process, or in another where this one sees GPUs or belongs
    to a run."""
    import torch

    from nemo2.preflight.rehearse.job import refuse_unrehearsable

    refuse_unrehearsable(recipe)
    if torch.cuda.is_available() or torch.distributed.is_initialized():
        return _rehearse_elsewhere(recipe)
    from nemo2.preflight.rehearse.job import on_gpus, quietly
    from nemo2.preflight.rehearse.stage import rehearse_rank, stages_of

    with quietly():
        return parts_of(rehearse_rank(on_gpus(recipe, Machine()), stage=stage) for stage in stages_of(recipe))


def _rehearse_elsewhere(recipe: Any) -> Ranks:
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    environment = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    done = subprocess.run(
        [sys.executable, "-m", "nemo2.preflight.planner.fit"],
        input=ZlibJSONSerializer().serialize(recipe),
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeFault((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    ranks = json.loads(done.stdout.splitlines()[-1])
    if isinstance(ranks, str):
        raise CannotBuild(ranks)
    return ranks


def key_of(recipe: Any) -> Optional[str]:
    """A key of all settings of a recipe that its memory depends on. None: one of them has no text."""
    if not isinstance(recipe, fdl.Buildable) or not isinstance(recipe.trainer, fdl.Buildable):
        return None
    recipe = on(recipe, Machine())
    unread = [(recipe, ("log", "resume"))]
    unread += [(recipe.trainer, [name for name in recipe.trainer.__arguments__ if name not in _TRAINER])]
    unread += [(node_at(recipe, path), names) for path, names in _SIZELESS.items()]
    for node, names in unread:
        for name in set(names) & set(getattr(node, "__arguments__", ())):
            delattr(node, name)
    try:
        return hashlib.sha256(to_json(recipe).encode()).hexdigest()[:16]
    except ConfigError:
        return None


@cache
def _installed() -> str:
    """A name of the installed code that a rehearsal runs: the versions, and nemo2's files."""
    root = Path(__file__).parents[2]
    files = sorted((str(file.relative_to(root)), file.stat().st_mtime_ns) for file in root.rglob("*.py"))
    parts = [*files, *((name, version_of(name)) for name in ("torch", "megatron-core"))]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _estimated(recipe: Any, chip: GPU) -> tuple[Ranks, float]:
    """The bytes of the first and the last stage, and of the fuller GPU, by formula."""
    subject = read_recipe(recipe, chip)
    last = subject.job.pp - 1
    kinds = {"first stage": 0, "last stage": last} if last else {"only stage": 0}
    estimates = {
        kind: predict_memory(subject.shape, subject.job, stage=stage, teacher=subject.teacher)
        for kind, stage in kinds.items()
    }
    ranks = {kind: {name: round(size) for name, size in memory.parts.items()} for kind, memory in estimates.items()}
    return ranks, max(memory.used for memory in estimates.values())


def _main() -> None:
    """What `_rehearse_elsewhere` starts: a recipe comes in, and the bytes of its ranks go out, or why they can't be built."""
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    try:
        answer = rehearse_ranks(ZlibJSONSerializer().deserialize(sys.stdin.read()))
    except CannotBuild as error:
        answer = str(error)
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    _main()
