# SPDX-License-Identifier: Apache-2.0
"""nemo2: LLM training recipes over PyTorch Lightning and Megatron-Core.

``import nemo2 as nl`` offers the trainer, strategies, precision, checkpointing and logging under the names of NeMo
2.0's ``nemo.lightning``. Each name is imported on first use. Models, data and recipes are in ``nemo2.llm``.
"""

from nemo2.base.backend.cudnn import share_cudnn
from nemo2.base.lazy import front_door
from nemo2.base.noise import quiet_known_warnings

__version__ = "0.1.0"

# These calls stand here because the first of our modules that imports Megatron-Core imports Transformer Engine with it.
quiet_known_warnings()
share_cudnn()

__getattr__, __dir__, __all__ = front_door(__name__, __file__, fallback="nemo2.from_nemo.modules:in_lightning")  # pyright: ignore[reportUnsupportedDunderAll]
