# SPDX-License-Identifier: Apache-2.0
"""Makes commands of public functions.

A verb is a function with a typed signature and a docstring. What stands before ``*`` in its signature is an argument of the
command, the rest are options, and a dataclass's fields are options too. A docstring's ``Args`` are their help, a verb's
``Example`` is the last line. A verb that returns a `Result` has ``--json``. `typer.Option` in an annotation adds what a type
can't say: another spelling, a limit.
"""

import copy
import dataclasses
import functools
import inspect
import json
import math
import re
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from nemo2.cli.commands import App

AT_LEAST_1 = typer.Option(min=1)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


_JSON = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False)


@dataclass(frozen=True)
class Result:
    """The answer of a verb."""

    data: Any
    """Plain data, which ``--json`` prints. None: the verb has printed it, or has none."""
    text: str = ""
    """The same for people."""
    exit_code: int = 0


def add_verbs(app: App, verbs: Mapping[str, Callable[..., Any]], groups: Mapping[str, str]) -> None:
    """Add a command for each function to ``app``.

    Args:
        verbs: The functions by the command's words: ``{"runs list": list_runs}``.
        groups: The help of each group, in whose text an example may follow ``Example:``.
    """
    inside: dict[str, App] = {}
    for words, verb in verbs.items():
        group, _, name = words.rpartition(" ")
        if group and group not in inside:
            help_text, _, example = groups[group].partition("Example: ")
            inside[group] = App(no_args_is_help=True, help=help_text.strip())
            app.add_typer(inside[group], name=group, epilog=f"Example: {example}")
        help_text, _, example = described(verb)
        (inside[group] if group else app).command(name, help=help_text, epilog=f"Example: {example}")(as_command(verb))


def as_command(verb: Callable[..., Any]) -> Callable[..., None]:
    """``verb`` with the signature that typer reads."""
    texts, hints, parts = described(verb)[1], typing.get_type_hints(verb, include_extras=True), {}
    parameters: list[inspect.Parameter] = []
    for name, one in inspect.signature(verb).parameters.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            parts[name] = options = typing.cast(Any, hint)
            kinds = typing.get_type_hints(options, include_extras=True)
            helps = {field: text for base in options.__mro__ for field, text in described(base)[1].items()}
            fields = inspect.signature(options).parameters.values()
            parameters += [_parameter(field, kinds[field.name], helps, is_option=True) for field in fields]
        else:
            parameters.append(_parameter(one, hint, texts, is_option=one.kind is one.KEYWORD_ONLY))
    prints = hints.get("return") is Result
    if prints:
        parameters.append(_parameter(_JSON, AsJson, {}, is_option=True))

    @functools.wraps(verb)
    def run(**arguments: Any) -> None:
        as_json = prints and arguments.pop("as_json", False)
        for name, kind in parts.items():
            values = {one.name: arguments.pop(one.name) for one in dataclasses.fields(kind) if one.name in arguments}
            arguments[name] = kind(**values)
        result = verb(**arguments)
        if isinstance(result, Result):
            if as_json and result.data is not None:
                print_json(result.data)
            elif result.text:
                print(result.text)
            if result.exit_code:
                raise typer.Exit(result.exit_code)

    panels = {name: one.title for one in getattr(verb, "groups", ()) for name in (one.option, *one.own)}
    for one in parameters:
        if one.name in panels:
            typing.get_args(one.annotation)[1].rich_help_panel = panels[one.name]
    # typer reads both.
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
    return run


def described(verb: Any) -> tuple[str, dict[str, str], str]:
    """The help, the help of each parameter, and the example in the docstring of a verb or of its options."""
    help_text, _, example = inspect.cleandoc(verb.__doc__ or "").partition("\n\nExample: ")
    help_text, _, arguments = help_text.partition("\n\nArgs:\n")
    # typer folds the first paragraph only, and would keep the line breaks of the source in the others.
    help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in help_text.split("\n\n"))
    rows = re.findall(r"^(\w+): (.*(?:\n[ ].*)*)", textwrap.dedent(arguments), re.MULTILINE)
    return help_text, {name: " ".join(text.split()) for name, text in rows}, " ".join(example.split())


def _parameter(one: inspect.Parameter, hint: Any, texts: Mapping[str, str], *, is_option: bool) -> inspect.Parameter:
    kind, info = hint, typer.Option() if is_option else typer.Argument()
    if typing.get_origin(hint) is Annotated:
        kind, declared = typing.get_args(hint)[:2]
        info = copy.copy(declared)
    # In an annotation typer keeps the first spelling as the default.
    if is_option and kind is bool and one.default is False and info.default is ... and not info.param_decls:
        info.param_decls = (f"--{one.name.replace('_', '-')}",)  # without a --no- of its own
    info.help = info.help or texts.get(one.name)
    return one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])


def print_json(value: Any, *, on_a_line: bool = False) -> None:
    """Print plain data as JSON: numbers that are not finite as null, because JSON has none, and other values as
    text."""
    text = json.dumps(_finite(value), indent=None if on_a_line else 2, ensure_ascii=False, default=str)
    print(text, flush=on_a_line)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
