# SPDX-License-Identifier: Apache-2.0
"""`one_weight` beside this file, and `small_runs` of the strategy's tests, can be imported by tests and their processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "nemo2"))
