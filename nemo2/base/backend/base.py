# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend."""

from abc import ABC, abstractmethod
from typing import Any

import torch

Override = tuple[Any, str]
"""The value that a config field must have on this backend, and the reason for the user."""


class Backend(ABC):
    """A kind of device to train on. Use it through `get_backend()`. It has no state except that of `install()`."""

    name: str
    """`"cuda"` or `"cpu"`, as in Lightning's accelerators."""

    process_group_backend: str
    """The backend of torch.distributed and of Megatron-Core's groups: `"nccl"` or `"gloo"`."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this process's tensors: the GPU that `set_device` chose, or the CPU."""

    @abstractmethod
    def install(self) -> None:
        """Make Megatron-Core's training path run on this device. Does nothing for CUDA with Transformer Engine.

        Idempotent. May be called before or after `megatron.core` is imported.

        Raises:
            RuntimeFault: this installation lacks something that the training path requires.
        """

    @abstractmethod
    def set_device(self, device: torch.device) -> None:
        """Bind this process to `device`, that of its rank."""

    def build_extensions(self, config: Any, *, local_rank: int) -> None:
        """Compile what Megatron-Core would compile within the first step of ``config``, the model's configuration."""
        del config, local_rank

    def plain_layers(self) -> str:
        """The sentence about the cost of layers without Transformer Engine. "": they are all that this device has."""
        return ""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""

    @abstractmethod
    def memory_figures(self) -> dict[str, int]:
        """The bytes of this process.

        `allocated_bytes` is the current amount. `peak_bytes` is the peak since `reset_peak_memory`, or on CPU since the
        process started, because the kernel keeps that mark. `capacity_bytes` is the device's memory.
        """

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Reset the peak. No effect on CPU."""

    @abstractmethod
    def config_overrides(self) -> dict[str, Override]:
        """Fields of `TransformerConfig` (and of its base `ModelParallelConfig`) that this backend restricts: name →
        (the required value, the reason).

        The caller skips fields that the installed Megatron-Core lacks and fields that already have the value.
        """

    def group_overrides(self) -> dict[str, Override]:
        """Arguments of Megatron-Core's ``initialize_model_parallel`` that have no meaning here, in the format of
        `config_overrides`."""
        return {}
