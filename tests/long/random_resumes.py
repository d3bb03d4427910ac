# SPDX-License-Identifier: Apache-2.0
"""Random runs that are interrupted and resumed, in the same layout and in another:
``python -m tests.long.random_resumes SECONDS [SEED]``.

A model of `tests.long.random_switches` gets random settings of its optimizer, schedule, data, precision and checkpoints. It
trains some steps in a layout of one to four ranks, saves, and trains on without a break. The same command then resumes from
that save, in the same layout and in two others. Each resume ends as one of

    same     in the same layout: losses, gradient norms, rates, counts, and all of the last checkpoint, to the last bit.
             In another: all that was loaded is what was saved, to the last bit, and the steps are within the bounds of the
             parity table
    refused  by nemo2's rules before it starts, or by the configuration itself

A resume that differs and a legal one that fails are printed with their seed, which reproduces them, and the exit code is 1.
"""

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

import nemo2
from nemo2.checkpoint.directory import finished
from nemo2.checkpoint.forms.form import OWN_LAYOUT_ONLY
from nemo2.config import Config
from nemo2.mcore.optim import lr_scheduler
from nemo2.models import peft
from support import ranks, resharding, small_runs
from tests.long import random_switches
from tests.long.parity import verdict

STEPS = 4
"""After the save."""
CHECKPOINTS = "checkpoints"
COUNTS, NUMBERS = ("consumed", "rates", "updated"), ("losses", "grad_norms", "val_losses", "scales")
"""Records that are the same in every layout, and those that are the same to the last bit in one."""
LAYOUTS: dict[str, dict[str, Any]] = {"one process": {"world": 1}, **random_switches.LAYOUTS}


def is_bias(name: str, parameter: Any) -> bool:
    return "bias" in name


_SCHEDULES = tuple(
    Config(getattr(lr_scheduler, kind), min_lr=1e-5, **settings)
    for kind, settings in (
        ("CosineAnnealingScheduler", {"warmup_steps": 2, "constant_steps": 1}),
        ("WarmupHoldAnnealScheduler", {"warmup_ratio": 0.3, "hold_ratio": 0.4}),
        ("WarmupHoldAnnealScheduler", {"warmup_ratio": 0.2, "decay_schedule": "one_minus_square_root"}),
        ("WarmupAnnealingScheduler", {"warmup_steps": 3}),
        ("WarmupHoldPolicyScheduler", {"warmup_steps": 2, "hold_steps": 3}),
        ("InverseSquareRootAnnealingScheduler", {}),
        ("NoamAnnealingScheduler", {"d_model": 32, "warmup_steps": 2}),
        ("PolynomialDecayAnnealingScheduler", {"power": 2.0, "cycle": True}),
        ("CosineAnnealingScheduler", {"warmup_steps": 1, "constant_steps": 0, "interval": "epoch"}),
        ("CosineAnnealingScheduler", {"warmup_steps": 1, "constant_steps": 0, "frequency": 2}),
    )
)
_STRATEGY, _OPTIM, _MODEL = "trainer.strategy.", "optim.config.", "model.config."
GROUPS: list[dict[str, tuple[Any, ...]]] = [
    {_OPTIM + "optimizer": ("adam", "sgd"), _OPTIM + "sgd_momentum": (0.0, 0.9), _OPTIM + "weight_decay": (0.0, 0.1)},
    {_OPTIM + "optimizer": ("lion", "muon", "soap", "adaptive_muon"), _OPTIM + "use_distributed_optimizer": (False, True)},
    {_OPTIM + "use_distributed_optimizer": (False, True), _OPTIM + "clip_grad": (0.0, 0.2)},
    {_OPTIM + "use_precision_aware_optimizer": (True,), _OPTIM + "exp_avg_dtype": (torch.float32, torch.bfloat16)},
    {_OPTIM + "decoupled_lr": (3e-4,), _OPTIM + "decoupled_min_lr": (None, 1e-6), "optim.lr_scheduler": _SCHEDULES},
    {_OPTIM + "grad_norm_skip_threshold": (1.0,), _OPTIM + "log_num_zeros_in_grad": (True,)},
    {_OPTIM + "decoupled_weight_decay": (False,), _OPTIM + "adam_beta2": (0.9,), _OPTIM + "adam_eps": (1e-5,)},
    {"optim.no_weight_decay_cond": (is_bias,), "optim.lr_scheduler": _SCHEDULES},
    {"optim.scale_lr_cond": (is_bias,), "optim.lr_mult": (0.1, 10.0), "optim.lr_scheduler": _SCHEDULES},
    {"optim.lr_scheduler": _SCHEDULES},
    {"trainer.plugins": tuple(Config(nemo2.MegatronMixedPrecision, name) for name in ("bf16-mixed", "16-mixed"))},
    {"trainer.plugins": (Config(nemo2.MegatronMixedPrecision, "bf16-mixed", grad_reduce_in_fp32=False),)},
    {_MODEL + "hidden_dropout": (0.1,), _MODEL + "attention_dropout": (0.0, 0.1)},
    {"data.num_train_samples": (8, 20, 24, 60), "data.seed": (1, 7)},
    {"data.rampup_batch_size": ([4, 4, 8], [4, 4, 16]), "data.micro_batch_size": (1, 2)},
    {"data.micro_batch_size": (1, 4), "data.num_workers": (0, 1), "data.num_train_samples": (64, 20)},
    {"trainer.limit_val_batches": (1, 2), "trainer.val_check_interval": (1, 2, 3)},
    {_STRATEGY + "ckpt_async_save": (True,), _STRATEGY + "ckpt_torch_dist_multiproc": (None, 1, 2, 3)},
    {_STRATEGY + "ckpt_assume_constant_structure": (True,), _STRATEGY + "ckpt_async_save": (True, False)},
    {_STRATEGY + "ckpt_parallel_save": (False, True), _STRATEGY + "ckpt_parallel_save_within_dp": (True, False),
     _STRATEGY + "ckpt_parallel_load": (False, True)},
    {_STRATEGY + "ckpt_parallel_save_optim": (False,), _STRATEGY + "ckpt_async_save": (True, False)},
    {"log.ckpt.save_last": (False, True), "log.ckpt.always_save_context": (False, True)},
    {"model.model_transform": tuple(Config(getattr(peft, kind), dim=4) for kind in ("LoRA", "CanonicalLoRA"))},
]  # fmt: skip


def drawn(seed: int) -> tuple[str, dict[str, Any], list[str], int]:
    """A model, its settings by path, layouts, the first of which saves, and the step that is saved."""
    base, values, layouts = random_switches.drawn(seed)
    values.pop(random_switches.PACKED, None)
    dice = random.Random(-1 - seed)
    layouts.insert(dice.choice((0, 1, 1, 2)), "one process")
    stop = dice.choice((1, 2, 3, 5))
    values |= {
        "optim.config.lr": 1e-3,
        "trainer.max_steps": stop + STEPS,
        "resume": Config(nemo2.AutoResume, resume_if_exists=True, resume_ignore_no_checkpoint=True),
        "log.ckpt": Config(
            nemo2.ModelCheckpoint,
            filename="{step}",
            every_n_train_steps=stop,
            save_top_k=-1,
            save_optim_on_train_end=True,
        ),
    }
    for group in dice.sample(GROUPS, dice.choice((1, 2, 3, 4))):
        values |= {path: dice.choice(of) for path, of in group.items()}
    return base, values, layouts, stop


def train(case: tuple[Any, ...], directory: str, again: str | None) -> dict[str, Any]:
    """What this rank recorded of a run in ``directory``, which resumes from what is there. ``again``: where it saves what it
    has loaded, before its first step."""
    import fiddle as fdl
    import lightning.pytorch as pl

    from nemo2.llm import api

    class SaveAgain(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(again)

    small_runs.quiet()
    torch._dynamo.config.disable = True
    api.check_parts = lambda *args, **kwargs: None
    recipe, recorder = random_switches.recipe_of(*case), small_runs.Recorder()
    recipe.log.explicit_log_dir = directory
    call = fdl.build(recipe)
    call.keywords["trainer"].callbacks += [recorder, *([SaveAgain()] if again else [])]
    call()
    return recorder.record()


def run(case: tuple[Any, ...], directory: Path, again: Path | None = None) -> dict[str, Any]:
    world, place = random_switches.world_of(case[2]), None if again is None else str(again)
    return ranks.run(train, world, case, str(directory), place, timeout=240.0, quiet=True)[0]


def results_of(seed: int) -> Iterator[tuple[str, str, Any]]:
    """Of each resume its layouts, its end, and why; no more than three of them run."""
    base, values, layouts, stop = drawn(seed)
    legal: list[tuple[str, tuple[Any, ...]]] = []
    for name in layouts:
        if why := random_switches.refused(case := (base, values, LAYOUTS[name])):
            yield name, "refused", why
        else:
            legal.append((name, case))
        if not legal or len(legal) == 3:
            break
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        for number, (name, case) in enumerate(legal):
            pair = f"{legal[0][0]} -> {name}"
            try:
                if not number:
                    whole = _uninterrupted(case, runs, stop)
                shutil.copytree(runs / "whole", runs / str(number))
                for checkpoint, manifest in finished(runs / str(number) / CHECKPOINTS):
                    if manifest.step > stop:
                        shutil.rmtree(checkpoint)
                again = runs / f"again{number}" if number else None
                resumed = run(case, runs / str(number), again)
            except ranks.RankFailed as error:
                yield pair, "refused" if OWN_LAYOUT_ONLY in str(error) else "FAILED", random_switches.shown(error)
                if not number:
                    return
                continue
            different = list(_records(whole, resumed, exact=again is None, rounds=_rounds(values)))
            saved = _checkpoint(runs / "whole", stop if again else stop + STEPS)
            files = resharding.Outcome(pair, 0.0, exact=True)
            resharding.compare_files(files, saved, again or _checkpoint(runs / str(number), stop + STEPS))
            different += files.different or ([] if files.parameters else ["no parameters are compared"])
            yield pair, "DIFFERS" if different else "same", different


def _uninterrupted(case: tuple[Any, ...], runs: Path, stop: int) -> dict[str, Any]:
    base, values, layout = case
    if "model.model_transform" in values:
        start = {path: value for path, value in values.items() if path != "model.model_transform"}
        run((base, start | {"trainer.max_steps": stop}, layout), runs / "base")
        values["resume"].restore_config = Config(nemo2.RestoreConfig, path=str(_checkpoint(runs / "base", stop)))
    return run(case, runs / "whole")


def _checkpoint(directory: Path, step: int) -> Path:
    return next(path for path, manifest in finished(directory / CHECKPOINTS) if manifest.step == step)


def _rounds(values: dict[str, Any]) -> bool:
    """Whether other layouts compute something else, by rounding or at random."""
    return "trainer.plugins" in values or any(value for path, value in values.items() if path.endswith("_dropout"))


def _records(whole: dict[str, Any], resumed: dict[str, Any], *, exact: bool, rounds: bool) -> Iterator[str]:
    for name in COUNTS if not exact else (*COUNTS, *NUMBERS):
        expected = whole[name][-len(resumed[name]) :] if resumed[name] else []
        if expected != resumed[name] or (name == "consumed" and len(expected) != STEPS):
            yield f"{name}: {resumed[name]}, uninterrupted {whole[name]}"
    for name, bound in zip(NUMBERS[:2], ("loss", "grad_norm"), strict=True):
        apart = 0.0 if exact or rounds else verdict.largest(resumed[name], whole[name][-STEPS:])
        if not apart <= verdict.BOUNDS[bound]:
            yield f"{name} differ by {apart:.1e}: {resumed[name]}, uninterrupted {whole[name]}"


if __name__ == "__main__":
    from tests.long import random_resumes  # ranks know its functions by this name

    sys.exit(random_switches.main(random_resumes, *sys.argv[1:]))
