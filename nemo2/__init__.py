# SPDX-License-Identifier: Apache-2.0
"""nemo2: LLM training recipes over PyTorch Lightning and Megatron-Core.

``import nemo2 as nl`` is the front door to what trains: the names of NeMo 2.0's ``nemo.lightning``, imported on first
use. Models, data and recipes have theirs in ``nemo2.llm``.
"""

from nemo2.deferred import install as defer_imports
from nemo2.lazy import front_door
from nemo2.noise import quiet_known_warnings

__version__ = "0.1.0"

# Here, because the warnings come while Megatron-Core is imported, by whichever of our modules is first.
quiet_known_warnings()
defer_imports()

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
