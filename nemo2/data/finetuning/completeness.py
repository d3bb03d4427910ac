# SPDX-License-Identifier: Apache-2.0
"""Checks that a rendered conversation holds the text of its record, and trains on what must be learned.

Templates leave out what they don't know without a word: messages of other roles, calls of tools, fields, earlier
reasoning. `check_complete` compares a record with its rendering. For a record with short texts the comparison may find them
elsewhere, so `probe_of` gives a conversation of the same shape whose texts are unmistakable.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Optional

from nemo2.data.documents import surrogate_in
from nemo2.data.finetuning.dialects import Conversation, Message, messages_keys, parsed_json
from nemo2.data.finetuning.sample import DESCRIPTIONS, Empty, Malformed, strings_in

Span = tuple[int, int]
_THINKING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>", re.DOTALL)
_REASONING = ("reasoning_content", "thinking")
_READ = frozenset(("role", "content", "reasoning_content", "thinking", "tool_calls", "tool_call_id"))
"""Fields of a message that are compared with the rendering by themselves, or have no text."""
_SETTINGS = frozenset(("tools", "functions", "mask", "weight", "train"))
"""Fields of a record that are read, beside its messages."""


class Piece(NamedTuple):
    """A text of a message.

    Attributes:
        what: What it is, for error messages.
        text: The text.
        kind: "content", "reasoning" or "call".
    """

    what: str
    text: str
    kind: str


def pieces_of(message: Message) -> Iterator[Piece]:
    """The texts of a message that a sample must hold."""
    if reasoning := message.get("reasoning_content"):
        yield Piece("reasoning", reasoning, "reasoning")
    contents = message["content"] or ()
    for content in [contents] if isinstance(contents, str) else (part["text"] for part in contents):
        thought = _thought(message, content)
        if thought:
            yield Piece("reasoning", thought[1], "reasoning")
        yield Piece("content", content[thought.end() :] if thought else content, "content")
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield Piece("tool call", function["name"], "call")
        arguments = function["arguments"]
        parsed = parsed_json(arguments) if isinstance(arguments, str) else arguments
        for value in _leaves(arguments if parsed is None else parsed):
            yield Piece("argument of a tool call", value, "call")
    for field, value in message.items():
        if field not in _READ and field not in DESCRIPTIONS:
            for text in strings_in(value):
                if len(text.split()) > 1:
                    yield Piece(f"field {field!r}", text, "content")


def unread_fields(record: Mapping[str, Any], conversation: Conversation, text: str) -> tuple[str, ...]:
    """The fields with text that the rendered ``text`` lacks, of a record beside its messages, and of messages.

    `check_complete` refuses a message's longer texts, so these are single words.
    """
    rendered = _Text(text)

    def lacks(name: str, value: Any) -> bool:
        words = 1 if name in DESCRIPTIONS else 0
        return any(len(text.split()) > words and not rendered.holds(text) for text in strings_in(value))

    read = _SETTINGS.union(messages_keys(record))
    beside = [str(name) for name, value in record.items() if name not in read and lacks(name, value)]
    fields = [
        name
        for message in conversation.messages
        for name, value in message.items()
        if name not in _READ and lacks(name, value)
    ]
    return (*beside, *(f"messages[].{name}" for name in dict.fromkeys(fields)))


class NoTools(Malformed):
    """The template leaves out the tools of a record."""


def check_texts(conversation: Conversation, chosen: Collection[int]) -> None:
    """Check the texts of a conversation before it is rendered.

    Raises:
        Malformed: a text has half of a character.
        Empty: no message to train on has text.
    """
    learned = False
    for place, message in enumerate(conversation.messages):
        for piece in pieces_of(message):
            if reason := surrogate_in(piece.text):
                raise Malformed(f"message {place + 1}, of the {message['role']}: {reason} of its {piece.what}")
            learned |= place in chosen and bool(piece.text.strip())
    if not learned:
        raise Empty("the turns of the assistant have no text")


def check_complete(conversation: Conversation, text: str, spans: Collection[Span], chosen: Collection[int]) -> None:
    """Check that the rendered ``text`` holds the conversation.

    The reasoning of turns that aren't trained on may be missing, because templates drop it when they serve, too.

    Args:
        spans: The ranges of characters that are trained on.
        chosen: The places of the messages to train on.

    Raises:
        Malformed: a text is missing, is misspelled, or is not trained on.
    """
    rendered, trained = _Text(text), _Text("\0".join(text[start:end] for start, end in spans))
    for place, message in enumerate(conversation.messages):
        where = f"of message {place + 1}, of the {message['role']}"
        for what, piece, kind in pieces_of(message):
            if place in chosen and not trained.holds(piece):
                if rendered.holds(piece):
                    raise Malformed(f"the chat template writes the {what} {where}, where it would not be trained on")
                hint = ""
                if kind == "reasoning":
                    last = "Train only on the last turn of each conversation (dataset_kwargs={'turns': 'last'}), or use"
                    hint = f". {'Use' if place == max(chosen) else last} a template that keeps it"
                raise Malformed(f"the chat template leaves out the {what} {where}, which should be trained on{hint}")
            if kind != "reasoning" and not rendered.holds(piece):
                raise Malformed(f"the chat template leaves out the {what} {where}")
        if reason := _misspelled(message, rendered):
            raise Malformed(f"the chat template writes the {reason} {where}")
    for tool in conversation.tools or ():
        name = tool.get("function", tool).get("name")
        if isinstance(name, str) and not rendered.holds(name):
            raise NoTools(f"the chat template leaves out the description of the tool {name!r}")


def check_context(conversation: Conversation, trained: str, chosen: Collection[int]) -> None:
    """Check that a probe's trained text holds nothing of messages that aren't chosen.

    Raises:
        Malformed: it does.
    """
    for place, message in enumerate(conversation.messages):
        for piece in pieces_of(message):
            if place not in chosen and piece.text.strip() and piece.text in trained:
                raise Malformed(
                    f"the {piece.what} of message {place + 1}, of the {message['role']}, would be trained on"
                )


def check_one_reasoning(turns: Collection[str]) -> None:
    """Check that no turn's text has two reasonings, as where a template writes an empty one before the one in the content.

    Raises:
        Malformed: a turn does.
    """
    if any(turn.count("</think>") > 1 for turn in turns):
        raise Malformed("the chat template writes a reasoning of its own before the one in the text of an answer")


def probe_of(conversation: Conversation, only: Optional[int] = None) -> Conversation:
    """The conversation with texts that occur nowhere else.

    Args:
        only: Replace the texts of this message alone, which gets one if it has none. None: of all messages.
    """
    messages = [
        _probe(message, place, needs_text=only is not None) if only in (None, place) else message
        for place, message in enumerate(conversation.messages)
    ]
    return replace(conversation, messages=messages)


def probe_span(text: str, place: int) -> Optional[Span]:
    """The range from the first to the last text of the probe's message at ``place``. None: there is none."""
    spans = [match.span() for match in re.finditer(f"zq{place}x[0-9]+q", text)]
    return (spans[0][0], spans[-1][1]) if spans else None


def shape_of(conversation: Conversation, chosen: Collection[int]) -> str:
    """What the probes of two conversations have in common if they are equal."""
    parts = [(sorted(message), message["role"], _kind(message)) for message in conversation.messages]
    return json.dumps([parts, sorted(chosen), bool(conversation.tools)], default=str)


def _kind(message: Message) -> Any:
    arguments = [_skeleton(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    content = message["content"]
    thought = _thought(message, content)
    return [bool(content), isinstance(content, str), thought is not None and bool(thought[1].strip()), arguments]


def _skeleton(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _skeleton(one) for key, one in value.items()}
    return [_skeleton(one) for one in value] if isinstance(value, list) else type(value).__name__


def _probe(message: Message, place: int, *, needs_text: bool) -> Message:
    count = 0

    def text(value: Any) -> Any:
        nonlocal count
        if isinstance(value, dict):
            return {key: text(one) for key, one in value.items()}
        if isinstance(value, list):
            return [text(one) for one in value]
        if isinstance(value, str) and value.strip():
            count += 1
            return f"zq{place}x{count}q"
        return value

    probe = dict(message)
    if isinstance(message["content"], list):
        probe["content"] = [{**part, "text": text(part["text"])} for part in message["content"]]
    else:
        probe["content"] = _around_thought(message, text)
    if "reasoning_content" in message:
        reasoning = text(message["reasoning_content"])
        probe |= {name: reasoning for name in _REASONING if name in message}
    if "tool_calls" in message:
        probe["tool_calls"] = [_probed_call(call, text) for call in message["tool_calls"]]
    if needs_text and not count and isinstance(message["content"], str):
        probe["content"] = text("empty")
    return probe


def _probed_call(call: dict[str, Any], change: Any) -> dict[str, Any]:
    """Changed name and arguments. An id with the name, as Kimi K2's, changes with it."""
    function = call["function"]
    name = change(function["name"])
    probe = {
        **call,
        "function": {**function, "name": name, "arguments": _changed_arguments(function["arguments"], change)},
    }
    if isinstance(call.get("id"), str):
        probe["id"] = call["id"].replace(function["name"], name)
    return probe


def _around_thought(message: Message, change: Any) -> Any:
    """Changed content. Tags of a thought stay, because templates look for them."""
    content = message["content"]
    thought = _thought(message, content)
    if thought is None:
        return change(content)
    inner, rest = thought[1], content[thought.end() :]
    blank = len(rest) - len(rest.lstrip())
    begin, end = thought.span(1)
    return (
        content[:begin]
        + inner[: len(inner) - len(inner.lstrip())] + change(inner.strip()) + inner[len(inner.rstrip()) :]
        + content[end : thought.end()] + rest[:blank] + change(rest[blank:])
    )  # fmt: skip


def _thought(message: Message, content: Any) -> Optional[re.Match[str]]:
    return _THINKING.match(content) if message["role"] == "assistant" and isinstance(content, str) else None


def _changed_arguments(arguments: Any, change: Any) -> Any:
    """Changed arguments, as JSON text if they were JSON text."""
    parsed = parsed_json(arguments) if isinstance(arguments, str) else None
    return change(arguments) if parsed is None else json.dumps(change(parsed), ensure_ascii=False)


class _Text:
    """A rendered text that is searched for the texts of messages."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def squeezed(self) -> str:
        return "".join(self.text.split())

    def holds(self, piece: str) -> bool:
        """Whether the piece is there, as it is, as part of JSON, or with other whitespace."""
        piece = piece.strip()
        if piece in self.text:
            return True
        escaped = [json.dumps(piece, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
        return any(one in self.text for one in escaped) or any(
            "".join(one.split()) in self.squeezed for one in (piece, *escaped)
        )


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            yield from _leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str):
        yield value
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)


def _misspelled(message: Message, rendered: _Text) -> Optional[str]:
    """Arguments or parts in Python's spelling, and arguments that are JSON within JSON. None: there are none."""
    if isinstance(message["content"], list) and repr(message["content"]) in rendered.text:
        return "content, as a Python list,"
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            if arguments.strip() and json.dumps(arguments, ensure_ascii=False) in rendered.text:
                return "arguments of a tool call, as text within JSON,"
        elif (
            arguments
            and repr(arguments) != json.dumps(arguments, ensure_ascii=False)
            and repr(arguments) in rendered.text
        ):
            return "arguments of a tool call, as a Python dict,"
    return None
