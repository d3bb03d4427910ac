# SPDX-License-Identifier: Apache-2.0
"""The ``nemo2`` command.

Every rank imports the file of the script that launched it, and so this package. The commands are imported when one runs.
"""

from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments``: by default, those of the process."""
    try:
        from nemo2.cli.app import main
    except KeyboardInterrupt:  # the import takes seconds
        return 130

    return main(arguments)


def script() -> NoReturn:
    """The ``nemo2`` script: `main`, and then an end of the process that takes no time."""
    from nemo2.cli.streams import end_process

    end_process(main())
