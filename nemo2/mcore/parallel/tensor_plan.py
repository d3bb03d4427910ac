# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel plan of a model: one of torch's styles for each sharded module."""

from collections.abc import Mapping
from typing import Any, Optional

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from nemo2.base.errors import ConfigError


def plan_of(model: nn.Module, *, custom: Optional[Mapping[str, Any]], from_model: bool) -> dict[str, Any]:
    """The plan that shards ``model``: the user's plan, or else the plan of a Hugging Face model inside.

    Raises:
        ConfigError: there is no plan.
    """
    if custom:
        return dict(custom)
    if from_model:
        for name, part in model.named_modules():
            plan = getattr(part, "tp_plan", None) or getattr(part, "_tp_plan", None)
            if plan:
                prefix = f"{name}." if name else ""
                return {prefix + pattern: style for pattern, style in plan.items()}
    missing = f"{type(model).__name__} has none" if from_model else "strategy.use_hf_tp_plan=False"
    raise ConfigError(
        f"strategy.tensor_parallel_size > 1 requires a tensor-parallel plan ({missing}). Set strategy.custom_tp_plan="
        "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise', ...}, or set tensor_parallel_size=1."
    )


def parallel_styles(plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """The plan with torch's styles in place of Hugging Face's names.

    Raises:
        ConfigError: torch has no equivalent of a style.
    """
    # Hugging Face's style names (transformers, integrations/tensor_parallel.py) as torch's styles.
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
    }
    unknown = sorted(
        {str(style) for style in plan.values() if not isinstance(style, ParallelStyle) and style not in styles}
    )
    if unknown:
        raise ConfigError(
            f"strategy.tensor_parallel_size > 1: torch has no equivalent of the plan's styles {', '.join(unknown)}. "
            f"Supported styles: {', '.join(styles)}. Set strategy.custom_tp_plan, or set tensor_parallel_size=1."
        )
    return {name: styles[style] if isinstance(style, str) else style for name, style in plan.items()}
