# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend."""

from abc import ABC, abstractmethod
from typing import Any

import torch

Override = tuple[Any, str]
"""A value a config field must take on this backend, and the reason to give the user."""


class Backend(ABC):
    """A kind of device to train on. Made to be used through `get_backend()`; stateless apart from `install()`."""

    name: str
    """`"cuda"` or `"cpu"`, as Lightning's accelerators are called."""

    process_group_backend: str
    """Backend of torch.distributed and of Megatron-Core's groups: `"nccl"` or `"gloo"`."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of this process' tensors: the GPU set by `set_device`, or the CPU."""

    @abstractmethod
    def install(self) -> None:
        """Make Megatron-Core's training path run on this device. Idempotent, and callable before or after
        `megatron.core` was imported. Does nothing for CUDA.

        Raises:
            RuntimeFault: something the training path cannot do without is missing from this installation.
        """

    @abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Bind this process to the `local_rank`-th device of its node."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished what was queued on it."""

    @abstractmethod
    def memory_figures(self) -> dict[str, int]:
        """Bytes this process holds: `allocated_bytes` now, `peak_bytes` since `reset_peak_memory` (since the process
        started on CPU, where the kernel keeps the mark), and the `capacity_bytes` of the device."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak. No effect on CPU."""

    @abstractmethod
    def config_overrides(self) -> dict[str, Override]:
        """Fields of `TransformerConfig` (and of `ModelParallelConfig`, which it extends) that cannot keep an arbitrary
        value here: name → (the value that works, why). A field absent from the installed Megatron-Core is to be
        skipped by whoever applies them; so is one that already has the value.
        """

    def group_overrides(self) -> dict[str, Override]:
        """Arguments of Megatron-Core's ``initialize_model_parallel`` that mean nothing here, as `config_overrides`."""
        return {}
