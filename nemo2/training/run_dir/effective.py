# SPDX-License-Identifier: Apache-2.0
"""The contents of ``effective_config.yaml``: the settings in force at the first step, after all adjustments."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Optional

_TRAINER_FIELDS = (
    "max_steps",
    "max_epochs",
    "num_devices",
    "num_nodes",
    "world_size",
    "log_every_n_steps",
    "val_check_interval",
    "limit_val_batches",
    "accumulate_grad_batches",
    "gradient_clip_val",
)
_DATA_FIELDS = ("seq_length", "micro_batch_size", "global_batch_size", "rampup_batch_size", "num_workers")


def effective_config(trainer: Any, model: Any) -> dict[str, Any]:
    """The settings that a trainer, set up, and its model really use, as plain data.

    The values come from the live objects, so a feature that a callback turned off appears as off. A value without a
    plain form is its ``repr``, without memory addresses. Sections that don't apply, such as a missing ``ddp_config``,
    are left out.
    """
    from nemo2.training.run_dir.resumed import ResumedRecipe

    # Trackers keep a callback's settings under its place in the list, which is the same before and after a resume.
    callbacks = [one for one in getattr(trainer, "callbacks", []) if not isinstance(one, ResumedRecipe)]
    strategy = getattr(trainer, "strategy", None)
    datamodule = getattr(trainer, "datamodule", None)
    precision = getattr(trainer, "precision_plugin", None)
    model = getattr(model, "_orig_mod", model)
    sections = {
        "trainer": _fields(trainer, _TRAINER_FIELDS),
        "strategy": _section(strategy, plain(getattr(strategy, "parallelism", None))),
        "ddp": plain(getattr(strategy, "ddp_config", None)),
        "precision": _section(
            precision,
            {"precision": plain(getattr(precision, "precision", None))}
            | (plain(getattr(precision, "dtype_config", None)) or {}),
        ),
        "optimizer": plain(getattr(getattr(model, "optim", None), "config", None)),
        "lr_scheduler": _captured(getattr(getattr(model, "optim", None), "lr_scheduler", None)),
        "data": _section(datamodule, _fields(datamodule, _DATA_FIELDS)),
        "model": _section(model, plain(getattr(model, "config", None))),
        "callbacks": [_captured(callback) for callback in callbacks],
    }
    return {name: section for name, section in sections.items() if section}


def planned_steps(effective: Any) -> Optional[int]:
    """The number of steps at which training ends, by the contents of ``effective_config.yaml``. None: unknown."""
    trainer = effective.get("trainer") if isinstance(effective, Mapping) else None
    steps = trainer.get("max_steps") if isinstance(trainer, Mapping) else None
    return steps if isinstance(steps, int) and steps > 0 else None


def plain(value: Any, *, depth: int = 4) -> Any:
    """``value`` as plain YAML data: dataclasses become mappings, enums their names, callables dotted names."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        # A path may contain bytes that aren't UTF-8, which Python shows as lone surrogates and no YAML reader accepts.
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, enum.Enum):
        return value.name
    if depth == 0:
        return _text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name), depth=depth - 1)
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        }
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item, depth=depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth=depth - 1) for item in value]
    return _text(value)


def _fields(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {}
    for name in names:
        try:
            value = getattr(owner, name)
        except Exception:  # a Lightning property may need a running loop; the file then lacks the field
            continue
        values[name] = plain(value)
    return values


def _captured(value: Any) -> dict[str, Any] | None:
    from nemo2.config.capture import captured_arguments

    return _section(value, plain(captured_arguments(value)))


def _section(owner: Any, values: Optional[dict[str, Any]]) -> dict[str, Any] | None:
    return None if owner is None else {"class": _name(owner)} | (values or {})


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _text(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}".lstrip(".")
    text = plain(str(value))
    # A default repr contains an address, which would make two equal runs differ.
    return _name(value) if " object at 0x" in text or " at 0x" in text else text
