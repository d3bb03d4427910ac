# SPDX-License-Identifier: Apache-2.0
"""Where a setting lives: the part of a recipe that has a field of this name.

NeMo 2.0 stores any name that a script sets on a strategy, so scripts set fields of the model or of the optimizer there.
The error for an unknown name, the command line and `nemo2 translate` name the field to write.
"""

import sys
from importlib import import_module
from typing import Any, Optional

from nemo2.config.aliases import aliases_of, parameter_names

_PARTS: tuple[tuple[str, str], ...] = (
    ("model.config", "nemo2.models.gpt:GPTConfig"),
    ("optim.config", "megatron.core.optimizer.optimizer_config:OptimizerConfig"),
    ("trainer.strategy", "nemo2.training.strategy:MegatronStrategy"),
    (
        "trainer.strategy.ddp",
        "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
    ),
    ("trainer.plugins", "nemo2.mcore.precision:MegatronMixedPrecision"),
    ("trainer", "nemo2.training.trainer:Trainer"),
    ("log", "nemo2.training.run_dir.logger:NeMoLogger"),
    ("log.ckpt", "nemo2.checkpoint.model_checkpoint:ModelCheckpoint"),
    ("resume", "nemo2.checkpoint.auto_resume:AutoResume"),
)
"""The parts of a recipe with their usual classes ("module:name"), which are read only if they are loaded (`load_parts`)."""
_ROLES = {"Strategy": "trainer.strategy", "Precision": "trainer.plugins"}
"""Lightning's base classes whose subclasses take each other's place in a recipe."""
_EVERYWHERE = frozenset({"name", "config", "path"})


def load_parts() -> None:
    """Load the usual classes of a recipe's parts, so that `homes_of` knows their fields without a recipe."""
    for _, place in _PARTS:
        import_module(place.partition(":")[0])


def homes_of(name: str, *, besides: Any = None) -> list[str]:
    """The paths in a recipe of the fields called ``name``, at most two. Without fields of the class ``besides``, and
    those that it lacks where it stands (`FSDP2Strategy` has no ``trainer.strategy.ddp``)."""
    own = _path_of(besides)

    def exists(path: str) -> bool:
        inside = path.removeprefix(f"{own}.") if path != own else ""
        return inside == path or inside.partition(".")[0] in parameter_names(besides)

    return [f"{path}.{name}" for path in _paths_with(name) if exists(path)][:2]


def usual_class_with(name: str, *, in_place_of: Any) -> Optional[str]:
    """The class that usually stands where ``in_place_of`` stands, if only it has a field ``name``: "MegatronStrategy" for
    a field that `FSDP2Strategy` lacks. None: there is none."""
    own = _path_of(in_place_of)
    usual = own and dict(_PARTS)[own].partition(":")[2]
    has_it = any(f"{path}.".startswith(f"{own}.") for path in _paths_with(name))
    return usual if own and has_it and usual != in_place_of.__name__ else None


def _paths_with(name: str) -> list[str]:
    """The paths of the parts that have a field of this name."""
    parts = _PARTS if name not in _EVERYWHERE else ()
    classes = [(path, cls) for path, place in parts if (cls := _loaded(place)) is not None]
    return [path for path, cls in classes if name in (*parameter_names(cls), *aliases_of(cls))]


def _path_of(cls: Any) -> str:
    """Where an object of this class stands in a recipe. "": anywhere."""
    bases = [base.__name__ for base in getattr(cls, "__mro__", ()) if base.__module__.startswith("lightning.")]
    role = next((path for base, path in _ROLES.items() if base in bases), "")
    return next((path for path, place in _PARTS if cls is not None and _loaded(place) is cls), role)


def _loaded(place: str) -> Optional[type]:
    module, _, name = place.partition(":")
    return getattr(sys.modules.get(module), name, None)
