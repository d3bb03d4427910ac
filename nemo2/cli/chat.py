# SPDX-License-Identifier: Apache-2.0
"""``nemo2 generate --chat``: a conversation with a checkpoint's model in the terminal."""

import json
import sys
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.base.names import did_you_mean

_PROMPT = "> "
_COMMANDS = {
    "/reset": "start a new conversation",
    "/save FILE": "append the conversation to a JSON-lines file for ChatDataModule",
    "/system WORDS": "set the system message; without WORDS, print it",
    "/help": "list these commands",
    "/exit": "exit; Ctrl-D exits too, Ctrl-C stops an answer",
}


def chat(
    path: str,
    name: str,
    limits: dict[str, Any],
    system: Optional[str],
    template: Optional[str],
    template_kwargs: Optional[str],
    *,
    seed: int,
    trust_remote_code: bool,
) -> None:
    """Read lines from the terminal and answer them, until the end of the input.

    Args:
        path: The weights.
        name: What the user calls them.
        limits: Arguments of `GenerationOptions`.
        template: A file with a chat template, or "plain". None: the run's.
        template_kwargs: The template's variables as a JSON object. None: none.

    Raises:
        ConfigError: ``template_kwargs`` is no JSON object, or has a variable that nemo2 sets.
    """
    from nemo2.llm.chat import conversation
    from nemo2.llm.inference import GenerationOptions

    how = GenerationOptions(**limits)
    try:
        variables = json.loads(template_kwargs or "{}")
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise ConfigError(
            f"--template-kwargs {template_kwargs}: must be a JSON object, for example --template-kwargs "
            "'{\"enable_thinking\": false}'."
        )
    template_settings = {"chat_template": template, "chat_template_kwargs": variables}
    with conversation(
        path, how, seed=seed, system=system, trust_remote_code=trust_remote_code, **template_settings
    ) as talk:
        print(f"{name}: at most {talk.max_sequence_length} tokens of conversation. /help lists commands.")
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
        unknown = f"No command {command}{did_you_mean(command, [name.partition(' ')[0] for name in _COMMANDS])}"
        print("/save needs a file: /save FILE." if command == "/save" else unknown)
