# SPDX-License-Identifier: Apache-2.0
"""NeMo's ``llm.fn``: functions over modules, and Megatron-Core's activation functions that model configurations
name."""

import sys

from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.utils import openai_gelu

from nemo2.mcore.parallel.module_functions import FNMixin, forall, map, walk

__all__ = ["FNMixin", "forall", "map", "openai_gelu", "quick_gelu", "squared_relu", "walk"]

activation = sys.modules[__name__]  # NeMo's module of the activation functions
