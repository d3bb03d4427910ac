# SPDX-License-Identifier: Apache-2.0
"""Conversations: what the model is given of them, what is kept, and the terminal."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.data.finetuning.chat import ChatEncoder
from nemo2.llm.chat import Conversation, conversation, save
from nemo2.llm.inference import GenerationOptions
from support import answering_runs, small_chats
from support.uncached import decode_without_cache

__all__ = ["decode_without_cache"]


class Echo(torch.nn.Module):
    """A model of tokens that writes one letter, and ends its turn after ``after`` of them; it remembers what it read."""

    def __init__(self, tokenizer: Any, *, after: int = 3) -> None:
        super().__init__()
        self.letter, self.end = tokenizer.text_to_ids("z")[0], tokenizer.text_to_ids("<|im_end|>")[0]
        self.read: list[list[int]] = []
        self.after, self.written = after, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.written == 0:
            self.read.append(tokens[0].tolist())
        ends = self.written == self.after
        self.written = 0 if ends else self.written + 1
        logits = torch.zeros(*tokens.shape, 400)
        logits[..., self.end if ends else self.letter] = 1.0
        return logits


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(small_chats.make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def talk_of(encoder: ChatEncoder, *, length: int = 200, **options: Any) -> tuple[Conversation, Echo]:
    model = Echo(encoder.tokenizer)
    how = GenerationOptions(max_new_tokens=20, temperature=0.0)
    return Conversation(model, encoder, length, how, **options), model


def shown(encoder: ChatEncoder, ids: list[int]) -> str:
    hf: Any = encoder.tokenizer
    return hf.tokenizer.decode(ids)


def test_the_model_reads_the_template_of_the_whole_conversation_and_its_answer_is_kept(encoder: ChatEncoder) -> None:
    talk, model = talk_of(encoder, system="Be brief.")
    told: list[str] = []
    talk.answer("One?", told.append)
    talk.answer("Two?", told.append)
    assert "".join(told) == "zzzzzz", "the end of the turn is no text"
    turns = [("system", "Be brief."), ("user", "One?"), ("assistant", "zzz"), ("user", "Two?")]
    theirs = encoder.tokenizer.tokenizer.apply_chat_template(  # pyright: ignore[reportAttributeAccessIssue]
        small_chats.say(*turns)["messages"], tokenize=False, add_generation_prompt=True
    )
    assert shown(encoder, model.read[1]) == theirs


def test_a_history_that_is_too_long_loses_its_first_turns_and_says_so(encoder: ChatEncoder) -> None:
    talk, model = talk_of(encoder, length=80, system="Be brief.")
    for question in ("One?", "Two?", "Three?", "Four?"):
        talk.answer(question, lambda piece: None)
    assert talk.unread > 0 and len(talk.turns) == 8
    last = shown(encoder, model.read[-1])
    assert "Be brief." in last and "Four?" in last and "One?" not in last
    assert len(model.read[-1]) + 20 <= 80
    turns = list(talk.turns)
    with pytest.raises(ConfigError, match="This message has .* tokens with its template, but the model reads only 80"):
        talk.answer("word " * 200, lambda piece: None)
    assert talk.turns == turns
    talk.reset()
    assert (talk.turns, talk.unread, talk.system) == ([], 0, "Be brief.")


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(encoder: ChatEncoder) -> None:
    talk, _ = talk_of(encoder)

    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.answer("One?", stop)
    assert [turn["content"] for turn in talk.turns] == ["One?", "z"]


def test_a_seed_that_is_no_number_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(ConfigError, match="seed='x': takes a whole number"):
        conversation("no checkpoint", GenerationOptions(), seed="x")  # pyright: ignore[reportArgumentType]


def test_what_is_saved_is_what_chat_data_reads(encoder: ChatEncoder, tmp_path: Path) -> None:
    talk, _ = talk_of(encoder, system="Be brief.")
    talk.answer("One?", lambda piece: None)
    for _ in range(2):
        save(talk, tmp_path / "said.jsonl")
    first, second = (json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines())
    assert first == second
    sample = encoder.encode(first)
    trained = [token for token, is_trained in zip(sample.ids, sample.trained, strict=True) if is_trained]
    assert shown(encoder, trained) == "zzz<|im_end|>"


def test_a_template_that_refuses_the_turns_is_told(encoder: ChatEncoder) -> None:
    strict = ChatEncoder(encoder.tokenizer, chat_template=small_chats.STRICT)
    talk, _ = talk_of(strict, system="Be brief.")
    with pytest.raises(ConfigError, match="cannot be shown to the model.*begin with the user"):
        talk.answer("One?", lambda piece: None)
    assert talk.turns == []


# In a terminal


def saved(directory: str) -> dict[str, str]:
    return {
        "with": answering_runs.save(f"{directory}/with", seq_length=1024),
        "without": answering_runs.save(f"{directory}/without", chat_template=None),
    }


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.side, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nemo2", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def read_until(self, words: str, *, typed: bytes = b"") -> str:
        """What it prints up to ``words``. ``typed``: what the user types after each second in which it prints nothing."""
        found, end = "", time.monotonic() + 120
        while words not in found:
            assert time.monotonic() < end, found
            if not select.select([self.side], [], [], 1.0)[0]:
                os.write(self.side, typed)
                continue
            try:
                found += os.read(self.side, 4096).decode("utf-8", "replace")
            except OSError:
                break
        return found

    def say(self, line: str) -> str:
        os.write(self.side, f"{line}\n".encode())
        return self.read_until("\n> ")


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.usefixtures("warm_interpreter")
def test_a_conversation_in_a_terminal(run_on_ranks: Any, tmp_path: Path) -> None:
    [runs] = run_on_ranks(saved, 1, str(tmp_path), timeout=180)
    terminal = Terminal("generate", runs["with"], "--max-new-tokens", "8")
    assert "at most 1024 tokens of conversation" in terminal.read_until("> ")
    first = terminal.say("Hello")
    assert "/system" in terminal.say("/help")
    assert "(system: Be brief.)" in terminal.say("/system Be brief.")
    assert terminal.say("Hello") != first
    assert "(4 turns saved in" in terminal.say(f"/save {tmp_path}/said.jsonl")
    assert "No command /rest; did you mean" in terminal.say("/rest")
    assert "New conversation" in terminal.say("/reset")
    assert "needs a file" in terminal.say("/save")
    os.write(terminal.side, b"\x04")
    terminal.read_until("never")
    assert terminal.process.wait(timeout=60) == 0
    record = json.loads((tmp_path / "said.jsonl").read_text())
    assert [turn["role"] for turn in record["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert record["messages"][2]["content"] in first.replace("\r\n", "\n")

    terminal = Terminal("generate", "--chat", runs["with"], "--max-new-tokens", "1000")
    terminal.read_until("> ")
    os.write(terminal.side, b"Hello\n")
    terminal.read_until("Hello\r\n")
    os.read(terminal.side, 16)
    os.write(terminal.side, b"\x03")
    assert "(stopped)" in terminal.read_until("\n> ")
    os.write(terminal.side, b"\x03")
    # A signal that comes after the prompt and before readline waits for a key is seen with the next line.
    assert "Ctrl-D exits" in terminal.read_until("exits)\r\n> ", typed=b"\n")
    os.write(terminal.side, b"/exit\n")
    terminal.read_until("never")
    assert terminal.process.wait(timeout=60) == 0

    untold = Terminal("generate", "--chat", runs["without"])
    assert untold.process.stderr is not None
    told = untold.process.stderr.read().decode()
    assert untold.process.wait(timeout=60) == 2
    assert "has no chat template" in told and "--template FILE" in told and "nemo2 generate" in told
    assert "--template plain" in told and "dataset_kwargs" not in told
    plain = Terminal("generate", "--chat", runs["without"], "--template", "plain")
    assert "tokens of conversation" in plain.read_until("> ")
    os.write(plain.side, b"/exit\n")
    plain.read_until("never")
    assert plain.process.wait(timeout=60) == 0

    bad = tmp_path / "bad.jinja"
    bad.write_text("{{ messages[0]")
    unreadable = Terminal("generate", "--chat", runs["with"], "--template", str(bad))
    assert unreadable.process.stderr is not None and unreadable.process.stderr.read()
    assert unreadable.process.wait(timeout=60) == 2
