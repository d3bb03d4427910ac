# SPDX-License-Identifier: Apache-2.0
"""Where the classes and functions of older recipes are now.

Saved recipes, in checkpoints and runs, name what they configure by its module. What moves keeps a row here, so that they load.
"""

MOVED = {
    "nemo2.strategies.teaching": "nemo2.strategies.distillation",
    "nemo2.llm.distillation:DistillationConfig": "nemo2.strategies.distillation",
    "nemo2.llm.pruning:PruningConfig": "nemo2.llm.pruned",
}
"""Former module, or one name of it ("module:name") → the module of today."""


def module_today(module: str, name: str) -> str:
    """The module that has the object which ``module`` called ``name`` when a recipe was saved."""
    return MOVED.get(f"{module}:{name}") or MOVED.get(module, module)
