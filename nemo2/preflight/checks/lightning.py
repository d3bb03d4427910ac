# SPDX-License-Identifier: Apache-2.0
"""Lightning's own errors about a trainer's words, numbers and times, and about callbacks, before the ranks meet them.

Lightning checks these in its constructors, which open no file and no connection, so the constructors are called.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import fiddle as fdl

from nemo2.base.names import sentence
from nemo2.config.walk import class_of, node_at
from nemo2.mcore.settle.parts import quietly, refusals_of
from nemo2.preflight.checks.domains import TRAINER

_PLAIN = (bool, int, float, str, dict, timedelta, type(None))
_ELSEWHERE = (
    *("accelerator", "devices", "num_nodes", "strategy", "plugins", "callbacks", "logger", "precision"),
    *("deterministic", "benchmark"),
)
"""Arguments that depend on the machine or on other parts, or that set torch's global switches."""
_OURS = ("nemo2.", "lightning.")
_ERRORS: dict[str, str] = {}
"""Lightning's error by the trainer's arguments. Empty: it has none."""
_QUIET = threading.Lock()
"""Held while logging is off. A second thread would take that for the state to restore, and leave it off for good."""


def trainer_problems(trainer: Any, *, accelerators: tuple[str, ...]) -> Iterator[str]:
    """The arguments of a trainer's node that Lightning rejects, each with Lightning's reason.

    Args:
        accelerators: The names that its strategy runs on. Empty: those of Lightning's registry.
    """
    from lightning.pytorch.accelerators import AcceleratorRegistry

    names = accelerators or ("auto", "gpu", *AcceleratorRegistry.available_accelerators())
    name = getattr(trainer, "accelerator", "auto")
    if name is None or (isinstance(name, str) and name not in names):
        yield (
            f"trainer.accelerator={name!r}: must be one of {', '.join(names)}. 'auto' takes GPUs where they exist, and CPU "
            "processes elsewhere."
        )
    if not isinstance(trainer, fdl.Buildable):
        return
    arguments = {
        str(name): value
        for name, value in trainer.__arguments__.items()
        if isinstance(value, _PLAIN) and name not in _ELSEWHERE
    }
    if not (together := _error(arguments)):
        return
    errors = {name: error for name, value in arguments.items() if (error := _error({name: value}))}
    for name, error in errors.items():
        if name not in TRAINER:  # else a rule of ours has the reason
            yield f"trainer.{name}={arguments[name]!r}: Lightning rejects it: {error}"
    if not errors:
        yield f"trainer: Lightning rejects these settings together: {together}"


def no_time(max_time: Any) -> bool:
    """Whether a trainer's ``max_time`` is over when it begins. False for one that Lightning rejects."""
    from lightning.pytorch.callbacks import Timer

    try:
        left = Timer(duration=max_time)._duration
    except Exception:  # `trainer_problems` has the reason
        return False
    return left is not None and left <= 0


def callback_problems(
    callbacks: Iterable[tuple[str, Any]], rule: str, *, here: bool, model: Any, recipe: Any
) -> Iterator[str]:
    """The errors of callbacks of nemo2 and Lightning about their arguments. Constructors of other classes are not called:
    they may do anything. Two callbacks of a class must differ in the folder of their files, which ``written_to`` names, and
    in their steps, whose first and end ``alone_in`` names. Only one may save its state under a key, which Lightning
    requires, or log under fixed names (``only_one``). `trainer.max_time` and `log.ckpt` count as callbacks.

    Args:
        callbacks: Nodes and live objects, each with its path.
        rule: The rule of an error that names no other rule.
        here: The run is on this machine, so callbacks with ``check_files`` look at their files.
        model: The model's settled configuration, at which callbacks with ``check_model`` look. None: unknown.
        recipe: The recipe, at which callbacks with ``check_recipe`` look.
    """
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.model_helpers import is_overridden

    beside = {"Timer": "trainer.max_time", "ModelCheckpoint": "log.ckpt"}
    only = {key: path for key, path in beside.items() if node_at(recipe, path) is not None}
    folders: dict[tuple[Any, str], str] = {}
    spans: list[tuple[str, Any, int, int]] = []
    for path, node in callbacks:
        cls = class_of(node)
        if field := getattr(cls, "written_to", None):
            folder = getattr(node, field) or ""
            if (first := folders.setdefault((cls, str(folder)), path)) != path:
                yield f"{path}.{field}={folder!r}: {first} writes files of the same names to this folder. Set another {field}."
        steps = [getattr(node, field) for field in getattr(cls, "alone_in", ())]
        if steps and all(isinstance(step, int) for step in steps):
            first, end = steps
            for other in (at for at, kind, start, stop in spans if kind is cls and first < stop and start < end):
                yield (
                    f"{path}: start_step={first} and end_step={end} overlap the steps of {other}, but a process has only one "
                    "profiler. Set other steps."
                )
            spans.append((path, cls, first, end))
        if not isinstance(node, fdl.Config) or not getattr(cls, "__module__", "").startswith(_OURS):
            continue
        if getattr(cls, "asks_for_overlap", False):
            continue  # settled with the rest
        try:
            with quietly():
                callback: Any = fdl.build(node)
                if here and hasattr(callback, "check_files"):
                    callback.check_files()
                if model is not None and hasattr(callback, "check_model"):
                    callback.check_model(model)
                if hasattr(callback, "check_recipe"):
                    callback.check_recipe(recipe)
        except ImportError:  # the ranks may have a package that this machine lacks
            continue
        except Exception as error:
            for refusal in refusals_of(error, rule, path):
                name = "" if cls.__name__ in refusal.message else f"{cls.__name__}: "
                yield f"{path}: {name}{sentence(refusal.message)}"
            continue
        stateful = not field and is_overridden("state_dict", callback, parent=Callback)
        alone = stateful or getattr(cls, "only_one", False)
        if alone and (first := only.setdefault(callback.state_key, path)) != path:
            yield f"{path}: {first} is a {cls.__name__} too, and a run has only one. Remove one of them."


def _error(arguments: Mapping[str, Any]) -> str:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    from nemo2.training.trainer import Trainer

    key = repr(sorted(arguments.items()))
    defaults: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with _QUIET:
        if key in _ERRORS:
            return _ERRORS[key]
        known = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            with quietly():
                Trainer(**defaults | dict(arguments), accelerator="cpu", devices=1, plugins=[LightningEnvironment()])
            _ERRORS[key] = ""
        except Exception as error:  # MisconfigurationException, TypeError, ValueError
            _ERRORS[key] = sentence(" ".join(str(error).split()))
        finally:
            logging.disable(known)
    return _ERRORS[key]
