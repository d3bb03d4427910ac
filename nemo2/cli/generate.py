# SPDX-License-Identifier: Apache-2.0
"""``nemo2 generate``: the answers of a checkpoint's model to prompts, or a conversation with it."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.base.files import refuse_existing, text_of, write_file
from nemo2.base.names import did_you_mean
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.begin_from import WeightsOption, named_weights
from nemo2.cli.commands import as_json, not_with, only_with, refuse_all_but
from nemo2.cli.flags import Html, Output, OverwriteFile

_STANDARD = Path("-")
"""Standard input or output, in place of a file name."""


def generate(
    checkpoints: Annotated[Optional[list[str]], typer.Argument(show_default=False)] = None,
    *,
    prompt: Annotated[Optional[list[str]], typer.Option("--prompt", "-p")] = None,
    source: WeightsOption = None,
    chat: bool = False,
    system: Optional[str] = None,
    template: Optional[str] = None,
    template_kwargs: Optional[str] = None,
    max_new_tokens: Annotated[Optional[int], AT_LEAST_1] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    stop: Optional[list[str]] = None,
    prompts_file: Annotated[Optional[Path], typer.Option("--prompts")] = None,
    batch_size: Annotated[int, AT_LEAST_1] = 4,
    seed: int = 1234,
    output: Output = None,
    overwrite: OverwriteFile = False,
    html: Html = None,
    trust_remote_code: bool = False,
) -> Result:
    """Generate text with a checkpoint's model, or chat with it.

    Runs in this process. Without a prompt on a terminal, starts a chat.

    Args:
        checkpoints: A checkpoint directory, a run (directory or name), or released weights (hf://organisation/name, or
            their folder). Takes several with --html.
        prompt: A prompt; may be repeated. '-' reads standard input.
        chat: Chat in the terminal. Type /help for commands.
        system: With --chat: system message.
        template: With --chat: a chat template: a file, or 'plain'. Default: the run's template.
        template_kwargs: With --chat: variables of the template as JSON, such as {"enable_thinking": false}.
        max_new_tokens: Maximum number of tokens to generate. Default: 64 per prompt, 256 per answer of a chat.
        temperature: Sampling temperature; 0 always takes the most likely token.
        top_k: Sample from this many most likely tokens; 0: from all tokens.
        top_p: Sample from the most likely tokens with this total probability.
        min_p: Drop tokens below this fraction of the highest token probability.
        stop: Stop before this text; may be repeated.
        prompts_file: A JSON-lines file of {"input": PROMPT}; '-' reads standard input.
        batch_size: Number of prompts to complete in one batch.
        seed: Random seed for sampling.
        output: Also write JSON lines to this file; '-': print only JSON lines.
        html: Write an HTML page with the texts of all checkpoints side by side.
        trust_remote_code: Run the Python code beside the tokenizer's files. Read it first.

    Example: nemo2 generate RUN_DIR/checkpoints/NAME --prompt 'def main(' --max-new-tokens 40
    """
    only_with("temperature", "top_k", "top_p", "min_p", "seed")
    not_with("as_json", "output", "html")
    only_with("output", "overwrite")
    chat = chat or (not prompt and not prompts_file and sys.stdin.isatty())
    named = checkpoints or [None]
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if chat:
        allowed = ("checkpoints", "source", "chat", "system", "template", "template_kwargs", "max_new_tokens")
        refuse_all_but(*allowed, *sampling, "seed", "trust_remote_code", why="in a chat")
        if len(named) > 1:
            raise ConfigError(f"{len(named)} checkpoints: a chat is with one. Name one of them.")
        path, name = named_weights(named[0], source), named[0] or source or ""
        limits = {"max_new_tokens": max_new_tokens or 256, **sampling}
        converse(path, name, limits, system, template, template_kwargs, seed=seed, trust_remote_code=trust_remote_code)
        return Result(None)
    only_with("chat", "system", "template", "template_kwargs")
    if bool(prompt) == bool(prompts_file):
        if prompt:
            raise ConfigError(f"--prompt {prompt[0]!r} and --prompts {prompts_file}: leave one of them out.")
        raise ConfigError("generate needs a prompt: either --prompt TEXT, or --prompts FILE with several prompts.")
    if len(named) > 1 and (html is None or output is not None):
        raise ConfigError(
            f"{len(named)} checkpoints: their texts are written side by side to a page. Give --html FILE, and no --output."
        )
    if len(named) > 1 and prompts_file == _STANDARD:
        raise ConfigError(
            f"--prompts -: standard input can be read only once, but there are {len(named)} checkpoints. Give a file."
        )
    if prompts_file is not None and prompts_file != _STANDARD:
        text_of(prompts_file)  # refused before torch is imported
    if output is not None and output != _STANDARD:
        refuse_existing(output, overwrite=overwrite)
    texts = [sys.stdin.read() if text == "-" else text for text in prompt or ()]
    paths = [named_weights(checkpoint, source) for checkpoint in named]
    from nemo2.llm.api import generate as entry

    lines_only = as_json() or output == _STANDARD
    alone = len(texts) == 1 and html is None and not lines_only
    unprinted = texts[:1]

    def show(place: int, text: str) -> None:
        """Print the prompt, once there is an answer, and the text."""
        print(*unprinted, text, sep="", end="", flush=True)
        unprinted.clear()

    def complete(path: str) -> list[Any]:
        return entry(
            path=path,
            prompts=texts or None,
            input_dataset=prompts_file,
            max_new_tokens=max_new_tokens,
            stop=stop,
            max_batch_size=batch_size,
            random_seed=seed,
            output_path=str(_STANDARD) if lines_only else str(output) if output else None,
            trust_remote_code=trust_remote_code,
            on_text=show if alone else None,
            **sampling,
        )

    if html is not None:
        from nemo2.llm.evaluation.figures import names_of
        from nemo2.llm.side_by_side import side_by_side

        answers = {
            name: complete(path) for name, path in zip(names_of([Path(path) for path in paths]), paths, strict=True)
        }
        how = f"temperature {temperature}, top-k {top_k}, top-p {top_p}, min-p {min_p}, seed {seed}"
        write_file(html, side_by_side(answers, subtitle=how))
        return Result(None, str(html))
    completions = complete(paths[0])
    if alone:
        print(*unprinted, sep="")
    if alone or lines_only:
        return Result(None)
    outputs = (one if isinstance(one, str) else f"{one.prompt}{one.text}" for one in completions)
    return Result(None, f"\n{'-' * 40}\n".join(outputs))


_PROMPT = "> "
_COMMANDS = {
    "/reset": "start a new conversation",
    "/save FILE": "append the conversation to a JSON-lines file for ChatDataModule",
    "/system WORDS": "set the system message; without WORDS, print it",
    "/help": "list these commands",
    "/exit": "exit; Ctrl-D exits too, Ctrl-C stops an answer",
}


def converse(
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
