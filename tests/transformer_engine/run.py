# SPDX-License-Identifier: Apache-2.0
"""Two ranks of performance-mode recipes over the stand-in of Transformer Engine, version after version.

A process of its own, because Megatron-Core takes the package's classes as bases when it is imported.
Leaves what happened as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

RECIPE, STEPS = "llama3_70b", 1


def main(results: Path, work: Path, versions: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import stand_in

    global _TE
    stand_in.install()
    _TE = stand_in.as_on_a_gpu()
    import torch

    import nemo2.checkpoint.model_checkpoint
    import nemo2.models.llama
    import nemo2.preflight.rehearse.shrink
    import nemo2.training.trainer  # noqa: F401
    from support import small_runs

    small_runs.freeze_what_is_loaded()  # collections, of which there are many, don't look through a million objects then
    global _RANK
    _RANK = 0 if os.fork() else 1  # what is imported is imported once
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(_RANK)
    small_runs.quiet()
    torch.distributed.init_process_group("gloo", init_method=f"file://{work / 'store'}", rank=_RANK, world_size=2)
    plain = _fit(work / "plain", overlap=False, te=False)
    found: dict[str, Any] = {"plain": plain}
    for version in versions:
        te = stand_in.use(version)
        runs = {}
        # The other two start buffers as these do, or none: once is enough, and what they begin with is written for them alone.
        more = (_resume, _generate) if version == stand_in.RUN[-1] else ()
        for entry in (_fit, _validate, *more):
            before = len(te.log)
            try:
                runs[entry.__name__[1:]] = {"result": entry(work / version)}
            except Exception as error:
                runs[entry.__name__[1:]] = {"error": f"{type(error).__name__}: {error}"}
            runs[entry.__name__[1:]]["log"] = te.log[before:]
            runs[entry.__name__[1:]]["left"] = te.buffers is not None
            te.buffers = None
            small_runs.release()
        found[version] = runs
    if stand_in.RUN[-1] in versions:
        stand_in.use(stand_in.RUN[0])
        found["older"] = _resume(work / stand_in.RUN[-1], steps=STEPS + 2)
    if _RANK == 0:
        results.write_text(json.dumps(found, default=str))
    torch.distributed.barrier()
    os._exit(0)


_RANK = 0
_TE: dict[str, bool] = {}


def _recipe(directory: Path, *, overlap: bool = True) -> Any:
    import stand_in

    from nemo2 import recipes
    from nemo2.preflight.rehearse.shrink import shrink

    recipe = shrink(recipes.get(RECIPE).pretrain_recipe(performance_mode=True), max_processes=2, steps=STEPS).recipe
    recipe.log.log_dir = str(directory)
    recipe.log.name = "run"
    recipe.trainer.strategy.ckpt_async_save = False
    if directory.name != stand_in.RUN[-1]:
        recipe.log.ckpt = None
    for callback in recipe.trainer.callbacks:
        if "MegatronCommOverlapCallback" in str(callback):
            callback.tp_comm_overlap = overlap
    return recipe


def _fit(directory: Path, *, overlap: bool = True, te: bool = True, steps: int = STEPS, resume: bool = False) -> Any:
    import fiddle as fdl

    from nemo2 import AutoResume
    from support import small_runs

    _TE["on"] = te
    recipe = _recipe(directory, overlap=overlap)
    recipe.trainer.max_steps = steps
    if resume:
        recipe.resume = fdl.Config(AutoResume, resume_if_exists=True)
    losses = small_runs.Recorder()
    recipe.trainer.callbacks.append(fdl.Config(lambda: losses))
    fdl.build(recipe)()
    _TE["on"] = True
    small_runs.release()
    return losses.losses


def _resume(directory: Path, *, steps: int = STEPS + 1) -> Any:
    return _fit(directory, steps=steps, resume=True)


def _validate(directory: Path) -> Any:
    """A live model is asked for text afterwards, whose length is no micro-batch's."""
    import fiddle as fdl

    from nemo2 import llm
    from nemo2.models.generate import generate

    recipe = _recipe(directory)
    model, data, trainer, log = (fdl.build(getattr(recipe, name)) for name in ("model", "data", "trainer", "log"))
    llm.validate(model, data, trainer, log=log)
    [text] = generate(model, model.tokenizer, ["1 2 3"], max_new_tokens=2, temperature=0)
    return [float(trainer.callback_metrics["val_loss"]), text.text]


def _generate(directory: Path) -> Any:
    from nemo2 import llm
    from nemo2.training.strategy import MegatronStrategy
    from nemo2.training.trainer import Trainer

    strategy = MegatronStrategy(tensor_model_parallel_size=2, sequence_parallel=True, ckpt_async_save=False)
    trainer = Trainer(strategy=strategy, devices=2, logger=False, enable_progress_bar=False)
    checkpoint = next(directory.glob("run/**/*-last"))
    [text] = llm.generate(str(checkpoint), trainer, ["1 2 3"], max_new_tokens=2, temperature=0)
    return text.text


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
