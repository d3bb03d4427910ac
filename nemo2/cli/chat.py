# SPDX-License-Identifier: Apache-2.0
"""``nemo2 chat``: a conversation with a checkpoint's model in the terminal."""

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.commands import only_with
from nemo2.cli.run_names import Checkpoint, checkpoint_called

CHAT_EXAMPLE = "Example: nemo2 chat runs/tuned --system 'Answer in one sentence.'"
_PROMPT = "> "
_COMMANDS = {
    "/reset": "forget the conversation",
    "/save FILE": "add it to a file of JSON lines, which ChatDataModule reads",
    "/system WORDS": "what stands before the first turn; without words, tell it",
    "/help": "these",
    "/exit": "leave; Ctrl-D does too, and Ctrl-C stops an answer",
}


def register(app: typer.Typer) -> None:
    app.command("chat", epilog=CHAT_EXAMPLE)(chat)


def chat(
    checkpoint: Checkpoint,
    system: Annotated[Optional[str], typer.Option(help="What stands before the first turn.")] = None,
    template: Annotated[
        Optional[Path], typer.Option(help="A file with the chat template (Jinja), in place of the run's.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many likeliest tokens; 0 means all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample within this probability mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out what is less likely than this share of the likeliest.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 1234,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python that lies beside the tokenizer's files. Read it before."),
    ] = False,
) -> None:
    """Talk with the model of a checkpoint, in this process. /help lists what can be done."""
    from nemo2.errors import ConfigError

    only_with("temperature", "top_k", "top_p", "min_p", "seed")
    folder = checkpoint_called(checkpoint)
    if template is not None and not template.is_file():
        raise ConfigError(f"--template {template}: there is no such file.")
    from nemo2.llm.chat import conversation
    from nemo2.llm.inference import HowToGenerate

    how = HowToGenerate(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    given = None if template is None else template.read_text("utf-8")
    with conversation(
        str(folder), how, seed=seed, system=system, chat_template=given, trust_remote_code=trust_remote_code
    ) as talk:
        print(f"{folder.name}: at most {talk.max_sequence_length} tokens of conversation. /help lists commands.")
        _talk(talk)


def _talk(talk: Any) -> None:
    """Read and answer lines until there are no more."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives `input` its history and its keys
    while True:
        try:
            line = input(_PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
            continue
        if line == "/exit":
            return
        if line.startswith("/"):
            _obey(talk, *line.split(maxsplit=1))
        elif line:
            _answer(talk, line)


def _answer(talk: Any, question: str) -> None:
    from nemo2.errors import Nemo2Error

    before = talk.unread
    try:
        talk.answer(question, lambda piece: print(piece, end="", flush=True))
        print()
    except KeyboardInterrupt:
        print("\n(stopped)")
    except Nemo2Error as error:
        print(error)
    if talk.unread > before:
        print(
            f"(The first {talk.unread} turns no longer fit into {talk.max_sequence_length} tokens: the model doesn't read them.)"
        )


def _obey(talk: Any, command: str, rest: str = "") -> None:
    from nemo2.llm.chat import save

    if command == "/reset":
        talk.reset()
        print("(The conversation is forgotten.)")
    elif command == "/system":
        talk.system = rest or talk.system
        print(f"(system: {talk.system or 'nothing'})")
    elif command == "/save" and rest:
        try:
            save(talk, Path(rest).expanduser())
            print(f"({len(talk.turns)} turns saved in {rest})")
        except OSError as error:
            print(f"{rest} can't be written: {error.strerror}.")
    elif command == "/help":
        print("\n".join(f"{name:15}{what}" for name, what in _COMMANDS.items()))
    else:
        print("/save needs a file: /save FILE." if command == "/save" else _unknown(command))


def _unknown(command: str) -> str:
    from nemo2.names import did_you_mean

    known = [name.partition(" ")[0] for name in _COMMANDS]
    return f"No command {command}{did_you_mean(command, known)}"
