# SPDX-License-Identifier: Apache-2.0
"""NeMo's ``nl.io``: objects that remember their arguments, what a checkpoint tells of its run, and weights of others."""

from pathlib import Path
from typing import Any, Optional, TypeVar, Union

from nemo2.checkpoint import context
from nemo2.checkpoint.directory import CONTEXT_PATH
from nemo2.config.capture import captured_arguments, configurable
from nemo2.errors import ConfigError
from nemo2.hugging_face.api import export_ckpt, import_ckpt
from nemo2.llm.inference import find_checkpoint

__all__ = ["IOMixin", "export_ckpt", "import_ckpt", "load_context", "reinit", "track_io"]

_T = TypeVar("_T")


@configurable
class IOMixin:
    """Instances of a class that has this among its bases remember their arguments, so that a recipe can hold them. What
    ``@nemo2.config.capture.configurable`` does, by inheritance."""

    def __init__(self) -> None:
        super().__init__()


def track_io(target: type[_T], artifacts: Optional[list[Any]] = None) -> type[_T]:
    """`configurable` by NeMo's name.

    Raises:
        ConfigError: ``artifacts``, which nemo2 doesn't have: contexts hold text, and files by path and hash.
    """
    if artifacts:
        raise ConfigError(
            "track_io(artifacts=...): a context holds text, and files by their path and hash. Leave it out."
        )
    return configurable(target)


def reinit(obj: _T) -> _T:
    """A new object, made with the arguments that ``obj`` was made with.

    Raises:
        ConfigError: its class doesn't remember them.
    """
    arguments = captured_arguments(obj)
    if arguments is None:
        raise ConfigError(
            f"A {type(obj).__qualname__} doesn't say how it was made: derive its class from nl.io.IOMixin."
        )
    return type(obj)(**arguments)


def load_context(path: Union[str, Path], subpath: Optional[str] = None, build: bool = True) -> Any:
    """The run that wrote a checkpoint, from its ``context/``; nothing of it is executed but an allow-list of classes.

    Args:
        path: A checkpoint, its ``context/``, or a run's directory.
        subpath: A part: "model", "data", "tokenizer", ..., and from there on an attribute, as in "model.config". None: the
            model.
        build: False: configs in place of the objects.

    Raises:
        CheckpointError: no checkpoint, or no such part.
    """
    place = Path(path)
    checkpoint = find_checkpoint(place.parent if place.name == CONTEXT_PATH else place)
    first, *rest = (subpath or "model").split(".")
    part: Any = first
    value = context.load_context(checkpoint, part, build=build)
    for name in rest:
        value = getattr(value, name)
    return value
