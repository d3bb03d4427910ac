# SPDX-License-Identifier: Apache-2.0
"""Converts records of text fields with a prompt template such as ``"{input} {output}"``, and trains on the output.

The prompt is tokenized as one text, as at inference. The answer has the tokens that follow those in the tokens of both, or if
the two don't part there, its own. By themselves they would begin with a blank of their own with SentencePiece, which puts one
before each text. Whitespace between the two belongs to the answer: a byte-level tokenizer merges a space with the following
word, so a prompt that ends in a space would be tokenized differently with and without its answer.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from string import Formatter
from typing import Any, Literal, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.names import check_choice, did_you_mean
from nemo2.data.documents import tokenized, unknown_in
from nemo2.data.finetuning.sample import Empty, Encoder, Malformed, Sample, Unread
from nemo2.data.special_text import Marks, as_plain_text, special_in
from nemo2.data.tokenizer import Tokenizer, identity_of

Side = Literal["left", "right"]
DEFAULT_FIELD = "input"
"""NeMo's default for the field that is truncated."""


@dataclass(frozen=True)
class TemplateEncoder(Encoder):
    """Encode records with text under the names in ``prompt_template``.

    Attributes:
        prompt_template: Text with the names of fields in braces. ``{{`` is a literal brace. The text from the field
            ``label_key`` on is the answer.
        label_key: The field with which the answer begins.
        truncation_field: The field that is truncated in a sample that is too long. If the template doesn't name "input", the
            default, the last field of the prompt is truncated. None: the sample's end is truncated.
        truncation_method: The side on which that field is truncated. An answer keeps its end token only on the "left".
        add_bos, add_eos: Begin the prompt with the tokenizer's begin-of-sequence token, or end the answer with its
            end-of-sequence token.
        answer_only_loss: Train on the answer only. False: also train on the prompt.
        special_as_text: Encode special tokens that a record's text spells as plain text. Those of the template stay special.

    Raises:
        ConfigError: the template doesn't name ``label_key`` or ``truncation_field``, or names a field twice.
    """

    tokenizer: Tokenizer
    prompt_template: str = "{input} {output}"
    label_key: str = "output"
    truncation_field: Optional[str] = DEFAULT_FIELD
    truncation_method: Side = "right"
    add_bos: bool = False
    add_eos: bool = True
    answer_only_loss: bool = True
    special_as_text: bool = False

    def __post_init__(self) -> None:
        names = self._names
        if self.label_key not in names:
            raise ConfigError(
                f"prompt_template={self.prompt_template!r} does not contain {{{self.label_key}}}, the answer "
                f"according to label_key={self.label_key!r}. Add it to the template, or set label_key."
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"prompt_template={self.prompt_template!r} contains a field twice. Name each field once.")
        if self.truncation_field not in (None, DEFAULT_FIELD, *names):
            raise ConfigError(
                f"truncation_field={self.truncation_field!r}: prompt_template={self.prompt_template!r} has no such "
                f"field{did_you_mean(self.truncation_field, names)}"
            )
        check_choice("truncation_method", self.truncation_method, Side)

    @property
    def identity(self) -> Mapping[str, Any]:
        settings = {name: value for name, value in vars(self).items() if name != "tokenizer" and name[0] != "_"}
        return {"encoder": "template", **settings, "tokenizer": identity_of(self.tokenizer)}

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has the fields that the template names."""
        return all(name in record for name in self._names)

    def check(self, record: Any) -> Unread:
        self._fields(record)
        return Unread()

    def encode(self, record: Any) -> Sample:
        return self._sample(self._fields(record))

    def truncate(self, record: Any, sample: Sample, max_tokens: int) -> Sample:
        """The longest sample of at most ``max_tokens`` tokens, with ``truncation_field`` truncated on one side.

        If the sample is too long even without that field, its end is truncated too.
        """
        name, fields = self.truncation_field, self._fields(record)
        if name == DEFAULT_FIELD and name not in fields:
            prompt = list(fields)[: list(fields).index(self.label_key)]
            name = prompt[-1] if prompt else None
        if name is None or (name == self.label_key and self.truncation_method == "right"):
            return super().truncate(record, sample, max_tokens)
        text = fields[name]

        def shortened(characters: int) -> Sample:
            cut = text[:characters] if self.truncation_method == "right" else text[len(text) - characters :]
            return self._sample({**fields, name: cut})

        too_many = bisect_right(range(len(text)), max_tokens, key=lambda characters: len(shortened(characters).ids))
        best = replace(shortened(max(0, too_many - 1)), unread=sample.unread, beside=sample.beside)
        return super().truncate(record, best, max_tokens)

    def _fields(self, record: Any) -> dict[str, str]:
        fields = {name: _text(record, name) for name in self._names}
        if not fields[self.label_key].strip():
            raise Empty(f"the answer, {self.label_key!r}, is empty")
        return fields

    def _sample(self, fields: Mapping[str, str]) -> Sample:
        special = special_in(fields.values(), getattr(self.tokenizer, "special_texts", ()))
        marks = Marks(self.tokenizer.special_texts) if special is not None and self.special_as_text else None
        texts = self._prompt_and_answer(fields if marks is None else marks.hide(dict(fields)))
        prompt, whole = self._ids(texts[0], marks), self._ids("".join(texts), marks)
        parts = whole[: len(prompt)] == prompt
        answer = whole[len(prompt) :] if parts else self._ids(texts[1], marks)
        prompt = [self._token("bos")] * self.add_bos + prompt
        answer += [self._token("eos")] * self.add_eos
        ids = prompt + answer
        trained = [not self.answer_only_loss] * len(prompt) + [True] * len(answer)
        return Sample(ids, trained, special=special, lost=unknown_in(ids, self.tokenizer))

    def _prompt_and_answer(self, fields: Mapping[str, str]) -> tuple[str, str]:
        """The prompt's text, and the answer's with the whitespace before it."""
        at = [name for _, name in self._pieces].index(self.label_key)
        filled = [(text, "" if name is None else fields[name]) for text, name in self._pieces]
        before = "".join(text + value for text, value in filled[:at]) + filled[at][0]
        prompt = before.rstrip(" ")
        answer = filled[at][1] + "".join(text + value for text, value in filled[at + 1 :])
        return prompt, before[len(prompt) :] + answer

    def _ids(self, text: str, marks: Optional[Marks]) -> list[int]:
        encode = self.tokenizer.text_to_ids
        if marks is None:
            return tokenized(lambda: encode(text), text)
        plain = as_plain_text(self.tokenizer)
        return tokenized(
            lambda: marks.ids(text, encode=encode, plain=plain, id_of=lambda token: encode(token)[0]), text
        )

    def _token(self, which: str) -> int:
        token = self.tokenizer.bos_id if which == "bos" else self.tokenizer.eos_id
        if token is None and getattr(self, f"add_{which}"):
            raise ConfigError(
                f"add_{which}=True, and {self.tokenizer!r} has no {which} token: name one ({which}_token=...), or set "
                f"dataset_kwargs={{'add_{which}': False}}."
            )
        return -1 if token is None else token

    @cached_property
    def _pieces(self) -> list[tuple[str, Optional[str]]]:
        """Pairs of a text and the name after it."""
        try:
            pieces = list(Formatter().parse(self.prompt_template))
        except ValueError as error:
            raise ConfigError(f"prompt_template={self.prompt_template!r}: {error}.") from error
        for _, name, form, conversion in pieces:
            if form or conversion:
                whole = f"{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
                raise ConfigError(
                    f"prompt_template={self.prompt_template!r}: {{{whole}}} asks for a form of the field, but a template only "
                    f"inserts text. Write {{{name}}}."
                )
        return [(text, name) for text, name, _, _ in pieces]

    @property
    def _names(self) -> list[str]:
        """The names of the template's fields."""
        return [name for _, name in self._pieces if name is not None]


def _text(record: Any, name: str) -> str:
    if not isinstance(record, Mapping):
        raise Malformed(f"a {type(record).__name__}, not a record with named fields")
    if name not in record:
        raise Malformed(f"no field {name!r}; its fields are: {', '.join(map(str, list(record)[:8])) or 'none'}")
    if not isinstance(record[name], str):
        raise Malformed(f"the field {name!r} is a {type(record[name]).__name__}, not text")
    return record[name]
