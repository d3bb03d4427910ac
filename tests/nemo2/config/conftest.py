# SPDX-License-Identifier: Apache-2.0
"""Makes `config_samples` importable by name, here and in the processes that nemo-run starts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
