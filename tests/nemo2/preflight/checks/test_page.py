# SPDX-License-Identifier: Apache-2.0
"""docs/checks.md is what the table of rules says."""

import re
from pathlib import Path
from typing import Any

import pytest

from nemo2.preflight.checks import RULES
from tools import checks_page as module

PAGE = Path(__file__).parents[4] / "docs" / "checks.md"
WORDS_OF_THE_VERSION = ("optimizer-is-known", "megatron-core-agrees")
"""Rules whose messages quote the installed Megatron-Core."""


@pytest.mark.slow
def test_the_page_is_written_from_the_rules(problems_once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "problems_of", problems_once)
    written, made = sections(PAGE.read_text()), sections(module.page())
    assert list(written) == list(made)
    elsewhere = {rule.name for rule in RULES if not rule.in_force()}
    for name, text in made.items():
        assert name in elsewhere or written[name] == text, f"{name}: run python -m tools.checks_page > docs/checks.md"
    assert {rule.name for rule in RULES} <= set(made)


def sections(text: str) -> dict[str, str]:
    """The parts of the page by their headings; without what Megatron-Core says in its own words."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {
        name: re.sub(r"^> .*$", "", part, flags=re.MULTILINE) if name in WORDS_OF_THE_VERSION else part
        for name, part in named.items()
    }
