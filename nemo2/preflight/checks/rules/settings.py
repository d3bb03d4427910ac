# SPDX-License-Identifier: Apache-2.0
"""Rules about settings that contradict each other, that a class rejects, or that Megatron-Core has removed."""

import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from nemo2.base.names import did_you_mean
from nemo2.config.aliases import parameters_of
from nemo2.config.arguments import missing_arguments
from nemo2.config.capture import is_configurable
from nemo2.config.typed_text import choices_of
from nemo2.config.value_types import type_hints
from nemo2.config.walk import class_of, iterate_nodes
from nemo2.data.base import number_problems
from nemo2.preflight.checks import domains
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.lightning import callback_problems, trainer_problems
from nemo2.preflight.checks.rule import Topic
from nemo2.training.run_dir.environment import holds_secret, is_secret_field

SETTINGS = Topic("Settings", needs_sizes=False)
AGREEMENT = Topic("Settings that must agree")
LAST = Topic("Megatron-Core's own checks")
_VARIABLE = re.compile(r"(?:^|/)(\$(?:\w+|\{\w+\}))(?:/|$)")


@SETTINGS.rule("secrets-stay-in-the-environment")
def _secrets(facts: Facts) -> Iterator[str]:
    """A recipe must not contain a token, key or password. Libraries read secrets from environment variables
    (HF_TOKEN, WANDB_API_KEY).

    Otherwise: The secret is written to the launcher's folder, to the run's recipe.json and to the context of every
    checkpoint.
    """
    for place, name, value in _texts_of(facts):
        if value and (is_secret_field(name) or holds_secret(value)):
            yield (
                f"{place} holds a secret, and nemo2 saves the recipe in several files. Remove it from the recipe, and "
                "set the library's environment variable instead (HF_TOKEN, WANDB_API_KEY, COMET_API_KEY)."
            )


@SETTINGS.rule("paths-are-written-out")
def _variables(facts: Facts) -> Iterator[str]:
    """A path, and a name without a default, must not be empty. A path must not contain an environment variable. `~` is the
    home directory.

    Otherwise: The run takes an empty text as none, and reads and writes in a folder whose name is `$HOME`, or another variable's.
    """
    for path, node in iterate_nodes(facts.recipe):
        for name, value in node.__arguments__.items():
            texts = [] if _may_be_empty(class_of(node), name) else _texts_in({name: value}, path, "")
            for place in (place for place, field, text in texts if field == name and not text):
                yield (
                    f"{place}='': the text is empty. Write it out, or set None where none is meant. On a command line, a "
                    "variable of the shell without a value leaves an empty text."
                )
    for place, _, value in _texts_of(facts):
        if variable := _VARIABLE.search(value):
            yield (
                f"{place}={value!r}: {variable.group(1)} is taken as the name of a folder, because recipes don't read "
                'variables. Write the path out. On a command line, the shell does it within "double quotes".'
            )


def _may_be_empty(target: Any, name: str) -> bool:
    """Whether a parameter names the empty text as a value (``Literal[""]``), or takes no path, and has a default other than
    None or is another library's."""
    if (parameter := parameters_of(target).get(name)) is None:
        return True
    choices = choices_of(type_hints(target).get(name, parameter.annotation))
    if any(typing.get_origin(choice) is typing.Literal and "" in typing.get_args(choice) for choice in choices):
        return True
    takes_path = not {Path, os.PathLike}.isdisjoint(typing.get_origin(choice) or choice for choice in choices)
    has_default = not any(parameter.default is none for none in (None, parameter.empty))
    return not takes_path and (has_default or not is_configurable(target))


def _texts_of(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """The path, name and value of each text of a recipe."""
    for path, node in iterate_nodes(facts.recipe):
        yield from _texts_in(node.__arguments__, path, "")


def _texts_in(value: Any, path: str, name: str) -> Iterator[tuple[str, str, str]]:
    """The texts of a mapping or list and its contents. Configs in it are searched separately."""
    if isinstance(value, str | PurePath):
        yield path, name, str(value)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _texts_in(item, f"{path}[{number}]", name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts_in(item, f"{path}.{key}" if path else str(key), str(key))


@SETTINGS.rule("strategy-settings-are-supported")
def _strategy(facts: Facts) -> Iterator[str]:
    """The strategy must be an object, its configuration or a name that Lightning knows, for a model of nemo2 one of nemo2's. It
    must not use arguments that Megatron-Core no longer supports. In a launched run it must create Megatron-Core's process groups,
    and the optimizer of a model that nemo2 updates.

    Otherwise: The strategy or the model raises an error on every rank.
    """
    strategy: Any = class_of(facts.strategy)
    model: Any = class_of(facts.at("model"))
    name = facts.strategy if strategy is str else getattr(strategy, "__name__", "")
    lightnings = strategy is str or getattr(strategy, "__module__", "").startswith("lightning.")
    known = _lightning_strategies() if strategy is str else [name]
    if name not in known:
        yield (
            f"trainer.strategy={name!r}: Lightning has no such strategy{did_you_mean(name, known)} "
            "Set MegatronStrategy, FSDP2Strategy or FSDPStrategy, or one of Lightning's names."
        )
    elif lightnings and any(kind.__module__ == "nemo2.models.gpt" for kind in getattr(model, "__mro__", ())):
        from nemo2.models.gpt import without_groups

        yield without_groups(model.__name__, f"trainer.strategy={name}")
    if facts.has_layout:
        yield from facts.settled.refused("strategy-settings-are-supported")
    if facts.of_strategy("init_model_parallel") is False:
        yield (
            "strategy.init_model_parallel=False: the launched processes have no process groups of Megatron-Core. Leave "
            "init_model_parallel=True. False is for a script that creates the groups and then calls the recipe itself."
        )
    if facts.of_strategy("setup_optimizers") is False and getattr(model, "__module__", "").startswith("nemo2."):
        yield (
            f"strategy.setup_optimizers=False: {model.__name__} has no other optimizer than the strategy's. Leave "
            "setup_optimizers=True. False is for a module with automatic_optimization=False, which updates its "
            "parameters itself."
        )


def _lightning_strategies() -> list[str]:
    """The names that Lightning's trainer accepts as a strategy."""
    from lightning.pytorch.strategies import StrategyRegistry

    return ["auto", *StrategyRegistry.available_strategies()]


@SETTINGS.rule("precision-is-known")
def _precision(facts: Facts) -> Iterator[str]:
    """The precision plugin must get a known precision, fp8 format and fp8 recipe.

    Otherwise: The plugin raises an error on every rank.
    """
    yield from domains.precision_out_of_range(facts.at("trainer.plugins"), facts.parts.precision_at)
    yield from facts.settled.refused("precision-is-known")


@SETTINGS.settled("schedule-is-one-curve")
def _schedule() -> None:
    """The steps and shares of the learning-rate schedule must be in range, and each phase must be set only once.

    Otherwise: The schedule raises an error on every rank.
    """


@SETTINGS.settled("checkpoint-settings-are-supported")
def _checkpoint_callback() -> None:
    """The checkpoint callback must get a known mode and positive intervals.

    Otherwise: The callback raises an error on every rank.
    """


@SETTINGS.rule("data-module-accepts-its-arguments")
def _data(facts: Facts) -> Iterator[str]:
    """The paths, split, samples, batch sizes, sequence length, seed, workers and ramp-up of the data module must be
    valid.

    Otherwise: The data module raises an error on every rank, or Megatron-Core's index builder divides by a sequence
    length of 0 and crashes the process.
    """
    yield from number_problems(facts.data) or facts.settled.refused("data-module-accepts-its-arguments")


@SETTINGS.rule("splits-have-data")
def _splits(facts: Facts) -> Iterator[str]:
    """The data must have samples for training. A `split` of token files must leave data for validation too, if the trainer
    validates.

    Otherwise: The data module raises an error on every rank.
    """
    data = facts.parts.get("data")
    if not hasattr(data, "no_samples"):
        return
    needed = ["train"] if getattr(class_of(facts.recipe), "__name__", "") != "validate" else []
    shared_out = hasattr(data, "paths") and not isinstance(data.paths, Mapping)
    if shared_out and facts.at("trainer.limit_val_batches") != 0:
        needed.append("validation")
    yield from filter(None, map(data.no_samples, needed))


@SETTINGS.rule("callbacks-have-their-arguments")
def _callbacks(facts: Facts) -> Iterator[str]:
    """Each callback must have all arguments for which its class has no default, and callbacks of nemo2 and Lightning
    must accept their arguments. The files that a callback reads on this machine must exist, the modules that it names must be
    in the model, and a callback for experts requires a model with experts. Two callbacks of a class must write to two folders.
    Of a class that saves a state or logs under fixed names, there must be only one, `log.ckpt` and `trainer.max_time` included.

    Otherwise: No rank can create the callback, the run stops before its first step, or one callback's files, values or settings
    replace the other's.
    """
    incomplete = [
        f"{missing}, or remove the callback."
        for path, node in iterate_nodes(facts.recipe)
        if path.startswith("trainer.callbacks") and (missing := missing_arguments(node, path))
    ]
    yield from incomplete or callback_problems(
        facts.callbacks,
        "callbacks-have-their-arguments",
        here=facts.here,
        model=facts.settled.objects.get("model.config", facts.written_config),
        recipe=facts.recipe,
    )


@SETTINGS.rule("lightning-agrees")
def _lightning(facts: Facts) -> Iterator[str]:
    """Lightning must know the accelerator, and accept the trainer's other words, numbers and times. The message has
    Lightning's own reason.

    Otherwise: Lightning raises an error on every rank.
    """
    # nemo2's strategies have a back end for each of these.
    ours = () if not facts.parts.get("trainer.strategy") else ("auto", "cpu", "gpu", "cuda")
    yield from trainer_problems(facts.trainer, accelerators=ours)


@SETTINGS.rule("one-precision-setting")
def _two_precisions(facts: Facts) -> Iterator[str]:
    """Precision must be set either on the precision plugin or by `trainer.precision`, not in both places.

    Otherwise: The trainer raises an error on every rank.
    """
    precision, is_plugin = facts.at("trainer.precision"), facts.parts.precision_at.startswith("trainer.plugins")
    if facts.has_layout and precision is not None and is_plugin and facts.precision is not None:
        yield (
            f"trainer.precision={precision!r} and a precision plugin in trainer.plugins both set the precision. Remove "
            "one of them."
        )


@AGREEMENT.settled("sizes-on-the-strategy")
def _sizes_on_the_strategy() -> None:
    """Parallel sizes must be set on the strategy, which copies them to the model configuration.

    Otherwise: The strategy raises an error on every rank, because the model would be built for one layout and run in
    another.
    """


@AGREEMENT.settled("one-switch-for-the-distributed-optimizer")
def _one_switch_for_the_distributed_optimizer() -> None:
    """`use_distributed_optimizer` is one switch. Set it on the optimizer or on the gradient buffers, or set both to
    the same value.

    Otherwise: The strategy raises an error on every rank.
    """


@AGREEMENT.settled("one-precision")
def _one_precision() -> None:
    """The model, the optimizer and the gradient buffers must not contradict the precision plugin.

    Otherwise: The strategy raises an error on every rank.
    """


@AGREEMENT.settled("one-source-of-optimizer-state")
def _one_source_of_optimizer_state() -> None:
    """Load either the whole optimizer state (`ckpt_load_optimizer`) or only its main parameters
    (`ckpt_load_main_params`).

    Otherwise: The strategy raises an error on every rank.
    """


@LAST.rule("megatron-core-agrees", megatron_refuses=True)
def _megatron(facts: Facts) -> Iterator[str]:
    """The installed Megatron-Core must accept the finished configuration of the model, the optimizer and the
    layout. The message has Megatron-Core's own reason, the setting to change, and values that it accepts.

    Otherwise: Megatron-Core raises an error on every rank.
    """
    if facts.settled.refused("megatron-core-agrees"):
        from nemo2.preflight.checks.megatron import refusals
        from nemo2.preflight.checks.rules.context import CONTEXT
        from nemo2.preflight.checks.rules.experts import EXPERTS
        from nemo2.preflight.checks.rules.pipeline import PIPELINE
        from nemo2.preflight.checks.rules.ranks import RANKS
        from nemo2.preflight.checks.rules.recompute import RECOMPUTE
        from nemo2.preflight.checks.rules.tensor import TENSOR

        topics = RANKS, TENSOR, CONTEXT, PIPELINE, EXPERTS, RECOMPUTE
        yield from refusals(facts, [rule for topic in topics for rule in topic.rules])
