# SPDX-License-Identifier: Apache-2.0
"""Encodes special tokens that a text spells as plain text, beside special tokens that a template writes.

A template's special tokens split a text before it is tokenized. So each part between them is tokenized by a copy of the
tokenizer that knows no special tokens, if data spelled some in it. While a template renders data, a mark stands in place
of each special token there (`Marks`).
"""

import re
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, Optional

from nemo2.base.errors import ConfigError, DataError
from nemo2.data.tokenizer import Tokenizer

OnSpecialToken = Literal["keep", "text", "fail"]
Pieces = list[tuple[int, tuple[int, int]]]
"""Ids, each with the range of its characters."""


def special_in(texts: Any, special: Sequence[str]) -> Optional[str]:
    """The first of the special tokens that one of the texts spells. None: there is none."""
    return next((token for text in texts for token in special if token in text), None) if special else None


def as_plain_text(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The tokenizer's method that encodes special tokens as plain text.

    Raises:
        ConfigError: it has none.
    """
    own = getattr(tokenizer, "plain_text_to_ids", None)
    if own is None:
        raise ConfigError(
            f"on_special_token='text': {tokenizer!r} has no method plain_text_to_ids, so the special tokens in a text cannot "
            "be encoded as plain text. Use 'keep' or 'fail'."
        )
    return own


class Marks:
    """Marks in place of special tokens.

    Args:
        special: The special tokens.
    """

    def __init__(self, special: Sequence[str]) -> None:
        self.special = sorted(special, key=len, reverse=True)
        self.name = f"zq{secrets.token_hex(8)}s"

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special)) or r"(?!)")

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile(f"{self.name}([0-9]+)q")

    def hide(self, value: Any) -> Any:
        """Plain data with marks in place of the special tokens in its texts."""
        if isinstance(value, str):
            return self._tokens.sub(lambda match: f"{self.name}{self.special.index(match[0])}q", value)
        if isinstance(value, dict):
            return {key: one if key == "role" else self.hide(one) for key, one in value.items()}
        return [self.hide(one) for one in value] if isinstance(value, list | tuple) else value

    def show(self, text: str) -> str:
        """The text with its special tokens."""
        return self._marks.sub(lambda match: self.special[int(match[1])], text)

    def tokenized(
        self,
        text: str,
        *,
        encode: Callable[[str], Pieces],
        plain: Callable[[str], Pieces],
        id_of: Callable[[str], int],
    ) -> Pieces:
        """The ids of a text with marks, whose special tokens are those of its template. The characters are those of the text
        without marks.

        Args:
            encode, plain: Encode a text, with special tokens as such and as plain text.
            id_of: The id of a special token.

        Raises:
            DataError: the tokenizer doesn't encode the parts between special tokens by themselves.
        """
        pieces: Pieces = []
        parts: list[int] = []
        start = first = 0
        for match in [*self._tokens.finditer(text), None]:
            part = text[first : match.start() if match else None]
            parts += [token for token, _ in encode(part)] if part else []
            shown = self.show(part)
            tokens = (plain if shown != part else encode)(shown) if part else []
            pieces += [(token, (start + begin, start + end)) for token, (begin, end) in tokens]
            start += len(shown)
            if match is not None:
                first = match.end()
                parts.append(id_of(match[0]))
                pieces.append((parts[-1], (start, start + len(match[0]))))
                start += len(match[0])
        if parts != [token for token, _ in encode(text)]:
            raise DataError(
                "a text spells a special token, and this tokenizer encodes what follows a special token differently, so it "
                "cannot encode that one as plain text (on_special_token='text')"
            )
        return pieces

    def ids(
        self,
        text: str,
        *,
        encode: Callable[[str], list[int]],
        plain: Callable[[str], list[int]],
        id_of: Callable[[str], int],
    ) -> list[int]:
        """`tokenized` for a tokenizer that reports no ranges."""

        def placed(ids_of: Callable[[str], list[int]]) -> Callable[[str], Pieces]:
            return lambda text: [(token, (0, len(text))) for token in ids_of(text)]

        return [token for token, _ in self.tokenized(text, encode=placed(encode), plain=placed(plain), id_of=id_of)]
