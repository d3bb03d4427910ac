# SPDX-License-Identifier: Apache-2.0
"""An executor by name, for nemo-run's command line."""

from typing import Optional

import nemo_run

from nemo2.config import Config


def torchrun(devices: Optional[int] = None) -> nemo_run.Config[nemo_run.LocalExecutor]:
    """Ranks on this machine, for ``run.executor=torchrun``, which in ``nemo llm`` are as many as ``trainer.devices`` says.

    Args:
        devices: How many. None: as many as there are GPUs, without any a single rank. ``run.executor.ntasks_per_node`` goes
            before.
    """
    import torch

    ranks = devices or max(torch.cuda.device_count(), 1)
    return Config(nemo_run.LocalExecutor, launcher="torchrun", ntasks_per_node=ranks)
