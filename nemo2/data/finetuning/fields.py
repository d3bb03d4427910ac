# SPDX-License-Identifier: Apache-2.0
"""Recognises the usual forms of records of text fields: input and output, Alpaca's instructions, prompts with
completions, questions with answers, and plain text."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional

from nemo2.base.advice import dataset_setting
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.data.finetuning.dialects import has_messages
from nemo2.data.finetuning.sample import DESCRIPTIONS, Encoder, Malformed, Sample, Unread, strings_in
from nemo2.data.finetuning.template import DEFAULT_FIELD, TemplateEncoder


class Form(NamedTuple):
    """A usual form of records.

    Attributes:
        question: The field that the prompt begins with.
        extra: A field that may be empty or missing and stands behind the question. None: there is none.
        answer: The field of the answer.
        between: The text between prompt and answer.
    """

    question: Optional[str]
    extra: Optional[str]
    answer: str
    between: str = " "

    def template(self, *, with_extra: bool) -> str:
        """The prompt template of a record."""
        if self.question is None:
            return f"{{{self.answer}}}"
        extra = f"\n{{{self.extra}}}" if with_extra else ""
        return f"{{{self.question}}}{extra}{self.between}{{{self.answer}}}"


FORMS = (
    Form("instruction", "input", "output"),
    Form("instruction", "context", "response"),
    Form("instruction", "input", "response"),
    Form("input", None, "output"),
    Form("prompt", None, "completion", between=""),
    Form("prompt", None, "response"),
    Form("question", "context", "answer"),
    Form("query", None, "response"),
    Form(None, None, "text"),
)
"""The forms in the order in which they are tried. TRL joins a prompt and its completion without a blank."""
_NO_FORM = (
    "neither a conversation ('messages': [{'role': 'user', 'content': ...}, {'role': 'assistant', 'content': ...}]) nor a "
    "prompt and its answer, such as 'input' and 'output'"
)


@dataclass(frozen=True)
class FieldsEncoder(Encoder):
    """Encode records by the fields that they have.

    Attributes:
        settings: The settings of a template. Its template is replaced by the record's form.
        truncation_field: The field that is truncated in a sample that is too long. A record whose prompt lacks it truncates the
            last field of its prompt. None: the sample's end is truncated.

    Raises:
        ConfigError: no form has ``truncation_field``.
    """

    settings: TemplateEncoder
    truncation_field: Optional[str] = DEFAULT_FIELD
    _encoders: dict[Any, TemplateEncoder] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = list(dict.fromkeys(name for form in FORMS for name in (form.question, form.extra) if name is not None))
        if self.truncation_field not in (None, *names):
            raise ConfigError(
                f"truncation_field={self.truncation_field!r} is no field of a prompt{did_you_mean(self.truncation_field, names)} "
                "To truncate another field, name it in prompt_template."
            )

    @property
    def identity(self) -> Mapping[str, Any]:
        own = {"encoder": "fields", "truncation_field": self.truncation_field}
        return {**self.settings.identity, **own, "forms": [list(form) for form in FORMS]}

    def check(self, record: Any) -> Unread:
        encoder, unused, _ = self._reading(record)
        encoder.check(record)
        return Unread(tuple(unused))

    def encode(self, record: Any) -> Sample:
        encoder, unused, beside = self._reading(record)
        return replace(encoder.encode(record), unread=Unread(tuple(unused)), beside=tuple(beside))

    def truncate(self, record: Any, sample: Sample, max_tokens: int) -> Sample:
        encoder, _, _ = self._reading(record)
        return encoder.truncate(record, sample, max_tokens)

    def _reading(self, record: Any) -> tuple[TemplateEncoder, list[str], list[str]]:
        """The record's encoder, and the fields with text that no sample shows: such fields, and descriptions."""
        if not isinstance(record, Mapping):
            raise Malformed(f"a {type(record).__name__}, not a record with named fields")
        fitting = [
            form for form in FORMS if form.answer in record and (form.question is None or form.question in record)
        ]
        form = next((form for form in fitting if form.extra in record), fitting[0] if fitting else None)
        if form is None:
            fields = ", ".join(map(str, list(record)[:8])) or "none"
            half = next((form for form in FORMS if form.question in record), None)
            lacks, hint = _NO_FORM if half is None else f"no field {half.answer!r}", ""
            if has_messages(record):
                lacks, hint = (
                    "a conversation, not a prompt and its answer",
                    ". Conversations are read by ChatDataModule",
                )
            raise Malformed(
                f"{lacks}; its fields are: {fields}. Rename them, or name them in a template "
                f"({dataset_setting('prompt_template', 'TEXT')} and label_key){hint}"
            )
        with_extra = form.extra is not None and bool(str(record.get(form.extra) or "").strip())
        used = {form.question, form.answer, form.extra}
        answer = record[form.answer]
        unused, beside = [], []
        for name, value in record.items():
            if name in used or (text := _lost(value, answer)) is None:
                continue
            several = len(text.split()) > 1
            if name in DESCRIPTIONS:
                beside += [name] * several
                continue
            unused.append(name)
            if several:
                raise Malformed(f"{not_shown(name, text)} ({form.template(with_extra=with_extra)!r} is the one in use)")
        return self._encoder(form, with_extra), unused, beside

    def _encoder(self, form: Form, with_extra: bool) -> TemplateEncoder:
        key = (form, with_extra)
        if key not in self._encoders:
            self._encoders[key] = replace(
                self.settings,
                prompt_template=form.template(with_extra=with_extra),
                label_key=form.answer,
                truncation_field=self._truncated_of(form.question, form.extra if with_extra else None),
            )
        return self._encoders[key]

    def _truncated_of(self, *prompt: Optional[str]) -> Optional[str]:
        if self.truncation_field is None or self.truncation_field in prompt:
            return self.truncation_field
        return next((name for name in reversed(prompt) if name is not None), None)


def _lost(value: Any, answer: Any) -> Optional[str]:
    """The longest text in a field that the sample doesn't use. None: there is none, or it repeats the answer, as Alpaca's
    ``text`` does."""
    texts = (text.strip() for text in strings_in(value))
    lost = [text for text in texts if text and not (isinstance(answer, str) and (answer in text or text in answer))]
    return max(lost, key=len, default=None)


def not_shown(name: str, text: str = "") -> str:
    """The fault of a field that no template names."""
    shown = f" ({text[:40]!r})" if text else ""
    return (
        f"the field {name!r} holds text that no sample would show{shown}. Remove it, or name it in a template, "
        f"{dataset_setting('prompt_template', 'TEXT')}"
    )
