# SPDX-License-Identifier: Apache-2.0
"""Compiles modules with ``torch.compile``."""

import contextlib
import inspect
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from torch import nn

from nemo2.base import ranks
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable
from nemo2.mcore.parallel.inspection import chunks_of, with_parents


@configurable
@dataclass
class JitConfig:
    """Select the modules that are compiled, and how."""

    module_selector: str = ""
    """The dotted path of a module in a chunk, such as ``decoder.layers.0.mlp``. A chunk of another pipeline stage may lack it.
    ``*`` matches any part of a name.
    "" or "*" compiles each chunk as a whole. Under a strategy that isn't nemo2's, they compile the LightningModule's
    ``module`` or ``model``, or else each of its children."""
    use_torch: bool = False
    """Compile with torch. False: compile nothing."""
    torch_kwargs: Optional[dict[str, Any]] = field(default_factory=dict)
    """Arguments of ``torch.compile``. None: none."""
    use_thunder: bool = False
    """Must be False, because nemo2 doesn't depend on Thunder. Its compiler can be set as
    ``torch_kwargs["backend"]``."""
    profile_thunder: bool = False
    """Must be False."""

    def __post_init__(self) -> None:
        if self.use_thunder or self.profile_thunder:
            raise ConfigError(
                f"JitConfig.{'use' if self.use_thunder else 'profile'}_thunder=True: nemo2 compiles with torch. Set "
                "use_torch=True. Where Thunder is installed, also set torch_kwargs={'backend': thunder.dynamo.ThunderCompiler()}."
            )
        known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
        for name in self.torch_kwargs or {}:
            if name not in known:
                raise ConfigError(
                    f"JitConfig.torch_kwargs: torch.compile has no argument {name!r}{did_you_mean(name, known)}"
                )


@configurable
class JitTransform(pl.Callback):
    """Compile modules in place, once, when training begins. ``torch.compile`` then compiles during the first steps.

    Parameter names don't change, so checkpoints also load into runs without this callback.

    Args:
        config: The modules to compile, and how: a `JitConfig`.

    Raises:
        ConfigError: ``config`` is none. When training begins: no module matches the selector.
    """

    def __init__(self, config: JitConfig) -> None:
        if not isinstance(config, JitConfig):
            raise ConfigError(
                f"JitTransform.config={config!r}: must be a JitConfig, such as JitConfig(use_torch=True)."
            )
        self.config = config
        self._done: list[nn.Module] = []

    def check_model(self, config: Any) -> None:
        """Raise the error of `on_train_epoch_start` about modules, except those of adapters, of attention's core and of rotary
        positions. ``config`` is settled."""
        from nemo2.models.conversion.families import modules_with_weights

        selector, leaves = self.config.module_selector or "*", _in_chunks(modules_with_weights(config) or (), config)
        if not self.config.use_torch or selector == "*" or not leaves:
            return
        known, parts = with_parents(leaves), selector.split(".")
        deep = {"rotary_pos_emb", *(f"{name}.core_attention" for name in known if name.endswith(".self_attention"))}
        deep |= {f"{leaf}.{own}" for leaf in leaves for own in ("to_wrap", "adapter")}
        heads = [_pattern(".".join(parts[:end])) for end in range(1, len(parts) + 1)]
        if not any(head.fullmatch(module) for head in heads for module in deep):
            _refuse_unmatched(known, selector)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.config.use_torch or self._done:
            return
        roots, selector = [_called_in(chunk) for chunk in chunks_of(trainer)], self.config.module_selector
        names = [name for root in roots for name, _ in root.named_modules() if name]
        if selector not in (None, "", "*"):  # a pipeline stage may lack them
            _refuse_unmatched([*dict.fromkeys(name for of_rank in ranks.gather(names) for name in of_rank)], selector)
        self._done = [module for root in roots for module in _selected(root, selector)]
        for module in self._done:
            module.compile(**self.config.torch_kwargs or {})


def _called_in(chunk: nn.Module) -> nn.Module:
    """The module that a step calls: the chunk, or the ``module`` or ``model`` of a LightningModule, whose own
    forward no step calls. A LightningModule without either is returned itself."""
    from nemo2.mcore.parallel.plain_chunk import PlainChunk  # imports Megatron-Core

    if not isinstance(chunk, PlainChunk | pl.LightningModule):
        return chunk
    named = (getattr(chunk, name, None) for name in ("module", "model"))
    return next((one for one in named if isinstance(one, nn.Module)), chunk)


def _selected(root: nn.Module, selector: Optional[str]) -> list[nn.Module]:
    if selector in (None, "", "*"):
        return list(root.children()) if isinstance(root, pl.LightningModule) else [root]
    pattern = _pattern(selector)
    return [module for name, module in root.named_modules() if name and pattern.fullmatch(name)]


def _in_chunks(names: Collection[str], config: Any) -> set[str]:
    """Full names of modules as they are in their chunk, which counts its layers from 0."""
    from nemo2.mcore.settle.settling import layers_per_chunk

    counts: list[int] = []
    with contextlib.suppress(AssertionError, ValueError, TypeError, ZeroDivisionError):  # other rules report it
        counts = layers_per_chunk(config)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    firsts = [0, *accumulate(count for chunk in range(chunks) for count in counts[chunk::chunks])]

    def local(match: re.Match[str]) -> str:
        layer = int(match[2])
        return f"{match[1]}{layer - max(first for first in firsts if first <= layer)}"

    return {re.sub(r"^(decoder\.layers\.)(\d+)", local, name) for name in names}


def _refuse_unmatched(names: Collection[str], selector: str) -> None:
    pattern = _pattern(selector)
    if not any(pattern.fullmatch(name) for name in names):
        raise ConfigError(
            f"JitConfig.module_selector={selector!r}: the model has no such module, where each pipeline stage counts its layers "
            f"from 0{did_you_mean(selector, names)}"
        )


def _pattern(selector: str) -> re.Pattern[str]:
    return re.compile(re.escape(selector).replace(r"\*", "[^.]*"))
