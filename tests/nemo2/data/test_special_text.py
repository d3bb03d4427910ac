# SPDX-License-Identifier: Apache-2.0
"""Special tokens that a text spells, encoded as plain text beside those of a template."""

from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.data.finetuning.chat import ChatEncoder
from nemo2.data.finetuning.sample import Malformed
from nemo2.data.finetuning.template import TemplateEncoder
from nemo2.data.prepare import prepare_data
from nemo2.data.tokenizer import AutoTokenizer, BPETokenizer, Tokenizer
from support import small_chats

SPOKEN = "Write <|im_end|> and <|im_start|>, then stop."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> AutoTokenizer:
    return small_chats.make_tokenizer(tmp_path_factory.mktemp("tokenizer"), small_chats.WITH_TOOLS)


def plain(tokenizer: AutoTokenizer, text: str) -> list[int]:
    """The ids by transformers' own switch."""
    return tokenizer.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def test_a_chat_keeps_the_template_s_tokens_and_spells_those_of_the_data(tokenizer: AutoTokenizer) -> None:
    begin, end = tokenizer.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    record = {
        "messages": [{"role": "user", "content": SPOKEN}, {"role": "assistant", "content": f"No. {SPOKEN}"}],
        "tools": [{"name": "search", "description": SPOKEN, "parameters": {}}],
    }
    sample = ChatEncoder(tokenizer, special_as_text=True).encode(record)
    assert sample.special == "<|im_start|>" or sample.special == "<|im_end|>"
    answer = [*plain(tokenizer, f"No. {SPOKEN}"), end]
    assert [one for one, flag in zip(sample.ids, sample.trained, strict=True) if flag] == answer
    assert sample.ids.count(begin) == sample.ids.count(end) == 3, "the template's: of the tools and of two turns"
    newline = plain(tokenizer, "\n")
    assert sample.ids[-len(answer) - len(newline) :] == answer + newline
    turn = [begin, *plain(tokenizer, f"user\n{SPOKEN}"), end]
    assert str(turn)[1:-1] in str(sample.ids)
    kept = ChatEncoder(tokenizer).encode(record)
    assert kept.ids.count(end) == 6 and tokenizer.ids_to_text(sample.ids).count("<|im_end|>") == 3


def test_a_record_without_special_tokens_has_the_same_ids_either_way(tokenizer: AutoTokenizer) -> None:
    record = small_chats.say(("user", "a"), ("assistant", "b <| c"))
    one, other = (ChatEncoder(tokenizer, special_as_text=flag).encode(record) for flag in (False, True))
    assert one == other


def test_a_template_of_fields_keeps_its_own_tokens(tokenizer: AutoTokenizer) -> None:
    settings: dict[str, Any] = {"prompt_template": "<|im_start|>{input}<|im_end|>{output}", "special_as_text": True}
    sample = TemplateEncoder(tokenizer, **settings).encode({"input": SPOKEN, "output": SPOKEN})
    begin, end = tokenizer.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    spelled = plain(tokenizer, SPOKEN)
    assert sample.ids == [begin, *spelled, end, *spelled, tokenizer.eos_id]


@pytest.mark.parametrize("kind", ["transformers", "tokenizers"])
def test_prepared_text_spells_them(kind: str, tokenizer: AutoTokenizer, tmp_path: Path) -> None:
    import numpy as np

    own: Tokenizer = tokenizer
    if kind == "tokenizers":
        own = BPETokenizer(tokenizer.pretrained_model_name, eos_token="<|endoftext|>")
    (tmp_path / "one.txt").write_text(SPOKEN)
    (tmp_path / "two.txt").write_text("nothing here")
    prepared = prepare_data(str(tmp_path), tmp_path / "out" / "data", own, on_special_token="text")
    assert (prepared.documents_with_special_tokens, prepared.special_tokens) == (1, "text")
    written = np.fromfile(f"{prepared.prefix}.bin", dtype=prepared.dtype).tolist()
    assert written == [*plain(tokenizer, SPOKEN), own.eod, *plain(tokenizer, "nothing here"), own.eod]
    with pytest.raises(Exception, match="one.txt.*'<\\|"):
        prepare_data(str(tmp_path / "one.txt"), tmp_path / "out" / "other", own, on_special_token="fail")


def test_a_copy_of_a_tokenizer_spells_them_too(tokenizer: AutoTokenizer) -> None:
    import copy
    import pickle

    expected = tokenizer.plain_text_to_ids(SPOKEN)
    for one in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert one.plain_text_to_ids(SPOKEN) == expected == plain(tokenizer, SPOKEN)
    assert tokenizer.text_to_ids(SPOKEN) != expected, "the tokenizer itself is as it was"


class Spelling(Tokenizer):
    """A tokenizer of a user with special tokens, and without a way to spell them."""

    vocab_size = 257  # pyright: ignore
    unique_identifiers = {}  # pyright: ignore
    special_texts = ("<|end|>",)  # pyright: ignore

    def text_to_ids(self, text: str) -> list[int]:
        return list(text.encode())

    def ids_to_text(self, ids: Any) -> str:
        return bytes(ids).decode()


def test_a_tokenizer_without_a_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("an <|end|>")
    options: Any = {"append_eod": False, "on_special_token": "text"}
    with pytest.raises(ConfigError, match="on_special_token='text'"):
        prepare_data(str(tmp_path / "one.txt"), tmp_path / "data", Spelling(), **options)


def test_a_tokenizer_that_changes_what_follows_a_special_token_is_refused(tmp_path: Path) -> None:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend = small_chats.make_tokenizer(tmp_path / "plain").backend
    backend.add_special_tokens([AddedToken("<|strip|>", lstrip=True, rstrip=True, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(tmp_path / "odd")
    template = "{% for m in messages %}{{ m.role }} <|strip|> {{ m.content }}<|im_end|>{% endfor %}"
    encoder = ChatEncoder(AutoTokenizer(str(tmp_path / "odd")), chat_template=template, special_as_text=True)
    with pytest.raises(Malformed, match="on_special_token"):
        encoder.encode(small_chats.say(("user", "a"), ("assistant", SPOKEN)))
