# SPDX-License-Identifier: Apache-2.0
"""Makes `resharding` importable by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
