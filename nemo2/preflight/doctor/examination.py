# SPDX-License-Identifier: Apache-2.0
"""Runs all examinations in order. A part that can't be examined is a finding, and the others follow."""

from collections.abc import Callable, Iterator

from nemo2.preflight.doctor.attention import attention
from nemo2.preflight.doctor.finding import Finding
from nemo2.preflight.doctor.machine import devices, launchers, network, resources
from nemo2.preflight.doctor.packages import commands, needed, optional

PARTS: tuple[Callable[[], Iterator[Finding]], ...] = (
    needed,
    optional,
    commands,
    resources,
    devices,
    attention,
    network,
    launchers,
)


def examine() -> list[Finding]:
    """All findings. Imports torch, but downloads nothing and leaves nothing behind."""
    findings: list[Finding] = []
    for part in PARTS:
        try:
            findings += part()
        except Exception as error:  # anything broken here is the finding
            findings.append(
                Finding(
                    topic="Examination", name=part.__name__, state="broken", value=f"{type(error).__name__}: {error}"
                )
            )
    return findings
