# SPDX-License-Identifier: Apache-2.0
"""The ``nemo2`` command and its exit codes: 0 done, 1 a run failed, 2 bad input, 130 and 143 for Ctrl-C and SIGTERM.

A command imports heavy libraries only when it needs them: ``nemo2 --help`` and ``nemo2 list`` load neither torch nor
nemo-run.
"""

import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Optional

import typer

from nemo2.base.advice import for_the_command_line
from nemo2.base.errors import EXIT_PREEMPTED, Nemo2Error, RuntimeFault, message_of
from nemo2.base.names import visible
from nemo2.base.noise import VERBOSE_VARIABLE
from nemo2.cli.adapter import add_verbs
from nemo2.cli.check import check
from nemo2.cli.cluster import add, list_clusters, show_cluster, test
from nemo2.cli.commands import App
from nemo2.cli.completion import ASK, Shell, candidates, print_script
from nemo2.cli.convert import export_weights, import_weights
from nemo2.cli.distill import distill
from nemo2.cli.doctor import doctor
from nemo2.cli.evaluate import evaluate
from nemo2.cli.generate import generate
from nemo2.cli.new_recipe import new_recipe
from nemo2.cli.plan import plan
from nemo2.cli.prepare import prepare_data
from nemo2.cli.preview import preview_data
from nemo2.cli.prune import prune
from nemo2.cli.recipe_list import list_recipes
from nemo2.cli.rehearse import rehearse
from nemo2.cli.runs import cancel, compare, list_runs, report, status, tail, trace
from nemo2.cli.serve import serve
from nemo2.cli.show import show
from nemo2.cli.streams import (
    drop_output,
    open_missing,
    replace_unknown_characters,
    why_output_is_refused,
)
from nemo2.cli.train import finetune, pretrain
from nemo2.cli.translate import translate
from nemo2.launch.signals import own_signals, raise_on_signals
from nemo2.training.run_dir.environment import redact_arguments, redact_text
from nemo2.training.run_dir.faults import words_of
from nemo2.training.run_dir.waiting import waiting_line

_DEBUG = "--debug"
_VERBOSE = ("-v", "--verbose")
VERBS: dict[str, Callable[..., Any]] = {
    "list": list_recipes,
    "show": show,
    "check": check,
    "pretrain": pretrain,
    "finetune": finetune,
    "generate": generate,
    "export": export_weights,
    "runs list": list_runs,
    "runs status": status,
    "runs tail": tail,
    "runs report": report,
    "runs compare": compare,
    "runs trace": trace,
    "runs cancel": cancel,
    "new-recipe": new_recipe,
    "translate": translate,
    "doctor": doctor,
    "data prepare": prepare_data,
    "data preview": preview_data,
    "plan": plan,
    "rehearse": rehearse,
    "distill": distill,
    "prune": prune,
    "evaluate": evaluate,
    "serve": serve,
    "import": import_weights,
    "cluster list": list_clusters,
    "cluster add": add,
    "cluster show": show_cluster,
    "cluster test": test,
}
"""The function of each command, in the order of ``nemo2 --help``."""
GROUPS = {
    "runs": "List, follow, compare and cancel runs. Example: nemo2 runs compare first second --html compared.html",
    "data": "Prepare and preview training data. Example: nemo2 data preview chats/training.jsonl --samples 2",
    "cluster": "Add, list, show and test cluster profiles. Example: nemo2 cluster test mycluster",
}
FIRST = ("list", "show", "check", "pretrain", "finetune", "generate", "export", "runs")
"""The commands at the top of ``nemo2 --help``."""
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


def _print_completion(shell: Optional[Shell]) -> None:
    if shell is not None:
        print_script(shell)
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
    completion: Annotated[
        Optional[Shell],
        typer.Option(
            "--show-completion",
            metavar="SHELL",
            help="Print the completion script of bash, zsh or fish.",
            callback=_print_completion,
            is_eager=True,
        ),
    ] = None,
) -> None:
    """The options of all commands. Their effects are elsewhere: `main` reads the first two."""


add_verbs(app, VERBS, GROUPS)
for _registered in (*app.registered_commands, *app.registered_groups):
    _registered.rich_help_panel = "Commands" if _registered.name in FIRST else "More commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments``: by default, those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in arguments or bool(os.environ.get("NEMO2_DEBUG"))
    if any(argument in _VERBOSE for argument in arguments):
        os.environ[VERBOSE_VARIABLE] = "1"  # the ranks inherit it
    arguments = [argument for argument in arguments if argument not in (_DEBUG, *_VERBOSE)]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    elif arguments == ["version"] or "--version" in arguments:
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
        if arguments[:1] == [ASK]:
            words = candidates(typer.main.get_command(app), arguments[1:])
            print("\n".join(words), end="\n" if words else "")
            return 0
        with (
            own_signals(),
            for_the_command_line(redact_arguments(arguments)),
            waiting_line("nemo2: loading libraries"),
        ):
            # A command that is ended deletes what it has half written. Ctrl-C is Python's: in a chat, each one is heard.
            raise_on_signals(signal.SIGTERM, signal.SIGHUP)
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
    print(f"error: {visible(redact_text(message_of(error)))}", file=sys.stderr)
    return code
