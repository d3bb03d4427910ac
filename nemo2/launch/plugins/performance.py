# SPDX-License-Identifier: Apache-2.0
"""Plugins for speed: environment variables that CUDA, NCCL, Transformer Engine and Triton read when a rank starts."""

import os
from dataclasses import dataclass
from typing import Any, Optional

import nemo_run

from nemo2.base.advice import print_warning
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.launch.environment import ALLOCATOR, BLACKWELL, EXPANDABLE, HOPPER, launch_variables, ranks_of
from nemo2.launch.plugins.editing import set_variable
from nemo2.launch.trusted_files import KERNEL_CACHE

_VBOOST = (
    "srun --nodes=$SLURM_NNODES --ntasks=$SLURM_NNODES --ntasks-per-node=1 --overlap "
    "sudo nvidia-smi boost-slider --vboost 1 || echo 'PerfEnvPlugin: the GPUs keep their clocks, see the line above'"
)


@dataclass(kw_only=True)
class PerfEnvPlugin(nemo_run.Plugin):
    """Set the environment variables of a fast run on the executor, where you can read and change them.

    For every run on GPUs `nemo2.launch.environment` already sets most of them, from the recipe and the kind of GPU.
    This plugin adds the optional variables and states the others. Variables that the executor already has keep their
    values, with a warning.

    Args:
        enable_layernorm_sm_margin: Let norms leave multiprocessors to concurrent communication. False: norms use all.
        layernorm_sm_margin: The number of multiprocessors that norms leave free.
        enable_vboost: On Slurm: raise the GPU's tensor-core clock at the cost of other clocks before the ranks start
            (``nvidia-smi boost-slider``, with sudo).
        nccl_pp_comm_chunksize: Bytes per message between pipeline stages (``NCCL_P2P_NET_CHUNKSIZE``). None: NCCL's
            default.
        gpu_sm100_or_newer: The GPUs are Blackwell, on which communication needs 32 queues rather than 1.
        user_buffer_registration: NCCL reads and writes registered buffers (``ddp_config.nccl_ub``). This allows NVLink
            SHARP and uses few multiprocessors, but excludes expandable segments.
    """

    enable_layernorm_sm_margin: bool = True
    layernorm_sm_margin: int = 16
    enable_vboost: bool = False
    nccl_pp_comm_chunksize: Optional[int] = None
    gpu_sm100_or_newer: bool = False
    user_buffer_registration: bool = False

    def __post_init__(self) -> None:
        require_counts("PerfEnvPlugin", least=0, layernorm_sm_margin=self.layernorm_sm_margin)
        if self.nccl_pp_comm_chunksize is not None:
            require_counts("PerfEnvPlugin", nccl_pp_comm_chunksize=self.nccl_pp_comm_chunksize)

    def setup(self, task: Any, executor: Any) -> None:
        """Set the variables.

        Raises:
            ConfigError: the recipe's settings contradict them.
        """
        ranks = ranks_of(
            task,
            capability=BLACKWELL if self.gpu_sm100_or_newer else HOPPER,
            devices=executor.nproc_per_node(),
            nodes=executor.nnodes(),
        )
        if ranks is None:
            raise ConfigError(
                "PerfEnvPlugin derives the variables from the layout of the strategy, but trainer.strategy is not one "
                "of nemo2's. Set trainer.strategy to a MegatronStrategy, FSDP2Strategy or FSDPStrategy."
            )
        if self.user_buffer_registration:
            ranks = ranks._replace(registered_buffers=True)
            _without_expandable_segments(executor)
        variables = {name: variable.value for name, variable in launch_variables(ranks).items()}
        margin = str(self.layernorm_sm_margin if self.enable_layernorm_sm_margin else 0)
        variables |= {f"NVTE_{step}_LAYERNORM_SM_MARGIN": margin for step in ("FWD", "BWD")}
        if self.nccl_pp_comm_chunksize is not None:
            if ranks.pipeline_parallel > 1:
                variables["NCCL_P2P_NET_CHUNKSIZE"] = str(self.nccl_pp_comm_chunksize)
            else:
                print_warning(
                    "PerfEnvPlugin: nccl_pp_comm_chunksize has no effect, because this recipe has one pipeline stage."
                )
        for name, value in variables.items():
            set_variable(self, executor, name, value)
        if self.enable_vboost:
            if not isinstance(executor, nemo_run.SlurmExecutor):
                raise ConfigError(
                    "PerfEnvPlugin.enable_vboost=True requires a SlurmExecutor, but the executor is a "
                    f"{type(executor).__name__}. Set enable_vboost=False."
                )
            executor.setup_lines = "\n".join(filter(None, [executor.setup_lines, _VBOOST]))


@dataclass(kw_only=True)
class TritonCacheSetup(nemo_run.Plugin):
    """Let each node compile Triton's kernels into a folder on its local disk.

    The default, ``~/.triton``, is on a shared file system on most clusters, where the ranks of all nodes write the same
    files.

    Args:
        folder: An absolute path. None: ``nemo2-triton-UID`` in the node's temporary folder.
    """

    folder: Optional[str] = None

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.startswith("/"):
            raise ConfigError(f"TritonCacheSetup.folder={self.folder!r}: must be an absolute path.")

    def setup(self, task: Any, executor: Any) -> None:
        """Set TRITON_CACHE_DIR."""
        set_variable(self, executor, KERNEL_CACHE, self.folder or f"/tmp/nemo2-triton-{os.getuid()}")


def _without_expandable_segments(executor: Any) -> None:
    options = executor.env_vars.get(ALLOCATOR, "").split(",")
    left = [option for option in options if option and option != EXPANDABLE]
    if len(left) < len([option for option in options if option]):
        print_warning(
            f"PerfEnvPlugin: {EXPANDABLE} is removed from {ALLOCATOR}, because NCCL can't register buffers in such segments."
        )
        executor.env_vars = {key: value for key, value in executor.env_vars.items() if key != ALLOCATOR}
        if left:
            executor.env_vars[ALLOCATOR] = ",".join(left)
