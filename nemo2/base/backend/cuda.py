# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs with NCCL: Megatron-Core's home, so there is nothing to install where Transformer Engine is.

`config_overrides` only turns off what needs a package that is not here, and says what that costs.
"""

import importlib
from typing import Any

import torch

from nemo2.base.backend.base import Backend, Override
from nemo2.base.backend.extensions import build_extensions
from nemo2.base.backend.extras import has, have_te, why_missing
from nemo2.base.backend.patching import Patcher


class CudaBackend(Backend):
    """Trains on the GPU `torch.cuda.current_device()` names."""

    name = "cuda"
    process_group_backend = "nccl"

    def __init__(self) -> None:
        self._patcher: Patcher | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def install(self) -> None:
        if self._patcher is not None or have_te():
            return
        from nemo2.base.backend.te_absent import gpu_patches

        self._patcher = Patcher(rebind_in=("megatron",))
        self._patcher.apply(gpu_patches(), version=importlib.import_module("megatron.core").__version__)

    def set_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def build_extensions(self, config: Any, *, local_rank: int) -> None:
        build_extensions(config, local_rank=local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory_figures(self) -> dict[str, int]:
        return {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
            "capacity_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        }

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def config_overrides(self) -> dict[str, Override]:
        if have_te():
            return {}
        without = "without Transformer Engine"
        overrides: dict[str, Override] = {
            "apply_rope_fusion": (False, f"{without} rotary embeddings read and write queries and keys several times"),
            "moe_permute_fusion": (
                False,
                f"{without} tokens go to their experts by sorting and indexing, in several kernels",
            ),
            "moe_router_fusion": (False, f"{without} the router is a chain of small kernels"),
            "tp_comm_overlap": (
                False,
                f"{without} tensor-parallel ranks exchange before and after matrix products, not beside",
            ),
            "cross_entropy_fusion_impl": (
                "native",
                f"{without} the loss is Megatron-Core's, in kernels of torch.compile",
            ),
            "delay_wgrad_compute": (False, f"{without} weight gradients are computed with the inputs' gradients"),
            "use_te_rng_tracker": (False, f"{without} Megatron-Core's own random streams are used, at no cost"),
            "persist_layer_norm": (False, "it names a kernel of Apex; PyTorch's norm is used, at no great cost"),
            "masked_softmax_fusion": (
                False,
                "scaled_dot_product_attention has no separate softmax; that costs nothing",
            ),
        }
        if not has("fused_weight_gradient_mlp_cuda"):
            overrides["gradient_accumulation_fusion"] = (
                False,
                f"{without} or Apex a weight's gradient is written first and added to the buffer then",
            )
        return overrides

    def plain_layers(self) -> str:
        """The sentence about the cost of layers without Transformer Engine, and how to install it."""
        return (
            f"Layers are plain PyTorch, because {why_missing('transformer_engine')}. Without Transformer Engine, fp8 "
            "is not available, norms are not fused with the matrix products after them, and expert layers and "
            "tensor-parallel communication are slower."
        )
