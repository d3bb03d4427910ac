# SPDX-License-Identifier: Apache-2.0
from nemo2.launch.plugins.performance import PerfEnvPlugin as PerfEnvPlugin
from nemo2.launch.plugins.performance import TritonCacheSetup as TritonCacheSetup
from nemo2.launch.plugins.profiling import MemoryProfilePlugin as MemoryProfilePlugin
from nemo2.launch.plugins.profiling import NsysPlugin as NsysPlugin
from nemo2.launch.plugins.profiling import PytorchProfilerPlugin as PytorchProfilerPlugin
from nemo2.launch.plugins.survival import FaultTolerancePlugin as FaultTolerancePlugin
from nemo2.launch.plugins.survival import PreemptionPlugin as PreemptionPlugin
from nemo2.launch.plugins.validation import ConfigValidationPlugin as ConfigValidationPlugin
from nemo2.launch.plugins.wandb import WandbPlugin as WandbPlugin
