# SPDX-License-Identifier: Apache-2.0
"""Converts records of messages with the tokenizer's chat template, and finds the assistant's tokens exactly, to train
on them.

The template renders a conversation, which is tokenized once, so the ids equal those that the model sees when it is
served. The template also determines which tokens the assistant writes:

- ``{% generation %}`` blocks mark them. If the blocks leave out the token that ends each turn, it is added.
- Without blocks, the conversation is rendered up to each of the assistant's turns (with the generation prompt) and past
  it. The text between is the turn with its end token. Each rendering must be the beginning of the whole one. A template
  that rewrites earlier turns, as most reasoning templates do, breaks this, and the sample is rejected, because a search
  for strings would not find the tokens that the model writes.

Whitespace after the last special token of a turn is left out: it separates turns, and the model never writes it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Optional

from nemo2.data.finetuning.identity import identity_of
from nemo2.data.finetuning.rendering import render
from nemo2.data.finetuning.sample import Empty, Encoder, Malformed, Sample, Whole
from nemo2.data.tokenizer import BPETokenizer, Tokenizer
from nemo2.errors import ConfigError

Turns = Literal["all", "last"]
Span = tuple[int, int]
MESSAGE_KEYS = ("messages", "conversations", "conversation")
"""The fields in which a record may have its messages."""
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

NEMO_TEMPLATE = (
    "{%- set open = namespace(turn=false) -%}"
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{{- '<extra_id_0>System\n' + system + '\n' -}}"
    "{%- for message in messages if message.role != 'system' -%}"
    "{{- ('' if open.turn else '<extra_id_1>') + message.role.capitalize() + '\n' -}}"
    "{%- set open.turn = message.role == 'assistant' -%}"
    "{%- if open.turn -%}"
    "{%- generation -%}{{- message.content + '\n<extra_id_1>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message.content + '\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- ('' if open.turn else '<extra_id_1>') + 'Assistant\n' -}}{%- endif -%}"
)
"""NeMo's own format of turns."""


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """Encode conversations under ``messages`` (role and content) or ``conversations`` (from and value), with a record's
    ``tools``.

    Attributes:
        tokenizer: An `AutoTokenizer`, or a `BPETokenizer` together with ``chat_template``.
        chat_template: Jinja text, or the path of a file with it. None: the tokenizer's own.
        turns: Train on "all" of the assistant's turns or only on the "last".

    Raises:
        ConfigError: on first use, if there is no template, or no Hugging Face tokenizer to render it.
        SecurityError: at the first record, if the template accesses more than its messages (`render`).
    """

    tokenizer: Tokenizer
    chat_template: Optional[str] = None
    turns: Turns = "all"

    def __post_init__(self) -> None:
        if self.turns not in ("all", "last"):
            raise ConfigError(f"turns={self.turns!r}: must be 'all' or 'last', the turns of the assistant to train on.")

    @property
    def identity(self) -> Mapping[str, Any]:
        import transformers

        return {
            "encoder": "chat",
            "template": self.template,
            "turns": self.turns,
            "tokenizer": identity_of(self.tokenizer),
            "transformers": transformers.__version__,
        }

    @cached_property
    def template(self) -> str:
        """The Jinja text."""
        given = self.chat_template
        if given is not None:
            looks_like_a_path = "{" not in given and "\n" not in given
            if looks_like_a_path and not Path(given).expanduser().is_file():
                raise ConfigError(f"chat_template={given!r} is neither a template nor an existing file.")
            return Path(given).expanduser().read_text("utf-8") if looks_like_a_path else given
        own = getattr(self._hf, "chat_template", None)
        if isinstance(own, Mapping):
            own = own.get("default")
        if not own:
            raise ConfigError(
                f"{self.tokenizer!r} has no chat template. Use the tokenizer of the chat model, or set "
                f"dataset_kwargs={{'chat_template': ...}} to a template or its file."
            )
        return str(own)

    @cached_property
    def _hf(self) -> Any:
        """The ``transformers`` object."""
        found = getattr(self.tokenizer, "tokenizer", None)
        if found is not None:
            return found
        if not isinstance(self.tokenizer, BPETokenizer):
            raise ConfigError(
                f"data.tokenizer={self.tokenizer!r}: chat templates require a Hugging Face tokenizer. Use "
                "AutoTokenizer, or BPETokenizer with the model's tokenizer.json."
            )
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise ConfigError("Chat templates require the package transformers: pip install 'nemo2[hf]'.") from error
        backend = self.tokenizer.backend
        named = {
            "eos_token": self.tokenizer.eos_id,
            "bos_token": self.tokenizer.bos_id,
            "pad_token": self.tokenizer.pad_id,
        }
        spelled = {name: backend.id_to_token(token) for name, token in named.items() if token is not None}
        return PreTrainedTokenizerFast(tokenizer_object=backend, **spelled)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self._hf, "added_tokens_decoder", {})
        return frozenset(self._hf.all_special_ids) | {token for token, what in added.items() if what.special}

    @cached_property
    def _has_blocks(self) -> bool:
        """Whether the template marks the assistant's tokens itself.

        Raises:
            ConfigError: the template is NeMo's, and the tokenizer lacks its tokens.
        """
        if self.template == NEMO_TEMPLATE:
            vocabulary = self._hf.get_vocab()
            missing = [token for token in ("<extra_id_0>", "<extra_id_1>") if token not in vocabulary]
            if missing:
                raise ConfigError(
                    f"{self.tokenizer!r} has no token {' and no token '.join(missing)}, which NeMo's own conversation "
                    "format uses to mark turns. Set use_hf_tokenizer_chat_template=True to use the tokenizer's "
                    f"template, or set dataset_kwargs={{'chat_template': ...}}."
                )
        return _GENERATION.search(self.template) is not None

    def encode(self, record: Any) -> Whole:
        messages, tools = messages_of(record)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise Empty("no turn of the assistant")
        chosen = answers[-1:] if self.turns == "last" else answers
        # OpenAI's files set this for single messages.
        chosen = [place for place in chosen if _weight_of(messages[place], place)]
        if not chosen:
            raise Empty("every turn of the assistant has weight 0")
        found = self._by_blocks if self._has_blocks else self._by_prefixes
        ids, trained = found(messages, tools, answers, chosen)
        if not any(trained):
            raise Empty("the chat template shows no text of the assistant")
        return Whole(Sample(ids, trained))

    def question(self, messages: list[Any]) -> list[int]:
        """The ids before the assistant's answer to the last of ``messages``.

        Raises:
            ConfigError: the template can't render these messages.
        """
        try:
            text = self._render(messages, None, tokenize=False, add_generation_prompt=True)
        except Malformed as error:
            raise ConfigError(f"These turns cannot be shown to the model: {error}.") from error
        return list(self._hf(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def end_of_turn(self) -> Optional[int]:
        """The token with which the assistant ends its turn. None: the template has none."""
        turn = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}
        try:
            sample = self.encode(turn).sample
        except (Malformed, Empty):
            return None
        last = max(place for place, trained in enumerate(sample.trained) if trained)
        return sample.ids[last] if sample.ids[last] in self._special else None

    # Templates with {% generation %}

    def _by_blocks(
        self, messages: list[Any], tools: Any, answers: list[int], chosen: list[int]
    ) -> tuple[list[int], list[bool]]:
        encoded = self._render(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, trained = list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]
        self._add_ends(ids, trained)
        if chosen == answers:
            return ids, trained
        runs = list(_runs(trained))
        if len(runs) != len(answers):
            raise Malformed(
                f"the template's {{% generation %}} blocks mark {len(runs)} pieces for {len(answers)} turns of the "
                "assistant, so nemo2 cannot select some of the turns"
            )
        for place, (start, end) in zip(answers, runs, strict=True):
            if place not in chosen:
                trained[start:end] = [False] * (end - start)
        return ids, trained

    def _add_ends(self, ids: list[int], trained: list[bool]) -> None:
        """Train on the token that ends a turn if the blocks end before it."""
        runs = list(_runs(trained))
        if not runs or runs[-1][1] >= len(ids):
            return
        ends_with = ids[runs[-1][1]]
        if ends_with in self._special and ids[runs[-1][1] - 1] not in self._special:
            for _, end in runs:
                if ids[end] == ends_with:
                    trained[end] = True

    # Templates without

    def _by_prefixes(
        self, messages: list[Any], tools: Any, answers: list[int], chosen: list[int]
    ) -> tuple[list[int], list[bool]]:
        del answers
        whole = self._render(messages, tools, tokenize=False)
        spans = [self._turn(messages, tools, place, whole) for place in chosen]
        encoded = self._tokenized(whole)
        if "offset_mapping" in encoded:
            ids, places = list(encoded["input_ids"]), encoded["offset_mapping"]
            trained = [
                any(start < end and first < end and start < last for first, last in spans) for start, end in places
            ]
        else:
            ids, trained = self._without_offsets(whole, spans)
        for start, end in _runs(trained):
            for place in range(self._end_of_turn(ids, start, end), end):
                trained[place] = False
        return ids, trained

    def _turn(self, messages: list[Any], tools: Any, place: int, whole: str) -> Span:
        """The range of characters that the assistant writes in the turn at ``place``."""
        before = self._render(messages[:place], tools, tokenize=False, add_generation_prompt=True)
        past = whole if place + 1 == len(messages) else self._render(messages[: place + 1], tools, tokenize=False)
        if not whole.startswith(before) or not whole.startswith(past):
            raise Malformed(
                f"the chat template renders turn {place + 1} of {len(messages)} differently when the conversation "
                "continues, as templates that drop earlier reasoning do, so nemo2 cannot tell which tokens are the "
                f"assistant's. Use a template with {{% generation %}} blocks (dataset_kwargs={{'chat_template': "
                f"...}}), or train only on the last turn of each conversation (dataset_kwargs={{'turns': 'last'}})"
            )
        return len(before), len(past)

    def _tokenized(self, text: str) -> Any:
        offsets = {"return_offsets_mapping": True} if getattr(self._hf, "is_fast", False) else {}
        return self._hf(text, add_special_tokens=False, **offsets)

    def _without_offsets(self, whole: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
        """The mask from the ids of each beginning of the text, for tokenizers that don't report the characters of a
        token."""
        ids = list(self._hf(whole, add_special_tokens=False)["input_ids"])
        trained = [False] * len(ids)
        for span in spans:
            first, last = (list(self._hf(whole[:at], add_special_tokens=False)["input_ids"]) for at in span)
            if ids[: len(first)] != first or ids[: len(last)] != last:
                raise Malformed(
                    "the tokenizer merges the start of the assistant's text with the text before it into one token"
                )
            trained[len(first) : len(last)] = [True] * (len(last) - len(first))
        return ids, trained

    def _end_of_turn(self, ids: Sequence[int], start: int, end: int) -> int:
        """The end of a turn's last special token, if only whitespace follows it; else ``end``."""
        last = next((place for place in range(end - 1, start - 1, -1) if ids[place] in self._special), None)
        if last is None or self._hf.decode(list(ids[last + 1 : end])).strip():
            return end
        return last + 1

    def _render(self, messages: list[Any], tools: Any, **options: Any) -> Any:
        given = self.chat_template
        source = repr(self.tokenizer) if given is None else given if "{" not in given else "these settings"
        return render(self._hf, messages, tools=tools, template=self.template, source=source, **options)


def _weight_of(message: dict[str, Any], place: int) -> bool:
    """Remove and return a message's weight: whether it is trained on.

    Raises:
        Malformed: the weight is neither 0 nor 1.
    """
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise Malformed(f"message {place + 1} has weight {weight!r}: 0 keeps it as context, 1 trains on it")
    return bool(weight)


def messages_of(record: Any) -> tuple[list[dict[str, Any]], Optional[list[Any]]]:
    """The messages of a record, each with a role, and its tools.

    Raises:
        Malformed: there are no messages, or a message lacks its role.
    """
    if not isinstance(record, Mapping):
        raise Malformed(f"a {type(record).__name__}, not a record with messages")
    key = next((key for key in MESSAGE_KEYS if isinstance(record.get(key), list)), None)
    if key is None:
        fields = ", ".join(map(str, list(record)[:8])) or "none"
        raise Malformed(f"no list under any of {', '.join(map(repr, MESSAGE_KEYS))}; its fields are: {fields}")
    messages = [_message(message, place + 1) for place, message in enumerate(record[key])]
    if record.get("system") and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise Malformed(f"'tools' is text that is not JSON ({error})") from error
    return messages, tools or None


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Malformed(f"message {number} is a {type(message).__name__}, not an object with a role and content")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or not role:
        raise Malformed(
            f"message {number} has no role ('role' or 'from'); its fields are: {', '.join(map(str, message))}"
        )
    told = {key: value for key, value in message.items() if key not in ("role", "from", "value") and value is not None}
    if "content" not in told and message.get("value") is not None:
        told["content"] = message["value"]
    if "content" not in told and not told.get("tool_calls"):
        raise Malformed(f"message {number}, of the {role}, has neither content nor tool calls")
    # Templates read the content of each message, also of tool calls.
    return {"role": _ROLES.get(role.lower(), role.lower()), "content": told.pop("content", ""), **told}


def _runs(flags: Sequence[bool]) -> Iterator[Span]:
    """The starts and ends of consecutive set flags."""
    start = None
    for place, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            yield start, place
            start = None
