# SPDX-License-Identifier: Apache-2.0
"""Every callback is on the page of callbacks."""

import re
from pathlib import Path

from nemo2 import callbacks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "callbacks.md"


def test_the_tables_name_every_callback_and_nothing_else():
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(vars(callbacks)["__all__"])
