# SPDX-License-Identifier: Apache-2.0
"""Predicts the speed, the memory and the cost of a job before it is queued.

Imports torch only when a recipe is read.
"""

from nemo2.base.gpus import GPU, gpu
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.memory import MemoryEstimate, predict_memory
from nemo2.preflight.planner.step_time import StepTime, predict

__all__ = ["GPU", "Job", "MemoryEstimate", "ModelShape", "StepTime", "gpu", "predict", "predict_memory"]
