# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/cpu.md and docs/gpu.md are those of the backends. To write them anew: python tests/docs/test_backend_pages.py"""

import re
from pathlib import Path
from unittest.mock import patch

import pytest

from nemo2.base.backend import cuda
from nemo2.base.backend.cpu import CpuBackend
from nemo2.base.backend.cpu_patches import megatron_patches

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table(head: str, rows: list[str]) -> str:
    return "\n".join([f"| {head} |", re.sub("[^|]+", "---", f"| {head} |").strip(), *rows])


def settings(overrides: dict) -> list[str]:
    return [f"| `{name}` | `{value!r}` | {why} |" for name, (value, why) in sorted(overrides.items())]


def tables() -> dict[str, dict[str, str]]:
    """By page and name."""
    with patch.object(cuda, "have_te", lambda: False), patch.object(cuda, "has", lambda name: False):
        gpu = settings(cuda.CudaBackend().config_overrides())
    # By module: the names of private functions differ from one Megatron-Core to the next.
    modules: dict[str, dict[str, None]] = {}
    for one in megatron_patches():
        modules.setdefault(one.why, {})[one.target.removeprefix("megatron.core.").split(":")[0]] = None
    functions = [f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for why, names in modules.items()]
    return {
        "cpu.md": {
            "settings": table("field | value here | why", settings(CpuBackend().config_overrides())),
            "functions": table("in `megatron.core` | without the replacement", functions),
        },
        "gpu.md": {"settings": table("field | value | why, and what it costs", gpu)},
    }


def written_anew(page: str) -> str:
    text = (DOCS / page).read_text()
    for name, rows in tables()[page].items():
        pattern = re.compile(f"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, rows=rows: f"{match[1]}\n{rows}\n\n{match[2]}", text)
        assert count == 1, f"{page} has no place for the table of {name}"
    return text


@pytest.mark.parametrize("page", tables())
def test_the_tables_of_a_page_are_the_backends(page):
    assert (DOCS / page).read_text() == written_anew(page), "run: python tests/docs/test_backend_pages.py"


if __name__ == "__main__":
    for page in tables():
        (DOCS / page).write_text(written_anew(page))
