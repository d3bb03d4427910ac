# SPDX-License-Identifier: Apache-2.0
"""An executor by name, for nemo-run's command line."""

from typing import Optional

import nemo_run

from nemo2.config import Config


def torchrun(devices: Optional[int] = None) -> nemo_run.Config[nemo_run.LocalExecutor]:
    """Ranks on this machine, for ``run.executor=torchrun``. In ``nemo llm`` their number is ``trainer.devices``.

    Args:
        devices: The number of ranks. None: the number of GPUs, or a single rank without any.
            ``run.executor.ntasks_per_node`` takes precedence.
    """
    import torch

    ranks = devices or max(torch.cuda.device_count(), 1)
    variables = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}  # older torch frees the memory of collectives later without it
    return Config(nemo_run.LocalExecutor, launcher="torchrun", ntasks_per_node=ranks, env_vars=variables)
