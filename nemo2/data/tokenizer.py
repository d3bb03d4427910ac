# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: a small protocol, and the classes that implement it.

A tokenizer is cheap to configure. It reads its file or imports its package when a property is first used, so a recipe
can be built on a machine that has neither.

Each tokenizer has NeMo's names (``text_to_ids``, ``ids_to_text``, ``bos_id`` ...) and Megatron's (``tokenize``,
``detokenize``, ``eod``, ``unique_identifiers``). Megatron-Core's datasets use the latter and put ``unique_identifiers``
into the key of their index cache.
"""

import contextlib
import hashlib
import json
import os
import string
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional, Union

from nemo2.base.backend.extras import install
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError, DataError
from nemo2.config.aliases import register_gone
from nemo2.config.capture import configurable
from nemo2.config.notices import warn_once, warn_without_effect

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""Spellings of the end-of-document token, in order of precedence, for tokenizer files that don't name it."""


class Tokenizer(ABC):
    """Convert text to token ids and back.

    An id that a tokenizer lacks is None. ``eod`` ends a document in a dataset. A tokenizer without such a token raises
    an error for ``eod``, because documents would otherwise run into each other.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest token id plus 1, including special tokens."""

    @abstractmethod
    def text_to_ids(self, text: str) -> list[int]:
        """The token ids of `text`, without special tokens around them."""

    @abstractmethod
    def ids_to_text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""

    @property
    @abstractmethod
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """The identity of this tokenizer as plain data: part of the key of every index built with it."""

    @property
    def eos_id(self) -> Optional[int]:
        """The end-of-sequence id."""
        return None

    @property
    def bos_id(self) -> Optional[int]:
        """The begin-of-sequence id."""
        return None

    @property
    def pad_id(self) -> Optional[int]:
        """The padding id."""
        return None

    @property
    def unk_id(self) -> Optional[int]:
        """The unknown-token id."""
        return None

    @property
    def special_texts(self) -> Sequence[str]:
        """The texts that become special tokens wherever a text spells them. Empty: there are none, or unknown ones."""
        return ()

    def plain_text_to_ids(self, text: str) -> list[int]:
        """`text_to_ids`, but special tokens that the text spells are plain text.

        Raises:
            ConfigError: the tokenizer can't do that.
        """
        return [token for token, _ in self.plain_pieces(text)]

    def plain_pieces(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """`plain_text_to_ids`, each id with the range of its characters. Tokenizers without a `backend` report no ranges.

        Raises:
            ConfigError: the tokenizer can't do that.
        """
        if (backend := self._plain_backend) is not None:
            encoding = backend.encode(text, add_special_tokens=False)
            return list(zip(encoding.ids, encoding.offsets, strict=True))
        if self.special_texts:
            raise ConfigError(
                f"on_special_token='text': {self!r} has no implementation in the package `tokenizers`, so it cannot encode "
                "special tokens as plain text. Use 'keep' or 'fail'."
            )
        return [(token, (0, len(text))) for token in self.text_to_ids(text)]

    @property
    def backend(self) -> Any:
        """The object of the ``tokenizers`` package. None: there is none."""
        return None

    @cached_property
    def _plain_backend(self) -> Any:
        """A copy of the backend without special tokens. None: there is no backend. A copy, because that is a switch of the whole
        object, which several threads share."""
        if self.backend is None:
            return None
        copied = type(self.backend).from_str(self.backend.to_str())
        copied.encode_special_tokens = True
        copied.no_truncation()
        copied.no_padding()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The state without that copy, whose switch is not part of a pickle."""
        return {key: value for key, value in self.__dict__.items() if key != "_plain_backend"}

    @property
    def eod(self) -> int:
        """The id that ends a document.

        Raises:
            DataError: the tokenizer has no such token.
        """
        if self.eos_id is None:
            raise DataError(
                f"{self!r} has no end-of-document token to separate the documents of a dataset. Add one of "
                f"{', '.join(END_OF_DOCUMENT)} to its vocabulary, or name the token (eos_token=...)."
            )
        return self.eos_id

    # Megatron's names

    def tokenize(self, text: str) -> list[int]:
        """`text_to_ids`."""
        return self.text_to_ids(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """`ids_to_text`."""
        return self.ids_to_text(ids)

    @property
    def eos(self) -> Optional[int]:
        """`eos_id`."""
        return self.eos_id

    @property
    def bos(self) -> Optional[int]:
        """`bos_id`."""
        return self.bos_id

    @property
    def pad(self) -> int:
        """-1, whatever `pad_id` is. Megatron's datasets leave this token out of the loss and replace it by 0, but documents
        have no padding, and a corpus may end them with `pad_id`: Qwen's "<|endoftext|>" is both."""
        return -1

    @property
    def padded_vocab_size(self) -> int:
        """`vocab_size`. The model, not the tokenizer, pads for tensor parallelism (`get_vocab_size`)."""
        return self.vocab_size

    def text_to_tokens(self, text: str) -> list[str]:
        """The pieces that `text` is split into, one per id."""
        return [self.ids_to_text([token_id]) for token_id in self.text_to_ids(text)]


@configurable
class BPETokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` package, from its ``tokenizer.json``.

    Args:
        path: The file, or a directory with a ``tokenizer.json``.
        eos_token: The end-of-sequence token, as spelled in the vocabulary. None: the first of `END_OF_DOCUMENT` in the
            vocabulary.
        bos_token, pad_token: The special tokens, as spelled in the vocabulary. None: the tokenizer has none.
        chat_template: Jinja text that renders conversations. None: the tokenizer has no template.

    Raises:
        DataError: on first use, if the file is missing or is no tokenizer, or a named token isn't in its vocabulary.
    """

    def __init__(
        self,
        path: Union[str, Path],
        eos_token: Optional[str] = None,
        bos_token: Optional[str] = None,
        pad_token: Optional[str] = None,
        chat_template: Optional[str] = None,
    ) -> None:
        _check_tokens(eos_token=eos_token, bos_token=bos_token, pad_token=pad_token)
        self.path = str(path)
        self.eos_token = eos_token
        self.bos_token = bos_token
        self.pad_token = pad_token
        self.chat_template = chat_template

    @cached_property
    def _file(self) -> Path:
        path = Path(self.path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise DataError(
                f"The tokenizer file {path} does not exist. Give the path of a tokenizer.json, or train one: "
                "nemo2 data prepare TEXT... --train-bpe 8192 --output PREFIX."
            )
        return path

    @cached_property
    def backend(self) -> Any:
        """The object of the ``tokenizers`` package."""
        from tokenizers import Tokenizer as Tokenizers

        try:
            backend = Tokenizers.from_file(str(self._file))
        except Exception as error:  # the package raises bare Exception for any fault in the file
            raise DataError(f"{self._file} is not a tokenizer of the `tokenizers` package: {error}.") from error
        # A file also holds how texts were cut and filled up when it was saved.
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def vocab_size(self) -> int:
        return _ids_below(self.backend.get_vocab(with_added_tokens=True))

    @cached_property
    def special_texts(self) -> Sequence[str]:
        return sorted(one.content for one in self.backend.get_added_tokens_decoder().values() if one.special)

    def text_to_ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def texts_to_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """`text_to_ids` of many texts at once. The package chooses the number of threads."""
        return [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=False)]

    def ids_to_text(self, ids: Sequence[int]) -> str:
        return self.backend.decode([int(token_id) for token_id in ids], skip_special_tokens=True)

    @cached_property
    def eos_id(self) -> Optional[int]:
        if self.eos_token is not None:
            return self._named("eos_token", self.eos_token)
        candidates = (self.backend.token_to_id(token) for token in END_OF_DOCUMENT)
        return next((token_id for token_id in candidates if token_id is not None), None)

    @cached_property
    def bos_id(self) -> Optional[int]:
        return self._named("bos_token", self.bos_token)

    @cached_property
    def pad_id(self) -> Optional[int]:
        return self._named("pad_token", self.pad_token)

    @cached_property
    def unk_id(self) -> Optional[int]:
        unknown = getattr(self.backend.model, "unk_token", None)
        return None if unknown is None else self.backend.token_to_id(unknown)

    def _named(self, field: str, token: Optional[str]) -> Optional[int]:
        if token is None:
            return None
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise DataError(f"{field}={token!r} is not in the vocabulary of {self._file}.")
        return token_id

    @cached_property
    def sha256(self) -> str:
        """The hash of the file. Two tokenizers with the same hash give the same ids."""
        return hashlib.sha256(self._file.read_bytes()).hexdigest()

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        # The contents and not the path: a copy of the file elsewhere is the same tokenizer.
        return OrderedDict([("class", type(self).__name__), ("sha256", self.sha256), ("eod", self.eos_id)])

    def __getstate__(self) -> dict[str, Any]:
        """The state without the loaded tokenizer, which each worker process loads itself."""
        return {key: value for key, value in super().__getstate__().items() if key != "backend"}

    def __repr__(self) -> str:
        return f"BPETokenizer({self.path!r})"


@configurable
class GPT2BPETokenizer(BPETokenizer):
    """GPT-2's byte-level BPE from its two files, ``vocab.json`` and ``merges.txt``.

    Args:
        vocab_file: The path of ``vocab.json``.
        merges_file: The path of ``merges.txt``.

    Raises:
        DataError: on first use, if a file is missing or has the wrong contents.
    """

    def __init__(self, vocab_file: Union[str, Path], merges_file: Union[str, Path]) -> None:
        super().__init__(path=vocab_file)
        self.vocab_file = os.path.expanduser(vocab_file)
        self.merges_file = os.path.expanduser(merges_file)

    @cached_property
    def backend(self) -> Any:
        from tokenizers import Tokenizer as Tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        try:
            tokenizer = Tokenizers(models.BPE.from_file(self.vocab_file, self.merges_file))
        except Exception as error:  # the package raises bare Exception for any fault in the files
            raise DataError(
                f"{self.vocab_file} and {self.merges_file} are not GPT-2's vocab.json and merges.txt: {error}."
            ) from error
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    @cached_property
    def sha256(self) -> str:
        """The hash of both files."""
        contents = Path(self.vocab_file).read_bytes() + Path(self.merges_file).read_bytes()
        return hashlib.sha256(contents).hexdigest()

    def __repr__(self) -> str:
        return f"GPT2BPETokenizer({self.vocab_file!r}, {self.merges_file!r})"


_IN_FILES = (
    "the tokenizer's files have the other special tokens: add them with transformers (add_special_tokens, save_pretrained), and "
    "set pretrained_model_name to that folder."
)
_BESIDE = "the files are those in the folder pretrained_model_name; GPT2BPETokenizer takes a vocabulary and merges."
register_gone(
    "nemo2.data.tokenizer:AutoTokenizer",
    **dict.fromkeys(("unk_token", "sep_token", "cls_token", "mask_token", "additional_special_tokens"), _IN_FILES),
    **dict.fromkeys(("vocab_file", "merges_file"), _BESIDE),
    include_special_tokens="texts become ids without special tokens; data.dataset_kwargs adds them (add_bos, add_eos).",
)


@configurable
class AutoTokenizer(Tokenizer):
    """A Hugging Face tokenizer, by its name on the hub or by a local directory. Needs the extra ``hf``.

    Args:
        pretrained_model_name: A hub name ("meta-llama/Llama-3.2-1B") or a directory.
        use_fast: Use the Rust implementation if there is one.
        trust_remote_code: Run the repository's code. Set it only if you have read that code.
        revision: A commit, tag or branch on the hub. None: the default branch.
        local_files_only: Use the local cache only, without network access.
        eos_token, bos_token, pad_token, chat_template: Override the tokenizer's own values.

    Raises:
        ConfigError: on first use, if transformers is not installed.
        DataError: on first use, if the tokenizer exists neither locally nor, unless ``local_files_only``, on the hub.
    """

    def __init__(
        self,
        pretrained_model_name: str,
        use_fast: bool = True,
        trust_remote_code: bool = False,
        revision: Optional[str] = None,
        local_files_only: bool = False,
        eos_token: Optional[str] = None,
        bos_token: Optional[str] = None,
        pad_token: Optional[str] = None,
        chat_template: Optional[str] = None,
    ) -> None:
        _check_tokens(eos_token=eos_token, bos_token=bos_token, pad_token=pad_token)
        if revision is not None and Path(pretrained_model_name).expanduser().is_dir():
            warn_without_effect(
                f"{pretrained_model_name} is a folder, which has one revision only.", revision=(revision, None)
            )
        self.pretrained_model_name = os.path.expanduser(pretrained_model_name)
        self.use_fast = use_fast
        self.trust_remote_code = trust_remote_code
        self.revision = revision
        self.local_files_only = local_files_only
        self.eos_token = eos_token
        self.bos_token = bos_token
        self.pad_token = pad_token
        self.chat_template = chat_template

    @cached_property
    def tokenizer(self) -> Any:
        """The ``transformers`` object."""
        from nemo2.data.hub import asking_hub

        try:
            from transformers import AutoTokenizer as HFAutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"AutoTokenizer({self.pretrained_model_name!r}) requires the package transformers: "
                f"{install('hf')}. Or use BPETokenizer with the model's tokenizer.json."
            ) from error
        names = ("eos_token", "bos_token", "pad_token", "chat_template")
        overrides = {name: value for name in names if (value := getattr(self, name)) is not None}
        load = partial(
            HFAutoTokenizer.from_pretrained,
            self.pretrained_model_name,
            use_fast=self.use_fast,
            trust_remote_code=self.trust_remote_code,
            revision=self.revision or "main",
            local_files_only=self.local_files_only,
        )
        try:
            local = self.local_files_only or Path(self.pretrained_model_name).exists()
            with contextlib.nullcontext() if local else asking_hub(self.pretrained_model_name):
                tokenizer = load(**overrides)
                if overrides.keys() - {"chat_template"}:
                    self._warn_about_new_tokens(known=load().get_vocab())
                return tokenizer
        except (OSError, ValueError) as error:
            where = "in the local cache" if self.local_files_only else "here or on the Hugging Face hub"
            raise DataError(
                f"The tokenizer {self.pretrained_model_name!r} could not be loaded {where}. Check the name. For a "
                "gated model, log in with `hf auth login`. On a machine without a network, download the tokenizer "
                f"elsewhere and give its directory. ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no message'})"
            ) from error

    def _warn_about_new_tokens(self, known: Collection[str]) -> None:
        for name in ("eos_token", "bos_token", "pad_token"):
            text = getattr(token := getattr(self, name), "content", token)
            if text is not None and text not in known:
                warn_once(
                    f"{self!r}: {name}={text!r} is not in its vocabulary and gets a new id, which no released model has trained. "
                    "Name a token of the vocabulary, unless the model trains its embeddings."
                )

    @cached_property
    def vocab_size(self) -> int:
        vocabulary = self.tokenizer.get_vocab()  # includes added tokens, unlike its own vocab_size
        return _ids_below(vocabulary) if vocabulary else len(self.tokenizer)

    @cached_property
    def special_texts(self) -> Sequence[str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return sorted({one.content for one in added.values() if one.special} | set(self.tokenizer.all_special_tokens))

    def text_to_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ids_to_text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=True)

    @property
    def backend(self) -> Any:
        return getattr(self.tokenizer, "backend_tokenizer", None)

    @property
    def eos_id(self) -> Optional[int]:
        return self.tokenizer.eos_token_id

    @property
    def bos_id(self) -> Optional[int]:
        return self.tokenizer.bos_token_id

    @property
    def pad_id(self) -> Optional[int]:
        return self.tokenizer.pad_token_id

    @property
    def unk_id(self) -> Optional[int]:
        return self.tokenizer.unk_token_id

    @cached_property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        vocabulary = "\n".join(f"{i} {t}" for t, i in sorted(self.tokenizer.get_vocab().items(), key=lambda p: p[1]))
        digest = hashlib.sha256(vocabulary.encode("utf-8", "surrogatepass")).hexdigest()
        # The contents and not the folder: a copy of it elsewhere is the same tokenizer.
        name = self.pretrained_model_name
        named = [] if Path(name).is_dir() else [("name", name)]
        return OrderedDict([("class", type(self).__name__), *named, ("vocabulary", digest), ("eod", self.eos_id)])

    def __repr__(self) -> str:
        return f"AutoTokenizer({self.pretrained_model_name!r})"


@configurable
class NullTokenizer(Tokenizer):
    """Use numbers as text: "17 4 256" is those three ids. The last id of the vocabulary ends a document.

    For data without text, such as mock data and tests.

    Args:
        vocab_size: The number of ids, with the end-of-document id. At least 2.
    """

    def __init__(self, vocab_size: int) -> None:
        require_counts("NullTokenizer", least=2, vocab_size=vocab_size)
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def text_to_ids(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(
                f"NullTokenizer reads numbers only, and {text[:60]!r} is text. A model that was trained on mock data has "
                "this tokenizer, and a run that starts from its weights takes it over. Set the data's tokenizer to one "
                "that reads text, tokenizer='data', and resume.restore_config.load_artifacts=False."
            ) from error
        if any(not 0 <= token_id < self._vocab_size for token_id in ids):
            raise DataError(f"{text[:60]!r} contains a number outside the vocabulary of {self._vocab_size} ids.")
        return ids

    def ids_to_text(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token_id)) for token_id in ids if token_id != self.eos_id)

    @property
    def eos_id(self) -> int:
        return self._vocab_size - 1

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        return OrderedDict([("class", type(self).__name__), ("vocab_size", self._vocab_size)])

    def __repr__(self) -> str:
        return f"NullTokenizer({self._vocab_size})"


@configurable
class ByteTokenizer(Tokenizer):
    """Use UTF-8 bytes as ids 0..255, and 256 as the end of a document. Needs no file and encodes any text."""

    def __init__(self) -> None:
        pass

    @property
    def vocab_size(self) -> int:
        return 257

    def text_to_ids(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def ids_to_text(self, ids: Sequence[int]) -> str:
        return bytes(int(token_id) for token_id in ids if token_id < 256).decode("utf-8", "replace")

    @property
    def eos_id(self) -> int:
        return 256

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        return OrderedDict([("class", type(self).__name__)])

    def __repr__(self) -> str:
        return "ByteTokenizer()"


def _check_tokens(**tokens: Any) -> None:
    """Raise ConfigError for a special token that is no text, such as an id."""
    for name, token in tokens.items():
        text = getattr(token, "content", token)  # transformers also takes an AddedToken
        if token is not None and not (isinstance(text, str) and text):
            raise ConfigError(f"{name}={token!r}: must be the text of a token, or None.")


def _ids_below(vocabulary: Mapping[str, int]) -> int:
    """The number that all ids are below. Vocabularies such as o200k's leave some ids out."""
    return max(vocabulary.values(), default=-1) + 1


def identity_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The identity of any tokenizer: two tokenizers with the same identity give the same ids.

    Its own identifiers and the ids that begin and end a text; for a fast Hugging Face tokenizer, also a hash of its whole
    state, such as merges and splitting rules.
    """
    identity = dict(getattr(tokenizer, "unique_identifiers", None) or _identity_by_ids(tokenizer))
    identity |= {name: getattr(tokenizer, name, None) for name in ("bos_id", "eos_id")}
    backend = getattr(getattr(tokenizer, "tokenizer", None), "backend_tokenizer", None)
    if backend is not None:
        identity["pipeline"] = hashlib.sha256(backend.to_str().encode("utf-8", "surrogatepass")).hexdigest()
    return identity


def _identity_by_ids(tokenizer: Any) -> dict[str, Any]:
    """The identity of a user's class without identifiers: its ids for every printable character and for some words."""
    text = f"{string.printable} The quick brown fox jumps over the lazy dog. In 2026, 3 + 4 = 7;\n\treturn None"
    ids = json.dumps([int(one) for one in tokenizer.text_to_ids(text)])
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    return {"class": kind, "vocab_size": tokenizer.vocab_size, "ids": hashlib.sha256(ids.encode()).hexdigest()}
