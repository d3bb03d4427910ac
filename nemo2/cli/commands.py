# SPDX-License-Identifier: Apache-2.0
"""Parses command lines. No option is accepted and then ignored, and the error for an unknown word names the right
spelling."""

import functools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.base.names import did_you_mean
from nemo2.cli.sources import recipe_tree

_READ: ContextVar[Any] = ContextVar("nemo2_command_line", default=None)
"""typer's context of the current command. click's own function doesn't work, because typer ships its own click from
0.20 on."""


class _Parsed:
    """Refuses what it can't read as nemo2 writes errors, takes changes of a recipe with and without dashes, and shows short
    types in ``--help``, so that the texts fit into 80 columns. typer 0.29 shows ``<bool>`` behind a
    flag, as if the flag took a value, and long types such as ``<list[str]>`` and ``<int range> [x>=1]``."""

    epilog: Any
    params: list[Any]

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for param in params:
            param.process_value = functools.partial(_processed, param)
            param.display_type_rich = functools.partial(_short_type, param)
            param._get_number_range_help_str = lambda: None
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = self._without_dashes(args) if self._takes_changes else args
        try:
            return super().parse_args(ctx, list(args))  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                self._refuse(ctx, str(getattr(error, "option_name", "")), args, error)
            if hasattr(error, "format_message") and type(error).__name__ != "NoArgsIsHelpError":
                raise ConfigError(self._message(error, ctx, args)) from error
            raise

    def _message(self, error: Any, ctx: Any, args: list[str]) -> str:
        """typer's error as nemo2 writes errors: field, value, rule and fix, without a box."""
        parameter, example = getattr(error, "param", None), str(self.epilog or "").partition("Example: ")[2]
        example = f" For example: {example}" if example else ""
        if type(error).__name__ == "MissingParameter" and parameter is not None:
            return f"{ctx.command_path} needs {_name_of(parameter)}.{example}"
        if type(error).__name__ == "BadParameter" and parameter is not None:
            option = next((opt for opt in parameter.opts if _value_of(opt, args) != _UNKNOWN), None)
            said = _name_of(parameter) if option is None else f"{option} {_value_of(option, args)}"
            return f"{said}: {_rule(str(error.message))}"
        message = str(error.format_message()).rstrip(".")
        if extra := re.search(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
            return f"{extra[1]!r}: {ctx.command_path} takes no such argument.{example}"
        return f"{message}. `{ctx.command_path} --help` lists the options."

    @property
    def _takes_changes(self) -> bool:
        return any(param.name == "overrides" for param in self.params)

    def _without_dashes(self, args: list[str]) -> list[str]:
        """The words with ``--a.b=v`` and ``--a.b v`` as ``a.b=v``, in their order: of two values the last one counts.
        Changes before the recipe's name are put behind it."""
        words, early, named, rest = [], [], False, iter(args)
        with_value = {name for param in self.params if not getattr(param, "is_flag", False) for name in param.opts}
        for word in rest:
            path, equals, value = word.removeprefix("--").partition("=")
            if word.startswith("--") and "." in path:
                if not equals and (value := next(rest, None)) is None:
                    raise ConfigError(f"{word}: a change needs a value: {word} VALUE, or {path}=VALUE.")
                (words if named else early).append(f"{path}={value}")
                continue
            words.append(word)
            if word.startswith("-"):
                words += islice(rest, int(word in with_value))
            elif not named:
                named, words, early = True, words + early, []
        return words + early

    def _refuse(self, ctx: Any, option: str, args: list[str], error: Exception) -> NoReturn:
        spellings = (name for param in self.params for name in (*param.opts, *param.secondary_opts))
        options = [name for name in spellings if name.startswith("--")]
        words = ctx.command_path.removeprefix("nemo2 ")
        refuse_moved(f"{words} {option}")
        name, written = option.lstrip("-"), _value_of(option, args)
        paths = _paths_in_recipe(name, args) if self._takes_changes else []
        if paths or (words in ("finetune", "data preview") and (paths := _settings_of_samples(name))):
            spelled = " or ".join(f"{path}={written}" for path in paths)
            raise ConfigError(f"{option}: {ctx.command_path} has no such option. Write {spelled}") from error
        close = did_you_mean(option, options, listed=True)
        also = (
            " To change a field of the recipe, write its path, for example trainer.max_steps=100."
            if self._takes_changes
            else ""
        )
        raise ConfigError(
            f"{ctx.command_path} has no option {option}{close}{also} `{ctx.command_path} --help` lists its options."
        ) from error


def _processed(parameter: Any, ctx: Any, value: Any) -> Any:
    """A parameter's value, of its type. An empty text on the command line is refused: it is what a shell makes of a variable
    without a value, and typer reads an empty path as the working directory."""
    typed = getattr(ctx.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    if typed and "" in (value if isinstance(value, list | tuple) else [value]) and parameter.name != _MAY_BE_EMPTY:
        if parameter.param_type_name == "argument":
            raise ConfigError(f"{ctx.command_path} has an empty argument. Write it, or leave it out.")
        raise ConfigError(f"{_name_of(parameter)}: the value is empty. Write one, or leave the option out.")
    return type(parameter).process_value(parameter, ctx, value)


def _short_type(parameter: Any, ctx: Any) -> str | None:
    if getattr(parameter, "is_flag", False):
        return None
    full = type(parameter).display_type_rich(parameter, ctx)
    return full and re.sub(r"list\[(.*?)\]", r"\1", full.replace(" range", "").replace("Path", "path"))


class Group(_Parsed, TyperGroup):
    """A group of nemo2's commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            if ctx.parent is None:
                for option in ("", *(f" {word}" for word in args[1:] if word.startswith("--")))[::-1]:
                    refuse_moved(f"{args[0]}{option}")
            raise ConfigError(
                f"{ctx.command_path} has no command {args[0]!r}{did_you_mean(args[0], list(self.commands))} "
                f"`{ctx.command_path} --help` lists the commands."
            )
        return super().resolve_command(ctx, args)


class Command(_Parsed, TyperCommand):
    """A command of nemo2."""

    def invoke(self, ctx: Any) -> Any:
        token = _READ.set(ctx)
        try:
            return super().invoke(ctx)
        finally:
            _READ.reset(token)


def _name_of(parameter: Any) -> str:
    """A parameter as the command line writes it: its options, or the name of an argument in capitals."""
    return " or ".join(parameter.opts) if parameter.opts[0].startswith("-") else str(parameter.name).upper()


def _rule(message: str) -> str:
    """typer's words on a wrong value, which differ with its version, as a rule."""
    rule = message.removeprefix("Value error, ").rstrip(".").partition(", unable to parse")[0]
    rule = re.sub(r"^'.*?' is not one of", "must be one of", rule.replace("Input should be", "must be"))
    return rule.replace("greater than or equal to", "at least").replace("less than or equal to", "at most") + "."


def _paths_in_recipe(option: str, args: list[str]) -> list[str]:
    """The paths of the fields that an unknown option such as ``--max-steps`` names in the recipe of a command line."""
    from nemo2.config.overrides import paths_of

    field, name = option.replace("-", "_"), next((arg for arg in args if not arg.startswith("-")), "")
    try:
        return paths_of(recipe_tree(name), field) if field.isidentifier() else []
    except Nemo2Error:  # the recipe's own error comes once the options are right
        return []


def _settings_of_samples(option: str) -> list[str]:
    """The paths of the setting of fine-tuning data that an unknown option such as ``--chat-template`` names."""
    from nemo2.data.finetuning.settings import DatasetSettings

    field = option.replace("-", "_")
    return [f"data.dataset_kwargs.{field}"] if field in DatasetSettings.__dataclass_fields__ else []


class App(typer.Typer):
    """A typer application whose commands are `Command`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, **settings)

    def command(self, name: Any = None, **settings: Any) -> Any:
        return super().command(name, cls=settings.pop("cls", Command), **settings)


def only_with(option: str, *others: str) -> None:
    """Refuse the options ``others`` on a command line without ``option``. Both are names of the command's parameters.

    Raises:
        ConfigError: the command line has one of ``others``.
    """
    if option not in _on_command_line():
        _refuse_any(others, f"read with {_spelled(option)} only", f", or add {_spelled(option)}")


def not_with(option: str, *others: str) -> None:
    """Refuse the options ``others`` on a command line with ``option``. Errors: see `only_with`."""
    if option in _on_command_line():
        _refuse_any(others, f"not read with {_spelled(option)}")


@dataclass(frozen=True)
class OptionGroup:
    """Options of a command that belong together, with their own heading in ``--help``.

    A verb's attribute ``groups`` lists its groups. The verb calls `refuse_across` where its options are to be judged.
    """

    title: str
    option: str
    """The option that chooses the group."""
    own: tuple[str, ...] = ()
    """Options that are read with it only."""
    beside: tuple[str, ...] = ()
    """Options of the groups below that are read beside it. All others of these groups are refused."""


def rules_of(groups: tuple[OptionGroup, ...]) -> Iterator[tuple[Callable[..., None], str, tuple[str, ...]]]:
    """`only_with` and `not_with` with their arguments."""
    for place, group in enumerate(groups):
        yield only_with, group.option, group.own
        yield not_with, group.option, tuple(b.option for b in groups[place + 1 :] if b.option not in group.beside)


def refuse_across(groups: tuple[OptionGroup, ...]) -> None:
    """Refuse options of one group beside options of another. Errors: see `only_with`."""
    for rule, option, others in rules_of(groups):
        rule(option, *others)


def refuse_all_but(*names: str, why: str) -> None:
    """Refuse all options and arguments on the command line but ``names``. Errors: see `only_with`."""
    _refuse_any(tuple(_on_command_line() - set(names)), f"not read {why}")


def as_json() -> bool:
    """Whether the command line asks for JSON."""
    return "as_json" in _on_command_line()


def _refuse_any(names: tuple[str, ...], why: str, other_fix: str = "") -> None:
    if refused := [_spelled(name) for name in sorted(names, key=names.index) if name in _on_command_line()]:
        several = len(refused) > 1
        raise ConfigError(
            f"{', '.join(refused)} {'are' if several else 'is'} {why}: leave {'them' if several else 'it'} out{other_fix}."
        )


def _on_command_line() -> set[str]:
    """The names of the parameters on the command line. Empty if the function is called from Python."""
    context = _READ.get()
    if context is None:
        return set()
    sources = {param.name: context.get_parameter_source(param.name) for param in context.command.params}
    return {name for name, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"}


def _spelled(name: str) -> str:
    """A parameter's spelling on the command line: its first long option, or NAME for an argument."""
    parameter = next(param for param in _READ.get().command.params if param.name == name)
    if not parameter.opts or not parameter.opts[0].startswith("-"):
        return name.upper()
    return next((opt for opt in parameter.opts if opt.startswith("--")), parameter.opts[0])


_MAY_BE_EMPTY = "system"
"""The option whose empty value differs from none: a template has a system message of its own."""
_UNKNOWN = "VALUE"


def _value_of(option: str, args: list[str]) -> str:
    """The value of an option, behind "=" or in the next word."""
    for place, text in enumerate(args):
        if text.startswith(f"{option}="):
            return text.partition("=")[2]
        if text == option and place + 1 < len(args) and not args[place + 1].startswith("-"):
            return args[place + 1]
    return _UNKNOWN


MOVED = {
    "explain": "nemo2 show RECIPE --explain FIELD",
    "diff": "nemo2 show RECIPE --diff OTHER",
    "freeze": "nemo2 show RECIPE --python, or --output FILE.py",
    "show-layout": "nemo2 show RECIPE --layout",
    "inspect": "nemo2 show CHECKPOINT, or nemo2 show RUN --checkpoint",
    "prepare-data": "nemo2 data prepare",
    "preview-data": "nemo2 data preview",
    "validate": "nemo2 evaluate CHECKPOINT --recipe RECIPE",
    "chat": "nemo2 generate CHECKPOINT --chat",
    "merge": "nemo2 export CHECKPOINT --merge, with --to checkpoint for a checkpoint of nemo2",
    "report": "nemo2 runs report RUN",
    "trace": "nemo2 runs trace RUN",
    "jobs": "nemo2 runs list --submitted, and nemo2 runs status, tail, report or cancel",
    "completion": "nemo2 --show-completion SHELL",
    "show --graph": "--output FILE",
    "show --recipe-json": "--output FILE.json",
    "distill --write": "--output FILE.json",
    "diff --all": "nemo2 show RECIPE --diff OTHER --defaults",
    "diff --code": "nemo2 show RECIPE --diff OTHER --python",
    "validate --checkpoint": "nemo2 evaluate CHECKPOINT --recipe RECIPE",
    **dict.fromkeys(("pretrain --json", "finetune --json", "distill --json"), "nemo2 runs status RUN --json"),
    "serve --json": "nemo2 serve CHECKPOINT --print, which prints the server's command",
}
"""Commands and options that don't exist, each with what takes its place."""


def refuse_moved(words: str) -> None:
    """Raise ConfigError if ``words``, a command or a command and its option, are in `MOVED`."""
    if words in MOVED:
        raise ConfigError(f"nemo2 {words} doesn't exist: use {MOVED[words]}.")
