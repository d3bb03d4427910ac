# SPDX-License-Identifier: Apache-2.0
"""``python -m nemo2``: the command line, where the ``nemo2`` script isn't on PATH."""

import sys

from nemo2.cli import main

if __name__ == "__main__":
    sys.exit(main())
