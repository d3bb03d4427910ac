# SPDX-License-Identifier: Apache-2.0
"""Completion in bash, zsh and fish. ``nemo2 --show-completion SHELL`` prints a script that calls `candidates` at each TAB.

Commands, options, recipes and runs are looked up directly. The settings of a recipe and their values come from an
index, because importing the recipe's tree takes seconds. A separate process writes the indexes of all recipes once per
version of nemo2: when ``nemo2 --show-completion`` prints its script, or at the first TAB. That TAB waits for the index of its
recipe, however long the import takes on a busy machine.
"""

import contextlib
import enum
import fcntl
import inspect
import json
import os
import subprocess
import sys
import time
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

from nemo2.base.files import replacing
from nemo2.base.gpus import NAMES
from nemo2.cli.run_names import all_runs
from nemo2.cli.sources import recipe_tree
from nemo2.cli.trackers import OFFLINE
from nemo2.launch.clusters import profiles
from nemo2.training.run_dir.trackers import TRACKERS

ASK = "__complete"
"""The command that the scripts call: ``nemo2 __complete WORD...``. The last word is the text before the cursor."""
PARTS = ("model.", "data.", "trainer.", "strategy.", "log.", "optim.", "resume.")
"""The parts of every recipe: the only completions for a recipe without an index."""
_RECIPES = ("name", "source", "recipe", "diff", "parent")
_RUNS = ("checkpoint", "checkpoints", "run", "names", "student", "teacher")

_BASH = """\
_nemo2() {
    local line="${COMP_LINE:0:COMP_POINT}" word reply
    local -a words
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    word="${words[-1]}"
    mapfile -t COMPREPLY < <(nemo2 __complete "${words[@]:1}" 2>/dev/null)
    # bash takes "=" and ":" for ends of words: what stands before the last of them is there already.
    local before="${word%"${word##*[=:]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[.=] ]] && compopt -o nospace
}
complete -o bashdefault -o default -F _nemo2 nemo2
"""
_ZSH = """\
#compdef nemo2
_nemo2() {
    local -a matches open typed
    # As typed the words have their quotes, one that is still open too; compadd quotes what it inserts.
    typed=("${(@Q)words[2,CURRENT]}")
    typed[-1]=${typed[-1]#[\\'\\"]}
    matches=("${(@f)$(nemo2 __complete "${(@)typed}" 2>/dev/null)}")
    open=(${(M)matches:#*[.=]})
    matches=(${matches:#*[.=]})
    (( $#open + $#matches )) || { _files; return }
    (( $#open )) && compadd -S '' -- $open
    (( $#matches )) && compadd -- $matches
    return 0
}
compdef _nemo2 nemo2
"""
_FISH = """\
function __nemo2_complete
    set -l words (commandline -opc)
    set -l word (commandline -ct | string trim -l -c "'\\"" | string replace -ra '\\\\\\\\(.)' '$1')
    set -l matches (nemo2 __complete $words[2..-1] "$word" 2>/dev/null)
    # Files only where nemo2 offers nothing, as in bash and zsh.
    if test (count $matches) -gt 0
        printf '%s\\n' $matches
    else
        __fish_complete_path "$word"
    end
end
complete -c nemo2 -f -a '(__nemo2_complete)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


Shell = Literal["bash", "zsh", "fish"]


def print_script(shell: Shell) -> None:
    """Print the script of ``nemo2 --show-completion``, and have the indexes written."""
    print(SCRIPTS[shell], end="")
    _write_in_background()


def candidates(command: Any, words: Sequence[str]) -> list[str]:
    """The completions of the last of ``words``. ``command``: typer's command for all of nemo2."""
    *before, word = words or [""]
    while before and before[0] in getattr(command, "commands", {}):
        command = command.commands[before.pop(0)]
    options = {name: one for one in command.params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")}
    asking = options.get(before[-1]) if before else None
    if asking is not None and not getattr(asking, "is_flag", False):
        return _starting(word, _values_of(asking.name, command))
    arguments = [param.name for param in command.params if not (param.opts and param.opts[0].startswith("-"))]
    positional = _positional(before, options)
    if word.startswith("-"):
        dotted = settings(positional[0], word[2:]) if "." in word and positional and "overrides" in arguments else []
        return _starting(word, [*(name for name in options if name.startswith("--")), "--help"]) + [
            f"--{one}" for one in dotted
        ]
    if hasattr(command, "commands"):
        return _starting(word, command.commands)
    name = arguments[min(len(positional), len(arguments) - 1)] if arguments else ""
    if name == "overrides" and positional:
        return settings(positional[arguments.index(name) - 1], word)
    return _starting(word, _values_of(name, command)) if name else []


def settings(recipe: str, word: str) -> list[str]:
    """The completions of an override of ``recipe``: the next part of its path, or values of the setting."""
    index = _index(recipe)
    path, equals, value = word.partition("=")
    if equals:
        return [f"{path}={one}" for one in index.get(path, []) if one.startswith(value)]
    if not index:
        return _starting(word, PARTS)
    parts = dict.fromkeys(_next_part(one, word) for one in index if one.startswith(word))
    return list(parts)


def index_of(recipe: Any) -> dict[str, list[str]]:
    """The settings of a recipe by path, each with the values to offer."""
    from nemo2.config.aliases import aliases_of, parameter_names
    from nemo2.config.walk import iterate_nodes

    index: dict[str, list[str]] = {}
    for path, node in iterate_nodes(recipe):
        target = node.__fn_or_cls__
        for name in parameter_names(target):
            index[f"{path}.{name}".removeprefix(".")] = _offered(target, name)
        for alias, real in aliases_of(target).items():
            if "." not in real:
                index[f"{path}.{alias}".removeprefix(".")] = _offered(target, real)
    prefix = "trainer.strategy."
    strategy = {path.removeprefix("trainer."): values for path, values in index.items() if path.startswith(prefix)}
    return index | strategy


def write_indexes(first: str = "") -> None:
    """Write the missing indexes: that of ``first``, for which a TAB waits, then the others unless another process
    writes them."""
    from nemo2.recipes._shipped import names

    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if first and not _file(first).is_file():
        write_index(first)
    with open(folder / ".writing", "w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for recipe in sorted(names()):
            if not _file(recipe).is_file():
                write_index(recipe)


def write_index(recipe: str) -> None:
    """Write the index of one recipe."""
    file = _file(recipe)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(file, by_user=False) as temporary:
        temporary.write_text(json.dumps(index_of(recipe_tree(recipe))), encoding="utf-8")


def _offered(target: Any, name: str) -> list[str]:
    from nemo2.config.factories import factory_names
    from nemo2.config.typed_text import part_classes
    from nemo2.config.value_types import type_hints

    hint = type_hints(target).get(name, Any)
    values = _words(hint)
    for arg in typing.get_args(hint) or (hint,):
        if arg is bool:
            values += ["True", "False"]
        elif arg is type(None):
            values.append("None")
        elif isinstance(arg, type) and issubclass(arg, enum.Enum):
            values += [member.name for member in arg]
    return values + list(factory_names(part_classes(hint)))


def _index(recipe: str) -> dict[str, list[str]]:
    """The index of a recipe. If it doesn't exist yet: the index of another version of nemo2, or else the index that a
    process writes now. Empty: that process failed."""
    from nemo2.recipes._shipped import names

    recipe = recipe.partition(":")[0]
    if recipe not in names():
        return {}
    if (index := _read(_file(recipe))) is not None:
        return index
    writer = _write_in_background(recipe)
    for older in _folder().parent.glob(f"*/{recipe}.json"):
        if (index := _read(older)) is not None:
            return index
    while (index := _read(_file(recipe))) is None and writer.poll() is None:
        time.sleep(0.05)
    return index or _read(_file(recipe)) or {}


def _read(file: Path) -> Optional[dict[str, list[str]]]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_in_background(first: str = "") -> "subprocess.Popen[bytes]":
    code = f"from nemo2.cli.completion import write_indexes; write_indexes({first!r})"
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    )


def _file(recipe: str) -> Path:
    return _folder() / f"{recipe}.json"


def _folder() -> Path:
    from nemo2 import __version__

    home = Path(os.environ.get("NEMO_HOME") or "~/.cache/nemo2").expanduser()
    return home / "completion" / __version__


def _values_of(parameter: str, command: Any) -> Iterable[str]:
    if parameter in _RECIPES:
        from nemo2.recipes._shipped import names

        return [*names(), *_runs()]
    if parameter in _RUNS:
        return _runs()
    if parameter == "gpus":
        return [*NAMES, *(f"{name}x8" for name in NAMES)]
    if parameter == "executor":
        return ["local", *profiles()]
    if parameter == "trackers":
        return [f"{name}{where}" for name in TRACKERS for where in ("", OFFLINE)]
    # Read from our own function, because typer's versions store choices in different places.
    return _words(inspect.signature(command.callback).parameters[parameter].annotation)


def _words(hint: Any) -> list[str]:
    """The words of a ``Literal`` in an annotation."""
    if hasattr(hint, "__metadata__"):
        return _words(hint.__origin__)
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [str(part) for part in parts]
    return [word for part in parts for word in _words(part)]


def _runs() -> list[str]:
    return list(dict.fromkeys(folder.parent.name for folder in all_runs()))


def _positional(before: Sequence[str], options: dict[str, Any]) -> list[str]:
    """The positional arguments: words that are neither options nor values of options."""
    words: list[str] = []
    asking: Optional[Any] = None
    for word in before:
        if asking is not None:
            asking = None
        elif word.startswith("-"):
            one = options.get(word)
            asking = None if one is None or getattr(one, "is_flag", False) else one
        else:
            words.append(word)
    return words


def _next_part(path: str, word: str) -> str:
    """``path`` up to and including its next dot, or all of it with ``=``."""
    end = path.find(".", len(word))
    return f"{path}=" if end < 0 else path[: end + 1]


def _starting(word: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(word)})
