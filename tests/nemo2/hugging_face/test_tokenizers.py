# SPDX-License-Identifier: Apache-2.0
"""The chat template that a model was trained with goes with its checkpoint, and with an export."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer as TheirTokenizer

from nemo2.checkpoint.context import load_context, write_context
from nemo2.data.finetuning.chat import NEMO_TEMPLATE, PLAIN_TEMPLATE
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
from nemo2.data.finetuning.module import ChatDataModule
from nemo2.data.tokenizer import BPETokenizer
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
