# SPDX-License-Identifier: Apache-2.0
"""A user's transform of a model, applied to each chunk before the chunk is wrapped.

A transform is a function that takes a module and returns a module. With one argument it is called with each chunk. With
a second argument called ``name`` it is called with each module of the chunk and the module's full dotted name, in which
layers and experts have their numbers in the whole model. In both forms it may replace modules, change them in place and
freeze parameters (``requires_grad_(False)``). Frozen parameters have no gradient and no optimizer state.

Weights are loaded afterwards. If a module of a transform has a method ``weights_loaded(names)``, it then receives the
names of the loaded parameters below it.

Checkpoints keep the names: a parameter of the original model is stored under its original name, wherever the transform
has moved it, so checkpoints of the plain model fit. Parameters that the transform adds are stored under their full
names.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Optional

import fiddle as fdl
import lightning.pytorch as pl
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import nn

from nemo2.base.errors import ConfigError
from nemo2.config.walk import class_of
from nemo2.mcore.parallel.plain_chunk import PlainChunk

Transform = Callable[..., nn.Module]
_RECORD = "transformed"


@dataclass(frozen=True)
class Transformed:
    """The changes to a chunk."""

    by: Transform
    before: nn.Module
    """The chunk before the transform, usually the same object as the chunk after it."""
    tree: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]
    """The original modules, each with its children and its parameters."""


def transform_of(model: Any, callbacks: Iterable[Any] = ()) -> Optional[Transform]:
    """The transform of a run: ``model.model_transform``, or that of a callback with an attribute of this name.

    Raises:
        ConfigError: two places give different transforms.
    """
    transforms: dict[str, Transform] = {}
    for place, owner in [("model", model), *((type(callback).__name__, callback) for callback in callbacks)]:
        transform = getattr(owner, "model_transform", None)
        if transform is not None:
            transforms[f"{place}.model_transform"] = transform
    refuse_two_transforms(transforms)
    return next(iter(transforms.values()), None)


def refuse_two_transforms(transforms: dict[str, Any]) -> None:
    """Check that a model has one transform. ``transforms``: by the place that sets them, functions or nodes of a recipe.

    Raises:
        ConfigError: the transforms differ, or a transform isn't callable.
    """
    for place, transform in transforms.items():
        if not (callable(transform) or isinstance(transform, fdl.Buildable)):
            raise ConfigError(f"{place}={transform!r}: must be a function that takes a module and returns a module.")
    if any(transform is not next(iter(transforms.values())) for transform in transforms.values()):
        settings = " and ".join(f"{place}={_called(transform)}" for place, transform in transforms.items())
        raise ConfigError(
            f"{settings}: a model has a single transform. Keep one, or write a function that applies both in order."
        )


def refuse_reading_weights(transform: Optional[Transform], *, under: str) -> None:
    """Check that a transform works with the sharding of ``under``, a strategy or a setting.

    Raises:
        ConfigError: the modules that the transform adds read the weights of other modules, which ``under`` shards.
    """
    if getattr(transform, "reads_weights", False):
        raise ConfigError(
            f"model_transform={_called(transform)} reads the weights of the layers that it extends, but {under} shards "
            "these weights. Use MegatronStrategy without fsdp='megatron', or FSDP2Strategy."
        )


def transformed(core: nn.Module, transform: Optional[Transform]) -> nn.Module:
    """The result of ``transform`` for ``core``, a chunk without wrappers. A chunk is transformed once, even after
    several calls.

    Raises:
        ConfigError: the schedule can't run the result, or another transform was applied before.
    """
    record = record_of(core)
    if record is not None and transform is not None:
        refuse_two_transforms({"the model's first model_transform": record.by, "model_transform": transform})
    if transform is None or record is not None:
        return core
    plain = isinstance(core, PlainChunk)
    root = core.module if plain else core
    tree = [(module, dict(module._modules), dict(module._parameters)) for module in core.modules()]
    record = Transformed(by=transform, before=core, tree=tree)
    result = walk(root, transform) if takes_names(transform) else transform(root)
    if not isinstance(result, nn.Module):
        raise ConfigError(
            f"model_transform={_called(transform)} returned {type(result).__name__} for {type(root).__name__}. It must "
            "return a module: its argument or a replacement."
        )
    if result is not root and (
        isinstance(root, pl.LightningModule) or not (plain or isinstance(result, MegatronModule))
    ):
        raise ConfigError(
            f"model_transform={_called(transform)} replaced the whole {type(root).__name__} with a "
            f"{type(result).__name__}, which the pipeline schedule can't run. Replace modules inside the model instead."
        )
    if plain:
        core.module = result
    else:
        core = result
    core.__dict__[_RECORD] = record
    _add_sharded_state_dict(core, original={id(module) for module, _, _ in tree})
    _require_grad_of_frozen_embeddings(core)
    return core


def forget_transform(core: nn.Module) -> None:
    """Treat a chunk as one that was never transformed. All of its modules must be back in their places."""
    core.__dict__.pop(_RECORD, None)


def record_of(core: nn.Module) -> Optional[Transformed]:
    """The changes to a chunk without wrappers. None: the chunk wasn't transformed."""
    return core.__dict__.get(_RECORD)


def tell_of_loaded_weights(core: nn.Module, names: Iterable[str]) -> None:
    """Call ``weights_loaded`` of each module of a transformed chunk that defines it.

    ``names``: the names of the loaded tensors, as in ``core.state_dict()``.
    """
    loaded = set(names)
    for path, module in core.named_modules() if record_of(core) is not None else ():
        listener = getattr(type(module), "weights_loaded", None)
        if listener is not None:
            below = f"{path}." if path else ""
            listener(module, {name.removeprefix(below) for name in loaded if name.startswith(below)})


def walk(root: nn.Module, function: Callable[..., nn.Module]) -> nn.Module:
    """``root`` with each of its modules replaced by ``function(module, name=full name)``.

    Children come before parents. The root comes last, under the name "". The modules inside a replacement are not
    visited, and a module in two places is visited once.
    """
    names = full_names(root)
    replaced: dict[int, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> nn.Module:
        if id(module) not in replaced:
            for name, child in list(module._modules.items()):
                if child is not None:
                    module._modules[name] = visit(child, f"{path}.{name}" if path else name)
            result = function(module, name=names[path])
            if not isinstance(result, nn.Module):
                raise ConfigError(
                    f"model_transform={_called(function)} returned {type(result).__name__} for "
                    f"{names[path] or 'the model'}. It must return a module: its argument or a replacement."
                )
            replaced[id(module)] = result
        return replaced[id(module)]

    return visit(root, "")


def takes_names(transform: Transform) -> bool:
    """Whether a transform has the form ``model_transform(module, name)``, which is called for each module.

    Raises:
        ConfigError: it has neither this form nor ``model_transform(module)``.
    """
    try:
        signature = inspect.signature(transform)
    except ValueError:  # of a builtin
        return False
    named = "name" in signature.parameters
    try:
        signature.bind(None, **{"name": ""} if named else {})
    except TypeError as error:
        raise ConfigError(
            f"model_transform={_called(transform)} has another signature than transform(module) and transform(module, name): "
            f"{error}. Rename its second argument to name, or give others a default."
        ) from error
    return named


def full_names(root: nn.Module) -> dict[str, str]:
    """The full name of each module by its path in ``root``, a chunk or a plain module. The root has the path and the
    name ""."""
    names = {"": ""}

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            here = names[path]
            names[inside] = f"{here}.{_number(module, name, path, child)}" if here else name
            visit(child, inside)

    visit(root, "")
    return names


def full_parameter_names(core: nn.Module) -> dict[str, str]:
    """The full name of each entry of ``core.state_dict()`` by its key there."""
    plain = isinstance(core, PlainChunk)
    names = full_names(core.module if plain else core)
    full = {}
    for key in core.state_dict(keep_vars=True):
        path, _, last = (key.removeprefix("module.") if plain else key).rpartition(".")
        module = path
        while module not in names:  # a module that names its parts differently in its state
            module = module.rpartition(".")[0]
        full[key] = ".".join(part for part in (names[module], path.removeprefix(module).lstrip("."), last) if part)
    return full


def _number(parent: nn.Module, name: str, path: str, child: nn.Module) -> str:
    """A child's name in the whole model. ``name`` is its name on this rank."""
    if not (isinstance(parent, nn.ModuleList) and name.isdigit()):
        return name
    if isinstance(number := getattr(child, "layer_number", None), int):
        return str(number - 1)
    if path.rpartition(".")[2] == "local_experts":
        return str(int(name) + parallel_state.get_expert_model_parallel_rank() * len(parent))
    return name


def _add_sharded_state_dict(core: nn.Module, *, original: set[int]) -> None:
    """Give new modules a ``sharded_state_dict``, which Megatron-Core calls on some modules that a transform may
    replace."""
    for module in core.modules():
        if id(module) not in original and not hasattr(module, "sharded_state_dict"):
            module.__dict__["sharded_state_dict"] = MethodType(MegatronModule.sharded_state_dict, module)


def _require_grad_of_frozen_embeddings(core: nn.Module) -> None:
    """Let the output of a frozen embedding require a gradient.

    Recomputation runs layers again only if one of their inputs requires a gradient. After a frozen embedding no input
    does, and trainable parameters in these layers would silently never change.
    """
    embedding = getattr(core, "embedding", None)
    recomputes = getattr(getattr(core, "config", None), "recompute_granularity", None) is not None
    if recomputes and isinstance(embedding, nn.Module) and not any(one.requires_grad for one in embedding.parameters()):
        embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if output.is_leaf else output
        )


def _called(transform: Any) -> str:
    return getattr(transform, "__qualname__", None) or class_of(transform).__name__
