# SPDX-License-Identifier: Apache-2.0
from nemo2.callbacks.flops_measurement import FLOPsMeasurementCallback as FLOPsMeasurementCallback
from nemo2.callbacks.garbage_collection import GarbageCollectionCallback as GarbageCollectionCallback
from nemo2.callbacks.loss_guard import LossGuard as LossGuard
from nemo2.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback as MegatronCommOverlapCallback
from nemo2.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
from nemo2.callbacks.memory_profile import MemoryProfileCallback as MemoryProfileCallback
from nemo2.callbacks.model_transform import ModelTransform as ModelTransform
from nemo2.callbacks.nsys import NsysCallback as NsysCallback
from nemo2.callbacks.profiler import PytorchProfilerCallback as PytorchProfilerCallback
from nemo2.callbacks.straggler_detection import StragglerDetectionCallback as StragglerDetectionCallback
from nemo2.callbacks.timing import TimingCallback as TimingCallback
from nemo2.run_dir.hang import HangWatchdog as HangWatchdog
from nemo2.run_dir.preemption import PreemptionCallback as PreemptionCallback
