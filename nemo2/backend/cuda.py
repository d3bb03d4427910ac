# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs with NCCL: Megatron-Core's home, so there is nothing to install.

`config_overrides` only turns off what needs a package that is not here.
"""

import torch

from nemo2.backend.base import Backend, Override
from nemo2.backend.extras import has, have_te, why_missing


class CudaBackend(Backend):
    """Trains on the GPU `torch.cuda.current_device()` names."""

    name = "cuda"
    process_group_backend = "nccl"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def install(self) -> None:
        """Nothing to do."""

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank)

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
        overrides: dict[str, Override] = {}
        if not have_te():
            reason = why_missing("transformer_engine")
            for name in ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion", "tp_comm_overlap"):
                overrides[name] = (False, reason)
            overrides["persist_layer_norm"] = (False, "it names an Apex kernel; the plain PyTorch norm is used")
            overrides["masked_softmax_fusion"] = (False, "attention runs on scaled_dot_product_attention")
            if not has("fused_weight_gradient_mlp_cuda"):
                overrides["gradient_accumulation_fusion"] = (False, why_missing("fused_weight_gradient_mlp_cuda"))
            overrides["cross_entropy_fusion_impl"] = ("native", reason)
        return overrides
