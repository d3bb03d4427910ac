# SPDX-License-Identifier: Apache-2.0
"""Reads NeMo 2.0's ``context/model.yaml`` as a nemo2 model, as data, without importing or needing NeMo.

NeMo writes the model's configuration three times (nemo/lightning/io/mixin.py, ``io_dump``). ``io.json`` is fiddle's
serialization of the whole trainer and may hold pickles. ``model.yaml`` is the model alone, a tree of ``_target_`` with
the arguments beside it. Only ``model.yaml`` is read, as plain data. Among its names only NeMo's language models count,
which are looked up by their last part among nemo2's.
"""

import logging
from pathlib import Path
from typing import Any

from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.base.names import did_you_mean
from nemo2.checkpoint.directory import CONTEXT_PATH
from nemo2.checkpoint.foreign_files import read_yaml
from nemo2.config.value_types import misfits

_log = logging.getLogger(__name__)
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
    config = _ours(tree.get("config"))
    return model(config(**_arguments(tree["config"], config)))


def describe(checkpoint: Path) -> str:
    """One line about the model, or the reason why it can't be rebuilt."""
    try:
        tree = _read(checkpoint)
        model, config = _ours(tree), _ours(tree.get("config"))
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
        CheckpointError: nemo2 has no such model, or the node, which is the model's config then, names none.
    """
    from nemo2 import models

    if not isinstance(node, dict) or "_target_" not in node:
        raise CheckpointError(
            f"context/{MODEL_FILE} does not describe a model: it has no config with a _target_. Put the file there that NeMo "
            "2.0 saved with these weights, not a recipe's."
        )
    target = node["_target_"]
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
    """The values that nemo2's class accepts, without those that describe how NeMo ran the model: plain ones, lists of them, and
    the activation function. Other functions are nemo2's own."""
    from dataclasses import fields

    from nemo2.checkpoint.context import MANAGED

    names = {item.name: item.type for item in fields(config)}  # pyright: ignore[reportArgumentType]  (config classes are dataclasses)
    arguments = {}
    for name in sorted(node.keys() & names.keys() - MANAGED):
        value = node[name]
        if isinstance(value, list) and all(isinstance(one, _PLAIN) for one in value):
            arguments[name] = tuple(value) if "tuple" in str(names[name]).lower() else value
        elif isinstance(value, _PLAIN) and value is not None:
            arguments[name] = value
    if (activation := _activation(node.get("activation_func"))) is not None:
        arguments["activation_func"] = activation
    for name, value, wanted in misfits(config, arguments):
        raise CheckpointError(f"context/{MODEL_FILE}: config.{name}={value!r}: must be {wanted}.")
    return arguments


def _activation(node: Any) -> Any:
    """The activation function of this name. None: none is named, or the class's own is used, with a warning."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.utils import openai_gelu
    from torch.nn import functional

    known = (functional.silu, functional.gelu, functional.relu, openai_gelu, quick_gelu, squared_relu)
    target = node.get("_target_") if isinstance(node, dict) else None
    if not isinstance(target, str):
        return None
    function = {one.__name__: one for one in known}.get(target.rpartition(".")[2])
    if function is None:
        _log.warning(
            "context/%s: config.activation_func=%s: nemo2 does not know this function, so the model has its class's own. Name "
            "a recipe of the model to set another.",
            MODEL_FILE,
            target,
        )
    return function
