# SPDX-License-Identifier: Apache-2.0
"""Makes `tools` importable, as it is for those who run its commands from the checkout's folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
