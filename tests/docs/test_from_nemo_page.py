# SPDX-License-Identifier: Apache-2.0
"""The page for people who come from NeMo says what is there, and what is not, as it is."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import nemo2 as nl
from nemo2 import callbacks, llm
from nemo2.base.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_nemo.md"


def named() -> set[str]:
    [section] = re.findall(r"<!-- names -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    return set(re.findall(r"`((?:nl|llm|callbacks)\.[\w.]+)`", section))


def test_every_name_that_is_said_to_be_the_same_is_there():
    names = named()
    assert len(names) > 35
    for name in names:
        value = {"nl": nl, "llm": llm, "callbacks": callbacks}[name.split(".")[0]]
        for part in name.split(".")[1:]:
            value = getattr(value, part)


@pytest.mark.parametrize("line", re.findall(r"\| `(from nemo2[\w.]* import \w+)` \|", PAGE.read_text()))
def test_the_imports_on_the_right_work(line):
    _, module, _, name = line.split()
    found = import_module(module)
    assert hasattr(found, name)


@pytest.mark.parametrize(
    "gone",
    [
        {"moe_extended_tp": True},
        {"encoder_tensor_model_parallel_size": 2},
        {"encoder_pipeline_model_parallel_size": 1},
        {"ddp": "pytorch"},
        {"find_unused_parameters": True},
        {"fsdp": "pytorch"},
        {"lazy_init": True},
        {"save_ckpt_format": "zarr"},
    ],
    ids=lambda gone: next(iter(gone)),
)
def test_what_is_gone_is_on_the_page_and_an_error_that_names_it(gone):
    [name] = gone
    assert f"`{name}" in PAGE.read_text()
    with pytest.raises(ConfigError, match=f"strategy.{name}="):
        trainer = nl.Trainer(strategy=nl.MegatronStrategy(**gone), devices=1)
        # The format is looked at when the writer is made.
        _ = trainer.strategy.checkpoint_io


def test_what_the_page_calls_missing_is_missing():
    # So that the page is changed when they come.
    assert not any(hasattr(llm.LlamaModel, name) for name in ("import_from", "importer", "exporter"))
