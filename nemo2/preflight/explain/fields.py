# SPDX-License-Identifier: Apache-2.0
"""The layers of a field: its default, all explicit values, the run's changes, and the final value."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import nemo2
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.aliases import aliases_of, parameter_names
from nemo2.config.provenance import record_of
from nemo2.config.show import format_value
from nemo2.config.tree import alias_owner
from nemo2.config.walk import iterate_nodes, node_at, who_set
from nemo2.mcore.overlap.presets import preset, preset_names
from nemo2.mcore.overlap.tp_overlap_cfg import TransformerLayerTPOverlapCfg
from nemo2.mcore.settle.run_settings import overlap_callbacks
from nemo2.mcore.settle.settling import Settled

_PACKAGE = Path(nemo2.__file__).parent.resolve()
_FOLDERS = tuple((_PACKAGE / name).resolve() for name in ("recipes", "callbacks", ""))
"""nemo2's own folders. Their files are shown without the path of the installation."""
_NOTHING = object()
_WIDEST = 60
"""Columns for values before their notes."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One value of the field, and its source."""

    value: Any
    who: str
    requested: bool = False
    """Whether a user or recipe set the value, rather than a default or the run."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The values of one field at one place of the recipe."""

    path: str
    """The place in the recipe."""
    layers: tuple[Layer, ...]
    """The values with their sources, in order. The run uses the last value."""

    @property
    def effective(self) -> Any:
        return self.layers[-1].value

    @property
    def differs(self) -> bool:
        """Whether the final value differs from the first, or any value in between does."""
        return len({shown(layer.value) for layer in self.layers}) > 1

    def line(self) -> str:
        """The value, its source, and the requested value if it differs, in one line."""
        last, *others = reversed(self.layers)
        requested = next((other for other in others if other.requested), None)
        overruled = requested is not None and shown(requested.value) != shown(last.value)
        note = (
            f"; {shown(requested.value)} was requested by {requested.who}"
            if overruled and requested and not last.requested
            else ""
        )
        return f"{self.path} = {shown(self.effective)}  # {last.who}{note}"

    def __str__(self) -> str:
        width = min(_WIDEST, max(len(shown(layer.value)) for layer in self.layers))
        lines = [f"{self.path} = {shown(self.effective)}"]
        lines += [f"  {shown(layer.value):{width}}  {layer.who}" for layer in self.layers]
        return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as a user would write it. Userbuffer settings, which are pages long, appear as the name of their
    preset."""
    if isinstance(value, TransformerLayerTPOverlapCfg):
        name = next((name for name in preset_names() if preset(name) == value), None)
        if name is not None:
            return repr(name)
    return format_value(value)


def explain(recipe: Any, effective: Settled, field: str) -> list[Explanation]:
    """Explain every place of ``recipe`` that ``field`` names.

    Args:
        recipe: The recipe.
        effective: The settled form of the recipe.
        field: A path from the recipe ("strategy.ddp_config.bucket_size"), or only the name or alias of a parameter.

    Raises:
        ConfigError: the recipe has no field of this name. The message lists the nearest names.
    """
    field = field.removeprefix("recipe.")  # as a script calls it
    explanations = [_explanation(path, node, name, effective) for path, node, name in _places(recipe, field)]
    buffers = _buffers_of_the_strategy(recipe, effective, field)
    if buffers is not None and buffers.path not in {explanation.path for explanation in explanations}:
        explanations.append(buffers)
    if not explanations:
        names: dict[str, None] = {}
        for _, node in iterate_nodes(recipe):
            names |= dict.fromkeys([*parameter_names(node.__fn_or_cls__), *aliases_of(node.__fn_or_cls__)])
        raise ConfigError(f"No setting of this recipe is called {field!r}{did_you_mean(field, list(names))}")
    return explanations


def explain_all(recipe: Any, effective: Settled) -> list[Explanation]:
    """Explain every field whose value in the run differs from its default, and every explicit value that the run
    changes, in the recipe's order.

    Args:
        recipe: The recipe.
        effective: The settled form of the recipe.
    """
    explanations = []
    for path, node in iterate_nodes(recipe):
        for name in parameter_names(node.__fn_or_cls__):
            if any(True for _ in iterate_nodes(node.__arguments__.get(name))):
                continue  # the nodes have fields of their own
            if name in node.__arguments__ or effective.steps(path, name):
                explanation = _explanation(path, node, name, effective)
                if explanation.differs:
                    explanations.append(explanation)
    return explanations


def _explanation(path: str, node: Any, name: str, effective: Settled) -> Explanation:
    target = node.__fn_or_cls__
    layers = []
    default = _default(node, name)
    if default is not _NOTHING:
        layers.append(Layer(value=default, who=f"default of {target.__name__}"))
    for file, line, value in who_set(node, name):
        layers.append(Layer(value=value, who=_who(file, line), requested=True))
    if name in node.__arguments__ and not who_set(node, name):
        layers.append(Layer(value=node.__arguments__[name], who="the recipe as it was read", requested=True))
    if name in effective.decisions and overlap_callbacks([node]):
        value, reason, by_user = effective.decisions[name]
        if not by_user:
            layers.append(Layer(value=value, who=reason))
    for step in effective.steps(path, name):
        layers.append(Layer(value=step.value, who=step.why))
    settled, value = effective.value(path, name)
    if settled and (not layers or shown(value) != shown(layers[-1].value)):
        layers.append(Layer(value=value, who=f"derived by {target.__name__}"))
    return Explanation(
        path=f"{path}.{name}".removeprefix("."), layers=tuple(layers) or (Layer(value=None, who="unset"),)
    )


def _buffers_of_the_strategy(recipe: Any, effective: Settled, field: str) -> Optional[Explanation]:
    """A setting of the gradient buffers if the recipe leaves them to the strategy: ``ddp="megatron"`` is no node."""
    from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig

    path = "trainer.strategy.ddp"
    ddp, (*parents, name) = effective.objects.get(path), field.split(".")
    name = aliases_of(DistributedDataParallelConfig).get(name, name)
    requested = node_at(recipe, ".".join(parents))
    if not hasattr(ddp, name) or (parents and (requested is None or requested != recipe.trainer.strategy.ddp)):
        return None
    steps = effective.steps(path, name)
    value = record_of(ddp).steps[name][0].value if steps else getattr(ddp, name)
    layers = [Layer(value=value, who=f"default of {DistributedDataParallelConfig.__name__}")]
    layers += [Layer(value=step.value, who=step.why) for step in steps]
    return Explanation(path=f"{path}.{name}", layers=tuple(layers))


def _who(file: str, line: int) -> str:
    """ "recipes/llama3_8b.py:9" with the kind of the place."""
    if file == "command line":
        return f"command line, change {line}"
    if file.startswith("--gpus"):
        return f"command line, {file}"
    path = Path(file).resolve()
    for folder in _FOLDERS:
        if path.is_relative_to(folder):
            place = f"{(Path(folder.name) / path.relative_to(folder)).as_posix()}:{line}"
            if "_performance" in path.name:
                return f"performance mode, {place}"
            if "precision" in path.parent.name:
                return f"precision, {place}"
            return f"recipe, {place}" if folder.name == "recipes" else place
    return f"{file}:{line}"


def _default(node: Any, name: str) -> Any:
    parameter = node.__signature_info__.parameters.get(name)
    if parameter is None or parameter.default is inspect.Parameter.empty:
        return _NOTHING
    if type(parameter.default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":  # dataclasses' marker
        return _NOTHING
    return parameter.default


def _places(recipe: Any, field: str) -> Iterator[tuple[str, Any, str]]:
    """``(path, node, name)`` of each place."""
    *parents, name = field.split(".")
    parent = node_at(recipe, ".".join(parents))
    for path, node in iterate_nodes(recipe):
        target = node.__fn_or_cls__
        if parents and node is not parent and parents != [getattr(target, "__name__", "")]:
            continue
        real: Optional[str] = name if name in parameter_names(target) else aliases_of(target).get(name)
        if real is None:
            continue
        if "." not in real:
            yield path, node, real
        elif parents or node is recipe:
            owner, last = alias_owner(node, name, real)
            yield ".".join([path, *real.split(".")[:-1]]).removeprefix("."), owner, last
