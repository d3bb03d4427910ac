# SPDX-License-Identifier: Apache-2.0
"""The places where packages above this one keep the factories of their parts. Imports nothing, so that announcing is
free."""

ANNOUNCED: list[str] = []
"""Modules with ``SOURCES``, a list of `nemo2.config.factories.Source`."""


def announce(module: str) -> None:
    """Name a module of factories. It is imported when a name is first looked up."""
    if module not in ANNOUNCED:
        ANNOUNCED.append(module)
