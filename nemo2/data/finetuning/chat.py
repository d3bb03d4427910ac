# SPDX-License-Identifier: Apache-2.0
"""Converts records of messages with the tokenizer's chat template, and finds the assistant's tokens exactly, to train
on them.

The template renders a conversation, which is tokenized once, so the ids equal those that the model sees when it is
served. The template also determines which tokens the assistant writes:

- ``{% generation %}`` blocks mark them. If the blocks leave out the token that ends each turn, it is added.
- Without blocks, the conversation is rendered up to each of the assistant's turns (with the generation prompt) and past
  it. The text between is the turn with its end token. If a rendering is not the beginning of the whole one, the turn's
  text is replaced by a probe, whose place in the rendering tells where the turn stands. A sample is rejected where even
  that fails, because a search for strings would not find the tokens that the model writes.

A record is rejected if the rendering lacks some of its text, or doesn't train on what must be learned
(`nemo2.data.finetuning.completeness`).

Whitespace after the last special token of a turn is left out: it separates turns, and the model never writes it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, Optional, Union

from nemo2.base.advice import advice
from nemo2.base.backend.extras import install
from nemo2.base.errors import ConfigError
from nemo2.base.names import check_choice
from nemo2.data.documents import tokenized, unknown_in
from nemo2.data.finetuning.completeness import (
    NoTools,
    Span,
    check_complete,
    check_context,
    check_one_reasoning,
    check_texts,
    probe_of,
    probe_span,
    shape_of,
    unread_fields,
)
from nemo2.data.finetuning.dialects import Conversation, conversation_of, forms
from nemo2.data.finetuning.rendering import RENDERER, Prefix, Rendered
from nemo2.data.finetuning.sample import Empty, Encoder, Malformed, Sample, Unread, strings_in
from nemo2.data.special_text import Marks, Pieces, special_in
from nemo2.data.tokenizer import BPETokenizer, Tokenizer, identity_of

Turns = Literal["all", "last"]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TAG = re.compile(r"</?[^\s<>]+>")
"""Such as ``<think>`` and ``<tool_call>``, which need not be special tokens."""
_MOST_SHAPES = 1024

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
PLAIN_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message.role.capitalize() + ':\\n' + message.content -}}"
    "{{- eos_token if message.role == 'assistant' -}}{{- '\n' -}}"
    "{%- endfor -%}"
    "{{- 'Assistant:\\n' if add_generation_prompt -}}"
)
"""Turns as text, for a base model. It needs no token but the one that ends a text. An answer is a line of its own, because most
tokenizers would join a blank before it with its first word."""
_TEMPLATES = {"plain": PLAIN_TEMPLATE}


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """Encode conversations under ``messages`` (role and content) or ``conversations`` (from and value), with a record's
    ``tools``.

    Attributes:
        tokenizer: An `AutoTokenizer`, or a `BPETokenizer` together with ``chat_template``.
        chat_template: Jinja text, the path of a file with it, the name of one of the tokenizer's own, or "plain"
            (`PLAIN_TEMPLATE`). None: the tokenizer's own, and for conversations with tools its own named "tool_use" if
            there is one.
        chat_template_kwargs: Variables that the template reads, under transformers' name: {"enable_thinking": False} for Qwen 3,
            GLM-4.5, SmolLM 3 and Nemotron 3 Nano. None: none.
        turns: Train on "all" of the assistant's turns or only on the "last".
        special_as_text: Encode special tokens that a record's text spells as plain text. Those of the template stay special.

    Raises:
        ConfigError: ``chat_template_kwargs`` has a variable that nemo2 sets, or isn't plain data. On first use: there is no
            template, or no Hugging Face tokenizer to render it.
        SecurityError: at the first record, if the template accesses more than its messages, or exceeds a limit
            (`nemo2.data.finetuning.rendering`).
    """

    tokenizer: Tokenizer
    chat_template: Optional[str] = None
    chat_template_kwargs: Optional[Mapping[str, Any]] = None
    turns: Turns = "all"
    special_as_text: bool = False

    def __post_init__(self) -> None:
        check_choice("turns", self.turns, Turns)
        _check_variables(self.chat_template_kwargs or {})

    @property
    def identity(self) -> Mapping[str, Any]:
        import transformers

        return {
            "encoder": "chat",
            "template": self.template,
            "template with tools": None if self._with_tools is None else self._with_tools.template,
            "turns": self.turns,
            "special_as_text": self.special_as_text,
            "tokenizer": identity_of(self.tokenizer),
            "transformers": transformers.__version__,
            **({"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}),
        }

    @cached_property
    def template(self) -> str:
        """The Jinja text."""
        template_setting = self.chat_template
        if template_setting is not None and ("{" in template_setting or "\n" in template_setting):
            return template_setting
        if template_setting is not None and Path(template_setting).expanduser().is_file():
            return Path(template_setting).expanduser().read_text("utf-8")
        own = self._own_templates
        if (template := {**_TEMPLATES, **own}.get(template_setting or "default")) is None:
            named = f" The tokenizer's own templates are named {', '.join(map(repr, own))}." if own else ""
            raise ConfigError(
                f"{self.tokenizer!r} has no chat template, as the tokenizers of base models.{named} "
                + advice(
                    "Add data.dataset_kwargs.chat_template=plain (--chat-template plain for a preview), ",
                    "Set dataset_kwargs={'chat_template': 'plain'}, ",
                )
                + "or name a file with a template in place of plain. A chat model brings its own."
                if template_setting is None
                else f"chat_template={template_setting!r} is neither a template nor an existing file, nor 'plain'.{named}"
            )
        return template

    @property
    def has_template(self) -> bool:
        """Whether ``chat_template`` is set, or the tokenizer has its own."""
        return self.chat_template is not None or "default" in self._own_templates

    @property
    def explicit_template(self) -> Optional[str]:
        """The Jinja text of ``chat_template``. None: it isn't set, and the tokenizer's own is used."""
        return None if self.chat_template is None else self.template

    @property
    def _own_templates(self) -> dict[str, str]:
        """The tokenizer's own templates by their names. A single one is the "default"."""
        own = getattr(self._hf, "chat_template", None)
        named = own if isinstance(own, Mapping) else {"default": own} if own else {}
        return {str(name): str(text) for name, text in named.items()}

    @cached_property
    def _with_tools(self) -> Optional["ChatEncoder"]:
        """The encoder of conversations with tools, for which transformers takes the template named "tool_use". None: there is
        no such template, or another one is requested."""
        named = None if self.chat_template is not None else self._own_templates.get("tool_use")
        return None if named is None else replace(self, chat_template=named)

    @cached_property
    def _hf(self) -> Any:
        """The ``transformers`` object."""
        tokenizer = getattr(self.tokenizer, "tokenizer", None)
        if tokenizer is not None:
            return tokenizer
        if not isinstance(self.tokenizer, BPETokenizer):
            raise ConfigError(
                f"data.tokenizer={self.tokenizer!r}: chat templates require a Hugging Face tokenizer. Use "
                + advice(
                    "data.tokenizer=AutoTokenizer(pretrained_model_name=FOLDER), or --tokenizer FOLDER for a preview.",
                    "AutoTokenizer, or BPETokenizer with the model's tokenizer.json.",
                )
            )
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise ConfigError(f"Chat templates require the package transformers: {install('hf')}.") from error
        backend = self.tokenizer.backend
        ids = {name: getattr(self.tokenizer, f"{name}_id") for name in ("eos", "bos", "pad")}
        special = {f"{name}_token": backend.id_to_token(token) for name, token in ids.items() if token is not None}
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=self.tokenizer.chat_template, **special)

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

    def check(self, record: Any) -> Unread:
        self._conversation(record)
        return Unread()

    def _conversation(self, record: Any) -> Conversation:
        conversation = conversation_of(record)
        own = record.get("chat_template_kwargs")
        if isinstance(own, Mapping):  # in a table, each record has the variables of all
            own = {name: value for name, value in own.items() if value is not None}
        if own and own != (self.chat_template_kwargs or {}):
            raise Malformed(
                f"its own chat_template_kwargs={own!r} aren't those of the run, which all records are rendered with. Set "
                "dataset_kwargs={'chat_template_kwargs': ...}, or remove the field"
            )
        if not conversation.answers:
            roles = dict.fromkeys(message["role"] for message in conversation.messages)
            raise Empty(f"no turn of the assistant; the roles are {', '.join(map(repr, roles)) or 'none'}")
        if not self._chosen(conversation):
            raise Empty("every turn of the assistant has weight 0")
        check_texts(conversation, self._chosen(conversation))
        return conversation

    def encode(self, record: Any) -> Sample:
        conversation = self._conversation(record)
        if conversation.tools and self._with_tools is not None:
            return self._with_tools.encode(record)
        contents = [{**message, "role": None} for message in conversation.messages]
        special = special_in(strings_in([contents, conversation.tools]), self._special_words)
        marks = Marks(self._special_words) if special is not None and self.special_as_text else None
        if marks is not None:
            hidden = marks.hide(conversation.messages), marks.hide(conversation.tools)
            conversation = replace(conversation, messages=hidden[0], tools=hidden[1])
        conversation = self._form_of(conversation)
        chosen = self._chosen(conversation)
        text, spans = self._rendered(conversation, chosen)
        if not any(start < end for start, end in spans):
            raise Empty("the chat template shows no text of the assistant")
        check_complete(conversation, text, spans, chosen)
        sample = self._sample(text, spans, marks)
        beside = unread_fields(record, conversation, text if marks is None else marks.show(text))
        return replace(sample, special=special, beside=beside)

    def _chosen(self, conversation: Conversation) -> list[int]:
        """The places of the messages to train on."""
        answers = conversation.answers
        chosen = answers[-1:] if self.turns == "last" else answers
        return [place for place in chosen if conversation.marks[place] is not False]

    def _form_of(self, conversation: Conversation) -> Conversation:
        """The first form of the conversation of which the template shows everything.

        Raises:
            Malformed: there is none. The reason is that of the common form.
        """
        shape = shape_of(conversation, self._chosen(conversation))
        cached = self._form_of_shape.get(shape)
        if isinstance(cached, Malformed):
            raise type(cached)(*cached.args)
        if cached is not None:
            return next(form for at, form in enumerate(forms(conversation, self.template)) if at == cached)
        reasons: list[Malformed] = []
        for number, form in enumerate(forms(conversation, self.template)):
            probe, chosen = probe_of(form), self._chosen(form)
            try:
                text, spans = self._rendered(probe, chosen)
                check_complete(probe, text, spans, chosen)
                trained = [text[start:end] for start, end in spans]
                check_context(probe, "".join(trained), chosen)
                check_one_reasoning(trained)
            except Malformed as error:
                reasons.append(error)
            else:
                self._remember(shape, number)
                return form
        # A form of which only the tools are missing tells more than an error of the common form.
        reason = next((reason for reason in reasons if isinstance(reason, NoTools)), reasons[0])
        self._remember(shape, type(reason)(*reason.args))
        raise reason

    def _remember(self, shape: str, outcome: Union[int, Malformed]) -> None:
        if len(self._form_of_shape) < _MOST_SHAPES:
            self._form_of_shape[shape] = outcome

    @cached_property
    def _form_of_shape(self) -> dict[str, Union[int, Malformed]]:
        """For each shape of a conversation, the number of its form, or why there is none."""
        return {}

    def question(self, messages: list[Any]) -> list[int]:
        """The ids before the assistant's answer to the last of ``messages``.

        Raises:
            ConfigError: the template can't render these messages.
        """
        try:
            conversation = conversation_of({"messages": [*messages, _turn("assistant")]})
            form = self._form_of(replace(conversation, marks=[False] * len(messages) + [True]))
            text = self._text(self._render(form.messages, Prefix(len(form.messages) - 1, prompt=True))[0])
            return self._tokenized(text)[0]
        except Malformed as error:
            raise ConfigError(f"These turns cannot be shown to the model: {error}.") from error

    @cached_property
    def end_of_turn(self) -> Optional[int]:
        """The token with which the assistant ends its turn. None: the template has none."""
        turn = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}
        try:
            sample = self.encode(turn)
        except (Malformed, Empty):
            return None
        last = max(place for place, trained in enumerate(sample.trained) if trained)
        return sample.ids[last] if sample.ids[last] in self._special else None

    # From messages to text

    def _rendered(self, conversation: Conversation, chosen: list[int]) -> tuple[str, list[Span]]:
        """The text of a conversation, and the ranges of characters that the chosen turns write."""
        if self._has_blocks:
            rendering = self._render(conversation.messages, Prefix(), tools=conversation.tools)[0]
            text = self._text(rendering)
            return text, self._chosen_blocks(rendering.spans, conversation, chosen)  # pyright: ignore
        return self._by_prefixes(conversation, chosen)

    def _chosen_blocks(self, spans: list[Span], conversation: Conversation, chosen: list[int]) -> list[Span]:
        answers = conversation.answers
        if chosen == answers:
            return spans
        if len(spans) != len(answers):
            raise Malformed(
                f"the template's {{% generation %}} blocks mark {len(spans)} pieces for {len(answers)} turns of the "
                "assistant, so nemo2 cannot select some of the turns"
            )
        return [span for place, span in zip(answers, spans, strict=True) if place in chosen]

    def _by_prefixes(self, conversation: Conversation, chosen: list[int]) -> tuple[str, list[Span]]:
        messages, tools = conversation.messages, conversation.tools
        prefixes = [Prefix()]
        for place in chosen:
            prefixes += [Prefix(place, prompt=True), Prefix(place + 1)]
        rendering, *others = self._render(messages, *prefixes, tools=tools)
        text = self._text(rendering)
        spans: list[Span] = []
        for place, before, past in zip(chosen, others[::2], others[1::2], strict=True):
            starts = not isinstance(before, Malformed) and text.startswith(before.text)
            last = place + 1 == len(messages)
            if starts and (last or (not isinstance(past, Malformed) and text.startswith(past.text))):
                spans.append((len(before.text), len(text if last else past.text)))  # pyright: ignore
            else:
                spans.append(self._located(conversation, place, text, before))
        closing = self._closing
        if spans and closing and spans[-1][1] == len(text) and text.rstrip().endswith(closing):
            spans[-1] = (spans[-1][0], len(text.rstrip()) - len(closing))
        return text, spans

    def _located(self, conversation: Conversation, place: int, text: str, before: Rendered) -> Span:
        """The range of the turn at ``place`` in a template that renders its surroundings differently when the
        conversation continues. Its text is replaced by a probe, to find where it stands."""
        messages = probe_of(conversation, only=place).messages
        prefixes = Prefix(), Prefix(place + 1), Prefix(place)
        whole, past, unprompted = self._render(messages, *prefixes, tools=conversation.tools)
        where = f"turn {place + 1} of {len(messages)}"
        probed, ended = self._text(whole), self._text(past)
        span, span_past = probe_span(probed, place), probe_span(ended, place)
        if span is None or span_past is None:
            raise Malformed(f"the chat template leaves out the text of {where}")
        head, tail = probed[: span[0]], probed[span[1] :]
        if not text.startswith(head) or not text.endswith(tail) or len(head) + len(tail) > len(text):
            raise Malformed(
                f"the chat template renders other messages differently depending on the text of {where}, so nemo2 cannot "
                f"tell which tokens are the assistant's{_ADVICE}"
            )
        if isinstance(before, Malformed):
            start = _after(head, self._prompt)
        else:
            start = len(self._shared(before.text, head))
            shared = 0 if isinstance(unprompted, Malformed) else len(self._shared(before.text, unprompted.text))
            if start < shared:
                raise Malformed(
                    f"the chat template renders the messages before {where} differently when the conversation continues: "
                    f"{before.text[start : start + 40]!r} becomes {head[start : start + 40]!r}, so nemo2 cannot tell which "
                    f"tokens are the assistant's{_ADVICE}"
                )
        return start, len(text) - len(tail) + len(self._shared(tail, ended[span_past[1] :]))

    def _shared(self, one: str, other: str) -> str:
        """The common beginning of two texts, without a part of a special token or of a tag."""
        length = len(commonprefix([one, other]))
        for text in (one, other):
            for pattern in (self._special_texts, _TAG):
                for match in pattern.finditer(text):
                    if match.start() < length < match.end():
                        length = match.start()
        return one[:length]

    @cached_property
    def _special_texts(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_words)) or r"(?!)")

    @cached_property
    def _special_words(self) -> list[str]:
        """The special tokens as text, the longest first."""
        words = filter(None, (self._hf.convert_ids_to_tokens(token) for token in self._special))
        return sorted(words, key=len, reverse=True)

    @cached_property
    def _closing(self) -> str:
        """What the template writes only behind the last message, after the end of the assistant's turn."""
        shared, last, _ = self._tails
        return last[len(shared) :].strip() if self._special_texts.search(shared) else ""

    @cached_property
    def _final_token(self) -> Optional[int]:
        """The token that ends a last turn to which the template gives no end: the one that begins a next message, or the
        tokenizer's end-of-sequence token."""
        _, last, inner = self._tails
        following = self._special_texts.match(inner[len(commonprefix([last, inner])) :].lstrip())
        return self._hf.convert_tokens_to_ids(following[0]) if following else self.tokenizer.eos_id

    @cached_property
    def _tails(self) -> tuple[str, str, str]:
        """What the template writes behind an answer: in every place, behind the last one, and before a next message."""
        turns = Conversation([_turn("user"), _turn("assistant"), _turn("user")], None, [None] * 3)
        messages = probe_of(turns).messages
        tails = []
        for one in self._render(messages, Prefix(2), Prefix()):
            span = None if isinstance(one, Malformed) else probe_span(one.text, 1)
            if span is None:
                return "", "", ""
            tails.append(one.text[span[1] :])  # pyright: ignore[reportAttributeAccessIssue]
        return self._shared(*tails), tails[0], tails[1]

    @cached_property
    def _prompt(self) -> str:
        """What the template writes before an answer. Empty: it can't be told."""
        after, before = self._render([_turn("user")], Prefix(), Prefix(prompt=True))
        if isinstance(after, Malformed) or isinstance(before, Malformed):
            return ""
        return before.text[len(commonprefix([after.text, before.text])) :]

    def _render(self, messages: Sequence[Any], *prefixes: Prefix, tools: Any = None) -> list[Rendered]:
        template = self.chat_template
        source = repr(self.tokenizer) if template is None else template if "{" not in template else "these settings"
        variables = {**self._hf.special_tokens_map, "documents": None, **self._own_variables, "tools": tools}
        return RENDERER.render(messages, prefixes, template=self.template, source=source, variables=variables)

    @cached_property
    def _own_variables(self) -> Mapping[str, Any]:
        """``chat_template_kwargs``, after a check that the template reads them.

        Raises:
            ConfigError: it doesn't.
        """
        own, templates = self.chat_template_kwargs or {}, (self, self._with_tools or self)
        for name in own:
            if not any(re.search(rf"\b{re.escape(name)}\b", template.template) for template in templates):
                raise ConfigError(
                    f"chat_template_kwargs has {name!r}, which the chat template does not read: remove it."
                )
        return own

    @staticmethod
    def _text(rendered: Rendered) -> str:
        if isinstance(rendered, Malformed):
            raise rendered
        return rendered.text

    # From text to tokens

    def _sample(self, text: str, spans: Sequence[Span], marks: Optional[Marks]) -> Sample:
        if marks is None:
            ids, places = self._tokenized(text)
        else:
            pieces = self._tokenized_with(marks, text)
            ids, places = [token for token, _ in pieces], [place for _, place in pieces]
            spans = [(len(marks.show(text[:start])), len(marks.show(text[:end]))) for start, end in spans]
            text = marks.show(text)
        trained = self._trained_by_prefixes(text, ids, spans) if places is None else _trained(places, spans)
        self._end_turns(ids, trained)
        return Sample(ids, trained, lost=self._lost(text, ids, places))

    def _lost(self, text: str, ids: list[int], places: Optional[Sequence[Span]]) -> Optional[str]:
        """What the tokenizer has no tokens for, or leaves out. None: nothing."""
        if (unknown := unknown_in(ids, self.tokenizer)) is not None or places is None:
            return unknown
        end = 0
        for start, stop in (*places, (len(text), len(text))):
            if text[
                end:start
            ].strip():  # not necessarily these: the places behind a character without a token are shifted
                return "some characters have no token"
            end = max(end, stop)
        return None

    def _end_turns(self, ids: list[int], trained: list[bool]) -> None:
        """Train on the token that ends each turn, and not on whitespace behind it.

        A template may begin the next message right behind an answer. Its first token, if it is special, is then what
        ends the turn. It also ends a last turn (`_final_token`). A template may also write the prompt of an answer behind
        every conversation: what begins a message doesn't end the turn if another special token does.
        """
        runs = list(_runs(trained))
        behind_last = ids[runs[-1][1]] if runs[-1][1] < len(ids) else None
        # The token that begins a message: the first special one, except for one that begins or ends a text.
        eos, bos = self.tokenizer.eos_id, self.tokenizer.bos_id
        texts = {eos, bos} if sum(token == bos for token in ids) < 2 else {eos}
        opening = next((token for token in ids if token in self._special and token not in texts), None)
        for start, whole_end in runs:
            end = self._before_opening(ids, start, whole_end, opening)
            trained[end:whole_end] = [False] * (whole_end - end)
            last = next((place for place in range(end - 1, start - 1, -1) if ids[place] in self._special), None)
            if last is not None and not self._hf.decode(ids[last + 1 : end]).strip():
                trained[last + 1 : end] = [False] * (end - last - 1)
            elif end == len(ids):
                if self._final_token is not None:
                    ids.append(self._final_token)
                    trained.append(True)
            elif ids[end] in self._special and (not self._has_blocks or ids[end] == behind_last):
                trained[end] = True

    def _before_opening(self, ids: Sequence[int], start: int, end: int, opening: Optional[int]) -> int:
        """The end of a turn without ``opening`` and the special tokens behind it, where one stands before it."""
        for before, place in pairwise(place for place in range(start, end) if ids[place] in self._special):
            if ids[place] == opening:
                text = self._hf.decode(list(ids[before + 1 : end]), skip_special_tokens=True)
                return end if text.strip() else place
        return end

    def _tokenized(self, text: str) -> tuple[list[int], Optional[list[Span]]]:
        """The ids of a text, and the range of each one's characters. None: the tokenizer doesn't report them."""
        offsets = {"return_offsets_mapping": True} if getattr(self._hf, "is_fast", False) else {}
        encoded = tokenized(lambda: self._hf(text, add_special_tokens=False, **offsets), text)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"]) if offsets else None

    def _tokenized_with(self, marks: Marks, text: str) -> Pieces:
        plain = self.tokenizer.plain_pieces

        def encode(text: str) -> Pieces:
            ids, places = self._tokenized(text)
            return list(zip(ids, places or (), strict=True))

        if not getattr(self._hf, "is_fast", False):
            plain("")  # tells why there is no way
            raise ConfigError(
                f"on_special_token='text': {self.tokenizer!r} does not report the characters of its tokens."
            )
        return tokenized(
            lambda: marks.tokenized(text, encode=encode, plain=plain, id_of=self._hf.convert_tokens_to_ids), text
        )

    def _trained_by_prefixes(self, text: str, ids: list[int], spans: Sequence[Span]) -> list[bool]:
        """The mask from the ids of each beginning of the text, for tokenizers that don't report the characters of a
        token."""
        trained = [False] * len(ids)
        for span in spans:
            first, last = (self._tokenized(text[:at])[0] for at in span)
            if ids[: len(first)] != first or ids[: len(last)] != last:
                raise Malformed(
                    "the tokenizer merges the start of the assistant's text with the text before it into one token"
                )
            trained[len(first) : len(last)] = [True] * (len(last) - len(first))
        return trained


_ADVICE = (
    ". Use a template with {% generation %} blocks (dataset_kwargs={'chat_template': ...}), or train only on the last turn "
    "of each conversation (dataset_kwargs={'turns': 'last'})"
)


def _check_variables(kwargs: Mapping[str, Any]) -> None:
    try:
        json.dumps(dict(kwargs))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'chat_template_kwargs={kwargs!r} must be plain data by name, for example {{"enable_thinking": False}}.'
        ) from error
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in kwargs:
            raise ConfigError(f"chat_template_kwargs has {name!r}, which nemo2 sets for each conversation: remove it.")


def _turn(role: str) -> dict[str, Any]:
    return {"role": role, "content": "text"}


def _after(text: str, prompt: str) -> int:
    """Where an answer begins in a text that ends with it: behind the last ``prompt``.

    Raises:
        Malformed: the prompt isn't there.
    """
    for length in range(len(prompt), 0, -1):
        at = text.rfind(prompt[:length])
        if at >= 0 and not prompt[length:].strip():
            return at + length
    raise Malformed("the chat template has no prompt where the assistant speaks first")


def _trained(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token, at these places in the text, has a character in one of the spans."""
    trained, at = [], 0
    ordered = sorted(spans)
    for start, end in places:
        while at < len(ordered) and ordered[at][1] <= start:
            at += 1
        trained.append(start < end and at < len(ordered) and ordered[at][0] < end)
    return trained


def _runs(flags: Sequence[bool]) -> Iterator[Span]:
    """The starts and ends of consecutive set flags."""
    end = 0
    for flag, run in groupby(flags):
        start, end = end, end + len(list(run))
        if flag:
            yield start, end
