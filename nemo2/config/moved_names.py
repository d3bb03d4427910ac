# SPDX-License-Identifier: Apache-2.0
"""Where the classes and functions of older recipes are now.

Saved recipes, in checkpoints and runs, name what they configure by its module. What moves keeps a row here, so that they load.
"""

MOVED = {
    "nemo2.strategies.teaching": "nemo2.training.strategies.distillation",
    "nemo2.llm.distillation:DistillationConfig": "nemo2.training.strategies.distillation",
    "nemo2.llm.pruning:PruningConfig": "nemo2.llm.pruned",
    "nemo2.llm.evaluation": "nemo2.llm.evaluation.api",
    **{
        f"nemo2.models.starcoder:Starcoder2{kind}": "nemo2.models.starcoder2"
        for kind in ("Config", "Config3B", "Config7B", "Config15B", "Model")
    },
}
"""Former module, or one name of it ("module:name") → the module of today."""

MOVED_ROOMS = {
    f"nemo2.{room}": f"nemo2.{folder}.{room}"
    for folder, rooms in {
        "base": "advice backend columns files gpus lazy names noise place ranks",
        "mcore": "optim overlap parallel precision settle",
        "report": "pictures trace",
        "models": "peft",
        "training": "fabric run_dir strategies strategy trainer",
        "preflight": "checks doctor explain planner rehearse",
        "llm": "evaluation",
    }.items()
    for room in rooms.split()
}
"""Former module or package → that of today, which has the same modules under the same names."""


def module_today(module: str, name: str) -> str:
    """The module that has the object which ``module`` called ``name`` when a recipe was saved."""
    exact = MOVED.get(f"{module}:{name}") or MOVED.get(module)
    room = ".".join(module.split(".")[:2])
    return exact or MOVED_ROOMS.get(room, room) + module.removeprefix(room)
