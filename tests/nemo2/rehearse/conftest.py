# SPDX-License-Identifier: Apache-2.0
"""Makes `real_and_rehearsed` importable by name, here and in the rank processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
