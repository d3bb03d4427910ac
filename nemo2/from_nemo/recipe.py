# SPDX-License-Identifier: Apache-2.0
"""Converts a NeMo 2.0 run into a nemo2 recipe, from ``task.json`` or a checkpoint's ``context/``, without running its
code.

The names in these files are looked up in our own table (`nemo2.from_nemo.names`) and never imported as they stand there.
They also pass through the policy for recipes of other people. Settings that can't be converted are listed by path, with
value and reason.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from megatron.core.transformer.enums import AttnBackend

from nemo2 import MegatronMixedPrecision, llm
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.base.files import why_not_inside
from nemo2.base.names import did_you_mean, shortened
from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
from nemo2.checkpoint.context import MANAGED
from nemo2.checkpoint.directory import CONTEXT_PATH
from nemo2.checkpoint.foreign_files import nemo_adapters, refuse_links
from nemo2.config import Config, Partial
from nemo2.config.aliases import aliases_of, gone, parameter_names
from nemo2.config.policy import NAMES_THAT_ARE_IMPORTED, SWITCHES_THAT_RUN_CODE, RecipePolicy
from nemo2.config.provenance import is_same
from nemo2.config.show import value_in_effect
from nemo2.data.finetuning.base import SampleDataModule
from nemo2.from_nemo.names import find
from nemo2.from_nemo.nemo_tree import Call, Named, read_io_json, read_model_yaml
from nemo2.hugging_face.identify import kind_at
from nemo2.recipes.log.default import default_log

TASK_FILE = "task.json"
IO_FILE = "io.json"
MODEL_FILE = "model.yaml"
_PLAIN = (bool, int, float, str, type(None))
_CONSTANTS: dict[str, Any] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")},
    **{f"torch.nn.functional.{name}": getattr(torch.nn.functional, name) for name in ("silu", "gelu", "relu")},
    **{f"torch._C._nn.{name}": getattr(torch.nn.functional, name) for name in ("silu", "gelu")},
    **{f"{AttnBackend.__module__}.AttnBackend.{one.name}": one for one in AttnBackend},
}
"""Values in NeMo's configurations that are neither its classes nor its functions."""
_ARTIFACTS = ("FileArtifact", "DirArtifact", "DirOrStringArtifact", "PathArtifact")
_STEPS = ("data_step_fn", "forward_step_fn", "transformer_layer_spec", "mamba_stack_spec")
"""Functions in a model's configuration that nemo2's classes have themselves."""


class NotConverted(NamedTuple):
    """A setting that isn't converted."""

    path: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} = {self.value}: {self.reason}"


class Translated(NamedTuple):
    recipe: Any
    """A `Partial` of `llm.pretrain` or `llm.finetune`."""
    left: list[NotConverted]
    source: Path
    """The file that was read."""


def recipe_of(path: Path) -> Translated:
    """The recipe of a NeMo 2.0 run or checkpoint. The recipe starts from the weights, if there are any.

    Args:
        path: A run's directory, with ``task.json`` or checkpoints; a checkpoint; or its ``context``.

    Raises:
        CheckpointError: none of these files exists, or a file doesn't have NeMo's format.
        SecurityError: something in the folder leads out of it.
    """
    path = path.parent if path.name == CONTEXT_PATH else path
    checkpoint = _checkpoint(path)
    of_run = [] if checkpoint is None else [checkpoint.parent.parent, checkpoint / CONTEXT_PATH]
    folders = [path, *of_run, path / CONTEXT_PATH]
    files = [folder / name for name in (TASK_FILE, IO_FILE, MODEL_FILE) for folder in folders]
    source = next((file for file in files if file.is_file()), None)
    if source is None:
        raise CheckpointError(
            f"{path} doesn't describe a run or checkpoint of NeMo 2.0: it has no {TASK_FILE}, "
            f"{CONTEXT_PATH}/{IO_FILE} or {CONTEXT_PATH}/{MODEL_FILE}."
        )
    if source.parent.name == CONTEXT_PATH:
        refuse_links(source.parent)
    tree = read_model_yaml(source) if source.name == MODEL_FILE else read_io_json(source)
    making = _Conversion(source.parent)
    recipe = making.run(tree)
    if checkpoint is not None and (adapters := nemo_adapters(checkpoint)) is not None:
        making.left.append(NotConverted("resume.restore_config.path", repr(str(checkpoint)), adapters))
    elif checkpoint is not None:
        recipe.resume = recipe.resume or Config(AutoResume)
        recipe.resume.restore_config = Config(RestoreConfig, path=str(checkpoint))
    # All names in the tree should be nemo2's by now. This check catches mistakes in the table above.
    RecipePolicy().check(recipe)
    return Translated(recipe, making.left, source)


def _checkpoint(path: Path) -> Optional[Path]:
    """The newest NeMo checkpoint in ``path``. None: there is none."""
    try:
        kind, folder = kind_at(path)
    except CheckpointError:
        return None
    return folder.absolute() if kind == "NeMo 2.0" else None


class _Conversion:
    """The conversion of one of NeMo's trees into a tree of nemo2."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        """The folder of the file. Tokenizers are in the same folder."""
        self._made: dict[int, Any] = {}
        self.left: list[NotConverted] = []

    def run(self, tree: Any) -> Any:
        """Convert the whole tree: an entry point with its parts, NeMo's context of a trainer, or only a model."""
        if not isinstance(tree, Call):
            raise CheckpointError(f"{self._folder} doesn't describe a run of NeMo 2.0: its root is {tree!r:.80}.")
        parts = dict(tree.arguments)
        if tree.target.name == "TrainerContext":
            extra = parts.get("extra")
            data = extra.get("datamodule") if isinstance(extra, Mapping) else None
            parts = {"model": parts.get("model"), "trainer": parts.get("trainer"), "data": data}
        elif tree.target.name not in ("pretrain", "finetune", "train"):
            parts = {"model": tree}
        parts = _apart(parts)
        converted = {name: self.value(name, parts[name]) for name in parts if parts[name] is not None}
        for part in ("model", "data", "trainer"):
            if not isinstance(converted.get(part), Config):
                converted.pop(part, None)
                self._leave(
                    part, parts.get(part), "the file has none that nemo2 supports, and a run requires one: set it"
                )
        entry = (
            llm.finetune
            if converted.get("peft") is not None or _is_finetuning(tree, converted.get("data"))
            else llm.pretrain
        )
        converted["log"] = converted.get("log") or default_log(name=_name_of(self._folder))
        names = parameter_names(entry)
        for name in sorted(converted.keys() - set(names)):
            self._leave(name, parts[name], f"llm.{entry.__name__} has no such part")
        recipe = Partial(entry, **{name: converted[name] for name in names if name in converted})
        self._give_precision(recipe, parts)
        return recipe

    def value(self, path: str, value: Any) -> Any:
        """The value in nemo2. Without a counterpart: None, and an entry in ``left``."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Call):
            if id(value) not in self._made:
                self._made[id(value)] = self._called(path, value)
            return self._made[id(value)]
        if isinstance(value, Named):
            if str(value) in _CONSTANTS:
                return _CONSTANTS[str(value)]
            counterpart = find(value.name.rpartition(".")[2])
            ours = (
                getattr(import_module(counterpart.home), counterpart.name, None)
                if counterpart.status == "works" and counterpart.name
                else None
            )
            if value.module.startswith("nemo.") and ours is not None and RecipePolicy().may_be_handed_over(ours):
                return ours
            return self._leave(path, value, "nemo2 has no such function")
        if isinstance(value, Mapping):
            return {name: self.value(f"{path}[{name!r}]", one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            pairs = [(one, self.value(f"{path}[{number}]", one)) for number, one in enumerate(value)]
            # Callbacks that nemo2 lacks are removed from the list.
            return type(value)(new for old, new in pairs if new is not None or old is None)
        return self._leave(path, value, "a recipe can't hold such a value")

    def _called(self, path: str, call: Call) -> Any:
        name = call.target.name
        if name in _ARTIFACTS:
            return self._beside(call.arguments.get("attr"))
        if call.target.module.startswith("pathlib"):
            return call.arguments.get("")
        cls = self._class(path, call)
        if cls is None:
            return None
        if call.pickled:
            return self._without_arguments(path, call, cls)
        node: Any = Config(cls)
        arguments = call.arguments | (call.arguments.get("kwargs") or {})
        for argument, value in arguments.items():
            if argument == "kwargs" or _is_written_by_nemo(cls, argument, value):
                continue
            self._set(node, argument, value, f"{path}.{argument}")
        return node

    def _set(self, node: Any, argument: str, value: Any, path: str) -> None:
        cls = node.__fn_or_cls__
        if argument in NAMES_THAT_ARE_IMPORTED or (argument in SWITCHES_THAT_RUN_CODE and value):
            self._leave(path, value, "it runs code that the file names: set it yourself if you trust that code")
        elif argument not in parameter_names(cls) and argument not in aliases_of(cls):
            if value is not None:
                reason = (
                    gone(cls, argument)
                    or f"{cls.__name__} has no {argument}{did_you_mean(argument, parameter_names(cls))}"
                )
                self._leave(path, value, reason)
        elif (ours := self.value(path, value)) is not None or value is None:
            ours = self._beside(ours) if isinstance(ours, str) and "tokenizer" in cls.__name__.lower() else ours
            ours = "auto" if (argument, ours) == ("accelerator", "gpu") else ours
            # NeMo stores every field of a dataclass, and in nemo2 an explicit field overrides the
            # precision.
            if is_same(value_in_effect(Config(cls), argument), ours):
                return
            try:
                setattr(node, argument, ours)
            except ConfigError as error:
                self._leave(path, value, str(error))

    def _class(self, path: str, call: Call) -> Optional[type]:
        """nemo2's class of that name, if recipes may call it."""
        module, name = call.target
        counterpart = find(name) if module.partition(".")[0] in ("nemo", "megatron", "lightning", "nemo_run") else None
        if counterpart is None or counterpart.status not in ("works", "renamed") or not counterpart.name:
            why = (
                "nemo2 has no such class"
                if counterpart is None or counterpart.status == "unknown"
                else counterpart.reason
            )
            return self._leave(path, call, f"{call.target}: {why}")
        ours = getattr(import_module(counterpart.home), counterpart.name)
        if not isinstance(ours, type) or not RecipePolicy().may_be_called(ours):
            return self._leave(
                path, call, f"{call.target}: a recipe can't contain {counterpart.home}.{counterpart.name}"
            )
        return ours

    def _without_arguments(self, path: str, call: Call, cls: type) -> Any:
        parameters = inspect.signature(cls).parameters.values()
        needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        reason = f"NeMo pickled its arguments into {call.pickled:.60}, and nemo2 opens no pickles"
        if cls is MegatronMixedPrecision:
            return Config(cls)  # The values that the precision wrote into the model's configuration tell the rest.
        if needed:
            return self._leave(path, call, f"{reason}, and {cls.__name__} needs {', '.join(needed)}: set it yourself")
        self._leave(path, call, f"{reason}. The recipe has it with default arguments: check them")
        return Config(cls)

    def _beside(self, text: Any) -> Any:
        """The full path of a file or folder that NeMo stored beside the description. For other texts: the text
        itself."""
        if not isinstance(text, str) or not (self._folder / text).exists() or text in ("", "."):
            return text
        outside = (self._folder / text).is_file() and why_not_inside(self._folder, text)
        return (
            text
            if outside or ".." in Path(text).parts or Path(text).is_absolute()
            else str(self._folder.absolute() / text)
        )

    def _give_precision(self, recipe: Any, parts: dict[str, Any]) -> None:
        """Restore a precision that NeMo stored as a pickle, from the values that it wrote into the configurations of
        model and optimizer."""
        plugins = getattr(recipe.trainer, "plugins", None) if hasattr(recipe, "trainer") else None
        plugin = next(
            (one for one in (plugins if isinstance(plugins, list) else [plugins]) if _is_precision(one)), None
        )
        if plugin is None or plugin.__arguments__:
            return
        model, optim = (_config_arguments(parts.get(name)) for name in ("model", "optim"))
        written = model if any(model.get(name) for name in ("bf16", "fp16")) else optim
        plugin.precision = "bf16-mixed" if written.get("bf16") else "16-mixed" if written.get("fp16") else "32"
        for name in parameter_names(MegatronMixedPrecision):
            if name.startswith(("fp8", "fp4", "first_last", "num_layers")) and name in model:
                self._set(plugin, name, model[name], f"trainer.plugins.{name}")

    def _leave(self, path: str, value: Any, reason: str) -> None:
        text = shortened(str(value) if isinstance(value, Call | Named) else repr(value), 120)
        self.left.append(NotConverted(path, text, " ".join(reason.split()).rstrip(".") + "."))


def _apart(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of an entry point. NeMo's model object also holds its optimizer, its tokenizer and its transform."""
    model = parts.get("model")
    if not isinstance(model, Call):
        return parts
    inside = dict(model.arguments)
    tokenizer, transform = inside.pop("tokenizer", None), inside.pop("model_transform", None)
    parts = parts | {"optim": parts.get("optim") or inside.pop("optim", None)}
    inside.pop("optim", None)
    if isinstance(transform, Call):
        parts["peft"] = parts.get("peft") or transform
    data = parts.get("data")
    if isinstance(data, Call) and tokenizer is not None and data.arguments.get("tokenizer") is None:
        parts["data"] = Call(data.target, data.arguments | {"tokenizer": tokenizer}, data.pickled)
    # The data module has the tokenizer now, and nemo2's entry points pass the tokenizer to the model.
    parts.pop("tokenizer", None)
    parts["model"] = Call(model.target, inside, model.pickled)
    return parts


def _is_finetuning(tree: Call, data: Any) -> bool:
    cls = getattr(data, "__fn_or_cls__", object)
    return tree.target.name == "finetune" or issubclass(cls, SampleDataModule)


def _is_written_by_nemo(cls: type, argument: str, value: Any) -> bool:
    """Whether NeMo's strategy or precision wrote this field, or it is a function that describes layers."""
    if not dataclasses.is_dataclass(cls):
        return False
    return argument in MANAGED or (argument in _STEPS and isinstance(value, Named)) or argument == "timers"


def _is_precision(node: Any) -> bool:
    return getattr(node, "__fn_or_cls__", None) is MegatronMixedPrecision


def _config_arguments(part: Any) -> dict[str, Any]:
    config = part.arguments.get("config") if isinstance(part, Call) else None
    return config.arguments if isinstance(config, Call) else {}


def _name_of(folder: Path) -> str:
    """The recipe's name, from NeMo's directory layout DIR/NAME/TIME/checkpoints/CHECKPOINT/context."""
    folder = folder.absolute()
    run = folder.parents[2] if folder.name == CONTEXT_PATH and folder.parent.parent.name == "checkpoints" else folder
    return "from_" + "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in run.name)[:60]
