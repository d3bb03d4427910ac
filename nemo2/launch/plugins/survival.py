# SPDX-License-Identifier: Apache-2.0
"""Plugins for jobs that end early: a signal before the time limit, and ranks that restart within the job."""

import signal
from dataclasses import dataclass
from typing import Any, Optional

import nemo_run

from nemo2.base.backend.extras import has, install
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.callbacks.fault_tolerance import FaultToleranceCallback
from nemo2.config.walk import callbacks_of
from nemo2.launch.environment import RESTARTS
from nemo2.launch.plugins.editing import add_callback, set_variable, trainer_of, warn_without_slurm
from nemo2.mcore.settle.machine import Machine
from nemo2.training.run_dir.hang import HangWatchdog
from nemo2.training.run_dir.preemption import PreemptionCallback, signal_of


@dataclass(kw_only=True)
class PreemptionPlugin(nemo_run.Plugin):
    """On Slurm, request the signal ``sig`` some time before the job's end, and let the run save when it arrives.

    Without this plugin a run already handles SIGTERM, and nemo2's Slurm jobs request it as early as the checkpoint
    needs (``grace_seconds`` of a profile). Use the plugin for a fixed time or another signal.

    Args:
        preempt_time: Seconds before the end of the job's time.
        sig: The signal.
        callbacks: The callbacks that handle the signal, as configs. None: a `PreemptionCallback` for ``sig``.
    """

    preempt_time: int = 60
    sig: int = signal.SIGTERM
    callbacks: Optional[list[Any]] = None

    def __post_init__(self) -> None:
        require_counts("PreemptionPlugin", preempt_time=self.preempt_time)
        self.sig = signal_of(self.sig, owner="PreemptionPlugin")

    def setup(self, task: Any, executor: Any) -> None:
        """Set ``executor.signal`` on a Slurm executor, and add the callbacks."""
        if isinstance(executor, nemo_run.SlurmExecutor):
            executor.signal = f"{signal.Signals(self.sig).name.removeprefix('SIG')}@{self.preempt_time}"
        else:
            warn_without_slurm(self, executor, "preempt_time")
        if self.callbacks is not None:
            trainer = trainer_of(self, task)
            trainer.callbacks = [*callbacks_of(trainer), *self.callbacks]
        elif self.sig != signal.SIGTERM:
            add_callback(self, task, PreemptionCallback, sig=signal.Signals(self.sig).name)


@dataclass(kw_only=True)
class FaultTolerancePlugin(nemo_run.Plugin):
    """Restart the ranks within the job when a rank dies or the run hangs.

    torchrun, which an executor without a launcher gets, restarts the ranks, and `HangWatchdog` ends ranks that hang. If
    NVIDIA's nvidia-resiliency-ext is installed, its launcher replaces torchrun: a process beside each rank monitors the
    heartbeats of `FaultToleranceCallback`, and checks GPUs and network cards before a restart. A launch of nemo2
    doesn't retry an error in the settings or the data. nemo-run's own `run.run` and `run.Experiment` do.

    Args:
        num_in_job_restarts: The number of restarts within one job. 0: none.
        num_job_retries_on_failure: On Slurm, the number of times that a failed job is started again. 0: never. Without
            the plugin a job restarts as long as it makes progress.
        initial_rank_heartbeat_timeout: Seconds until the end of the first step, including compilation.
        rank_heartbeat_timeout: Seconds from one step or validation batch to the next, including a save between them.
        resiliency_ext: Whether to use nvidia-resiliency-ext. None: if it is installed here, unless the ranks run on
            this machine and it has no GPU, because the package's launcher calls NVIDIA's management library before it
            restarts ranks.
    """

    num_in_job_restarts: int = 3
    num_job_retries_on_failure: int = 2
    initial_rank_heartbeat_timeout: int = 1800
    rank_heartbeat_timeout: int = 300
    resiliency_ext: Optional[bool] = None

    def __post_init__(self) -> None:
        for least, names in (
            (0, ("num_in_job_restarts", "num_job_retries_on_failure")),
            (1, ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout")),
        ):
            require_counts("FaultTolerancePlugin", least=least, **{name: getattr(self, name) for name in names})

    def setup(self, task: Any, executor: Any) -> None:
        """Choose the launcher, limit the restarts, and add the watchdogs.

        Raises:
            ConfigError: the executor uses nsys, or another launcher than torchrun.
        """
        if executor.launcher is None:
            executor.launcher = "torchrun"
        launcher = executor.get_launcher()
        if launcher.nsys_profile:
            raise ConfigError(
                "FaultTolerancePlugin doesn't work with nsys, because nsys would record a restarted rank into the file "
                "of the rank that failed. Leave out FaultTolerancePlugin or NsysPlugin."
            )
        if not isinstance(launcher, nemo_run.Torchrun | nemo_run.FaultTolerance):
            raise ConfigError(
                "FaultTolerancePlugin requires torchrun, which restarts ranks, but the executor's launcher is "
                f"{type(launcher).__name__}. Set launcher='torchrun', or starter = \"torchrun\" in a cluster profile."
            )
        if isinstance(executor, nemo_run.SlurmExecutor):
            # 0 is nemo-run's default, with which a job restarts as long as it makes progress.
            executor.retries = self.num_job_retries_on_failure or -1
        else:
            warn_without_slurm(self, executor, "num_job_retries_on_failure")
        set_variable(self, executor, RESTARTS, str(self.num_in_job_restarts))
        if self._resiliency_ext(executor):
            executor.launcher = nemo_run.FaultTolerance(
                max_restarts=self.num_in_job_restarts,
                initial_rank_heartbeat_timeout=self.initial_rank_heartbeat_timeout,
                rank_heartbeat_timeout=self.rank_heartbeat_timeout,
            )
            add_callback(self, task, FaultToleranceCallback)
            return
        add_callback(
            self,
            task,
            HangWatchdog,
            timeout_seconds=float(self.rank_heartbeat_timeout),
            first_timeout_seconds=float(self.initial_rank_heartbeat_timeout),
        )

    def _resiliency_ext(self, executor: Any) -> bool:
        if self.resiliency_ext is False:
            return False
        installed = has("nvidia_resiliency_ext")
        has_gpus = not isinstance(executor, nemo_run.LocalExecutor) or Machine.here().accelerator == "cuda"
        if self.resiliency_ext and not installed:
            raise ConfigError(
                "FaultTolerancePlugin.resiliency_ext=True: nvidia-resiliency-ext is not installed here. Run "
                f"`{install('resiliency')}` here and where the ranks run, or leave resiliency_ext unset."
            )
        if self.resiliency_ext and not has_gpus:
            raise ConfigError(
                "FaultTolerancePlugin.resiliency_ext=True: nvidia-resiliency-ext calls NVML, the library of NVIDIA's "
                "driver, before it restarts ranks, but this machine has no GPU. Leave resiliency_ext unset to use "
                "torchrun and HangWatchdog."
            )
        return installed and has_gpus
