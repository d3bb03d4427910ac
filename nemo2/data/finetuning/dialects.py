# SPDX-License-Identifier: Apache-2.0
"""Reads conversations in the dialects of published sets and of the common training programs, and writes them in the
forms that chat templates read.

The common form is that of transformers: messages with ``role`` (system, developer, user, assistant, tool), ``content``
as text, ``reasoning_content``, and ``tool_calls`` whose arguments are objects. Templates differ in what they read of
it, so `forms` gives the alternatives that mean the same.
"""

import copy
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Optional

from nemo2.data.finetuning.sample import Malformed

MESSAGE_KEYS = ("messages", "conversations", "conversation")
"""The fields in which a record may have its messages."""
_PROMPTED = ("prompt", "completion")
"""TRL's fields: the messages of a prompt and of its completion."""
Message = dict[str, Any]

_COMMON_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
}
_CALL_ROLES = ("function_call", "tool_call", "tool_calls")
"""Roles of ShareGPT's tool sets, whose text is a call as JSON."""
_TOOL_ROLES = ("ipython", "observation", "function", "tool_response")
"""Names that templates give the role of a tool's result, besides "tool"."""
_CONTENTS = ("content", "value", "text")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = {"text": ("text", "value", "content"), "input_text": ("text",), "output_text": ("text",)}
_REASONING_PARTS = {"thinking": ("thinking", "text", "value"), "reasoning": ("value", "text", "reasoning")}
_CALL_PARTS = ("tool_call", "function_call")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos", "input_audio")
_TRAIN_MARKS = ("weight", "loss_weight", "loss_scale", "loss", "loss_mask", "train", "training", "trainable")
"""Fields of a message that say whether it is trained on: OpenAI, LLaMA-Factory, ms-swift, axolotl."""
_UNSUPPORTED_MARKS = ("train_detail", "training_detail", "mask", "masked", "label", "labels", "ignore", "ignored")
"""Fields that say it for parts of a message, or by rules of another program."""


@dataclass(frozen=True)
class Conversation:
    """A record's conversation in the common form.

    Attributes:
        messages: The messages in order.
        tools: The tools, as transformers describes them. None: none.
        marks: For each message, whether the record says that it is trained on. None: the record doesn't say.
    """

    messages: list[Message]
    tools: Optional[list[Any]]
    marks: list[Optional[bool]]

    @property
    def answers(self) -> list[int]:
        """The places of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]


def conversation_of(record: Any) -> Conversation:
    """The conversation of a record.

    Raises:
        Malformed: there are no messages, a message lacks its role or its text, or the record asks for something that
            isn't supported.
    """
    if not isinstance(record, Mapping):
        raise Malformed(f"a {type(record).__name__}, not a record with messages")
    raw, prompted = _raw_messages(record)
    messages, marks = [], []
    for place, message in enumerate(raw):
        read, mark = _message(message, place + 1)
        messages.append(read)
        marks.append(False if place < prompted and read["role"] == "assistant" else mark)
    system = record.get("system") or record.get("system_prompt")
    if system and not isinstance(system, str):
        raise Malformed(f"the system prompt beside the messages is a {type(system).__name__}, not text")
    if system and not any(one["role"] == "system" and one["content"] == system for one in messages):
        messages.insert(0, {"role": "system", "content": system})
        marks.insert(0, None)
    for key in _MEDIA:
        if record.get(key):
            raise Malformed(f"{key!r} beside the messages, but only text is supported")
    _check_marks_of_record(record, raw)
    return Conversation(messages, _tools(record), marks)


def messages_keys(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that the messages of a record are read from. Empty: it has none."""
    for key in MESSAGE_KEYS:
        if isinstance(_listed(record.get(key)), list):
            return (key,)
    prompted = all(isinstance(record.get(key), list) for key in _PROMPTED)
    return _PROMPTED if prompted else ()


def has_messages(record: Any) -> bool:
    """Whether a record is a conversation."""
    return isinstance(record, Mapping) and bool(messages_keys(record))


def _raw_messages(record: Mapping[str, Any]) -> tuple[list[Any], int]:
    """The messages as they stand in the record, and how many of them belong to its prompt."""
    keys = messages_keys(record)
    if keys:
        lists: list[list[Any]] = [_listed(record[key]) for key in keys]
        return [message for one in lists for message in one], len(lists[0]) if keys == _PROMPTED else 0
    fields = ", ".join(map(str, list(record)[:8])) or "none"
    raise Malformed(
        f"no list under any of {', '.join(map(repr, MESSAGE_KEYS))}; its fields are: {fields}. Records of prompts and "
        "answers are read by FineTuningDataModule"
    )


def _listed(value: Any) -> Any:
    """The list in JSON text. Any other value stays as it is."""
    return parsed_json(value) if isinstance(value, str) and value.lstrip().startswith("[") else value


# Messages


def _message(message: Any, number: int) -> tuple[Message, Optional[bool]]:
    if not isinstance(message, Mapping):
        raise Malformed(f"message {number} is a {type(message).__name__}, not an object with a role and content")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or not role.strip():
        raise Malformed(
            f"message {number} has no role ('role' or 'from'); its fields are: {', '.join(map(str, message))}"
        )
    role = role.strip().lower()
    for meant in difflib.get_close_matches(role, () if role in _ROLES else _COMMON_ROLES, n=1, cutoff=0.8):
        # A chat of several people may have a "user2".
        if role != meant and (meant == "assistant" or not role.startswith(meant)):
            untrained = ", whose turns aren't trained on" if meant == "assistant" else ""
            raise Malformed(f"message {number} has the role {role!r}{untrained} (did you mean {meant!r}?)")
    fields = {key: value for key, value in message.items() if key not in ("role", "from") and value is not None}
    where = f"message {number}, of the {role},"
    mark = _mark(fields, _ROLES.get(role, role), role, where)
    read: Message = {"role": "assistant" if role in _CALL_ROLES else _ROLES.get(role, role)}
    texts = [fields.pop(key) for key in _CONTENTS if key in fields]
    content, reasoning, calls = _content(texts[0] if texts else None, where)
    if any(other != texts[0] for other in texts[1:]):
        raise Malformed(f"{where} has two texts, under several of {', '.join(_CONTENTS)}")
    for key in _REASONING:
        other = fields.pop(key, None)
        if other and not isinstance(other, str):
            raise Malformed(f"{where} has {key!r} of type {type(other).__name__}, not text")
        if other and reasoning and other != reasoning:
            raise Malformed(f"{where} has two different reasonings")
        reasoning = other or reasoning
    if refusal := fields.pop("refusal", None):
        if content:
            raise Malformed(f"{where} has both content and a refusal")
        content = refusal
    if role in _CALL_ROLES:
        calls += _calls(content, where)
        content = None
    calls += _calls(fields.pop("tool_calls", None), where)
    calls += _calls(fields.pop("function_call", None), where)
    for key in _MEDIA:
        if fields.pop(key, None):
            raise Malformed(f"{where} has {key!r}, but only text is supported")
    if content is None and not calls and not reasoning:
        raise Malformed(f"{where} has neither content nor tool calls")
    read["content"] = content or ""  # templates read the content of each message, also of tool calls
    if reasoning:
        read["reasoning_content"] = reasoning
    if calls:
        read["tool_calls"] = calls
    return {**read, **fields}, mark


def _content(value: Any, where: str) -> tuple[Optional[str], Optional[str], list[Any]]:
    """The text, the reasoning and the calls of a message's content."""
    if value is None or isinstance(value, str):
        return value, None, []
    if isinstance(value, Mapping) and isinstance(value.get("parts"), list):
        value = value["parts"]
    if not isinstance(value, list):
        raise Malformed(f"{where} has content of type {type(value).__name__}, not text")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for part in value:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in _CALL_PARTS:
            calls += _calls(next((part[key] for key in (kind, "value", "function") if part.get(key)), None), where)
            continue
        names = _TEXT_PARTS.get(str(kind), _REASONING_PARTS.get(str(kind), ()))
        text = next((part[name] for name in names if part.get(name) is not None), None)
        if isinstance(text, list) and kind in _REASONING_PARTS:
            text, _, _ = _content(text, where)
        if not isinstance(text, str):
            raise Malformed(f"{where} has a part of type {kind!r}, but only text is supported")
        (texts if kind in _TEXT_PARTS else reasoning).append(text)
    return "".join(texts), "".join(reasoning) or None, calls


def _calls(value: Any, where: str) -> list[Any]:
    """Tool calls as transformers writes them: ``{"type": "function", "function": {"name", "arguments"}}``."""
    if isinstance(value, str) and value.strip():
        value = parsed_json(value) or value
    if not value:
        return []
    calls = []
    for call in [value] if isinstance(value, Mapping) else value if isinstance(value, list) else [value]:
        call = parsed_json(call) if isinstance(call, str) else call
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise Malformed(f"{where} has a tool call that is no JSON object with a name and arguments")
        function = {key: one for key, one in inner.items() if one is not None}
        if "arguments" not in function and "parameters" in function:
            function["arguments"] = function.pop("parameters")
        arguments = function.get("arguments", {})
        parsed = parsed_json(arguments) if isinstance(arguments, str) else arguments
        function["arguments"] = parsed if isinstance(parsed, Mapping) else arguments
        outer = {key: one for key, one in call.items() if one is not None} if inner is not call else {}
        calls.append({**outer, "type": "function", "function": function})
    return calls


def _mark(fields: Message, role: str, name: str, where: str) -> Optional[bool]:
    """Remove the fields that say whether a message is trained on, and return what they say."""
    marks = {key: fields.pop(key) for key in _TRAIN_MARKS if key in fields}
    for key in _UNSUPPORTED_MARKS:
        value = fields.pop(key, None)
        if value not in (None, "", []):
            raise Malformed(
                f"{where} has {key}={value!r}, which nemo2 doesn't support. 'weight' 0 keeps a message as context, 1 "
                "trains on it"
            )
    for key, value in marks.items():
        if value not in (0, 1):
            raise Malformed(f"{where} has {key} {value!r}: 0 keeps it as context, 1 trains on it")
        if value and role != "assistant" and name not in _CALL_ROLES:
            raise Malformed(f"{where} has {key} {value!r}, but only turns of the assistant can be trained on")
    values = {bool(value) for value in marks.values()}
    if len(values) > 1:
        raise Malformed(f"{where} has fields that contradict each other: {marks}")
    return values.pop() if values else None


def _check_marks_of_record(record: Mapping[str, Any], raw: list[Any]) -> None:
    """Refuse what a record says about all its messages, except for NeMo's default: train on everyone but the user."""
    kind = record.get("type")
    if kind in ("VALUE_TO_TEXT", "TEXT_TO_VALUE"):
        raise Malformed(f"type={kind!r}, NeMo's training on attributes, is not supported. Remove 'type' and the labels")
    mask = record.get("mask")
    if mask not in (None, "", False):
        spoken = {message.get("from", message.get("role")) for message in raw if isinstance(message, Mapping)}
        others = {_ROLES.get(name, name) for role in spoken - {mask} for name in (str(role).strip().lower(),)}
        if not isinstance(mask, str) or mask not in spoken or not others <= {"assistant", "system"}:
            raise Malformed(
                f"mask={mask!r}: NeMo leaves out this role's turns and trains on all others, but only turns of the "
                "assistant can be trained on. Set 'mask' to the role of the user"
            )
    for key in ("weight", "loss_weight", "sample_weight", "train"):
        if (value := record.get(key)) is not None and isinstance(value, int | float) and value != 1:
            raise Malformed(
                f"{key}={value!r}: weights of whole records are not supported. Remove the record or the field"
            )


def _tools(record: Mapping[str, Any]) -> Optional[list[Any]]:
    tools = record.get("tools") or record.get("functions")
    if record.get("functions") and tools != record["functions"]:
        raise Malformed("'tools' and 'functions' have different contents")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise Malformed(f"'tools' is text that is not JSON ({error})") from error
    if not tools:
        return None
    tools = [tools] if isinstance(tools, Mapping) else tools
    if not isinstance(tools, list):
        raise Malformed(f"'tools' is a {type(tools).__name__}, not a list")
    read = [parsed_json(tool) if isinstance(tool, str) else tool for tool in tools]
    for tool in read:
        if not isinstance(tool, Mapping) or not isinstance(tool.get("function", tool), Mapping):
            raise Malformed(f"'tools' has an entry that is no object with a name and parameters: {str(tool)[:40]}")
    return [{"type": "function", "function": tool} if "name" in tool else tool for tool in read]


def parsed_json(text: str) -> Any:
    """The value of JSON text. None: it isn't JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# Forms that mean the same

Change = Callable[[Conversation], Conversation]


def forms(conversation: Conversation, template: str) -> Iterator[Conversation]:
    """The conversation in the forms that templates read, the common form first."""
    choices = [
        [_with_role("tool", role) for role in _TOOL_ROLES if _quotes(template, role)],
        [_with_json_arguments],
        [_with_null_content],
        [_with_numbers, *([_with_names] if ".id" in template or _quotes(template, "id") else [])],
        [_with_parts],
        [_with_thinking, *([_with_inline_reasoning] if "</think>" in template else [])],
        [_with_one_system],
    ]
    if not _quotes(template, "developer"):
        conversation = _with_role("developer", "system")(conversation)
    tried: list[Conversation] = []
    # A change that a conversation has no use for leaves it equal, and it is not tried again.
    for changes in sorted((list(filter(None, some)) for some in product(*([None, *one] for one in choices))), key=len):
        if len(changes) > 3:
            return
        changed = conversation
        for change in changes:
            changed = change(changed)
        if changed not in tried:
            tried.append(changed)
            yield changed


def _quotes(template: str, role: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template


def _of_each_message(change: Callable[[Message], Message]) -> Change:
    return lambda conversation: replace(conversation, messages=[change(message) for message in conversation.messages])


def _with_role(role: str, other: str) -> Change:
    return _of_each_message(lambda message: {**message, "role": other} if message["role"] == role else message)


@_of_each_message
def _with_json_arguments(message: Message) -> Message:
    """OpenAI's form: arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**message, "tool_calls": calls}


@_of_each_message
def _with_null_content(message: Message) -> Message:
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


def _with_numbers(conversation: Conversation) -> Conversation:
    """Ids of nine digits, which Mistral's templates require."""
    return _with_ids(conversation, lambda name, number: f"{number + 1:09d}")


def _with_names(conversation: Conversation) -> Conversation:
    """Kimi K2's ids, which its template writes in place of names. Source: ``docs/tool_call_guidance.md`` of its release."""
    return _with_ids(conversation, lambda name, number: f"functions.{name}:{number}")


def _with_ids(conversation: Conversation, id_of: Callable[[str, int], str]) -> Conversation:
    """Ids of calls and their results, from the names and the numbers of the calls."""
    messages, pending, number = [], [], 0
    for message in conversation.messages:
        if message.get("tool_calls"):
            calls = []
            pending = []
            for call in message["tool_calls"]:
                pending.append((call.get("id"), id_of(call["function"]["name"], number)))
                calls.append({**call, "id": pending[-1][1]})
                number += 1
            message = {**message, "tool_calls": calls}
        elif message["role"] in ("tool", *_TOOL_ROLES) and pending:
            at = next((at for at, (old, _) in enumerate(pending) if old and old == message.get("tool_call_id")), 0)
            message = {**message, "tool_call_id": pending.pop(at)[1]}
        messages.append(message)
    return replace(conversation, messages=messages)


@_of_each_message
def _with_parts(message: Message) -> Message:
    """Content as a list of parts, which templates of models with images read."""
    content = message["content"]
    if not content or not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


@_of_each_message
def _with_thinking(message: Message) -> Message:
    """Reasoning under the name that GPT-OSS's templates read."""
    return {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message


@_of_each_message
def _with_inline_reasoning(message: Message) -> Message:
    """Reasoning within the content, for templates that know its tags and no field."""
    if "reasoning_content" not in message or not isinstance(message["content"], str | None):
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content'] or ''}"}


def _with_one_system(conversation: Conversation) -> Conversation:
    """The system messages at the start as one, for templates that read only the first."""
    messages, marks = conversation.messages, conversation.marks
    count = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    if count < 2 or any(not isinstance(one["content"], str) for one in messages[:count]):
        return conversation
    joined = {**messages[0], "content": "\n\n".join(message["content"] for message in messages[:count])}
    return replace(conversation, messages=[joined, *messages[count:]], marks=[marks[0], *marks[count:]])
