# SPDX-License-Identifier: Apache-2.0
"""The names of token files: ``PREFIX.bin``, ``PREFIX.idx`` and their description ``PREFIX.json``."""

from pathlib import Path
from typing import Union

SUFFIXES = (".bin", ".idx", ".json")


def strip_suffix(path: Union[str, Path]) -> str:
    """The prefix of a pair of token files, also if ``path`` names one of the two files."""
    return str(path).removesuffix(".bin").removesuffix(".idx")


def token_files(path: Union[str, Path]) -> list[str]:
    """The token files of a prefix, or of the one of them that ``path`` names."""
    return [f"{strip_suffix(path)}{suffix}" for suffix in SUFFIXES]
