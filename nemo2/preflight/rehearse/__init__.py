# SPDX-License-Identifier: Apache-2.0
"""Rehearses a job for any number of GPUs in one process on a laptop, with the code that the job will run.

The counts are plain data. Only `rehearse`, which is imported on first use, needs torch.
"""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
