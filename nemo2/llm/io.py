# SPDX-License-Identifier: Apache-2.0
"""NeMo's ``nl.io``: objects that remember their arguments, what a checkpoint tells of its run, and weights of others."""

from abc import ABCMeta
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

from nemo2.checkpoint import context
from nemo2.checkpoint.described import find_checkpoint
from nemo2.checkpoint.directory import CONTEXT_PATH
from nemo2.checkpoint.nemo_context import load_nemo_model
from nemo2.config.capture import captured_arguments, configurable, remembers_arguments
from nemo2.errors import CheckpointError, ConfigError
from nemo2.hugging_face.api import export_ckpt, import_ckpt
from nemo2.hugging_face.foreign import foreign_at, nemo_tokenizer

__all__ = ["IOMixin", "TrainerContext", "export_ckpt", "import_ckpt", "load", "load_context", "reinit", "track_io"]

_T = TypeVar("_T")


@configurable
class IOMixin(metaclass=ABCMeta):  # noqa: B024  # for __subclasshook__; nothing of it is abstract
    """Instances of a class that has this among its bases remember their arguments, so that a recipe can hold them. What
    ``@nemo2.config.capture.configurable`` does, by inheritance; what is decorated so counts as an instance of this."""

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def __subclasshook__(cls, subclass: type) -> Any:
        return True if cls is IOMixin and remembers_arguments(subclass) else NotImplemented


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


@dataclass
class TrainerContext:
    """What a checkpoint tells of its run, under NeMo's names."""

    model: Any
    extra: dict[str, Any] = field(default_factory=dict)
    """``datamodule``, where the checkpoint describes it."""

    @property
    def trainer(self) -> Any:
        """Raises ConfigError: a checkpoint describes what it holds, and not the machine that wrote it."""
        raise ConfigError(
            "TrainerContext.trainer: a checkpoint doesn't keep its trainer. recipe.json, in the run's directory, describes it: "
            "`nemo2 show RUN`."
        )


def load_context(path: Union[str, Path], subpath: Optional[str] = None, build: bool = True) -> Any:
    """The run that wrote a checkpoint, from its ``context/``; nothing of it is executed but an allow-list of classes.

    Args:
        path: A checkpoint, its ``context/``, or a run's directory. Of NeMo 2.0's the model and its tokenizer are read.
        subpath: A part: "model", "data", "tokenizer", ..., and from there on an attribute, as in "model.config". None: a
            `TrainerContext`.
        build: False: configs in place of the objects.

    Raises:
        CheckpointError: no checkpoint, or no such part.
        ConfigError: ``build=False`` of a checkpoint of NeMo 2.0's.
    """
    place = Path(path)
    place = place.parent if place.name == CONTEXT_PATH else place
    foreign = foreign_at(place)
    checkpoint = foreign if foreign is not None else find_checkpoint(place)
    part = partial(_part_of_nemo if foreign is not None else _part, checkpoint, build=build)
    if subpath is None:
        return TrainerContext(
            part("model"), {"datamodule": part("data")} if context.describes(checkpoint, "data") else {}
        )
    first, *rest = subpath.split(".")
    if [first, *rest[:1]] == ["model", "tokenizer"]:
        first, *rest = rest
    value = part(first)
    for name in rest:
        value = getattr(value, name)
    return value


def load(path: Union[str, Path], output_type: Any = Any, subpath: Optional[str] = None, build: bool = True) -> Any:
    """`load_context` in NeMo's order of arguments; ``output_type`` has no effect."""
    return load_context(path, subpath, build)


def _part(checkpoint: Path, name: Any, *, build: bool) -> Any:
    value = context.load_context(checkpoint, name, build=build)
    if name == "model" and build and context.describes(checkpoint, "tokenizer"):
        value.tokenizer = context.load_context(checkpoint, "tokenizer")
        context.refuse_another_tokenizer(checkpoint, value.tokenizer)
    return value


def _part_of_nemo(checkpoint: Path, part: str, *, build: bool) -> Any:
    if not build:
        raise ConfigError(
            f"load_context({str(checkpoint)!r}, build=False): of a checkpoint of NeMo 2.0's objects are made. Its run as a "
            f"recipe to edit: `nemo2 translate {checkpoint} --output recipe.py`."
        )
    if part == "model":
        model = load_nemo_model(checkpoint)
        model.tokenizer = nemo_tokenizer(checkpoint)
        return model
    if part == "tokenizer" and (tokenizer := nemo_tokenizer(checkpoint)) is not None:
        return tokenizer
    raise CheckpointError(
        f"{checkpoint} is NeMo 2.0's, of which the model and a tokenizer of Hugging Face's are read, and not {part!r}: "
        f"`nemo2 translate {checkpoint}` writes its run as a recipe."
    )
