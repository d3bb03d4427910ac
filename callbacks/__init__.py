# SPDX-License-Identifier: Apache-2.0
"""Callbacks: one Lightning callback per file, loaded when it is asked for."""

from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names

if __name__ != "nemo2.callbacks":
    raise ImportError(
        "This folder is installed as `nemo2.callbacks`: write `from nemo2.callbacks import TimingCallback`."
    )

if TYPE_CHECKING:
    from nemo2.callbacks.flops_measurement import FLOPsMeasurementCallback as FLOPsMeasurementCallback
    from nemo2.callbacks.garbage_collection import GarbageCollectionCallback as GarbageCollectionCallback
    from nemo2.callbacks.loss_guard import LossGuard as LossGuard
    from nemo2.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback as MegatronCommOverlapCallback
    from nemo2.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from nemo2.callbacks.memory_profile import MemoryProfileCallback as MemoryProfileCallback
    from nemo2.callbacks.nsys import NsysCallback as NsysCallback
    from nemo2.callbacks.profiler import PytorchProfilerCallback as PytorchProfilerCallback
    from nemo2.callbacks.straggler_detection import StragglerDetectionCallback as StragglerDetectionCallback
    from nemo2.callbacks.timing import TimingCallback as TimingCallback
    from nemo2.run_dir.hang import HangWatchdog as HangWatchdog
    from nemo2.run_dir.preemption import PreemptionCallback as PreemptionCallback

_HOMES = {
    "FLOPsMeasurementCallback": "nemo2.callbacks.flops_measurement",
    "GarbageCollectionCallback": "nemo2.callbacks.garbage_collection",
    "HangWatchdog": "nemo2.run_dir.hang",
    "LossGuard": "nemo2.callbacks.loss_guard",
    "MegatronCommOverlapCallback": "nemo2.callbacks.megatron_comm_overlap",
    "MemoryMonitor": "nemo2.callbacks.memory_monitor",
    "MemoryProfileCallback": "nemo2.callbacks.memory_profile",
    "NsysCallback": "nemo2.callbacks.nsys",
    "PreemptionCallback": "nemo2.run_dir.preemption",
    "PytorchProfilerCallback": "nemo2.callbacks.profiler",
    "StragglerDetectionCallback": "nemo2.callbacks.straggler_detection",
    "TimingCallback": "nemo2.callbacks.timing",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
