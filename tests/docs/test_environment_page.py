# SPDX-License-Identifier: Apache-2.0
"""The page on environment variables knows those that nemo2 reads."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "environment.md").read_text()
READ = re.compile(r"""environ(?:\.get\(|\[)\s*["']([A-Z_0-9]+)["']""")
OF_A_PROCESS = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "PATH", "PYTHONPATH", "PYTHONWARNINGS", "TERM"}
SET_ONLY = {"TORCH_DISTRIBUTED_DEBUG", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}


def sources() -> str:
    folders = ("nemo2", "recipes", "callbacks")
    return "\n".join(file.read_text() for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))


def test_every_variable_that_is_read_is_told():
    text = sources()
    read = {
        *READ.findall(text),
        *re.findall(r'_VARIABLE = "([A-Z_0-9]+)"', text),
        *re.findall(r'^VARIABLE = "(.+)"$', text, re.M),
    }
    assert {"NEMO_HOME", "NEMO2_RUNS", "NEMO2_RECIPES", "NEMO_EXPM_VERSION"} <= read
    assert sorted(name for name in read - OF_A_PROCESS - SET_ONLY if f"`{name}`" not in PAGE) == []


def test_every_variable_that_is_told_of_is_used():
    text = sources()
    told = set(re.findall(r"`([A-Z][A-Z_0-9]{4,})`", PAGE))
    assert sorted(name for name in told if name not in text) == []
