# SPDX-License-Identifier: Apache-2.0
"""The ``nemo2`` command and its exit codes: 0 done, 1 a run failed, 2 bad input, 130 and 143 for Ctrl-C and SIGTERM.

A command imports heavy libraries only when it needs them: ``nemo2 --help`` and ``nemo2 list`` load neither torch nor
nemo-run.
"""

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from nemo2.cli import (
    chat,
    check,
    cluster,
    completion,
    convert,
    distill,
    doctor,
    evaluate,
    explain,
    inspect,
    jobs,
    layout,
    list_show,
    plan,
    preview,
    prune,
    recipe_tools,
    rehearse,
    run_list,
    runs,
    serve,
    tools,
    trace,
    translate,
)
from nemo2.cli.commands import App
from nemo2.cli.streams import (
    drop_output,
    end_process,
    open_missing,
    replace_unknown_characters,
    why_output_is_refused,
)
from nemo2.cli.waiting import waiting_line
from nemo2.errors import EXIT_PREEMPTED, Nemo2Error, RuntimeFault
from nemo2.names import visible
from nemo2.noise import VERBOSE_VARIABLE
from nemo2.run_dir.environment import redact_text
from nemo2.run_dir.faults import words_of

_DEBUG = "--debug"
_VERBOSE = ("-v", "--verbose")
PANELS = {
    "Recipes": ("list", "show", "explain", "diff", "freeze", "new-recipe", "translate"),
    "Before a run": ("doctor", "prepare-data", "preview-data", "check", "rehearse", "plan", "show-layout"),
    "Train": ("pretrain", "finetune", "distill", "validate"),
    "Runs": ("report", "trace", "runs", "jobs", "cluster"),
    "Checkpoints": ("inspect", "evaluate", "generate", "chat", "serve", "export", "import", "merge", "prune"),
    "Shell": ("completion",),
}
"""The commands as ``nemo2 --help`` groups them, in this order."""

app = App(
    name="nemo2",
    help="Train large language models from recipes: list, inspect, change and run recipes.",
    epilog="Example: nemo2 pretrain llama_tiny trainer.max_steps=50 --devices 2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from nemo2 import __version__

        print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show tracebacks. May appear anywhere in a command.")] = False,
    verbose: Annotated[
        bool, typer.Option(*_VERBOSE, help="Print more of the run's log. May appear anywhere in a command.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options of all commands. Their effects are elsewhere: `main` reads the first two."""


list_show.register(app)
inspect.register(app)
check.register(app)
completion.register(app)
doctor.register(app)
explain.register(app)
layout.register(app)
plan.register(app)
preview.register(app)
recipe_tools.register(app)
convert.register(app)
rehearse.register(app)
evaluate.register(app)
chat.register(app)
serve.register(app)
prune.register(app)
distill.register(app)
trace.register(app)
runs.register(app)
cluster.register(app)
jobs.register(app)
run_list.register(app)
tools.register(app)
translate.register(app)
_panels = {name: panel for panel, names in PANELS.items() for name in names}
for _order in (app.registered_commands, app.registered_groups):
    _order.sort(key=lambda one: list(_panels).index(str(one.name)))
for _registered in (*app.registered_commands, *app.registered_groups):
    _registered.rich_help_panel = _panels[str(_registered.name)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments``: by default, those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in arguments or bool(os.environ.get("NEMO2_DEBUG"))
    if any(argument in _VERBOSE for argument in arguments):
        os.environ[VERBOSE_VARIABLE] = "1"  # the ranks inherit it
    arguments = [argument for argument in arguments if argument not in (_DEBUG, *_VERBOSE)]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    elif arguments == ["version"]:
        arguments = ["--version"]
    if not debug:
        # On import, Megatron-Core logs a line for each optional library that is missing.
        warnings.filterwarnings("ignore", module=r"megatron\.")
    # Importing torch, Lightning, nemo-run and Megatron-Core creates half a million objects and no garbage. The
    # collections during these imports took 2 of the 7 s of `nemo2 show`.
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000, *thresholds[1:])
    open_missing()
    replace_unknown_characters()
    try:
        if arguments[:1] == [completion.ASK]:
            found = completion.candidates(typer.main.get_command(app), arguments[1:])
            print("\n".join(found), end="\n" if found else "")
            return 0
        with waiting_line("nemo2: loading torch and Megatron-Core"):
            code = _code_of(lambda: app(arguments, prog_name="nemo2"))
        sys.stdout.flush()  # A write error surfaces here. At the end of the interpreter it would print a traceback.
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `nemo2 list | head`: the reader has left. Nothing may be flushed into the closed pipe at exit.
        drop_output()
        return 0
    except Nemo2Error as error:
        return _report(error, debug=debug, code=_code(error))
    except Exception as error:
        if debug:
            traceback.print_exc()
        elif isinstance(error, OSError) and (refusal := why_output_is_refused()) is not None:
            drop_output()
            print(f"error: can't write the output: {refusal}.", file=sys.stderr)
        elif isinstance(error, PermissionError) and error.filename is not None:
            path = visible(os.fsdecode(error.filename))
            print(
                f"error: this user has no permission for {path}. Ask its owner for access, or use a copy.",
                file=sys.stderr,
            )
            return 2
        else:
            print(f"error: {type(error).__name__}: {visible(redact_text(words_of(error)))}", file=sys.stderr)
            print("nemo2 doesn't expect this error. Use --debug to print its traceback.", file=sys.stderr)
        return 1
    finally:
        gc.set_threshold(*thresholds)


def script() -> NoReturn:
    """The ``nemo2`` script: `main`, and then an end of the process that takes no time."""
    end_process(main())


def _code_of(command: Callable[[], Any]) -> int:
    try:
        command()
    except SystemExit as exit:
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # typer's stream after the reader of a pipe has left
            raise BrokenPipeError from exit
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0


def _code(error: Nemo2Error) -> int:
    if getattr(error, "exit_code", None) == EXIT_PREEMPTED:
        return EXIT_PREEMPTED
    return 1 if isinstance(error, RuntimeFault) else 2


def _report(error: Nemo2Error, *, debug: bool, code: int) -> int:
    if debug:
        traceback.print_exception(error)
        details = getattr(error, "details", "")
        if details:
            print(f"\nfrom the rank:\n{details}", file=sys.stderr)
    print(f"error: {visible(redact_text(str(error)))}", file=sys.stderr)
    return code
