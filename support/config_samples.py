# SPDX-License-Identifier: Apache-2.0
"""The classes of a small recipe, similar to nemo2's own. They are in a module, because recipes hold names, not code."""

import dataclasses
import enum
import json
import pathlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Optional, Union

import torch
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo2.config import Config, Partial, configurable


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@configurable(overlap_grad_sync="overlap_grad_reduce")
@dataclasses.dataclass
class DDP:
    overlap_grad_reduce: bool = False
    bucket_size: Optional[int] = None
    dims: list[int] = dataclasses.field(default_factory=list)


@configurable
@dataclasses.dataclass
class Model:
    layers: int = 2
    hidden: int = 8
    ffn: Optional[int] = None
    dtype: torch.dtype = torch.float32
    act: Callable = torch.nn.functional.gelu

    def __post_init__(self) -> None:
        if self.ffn is None:
            self.ffn = 4 * self.hidden


@configurable
@dataclasses.dataclass
class BigModel(Model):
    layers: int = 32


@configurable(ddp_config="ddp")
class Strategy:
    def __init__(
        self,
        tensor_parallel: int = 1,
        *,
        sequence_parallel: bool = False,
        ddp: Union[Literal["megatron"], DDP] = "megatron",
        root: Optional[pathlib.Path] = None,
        timeout: Optional[timedelta] = None,
    ) -> None:
        self.tensor_parallel = tensor_parallel
        self.sequence_parallel = sequence_parallel
        self.ddp = ddp
        self.root = root
        self.timeout = timeout


@configurable
class Callback:
    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.calls = 0


class LoudCallback(Callback):
    def __init__(self, volume: int = 11, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.volume = volume


@configurable
class Trainer:
    def __init__(
        self,
        strategy: Strategy,
        *,
        max_steps: int = 10,
        lr: float = 1e-3,
        devices: Union[list[int], str, int] = "auto",
        callbacks: Optional[list[Callback]] = None,
    ) -> None:
        self.strategy = strategy
        self.max_steps = max_steps
        self.lr = lr
        self.devices = devices
        self.callbacks = callbacks


@dataclasses.dataclass
class Options:
    """A dataclass without nemo2's decorator, like a third party's."""

    mode: Mode = Mode.FAST
    share: float = 0.5
    name: str = "run"
    split: Optional[tuple[int, int]] = None
    extra: dict[str, int] = dataclasses.field(default_factory=dict)
    ddp: DDP = dataclasses.field(default_factory=DDP)
    fallback: Optional[DDP] = None
    note: str = None  # type: ignore[assignment]  # as in other people's signatures


class Plain:
    """A class that doesn't record the arguments of its instances."""


@configurable(strategy="trainer.strategy")
def train(model: Model, trainer: Trainer, options: Any = None) -> tuple:
    return model, trainer, options


@configurable
def write_result(model: Model, callbacks: list, path: pathlib.Path, pause: timedelta, acts: list) -> None:
    """The entry point of a run in another process. It writes down the received arguments."""
    arrived = {
        "model": [model.layers, str(model.dtype)],
        "every": [item.every for item in callbacks],
        "pause": pause.total_seconds(),
        "acts": [round(float(act(torch.tensor(1.0))), 4) for act in acts],
    }
    path.write_text(json.dumps(arrived))


def recipe(*callbacks: Any) -> Partial:
    """A recipe with a callback of its own, and ``callbacks`` appended as a script does."""
    strategy = Config(Strategy, tensor_parallel=2, ddp=Config(DDP))
    trainer = Config(Trainer, strategy=strategy, callbacks=[Config(Callback, every=3)])
    trainer.callbacks.extend(callbacks)
    return Partial(train, model=Config(BigModel), trainer=trainer, options=Config(Options))


def sent(config: Any) -> Any:
    """A recipe as it arrives in another process."""
    wire = ZlibJSONSerializer()
    return wire.deserialize(wire.serialize(config))
