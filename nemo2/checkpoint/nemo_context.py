# SPDX-License-Identifier: Apache-2.0
"""Reads NeMo 2.0's ``context/model.yaml`` as a nemo2 model, as data, without importing or needing NeMo.

NeMo writes the model's configuration three times (nemo/lightning/io/mixin.py, ``io_dump``). ``io.json`` is fiddle's
serialization of the whole trainer and may hold pickles. ``model.yaml`` is the model alone, a tree of ``_target_`` with
the arguments beside it. Only ``model.yaml`` is read, as plain data. Among its names only NeMo's language models count,
which are looked up by their last part among nemo2's.
"""

from pathlib import Path
from typing import Any

from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.base.names import did_you_mean
from nemo2.checkpoint.directory import CONTEXT_PATH
from nemo2.checkpoint.foreign_files import read_yaml

MODEL_FILE = "model.yaml"
_PREFIX = "nemo.collections.llm."
_PLAIN = (bool, int, float, str, type(None))


def load_nemo_model(checkpoint: Path | str) -> Any:
    """The model of a NeMo 2.0 checkpoint, built without weights. Its ``config`` has the values of NeMo's.

    Fields that describe how NeMo ran the model (parallel sizes, dtypes, functions) are set by this run's strategy and
    nemo2's classes.

    Raises:
        CheckpointError: there is no ``context/model.yaml``, or nemo2 has no such model.
        SecurityError: the file names something that isn't one of NeMo's language models.
    """
    tree = _read(Path(checkpoint))
    model = _ours(tree)
    config = _ours(tree.get("config") or {})
    return model(config(**_arguments(tree.get("config") or {}, config)))


def describe(checkpoint: Path) -> str:
    """One line about the model, or the reason why it can't be rebuilt."""
    try:
        tree = _read(checkpoint)
        model, config = _ours(tree), _ours(tree.get("config") or {})
    except (CheckpointError, SecurityError) as error:
        return str(error)
    return f"model: {model.__name__}({config.__name__}), known to nemo2"


def model_config(checkpoint: Path) -> dict[str, Any]:
    """The model's configuration in ``context/model.yaml``, unchanged. Empty: the file can't be read."""
    try:
        config = _read(checkpoint).get("config")
    except (CheckpointError, SecurityError):
        return {}
    return config if isinstance(config, dict) else {}


def _read(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / CONTEXT_PATH / MODEL_FILE
    tree = read_yaml(file)
    if not isinstance(tree, dict) or "_target_" not in tree:
        raise CheckpointError(f"{file} does not describe a model: it has no _target_.")
    return tree


def _ours(node: Any) -> type:
    """nemo2's class of the same name.

    Raises:
        SecurityError: the name isn't one of NeMo's language models.
        CheckpointError: nemo2 has no such model.
    """
    from nemo2 import models

    target = node.get("_target_") if isinstance(node, dict) else None
    if not isinstance(target, str) or not target.startswith(_PREFIX):
        raise SecurityError(
            f"context/{MODEL_FILE} names {target!r}, but nemo2 looks up only NeMo's language models ({_PREFIX}...)."
        )
    name = target.rpartition(".")[2]
    cls = getattr(models, name) if name in models.__all__ else None
    if not isinstance(cls, type):
        raise CheckpointError(
            f"The checkpoint is of NeMo's {name}, which nemo2 does not have{did_you_mean(name, models.__all__)}"
        )
    return cls


def _arguments(node: dict[str, Any], config: type) -> dict[str, Any]:
    """The plain values that nemo2's class accepts, without those that describe how NeMo ran the model."""
    from dataclasses import fields

    from nemo2.checkpoint.context import MANAGED

    names = {item.name for item in fields(config)}  # pyright: ignore[reportArgumentType]  (config classes are dataclasses)
    return {
        name: value
        for name, value in node.items()
        if name in names - MANAGED and isinstance(value, _PLAIN) and value is not None
    }
