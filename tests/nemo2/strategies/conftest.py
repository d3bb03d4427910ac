# SPDX-License-Identifier: Apache-2.0
"""Makes `sharded_runs` importable by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
