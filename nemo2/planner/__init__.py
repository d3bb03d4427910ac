# SPDX-License-Identifier: Apache-2.0
"""How fast a job will be, what it needs and what it costs, before it is queued.

Nothing here imports torch until a recipe is read.
"""

from nemo2.gpus import GPU, gpu
from nemo2.models.shape import ModelShape
from nemo2.planner.job import Job
from nemo2.planner.memory import MemoryEstimate, predict_memory
from nemo2.planner.step_time import StepTime, predict

__all__ = ["GPU", "Job", "MemoryEstimate", "ModelShape", "StepTime", "gpu", "predict", "predict_memory"]
