# SPDX-License-Identifier: Apache-2.0
"""A finding of the doctor, and a list of findings for reading."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nemo2.base.columns import columns, prose_width

State = Literal["ok", "absent", "note", "broken"]
"""``absent``: an optional part is missing. ``note``: worth knowing. ``broken``: something that nemo2 needs is missing
or broken."""

_MARKS: dict[State, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "absent": ("-", "dim"),
    "note": ("note", "yellow"),
    "broken": ("BROKEN", "red"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding: the fact, its consequence and the remedy."""

    topic: str
    name: str
    state: State
    value: str
    """A version, a size, or a few words."""
    costs: str = ""
    """The consequence of leaving it as it is."""
    fix: str = ""
    """The command that installs or repairs it."""

    @property
    def text(self) -> str:
        """The value, the consequence and the remedy, one line each."""
        return "\n".join(filter(None, (self.value, self.costs, self.fix and f"-> {self.fix}")))


def checked(ok: object, *, otherwise: State = "broken", costs: str = "", fix: str = "", **facts: str) -> Finding:
    """A finding with the state ``otherwise``, its costs and its fix if something is not ``ok``.

    ``facts`` are the topic, the name and the value.
    """
    return Finding(state="ok", **facts) if ok else Finding(state=otherwise, costs=costs, fix=fix, **facts)


def report(findings: Iterable[Finding], *, colours: bool = False) -> str:
    """A table by topic, and a last line with the overall result."""
    findings = list(findings)
    longest = max((len(finding.name) for finding in findings), default=0)
    lines: list[str] = []
    for topic in dict.fromkeys(finding.topic for finding in findings):
        lines += ["", _style(topic, "1", colours)]
        rows = [(_mark(one), one.name, one.text) for one in findings if one.topic == topic]
        lines += columns(rows, least=longest, indent=2, width=prose_width(), colours=colours)
    broken = [finding.name for finding in findings if finding.state == "broken"]
    verdict = f"broken: {', '.join(broken)}" if broken else "everything that nemo2 needs is installed and works"
    return "\n".join([*lines[1:], "", _style(verdict, "31" if broken else "32", colours)])


def _mark(finding: Finding) -> tuple[str, str]:
    mark, style = _MARKS[finding.state]
    return mark.ljust(6), style


def _style(text: str, code: str, colours: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colours else text
