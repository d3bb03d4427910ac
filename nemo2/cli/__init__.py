# SPDX-License-Identifier: Apache-2.0
"""The ``nemo2`` command."""

from nemo2.cli.app import main, script

__all__ = ["main", "script"]
