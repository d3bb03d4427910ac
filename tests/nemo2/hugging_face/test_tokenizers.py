# SPDX-License-Identifier: Apache-2.0
"""The chat template that a model was trained with goes with its checkpoint, and with an export."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer as TheirTokenizer

from nemo2.checkpoint.context import load_context, write_context
from nemo2.data.finetuning.chat import NEMO_TEMPLATE, PLAIN_TEMPLATE
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
from nemo2.data.finetuning.module import ChatDataModule
from nemo2.data.tokenizer import AutoTokenizer, BPETokenizer
from nemo2.hugging_face.tokenizers import put_tokenizer
from support import small_chats

TURNS = small_chats.say(("user", "One?"), ("assistant", "Two."))["messages"]


def exported(folder: Path, tokenizer: Any, data: Any) -> Any:
    """The tokenizer of a run's export, as transformers reads it."""
    write_context(
        folder / "run", SimpleNamespace(lightning_module=SimpleNamespace(tokenizer=tokenizer), datamodule=data)
    )
    (folder / "export").mkdir()
    assert put_tokenizer(folder / "run", folder / "export") is None
    return TheirTokenizer.from_pretrained(folder / "export")


@pytest.mark.parametrize("own", [None, small_chats.CHATML])
@pytest.mark.parametrize("kind", ["AutoTokenizer", "BPETokenizer"])
def test_a_template_of_the_data_replaces_the_tokenizers_own(kind: str, own: str | None, tmp_path: Path) -> None:
    tokenizer: Any = small_chats.make_tokenizer(tmp_path / "tokenizer", own)
    tokenizer = tokenizer if kind == "AutoTokenizer" else BPETokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    data = HFDatasetDataModule([{"messages": TURNS}], tokenizer=tokenizer, dataset_kwargs={"chat_template": "plain"})
    theirs = exported(tmp_path, tokenizer, data)
    text = theirs.apply_chat_template(TURNS, tokenize=False)
    assert text == f"User:\nOne?\nAssistant:\nTwo.{theirs.eos_token}\n"
    assert load_context(tmp_path / "run", "tokenizer").chat_template == PLAIN_TEMPLATE


@pytest.mark.parametrize(("own", "template"), [(False, NEMO_TEMPLATE), (True, small_chats.CHATML)])
def test_chat_data_has_nemos_template_or_the_tokenizers_own(own: bool, template: str, tmp_path: Path) -> None:
    tokenizer = small_chats.make_tokenizer(tmp_path / "tokenizer")
    data = ChatDataModule(tmp_path, tokenizer=tokenizer, use_hf_tokenizer_chat_template=own)
    assert exported(tmp_path, tokenizer, data).chat_template == template


@pytest.mark.parametrize("kind", [AutoTokenizer, BPETokenizer])
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("ends", [None, 2, [0, 2]])
def test_an_export_has_the_special_tokens_that_were_set(
    kind: type[Any], older: bool, ends: object, tmp_path: Path
) -> None:
    """``older``: files that list their special tokens apart. ``ends``: the release's own ids, in its generation_config.json."""
    folder = tmp_path / "tokenizer"
    small_chats.make_tokenizer(folder, None)
    if older:
        (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}')
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "top_p": 0.9}))
    tokenizer = kind(str(folder), eos_token="<extra_id_0>", pad_token="<extra_id_1>")
    theirs = exported(tmp_path, tokenizer, None)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id) == (3, 4)
    assert theirs.bos_token == "<|endoftext|>"
    generation = json.loads((tmp_path / "export/generation_config.json").read_text())
    assert generation["eos_token_id"] == ([0, 2, 3] if ends == [0, 2] else 3)
    assert (generation["pad_token_id"], generation.get("top_p")) == (4, None if ends is None else 0.9)


def test_files_whose_special_tokens_nobody_set_are_exported_byte_for_byte(tmp_path: Path) -> None:
    tokenizer = small_chats.make_tokenizer(tmp_path / "tokenizer", small_chats.CHATML)
    exported(tmp_path, tokenizer, None)
    for file in (tmp_path / "tokenizer").iterdir():
        assert (tmp_path / "export" / file.name).read_bytes() == file.read_bytes()
    assert not (tmp_path / "export/generation_config.json").exists()
