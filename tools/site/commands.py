# SPDX-License-Identifier: Apache-2.0
"""The page of all commands, from what typer knows of them."""

from typing import Any

import typer

from nemo2.cli.app import app
from tools.wrapped import wrapped

NO_BREAK = "\N{NO-BREAK SPACE}"


def page() -> str:
    """Every command with its arguments and options."""
    lines = [
        "# Commands",
        "",
        "This page lists every command with its arguments and options. `nemo2 COMMAND --help` prints the same text. All commands "
        "use the same [exit codes](../environment.md#exit-codes). Put `-v` anywhere in a command to print more of the run's "
        "log, and `--debug` to print tracebacks.",
        "",
    ]
    lines += ["## All commands", "", *all_commands(), ""]
    lines += ["## Flags of several commands", "", "A flag means the same in every command that has it.", ""]
    lines += [*shared_flags(), ""]
    for words, command in sorted(_commands(typer.main.get_command(app), ("nemo2",))):
        lines += _section(" ".join(words), command)
    return "\n".join(lines)


def all_commands() -> list[str]:
    """A table of the commands, each with a link to its section and the first sentence of its help."""
    lines = ["| command | what it does |", "|---|---|"]
    for words, command in sorted(_commands(typer.main.get_command(app), ("nemo2",))):
        first = _line((command.help or "").partition("\n\n")[0])
        lines.append(f"| [{NO_BREAK.join(words)}](#{'-'.join(words)}) | {first} |")
    return lines


def shared_flags() -> list[str]:
    """A table of the flags that at least four commands have, with these commands."""
    commands: dict[str, list[str]] = {}
    for words, command in sorted(_commands(typer.main.get_command(app), ())):
        for name in {name for one in command.params for name in one.opts if name.startswith("--")} - {
            "--help",
            "--gpu",
        }:
            commands.setdefault(name, []).append(NO_BREAK.join(words))
    shared = sorted((item for item in commands.items() if len(item[1]) >= 4), key=lambda item: (-len(item[1]), item[0]))
    return ["| flag | commands |", "|---|---|", *(f"| `{name}` | {', '.join(having)} |" for name, having in shared)]


def _commands(command: Any, words: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        return [(words, command)]
    return [
        found
        for name, inner in command.commands.items()
        if not inner.hidden
        for found in _commands(inner, (*words, name))
    ]


def _section(words: str, command: Any) -> list[str]:
    context = command.make_context(words, [], resilient_parsing=True)
    parameters = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option"]
    usage = " ".join([words, *(_usage(one) for one in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## {words}", "", _line(command.help or ""), "", f"```text\n{usage}\n```", ""]
    if parameters:
        lines += ["| argument, option | meaning |", "|---|---|"]
        lines += [f"| `{_usage(one)}` | {_line(one.help or '')} |" for one in arguments]
        lines += [
            f"| `{_bar(spelt)}` | {_line(told)} |" for spelt, told in (one.get_help_record(context) for one in options)
        ]
        lines += [""]
    if command.epilog:
        lines += [_example(command.epilog), ""]
    return lines


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    name = f"{name}..." if argument.nargs == -1 and "..." not in name else name
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _bar(text: str) -> str:
    return text.replace(" range>", ">").replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _example(epilog: str) -> str:
    before, colon, command = epilog.partition(": ")
    if not (colon and command.startswith("nemo2")):
        return _line(epilog)
    return "\n".join([f"{before}:", "", "```bash", *wrapped(command), "```"])
