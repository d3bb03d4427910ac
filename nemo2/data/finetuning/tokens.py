# SPDX-License-Identifier: Apache-2.0
"""Encodes records that already are token ids, and sources with several kinds of records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.data.finetuning.chat import ChatEncoder
from nemo2.data.finetuning.dialects import has_messages
from nemo2.data.finetuning.fields import FieldsEncoder
from nemo2.data.finetuning.sample import Empty, Encoder, Malformed, Sample, Unread
from nemo2.data.finetuning.settings import DatasetSettings
from nemo2.data.finetuning.template import TemplateEncoder
from nemo2.data.tokenizer import Tokenizer

IGNORED = -100
"""The label that losses ignore, as in transformers and PyTorch."""
MASKS = ("loss_mask", "assistant_masks", "completion_mask")
"""Fields that are 0 for tokens that aren't trained on. The last two are those of transformers and TRL."""
_LARGEST_VOCABULARY = 1 << 31
"""Samples are stored as int32."""


@dataclass(frozen=True)
class TokenEncoder(Encoder):
    """Encode records with ``input_ids``, and with ``labels`` (-100 for tokens that aren't trained on) or masks (`MASKS`) of the
    same length. A token is trained on if all of them say so.

    As in transformers, a label is at the position of its own token. Without labels and mask all tokens are trained on. Tokens
    with an ``attention_mask`` of 0 are padding, and left out. A record with several samples, whose ``position_ids`` restart or
    whose ``seq_lengths`` are several (TRL's packing), is malformed.

    Attributes:
        vocab_size: Ids must be below it, because ranks that share a vocabulary train on any other id without an error. None:
            unknown.
    """

    vocab_size: Optional[int] = None

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"encoder": "tokens"}

    def check(self, record: Any) -> Unread:
        self.encode(record)
        return Unread()

    def encode(self, record: Any) -> Sample:
        ids = _numbers(record, "input_ids")
        marks = {
            name: _numbers(record, name, length=len(ids))
            for name in ("labels", *MASKS, "position_ids", "attention_mask")
            if record.get(name) is not None
        }
        shown = _range_of(marks.pop("attention_mask", [1] * len(ids)))
        ids, marks = ids[shown], {name: values[shown] for name, values in marks.items()}
        lengths = record.get("seq_lengths")
        if 0 in marks.pop("position_ids", [])[1:] or (lengths is not None and len(lengths) > 1):
            raise Malformed(
                "several samples in one record, which would attend to each other. Give each its own record, and set "
                "data.packed_sequence_specs to pack them"
            )
        if len(ids) < 2:
            raise Empty(f"{len(ids)} tokens")
        limit = _LARGEST_VOCABULARY if self.vocab_size is None else self.vocab_size
        if min(ids) < 0 or max(ids) >= limit:
            wrong = next(at for at, token in enumerate(ids) if not 0 <= token < limit)
            raise Malformed(f"input_ids[{wrong}]={ids[wrong]}: must be at least 0 and below the vocabulary's {limit}")
        trained = [True] * len(ids)
        if (labels := marks.pop("labels", None)) is not None:
            wrong = next((at for at, label in enumerate(labels) if label not in (IGNORED, ids[at])), None)
            if wrong is not None:
                raise Malformed(
                    f"labels[{wrong}]={labels[wrong]} and input_ids[{wrong}]={ids[wrong]}: a label must be the token "
                    f"at the same position, or {IGNORED}. Do not shift labels by one, as Megatron-Core's labels are"
                )
            trained = [label != IGNORED for label in labels]
        for flags in marks.values():
            trained = [one and bool(flag) for one, flag in zip(trained, flags, strict=True)]
        return Sample(ids, trained)


@dataclass(frozen=True)
class AnyEncoder(Encoder):
    """Encode each record by its fields: those of a ``prompt_template`` that is set, ``input_ids``, messages, or a usual form.

    The tokenizer may be None if all records have ``input_ids``.
    """

    tokenizer: Tokenizer | None
    settings: DatasetSettings

    @property
    def identity(self) -> Mapping[str, Any]:
        if self.tokenizer is None:
            return TokenEncoder().identity
        try:
            chat = dict(self._chat.identity)
        except (ConfigError, ImportError):
            chat = None  # in that case no record may be a conversation
        first = {} if self.settings.prompt_template is None else {"first": "prompt_template"}
        return {**self._template.identity, "encoder": "any", "chat": chat, **first}

    @cached_property
    def _tokens(self) -> TokenEncoder:
        return TokenEncoder(None if self.tokenizer is None else self.tokenizer.vocab_size)

    @cached_property
    def _template(self) -> Any:
        return self.settings.template(self._needed)

    @cached_property
    def _chat(self) -> Any:
        return self.settings.chat(self._needed)

    @cached_property
    def _unread(self) -> Mapping[type[Encoder], tuple[str, ...]]:
        kinds = TemplateEncoder, FieldsEncoder, ChatEncoder, TokenEncoder
        return {kind: self.settings.unread_by(kind) for kind in kinds}

    @property
    def _needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise Malformed("text, but data.tokenizer is None. Set it to the tokenizer of the model")
        return self.tokenizer

    def check(self, record: Any) -> Unread:
        encoder = self._encoder_of(record)
        return encoder.check(record)._replace(settings=self._unread[type(encoder)])

    def encode(self, record: Any) -> Sample:
        encoder = self._encoder_of(record)
        sample = encoder.encode(record)
        return replace(sample, unread=sample.unread._replace(settings=self._unread[type(encoder)]))

    def truncate(self, record: Any, sample: Sample, max_tokens: int) -> Sample:
        return self._encoder_of(record).truncate(record, sample, max_tokens)

    def _encoder_of(self, record: Any) -> Encoder:
        if not isinstance(record, Mapping):
            raise Malformed(f"a {type(record).__name__}, not a record with named fields")
        own = self.settings.prompt_template is not None and self.tokenizer is not None
        if own and self._template.fits(record):
            return self._template
        if record.get("input_ids") is not None:
            return self._tokens
        return self._chat if has_messages(record) else self._template


def _range_of(attention: Sequence[int]) -> slice:
    """The tokens that aren't padding."""
    places = [place for place, flag in enumerate(attention) if flag]
    shown = slice(places[0], places[-1] + 1) if places else slice(0)
    if not all(attention[shown]):
        raise Malformed("'attention_mask' hides tokens between others, but padding stands before or behind a text")
    return shown


def _numbers(record: Mapping[str, Any], name: str, length: int | None = None) -> list[int]:
    value = record[name]
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or not all(isinstance(one, int) for one in value):
        raise Malformed(f"{name!r} is not a list of whole numbers")
    if length is not None and len(value) != length:
        raise Malformed(f"{name!r} has {len(value)} entries for {length} tokens")
    return list(value)
