# SPDX-License-Identifier: Apache-2.0
"""NeMo's ``nl.io``: objects that record their arguments, a checkpoint's description of its run, and foreign weights."""

from abc import ABCMeta
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

import fiddle as fdl

from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint import context
from nemo2.checkpoint.directory import CONTEXT_PATH
from nemo2.config.capture import captured_arguments, configurable, remembers_arguments
from nemo2.hugging_face.api import export_ckpt, import_ckpt
from nemo2.hugging_face.checkpoint import Checkpoint

__all__ = ["IOMixin", "TrainerContext", "export_ckpt", "import_ckpt", "load", "load_context", "reinit", "track_io"]

_T = TypeVar("_T")
_ADVICE = {"NeMo 2.0": "`nemo2 translate {}` writes its run as a recipe."}


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
        path: A checkpoint, its ``context/``, or a run's directory. From a checkpoint of NeMo 2.0 and from a release the
            model and its tokenizer are read.
        subpath: A part: "model", "data", "tokenizer", ..., optionally followed by attributes, as in "model.config".
            None: a `TrainerContext`.
        build: False: return configs instead of objects.

    Raises:
        CheckpointError: there is no checkpoint, or it has no such part.
        ConfigError: its format doesn't describe a model.
    """
    place = Path(path)
    checkpoint = Checkpoint.open(place.parent if place.name == CONTEXT_PATH else place)
    if subpath is None:
        described = context.describes(checkpoint.path, "data")
        return TrainerContext(
            _part(checkpoint, "model", build=build),
            {"datamodule": _part(checkpoint, "data", build=build)} if described else {},
        )
    first, *rest = subpath.split(".")
    if [first, *rest[:1]] == ["model", "tokenizer"]:
        first, *rest = rest
    value = _part(checkpoint, first, build=build)
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


def _part(checkpoint: Checkpoint, name: Any, *, build: bool) -> Any:
    if name == "model":
        model = checkpoint.model_config()
        if build:
            model = fdl.build(model)
            model.tokenizer = checkpoint.tokenizer() or model.tokenizer
        return model
    if checkpoint.is_nemo2:
        return context.load_context(checkpoint.path, name, build=build)
    if name == "tokenizer" and (tokenizer := checkpoint.tokenizer()) is not None:
        return tokenizer
    advice = _ADVICE.get(checkpoint.kind, "`nemo2 show {} --checkpoint` shows what it contains.")
    raise CheckpointError(
        f"{checkpoint.path} is a checkpoint of {checkpoint.kind}. nemo2 reads its model and a Hugging Face tokenizer, but "
        f"not {name!r}. {advice.format(checkpoint.path)}"
    )
