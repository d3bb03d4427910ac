# SPDX-License-Identifier: Apache-2.0
"""NeMo's ``nl.io``: objects that record their arguments, a checkpoint's description of its run, and foreign weights."""

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
    """Make the instances of a subclass record their arguments, so that a recipe can hold them.

    This is ``@nemo2.config.capture.configurable`` by inheritance. Instances of decorated classes also count as
    instances of this class.
    """

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def __subclasshook__(cls, subclass: type) -> Any:
        return True if cls is IOMixin and remembers_arguments(subclass) else NotImplemented


def track_io(target: type[_T], artifacts: Optional[list[Any]] = None) -> type[_T]:
    """`configurable` under NeMo's name.

    Args:
        target: The class.
        artifacts: Must be None, because contexts hold text, and files by path and hash.

    Raises:
        ConfigError: ``artifacts`` is set.
    """
    if artifacts:
        raise ConfigError(
            "track_io(artifacts=...): a context contains text, and files by their path and hash. Remove artifacts."
        )
    return configurable(target)


def reinit(obj: _T) -> _T:
    """Make a new object with the arguments of ``obj``.

    Args:
        obj: An object of a configurable class.

    Raises:
        ConfigError: the object's class doesn't record its arguments.
    """
    arguments = captured_arguments(obj)
    if arguments is None:
        raise ConfigError(
            f"nemo2 cannot tell how a {type(obj).__qualname__} was created. Derive its class from nl.io.IOMixin."
        )
    return type(obj)(**arguments)


@dataclass
class TrainerContext:
    """A checkpoint's description of its run, under NeMo's names."""

    model: Any
    """The model."""
    extra: dict[str, Any] = field(default_factory=dict)
    """``datamodule``, if the checkpoint describes it."""

    @property
    def trainer(self) -> Any:
        """Raises ConfigError: a checkpoint describes its contents, not the machine that wrote it."""
        raise ConfigError(
            "TrainerContext.trainer: a checkpoint does not contain its trainer. recipe.json in the run's directory "
            "describes the trainer: `nemo2 show RUN`."
        )


def load_context(path: Union[str, Path], subpath: Optional[str] = None, build: bool = True) -> Any:
    """Load a checkpoint's description of its run from its ``context/``. Only classes on an allow-list are executed.

    Args:
        path: A checkpoint, its ``context/``, or a run's directory. From a checkpoint of NeMo 2.0 the model and its
            tokenizer are read.
        subpath: A part: "model", "data", "tokenizer", ..., optionally followed by attributes, as in "model.config".
            None: a `TrainerContext`.
        build: False: return configs instead of objects.

    Raises:
        CheckpointError: there is no checkpoint, or it has no such part.
        ConfigError: ``build=False`` for a checkpoint of NeMo 2.0.
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
    """Call `load_context` with NeMo's order of arguments.

    The arguments that are not listed here are those of `load_context`.

    Args:
        output_type: Accepted for NeMo's signature, without effect.
    """
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
            f"load_context({str(checkpoint)!r}, build=False): nemo2 always builds the objects of a NeMo 2.0 "
            f"checkpoint. To edit its run as a recipe, run `nemo2 translate {checkpoint} --output recipe.py`."
        )
    if part == "model":
        model = load_nemo_model(checkpoint)
        model.tokenizer = nemo_tokenizer(checkpoint)
        return model
    if part == "tokenizer" and (tokenizer := nemo_tokenizer(checkpoint)) is not None:
        return tokenizer
    raise CheckpointError(
        f"{checkpoint} is a NeMo 2.0 checkpoint. nemo2 reads its model and a Hugging Face tokenizer, but not "
        f"{part!r}. `nemo2 translate {checkpoint}` writes its run as a recipe."
    )
