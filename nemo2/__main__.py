# SPDX-License-Identifier: Apache-2.0
"""``python -m nemo2``: the command line, where the ``nemo2`` script isn't on PATH."""

import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
    # Python has put the working directory before installed packages. It moves to the end, because it may contain a
    # module by chance.
    sys.path.append(sys.path.pop(0))

from nemo2.cli import script

if __name__ == "__main__":
    script()
