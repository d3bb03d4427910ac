# SPDX-License-Identifier: Apache-2.0
"""Where a setting lives: the part of a recipe that has a field of this name.

NeMo 2.0 stores any name that a script sets on a strategy, so scripts set fields of the model or of the optimizer there.
The error for an unknown name, the command line and `nemo2 translate` name the field to write.
"""

import sys
from typing import Any

from nemo2.config.aliases import aliases_of, parameter_names

_PARTS: tuple[tuple[str, str], ...] = (
    ("model.config", "nemo2.models.gpt:GPTConfig"),
    ("optim.config", "megatron.core.optimizer.optimizer_config:OptimizerConfig"),
    ("trainer.strategy", "nemo2.strategy:MegatronStrategy"),
    (
        "trainer.strategy.ddp",
        "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
    ),
    ("trainer.plugins", "nemo2.precision:MegatronMixedPrecision"),
    ("trainer", "nemo2.trainer:Trainer"),
    ("log", "nemo2.run_dir.logger:NeMoLogger"),
    ("log.ckpt", "nemo2.checkpoint.model_checkpoint:ModelCheckpoint"),
    ("resume", "nemo2.checkpoint.auto_resume:AutoResume"),
)
"""The parts of a recipe with their usual classes ("module:name"), which are read only if they are loaded."""
_EVERYWHERE = frozenset({"name", "config", "path"})


def homes_of(name: str, *, besides: Any = None) -> list[str]:
    """The paths in a recipe of the fields called ``name``, at most two. Without fields of the class ``besides``."""
    found = []
    for path, place in _PARTS if name not in _EVERYWHERE else ():
        module, _, cls = place.partition(":")
        target = getattr(sys.modules.get(module), cls, None)
        if target is not None and target is not besides and name in (*parameter_names(target), *aliases_of(target)):
            found.append(f"{path}.{name}")
    return found[:2]
