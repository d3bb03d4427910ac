# SPDX-License-Identifier: Apache-2.0
"""Plugins that profile a few steps: Nsight Systems, torch's profiler, a GPU's memory."""

from dataclasses import dataclass
from typing import Any, Optional

import nemo_run

from nemo2.base.errors import ConfigError
from nemo2.callbacks.memory_profile import MemoryProfileCallback
from nemo2.callbacks.nsys import NsysCallback
from nemo2.callbacks.profiler import PytorchProfilerCallback
from nemo2.launch.plugins.editing import add_callback, arguments_of


@dataclass(kw_only=True)
class NsysPlugin(nemo_run.Plugin):
    """Start the ranks under ``nsys profile``, and let `NsysCallback` select the recorded steps.

    The recordings are in ``nsys_profile`` in the job's folder. On Slurm each start of the job writes to its own
    ``lives/N/nsys_profile``.

    Args:
        start_step: The first recorded step, counted from 0.
        end_step: The step before which recording ends.
        ranks: The global ranks to record. None: rank 0.
        nsys_trace: The traced APIs ("nvtx", "cuda", "cublas", ...). None: nvtx and cuda.
        gen_shape: Record tensor shapes for every operator. Slow.
    """

    start_step: int
    end_step: int
    ranks: Optional[list[int]] = None
    nsys_trace: Optional[list[str]] = None
    gen_shape: bool = False

    def setup(self, task: Any, executor: Any) -> None:
        """Add the callback and set the executor's launcher to nsys.

        Raises:
            ConfigError: the executor already uses the fault-tolerance launcher.
        """
        launcher = executor.get_launcher()
        if isinstance(launcher, nemo_run.FaultTolerance):
            raise ConfigError(
                "NsysPlugin doesn't work with the fault-tolerance launcher, because nsys would record a restarted rank "
                "into the file of the rank that failed. Leave out NsysPlugin or FaultTolerancePlugin."
            )
        arguments = arguments_of(self)
        arguments.pop("nsys_trace")
        add_callback(self, task, NsysCallback, **arguments)
        launcher.nsys_profile = True
        if self.nsys_trace is not None:
            launcher.nsys_trace = list(self.nsys_trace)
        executor.launcher = launcher


@dataclass(kw_only=True)
class PytorchProfilerPlugin(nemo_run.Plugin):
    """Add `PytorchProfilerCallback`: a trace per rank for ``nemo2 runs trace``, in ``traces`` in the run directory.

    Args:
        start_step: The first step of the warm-up or of the profile, counted from 0.
        end_step: The step before which profiling ends at the latest.
        warmup_steps: Steps in which the profiler runs without keeping its records.
        active_steps: The number of steps in the trace.
        trace_dir: The folder of the files. None: the run directory.
        profiler_kwargs: Further arguments of ``torch.profiler.profile``.
    """

    start_step: int
    end_step: int
    warmup_steps: int = 0
    active_steps: int = 1
    trace_dir: Optional[str] = None
    profiler_kwargs: Optional[dict[str, Any]] = None

    def setup(self, task: Any, executor: Any) -> None:
        """Add the callback."""
        add_callback(self, task, PytorchProfilerCallback, **arguments_of(self))


@dataclass(kw_only=True)
class MemoryProfilePlugin(nemo_run.Plugin):
    """Add `MemoryProfileCallback`: every allocation of a GPU, for torch's viewer.

    Args:
        dir: The folder of the files. None: ``memory`` in the run directory.
        ranks: The global ranks that record. None: all.
    """

    dir: Optional[str] = None
    ranks: Optional[list[int]] = None

    def setup(self, task: Any, executor: Any) -> None:
        """Add the callback."""
        add_callback(self, task, MemoryProfileCallback, **arguments_of(self))
