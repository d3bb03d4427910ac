# SPDX-License-Identifier: Apache-2.0
"""Lightning's own errors about a trainer's words, numbers and times, and about callbacks, before the ranks meet them.

Lightning checks these in its constructors, which open no file and no connection, so the constructors are called.
"""

import itertools
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
    """The errors of callbacks of nemo2 and Lightning about their arguments, and of callbacks that get in each other's way.
    Constructors of other classes are not called: they may do anything.

    Args:
        callbacks: Nodes and live objects, each with its path.
        rule: The rule of an error that names no other rule.
        here: The run is on this machine, so callbacks with ``check_files`` look at their files.
        model: The model's settled configuration, at which callbacks with ``check_model`` look. None: unknown.
        recipe: The recipe, at which callbacks with ``check_recipe`` look.
    """
    callbacks = list(callbacks)
    yield from _clashes(callbacks)
    checks: dict[str, tuple[Any, ...] | None] = {
        "check_files": () if here else None,
        "check_model": None if model is None else (model,),
        "check_recipe": (recipe,),
    }
    first_paths = {key: path for key, path in _IN_OTHER_FIELDS.items() if node_at(recipe, path) is not None}
    for path, node in callbacks:
        cls = class_of(node)
        if isinstance(node, fdl.Partial) or not getattr(cls, "__module__", "").startswith(_OURS):
            continue
        if getattr(cls, "asks_for_overlap", False):
            continue  # settled with the rest
        callback: Any = node
        try:
            if isinstance(node, fdl.Config):
                with quietly():
                    callback = fdl.build(node)
                    for name, arguments in checks.items():
                        if arguments is not None and hasattr(callback, name):
                            getattr(callback, name)(*arguments)
        except ImportError:  # the ranks may have a package that this machine lacks
            continue
        except Exception as error:
            for refusal in refusals_of(error, rule, path):
                name = "" if cls.__name__ in refusal.message else f"{cls.__name__}: "
                yield f"{path}: {name}{sentence(refusal.message)}"
            continue
        if _is_alone(callback) and (first := first_paths.setdefault(callback.state_key, path)) != path:
            yield f"{path}: {first} is a {cls.__name__} too, and a run has only one. Remove one of them."


_IN_OTHER_FIELDS = {"Timer": "trainer.max_time", "ModelCheckpoint": "log.ckpt"}
"""Fields of a recipe that add a callback, by its state's key."""


def _clashes(callbacks: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Two callbacks of a class whose files, in the folder that ``written_to`` names, would replace each other, or whose
    steps overlap, of which ``alone_in`` names the first and the end."""
    for (first, one), (path, other) in itertools.combinations(callbacks, 2):
        if (cls := class_of(one)) is not class_of(other):
            continue
        field = getattr(cls, "written_to", "")
        folder, before = (field and str(getattr(node, field) or "") for node in (other, one))
        if field and folder == before:
            yield f"{path}.{field}={folder!r}: {first} writes files of the same names to this folder. Set another {field}."
        spans = [[getattr(node, field) for field in getattr(cls, "alone_in", ())] for node in (other, one)]
        is_known = all(spans) and all(isinstance(step, int) for span in spans for step in span)
        if is_known and max(start for start, _ in spans) < min(end for _, end in spans):
            yield (
                f"{path}: start_step={spans[0][0]} and end_step={spans[0][1]} overlap the steps of {first}, but a process "
                "has only one profiler. Set other steps."
            )


def _is_alone(callback: Any) -> bool:
    """Whether a run may have only one of a callback: it logs under fixed names (``only_one``), or it saves its state under
    a key, which Lightning requires to be of one callback."""
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.model_helpers import is_overridden

    saves_state = not hasattr(callback, "written_to") and is_overridden("state_dict", callback, parent=Callback)
    return saves_state or getattr(callback, "only_one", False)


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
