# SPDX-License-Identifier: Apache-2.0
"""Commands of nemo2 on a rank, which may start Megatron-Core."""

import contextlib
import io
import shlex


def printed(*lines: str) -> list[tuple[int, str]]:
    """The exit code of each command, and what it prints."""
    from nemo2.cli import main

    results = []
    for line in lines:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(shlex.split(line))
        results.append((code, out.getvalue()))
    return results
