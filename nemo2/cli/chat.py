# SPDX-License-Identifier: Apache-2.0
"""``nemo2 chat``: a conversation with a checkpoint's model in the terminal."""

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.begin_from import Weights, WeightsOption, named_weights
from nemo2.cli.commands import only_with
from nemo2.cli.flags import MinP, Temperature, TopK, TopP

CHAT_EXAMPLE = "Example: nemo2 chat runs/tuned --system 'Answer in one sentence.'"
_PROMPT = "> "
_COMMANDS = {
    "/reset": "start a new conversation",
    "/save FILE": "append the conversation to a JSON-lines file for ChatDataModule",
    "/system WORDS": "set the system message; without WORDS, print it",
    "/help": "list these commands",
    "/exit": "exit; Ctrl-D exits too, Ctrl-C stops an answer",
}


def register(app: typer.Typer) -> None:
    app.command("chat", epilog=CHAT_EXAMPLE)(chat)


def chat(
    checkpoint: Weights = None,
    source: WeightsOption = None,
    system: Annotated[Optional[str], typer.Option(help="System message.")] = None,
    template: Annotated[
        Optional[Path], typer.Option(help="File with a Jinja chat template. Default: the run's template.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 1234,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the Python code beside the tokenizer's files. Read it first."),
    ] = False,
) -> None:
    """Chat with the model of a checkpoint, in this process. Type /help for commands."""
    from nemo2.errors import ConfigError

    only_with("temperature", "top_k", "top_p", "min_p", "seed")
    path = named_weights(checkpoint, source)
    if template is not None and not template.is_file():
        raise ConfigError(f"--template {template}: there is no such file.")
    from nemo2.llm.chat import conversation
    from nemo2.llm.inference import GenerationOptions

    how = GenerationOptions(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    given = None if template is None else template.read_text("utf-8")
    with conversation(
        path, how, seed=seed, system=system, chat_template=given, trust_remote_code=trust_remote_code
    ) as talk:
        print(
            f"{checkpoint or source}: at most {talk.max_sequence_length} tokens of conversation. /help lists commands."
        )
        _talk(talk)


def _talk(talk: Any) -> None:
    """Read and answer lines until the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives `input` its history and its keys
    while True:
        try:
            line = input(_PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D exits)")
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
            f"(The first {talk.unread} turns no longer fit into {talk.max_sequence_length} tokens; the model doesn't see them.)"
        )


def _obey(talk: Any, command: str, rest: str = "") -> None:
    from nemo2.llm.chat import save

    if command == "/reset":
        talk.reset()
        print("(New conversation.)")
    elif command == "/system":
        talk.system = rest or talk.system
        print(f"(system: {talk.system or 'nothing'})")
    elif command == "/save" and rest:
        try:
            save(talk, Path(rest).expanduser())
            print(f"({len(talk.turns)} turns saved in {rest})")
        except OSError as error:
            print(f"can't write {rest}: {error.strerror}.")
    elif command == "/help":
        print("\n".join(f"{name:15}{what}" for name, what in _COMMANDS.items()))
    else:
        print("/save needs a file: /save FILE." if command == "/save" else _unknown(command))


def _unknown(command: str) -> str:
    from nemo2.names import did_you_mean

    known = [name.partition(" ")[0] for name in _COMMANDS]
    return f"No command {command}{did_you_mean(command, known)}"
