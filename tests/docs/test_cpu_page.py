# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/cpu.md are those of the backend. To write them anew: python tests/docs/test_cpu_page.py"""

import re
from pathlib import Path

from nemo2.base.backend.cpu import CpuBackend
from nemo2.base.backend.cpu_patches import megatron_patches

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cpu.md"


def tables() -> dict[str, str]:
    settings = [
        f"| `{name}` | `{value!r}` | {why} |" for name, (value, why) in sorted(CpuBackend().config_overrides().items())
    ]
    # By module: the names of private functions differ from one Megatron-Core to the next.
    modules: dict[str, dict[str, None]] = {}
    for patch in megatron_patches():
        modules.setdefault(patch.why, {})[patch.target.removeprefix("megatron.core.").split(":")[0]] = None
    functions = [f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for why, names in modules.items()]
    return {
        "settings": "\n".join(["| field | value here | why |", "|---|---|---|", *settings]),
        "functions": "\n".join(["| in `megatron.core` | without the replacement |", "|---|---|", *functions]),
    }


def written_anew(text: str) -> str:
    for name, table in tables().items():
        start = f"<!-- generated: {name} -->\n"
        pattern = re.compile(f"({re.escape(start)}).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", text)
        assert count == 1, f"{PAGE.name} has no place for the table of {name}"
    return text


def test_the_tables_of_the_cpu_page_are_the_backends() -> None:
    text = PAGE.read_text()
    assert text == written_anew(text), "run: python tests/docs/test_cpu_page.py"


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
