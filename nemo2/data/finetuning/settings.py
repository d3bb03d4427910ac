# SPDX-License-Identifier: Apache-2.0
"""``dataset_kwargs``: how records become samples, with the names of NeMo's datasets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional, TypeVar, Union, get_type_hints

from nemo2.base.advice import advice
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean, shortened
from nemo2.config.notices import warn_once
from nemo2.config.typed_text import WrongType
from nemo2.config.values import typed
from nemo2.data.documents import OnBadLine
from nemo2.data.finetuning.chat import ChatEncoder, Turns
from nemo2.data.finetuning.encode import Limits, OnTooLong
from nemo2.data.finetuning.fields import FieldsEncoder
from nemo2.data.finetuning.sample import Encoder
from nemo2.data.finetuning.template import Side, TemplateEncoder
from nemo2.data.special_text import OnSpecialToken
from nemo2.data.tokenizer import Tokenizer

T = TypeVar("T")
_ESCAPE = re.compile(r"\\[nt]")


@dataclass(frozen=True)
class DatasetSettings:
    """The valid entries of ``dataset_kwargs``.

    Attributes:
        prompt_template: See `nemo2.data.finetuning.template.TemplateEncoder`. None: the template of the record's form
            (`nemo2.data.finetuning.fields.FORMS`), or "{input} {output}" if ``label_key`` is set.
        label_key, truncation_field, truncation_method: See `nemo2.data.finetuning.template.TemplateEncoder`.
        add_bos, add_eos, answer_only_loss: See `nemo2.data.finetuning.template.TemplateEncoder`.
        chat_template, chat_template_kwargs, turns: See `nemo2.data.finetuning.chat.ChatEncoder`.
        on_too_long, on_bad_line, max_bad_lines, on_special_token: See `nemo2.data.finetuning.encode.Limits`.
        pad_to_max_length: Pad every batch to ``data.seq_length``. False: pad to the batch's longest sample, if the
            layout allows it.
        index_mapping_dir: The folder of samples and packs. Only this user may write to it, and all ranks must see it.
            None: ``index_cache`` beside the data.
    """

    prompt_template: Optional[str] = None
    label_key: str = "output"
    truncation_field: Optional[str] = "input"
    truncation_method: Side = "right"
    add_bos: bool = False
    add_eos: bool = True
    answer_only_loss: bool = True
    chat_template: Optional[str] = None
    chat_template_kwargs: Optional[Mapping[str, Any]] = None
    turns: Turns = "all"
    on_too_long: OnTooLong = "truncate"
    on_bad_line: OnBadLine = "fail"
    max_bad_lines: int = 1000
    on_special_token: OnSpecialToken = "keep"
    pad_to_max_length: bool = False
    index_mapping_dir: Optional[Union[str, Path]] = None

    @classmethod
    def of(cls, dataset_kwargs: Optional[Mapping[str, Any]]) -> "DatasetSettings":
        """The settings of ``dataset_kwargs``.

        Raises:
            ConfigError: an unknown name, or an invalid value.
        """
        if not isinstance(dataset_kwargs, Mapping | None):
            raise ConfigError(f"data.dataset_kwargs={dataset_kwargs!r}: must be settings by their names, or None.")
        hints, options = get_type_hints(cls), {}
        for name, value in (dataset_kwargs or {}).items():
            if name not in hints:
                raise ConfigError(f"data.dataset_kwargs has no setting {name!r}{did_you_mean(name, list(hints))}")
            try:
                options[name] = typed(value, hints[name])
            except WrongType as error:
                raise ConfigError(f"data.dataset_kwargs.{name} {error}.") from error
            if options[name] == "":  # the encoders would take it as none
                raise ConfigError(
                    f"data.dataset_kwargs.{name}='': the text is empty. Write it out, or leave the setting out."
                )
        settings = cls(**options)
        settings.limits(1)
        if settings.truncation_field is None and settings.truncation_method == "left":
            raise ConfigError(
                "data.dataset_kwargs.truncation_method='left' with truncation_field=None: without a field to truncate, a "
                "sample's end is cut off. Name a field, or set truncation_method='right'."
            )
        if escape := _ESCAPE.search(settings.prompt_template or ""):
            quoted = advice(
                """write quotes within the shell's: '"{input}\\n{output}"'""",
                "write it without r and with one backslash",
            )
            warn_once(
                f"data.dataset_kwargs.prompt_template contains the two characters {escape[0]}, and samples will show them. For a "
                f"line break or a tab, {quoted}."
            )
        return settings

    def unread_by(self, kind: type[Encoder]) -> tuple[str, ...]:
        """The settings that decide samples of another kind of records only, with their values, as ``add_bos=True``. Settings
        with their defaults are left out.

        Args:
            kind: The encoder of the records. That of records that already are token ids reads none of them.
        """
        of_fields, of_chats = ({field.name for field in fields(one)} for one in (TemplateEncoder, ChatEncoder))
        read = {TemplateEncoder: of_fields, FieldsEncoder: of_fields, ChatEncoder: of_chats}.get(kind, set())  # pyright: ignore[reportArgumentType, reportCallIssue]
        return tuple(
            f"{one.name}={shortened(repr(value))}"
            for one in fields(self)
            if one.name in (of_fields | of_chats) - read and (value := getattr(self, one.name)) != one.default
        )

    def template(self, tokenizer: Tokenizer) -> Union[TemplateEncoder, FieldsEncoder]:
        """The encoder for records of fields."""
        if self.prompt_template is None and self.label_key == "output":
            plain = self._as(
                TemplateEncoder, tokenizer=tokenizer, prompt_template="{input} {output}", truncation_field="input"
            )
            return FieldsEncoder(plain, self.truncation_field)
        template = "{input} {output}" if self.prompt_template is None else self.prompt_template
        return self._as(TemplateEncoder, tokenizer=tokenizer, prompt_template=template)

    def chat(self, tokenizer: Tokenizer, default_template: Optional[str] = None) -> ChatEncoder:
        """The encoder for conversations. ``default_template`` replaces the tokenizer's own template."""
        return self._as(ChatEncoder, tokenizer=tokenizer, chat_template=self.chat_template or default_template)

    def limits(self, max_tokens: int) -> Limits:
        """The limits on samples, and the treatment of samples beyond them."""
        return self._as(Limits, max_tokens=max_tokens)

    @property
    def special_as_text(self) -> bool:
        """Whether special tokens that a record's text spells are encoded as plain text."""
        return self.on_special_token == "text"

    def _as(self, kind: type[T], **others: Any) -> T:
        """An object of this dataclass, with ``others`` and the settings of its fields' names."""
        names = {field.name for field in fields(kind)} - others.keys()  # pyright: ignore[reportArgumentType]
        return kind(**{name: getattr(self, name) for name in names}, **others)
