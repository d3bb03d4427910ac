# SPDX-License-Identifier: Apache-2.0
"""The table of docs/gpu.md is that of the backend. To write it anew: python tests/docs/test_gpu_page.py"""

import re
from pathlib import Path
from unittest.mock import patch

from nemo2.base.backend import cuda

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def written_anew(text: str) -> str:
    with patch.object(cuda, "have_te", lambda: False), patch.object(cuda, "has", lambda name: False):
        found = cuda.CudaBackend().config_overrides()
    rows = [f"| `{name}` | `{value!r}` | {why} |" for name, (value, why) in sorted(found.items())]
    table = "\n".join(["| field | value | why, and what it costs |", "|---|---|---|", *rows])
    text, count = re.subn(
        r"(<!-- generated: settings -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{table}\n\n{match[2]}",
        text,
        flags=re.DOTALL,
    )
    assert count == 1, f"{PAGE.name} has no place for the table"
    return text


def test_the_table_of_the_gpu_page_is_the_backends() -> None:
    text = PAGE.read_text()
    assert text == written_anew(text), "run: python tests/docs/test_gpu_page.py"


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
