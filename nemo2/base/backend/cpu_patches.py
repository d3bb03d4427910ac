# SPDX-License-Identifier: Apache-2.0
"""Replacements, on a CPU, for the calls to CUDA that Megatron-Core's training path makes unconditionally.

There are two tables for `patching.Patcher`. `TORCH` replaces `torch.cuda` calls and `device="cuda"` arguments.
`megatron_patches()` replaces code that checks for CUDA tensors or Transformer Engine and draws the wrong conclusion.
Three attributes stay unchanged on purpose: `torch.cuda.is_available()` (False is correct, and libraries call it),
`Tensor.is_cuda`, and `torch.cuda.FloatTensor` (Megatron's `isinstance` checks with it work).

This module replaces attributes rather than using a TorchFunctionMode. A mode is off inside its own handlers, and
`Tensor.backward` is a handler, so the whole backward pass would not be redirected.

Differences that can be expressed as a layer or a setting are in `nemo2.models.layers` and
`CpuBackend.config_overrides`.
"""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from nemo2.base.backend.null_cuda import NullContext, NullEvent, NullStream
from nemo2.base.backend.patching import Patch
from nemo2.base.backend.te_absent import adam_patches, kernel_patches, recomputation_patch
from nemo2.base.variables import replaced

_CPU = torch.device("cpu")
_THE_STREAM = NullStream()


# ------------------------------------------------------------------------------------------------ tensors and devices


def _means_cuda(device: Any) -> bool:
    """Whether a `device` argument names a GPU: `"cuda"`, `"cuda:1"`, `torch.device("cuda")` or an index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A tensor factory that creates tensors for a GPU on the CPU, and ignores page-locking."""
    if kwargs:
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
    return original(*args, **kwargs)


def _method_on_cpu(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method whose device may also be the first positional argument."""
    if args and _means_cuda(args[0]):
        args = (_CPU, *args[1:])
    if kwargs and _means_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    return original(self, *args, **kwargs)


def _unchanged(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    del args, kwargs
    return self


def _nothing() -> Callable[..., None]:
    """A new function each time, because torch._dynamo stores rules by function and rejects a function with two
    names."""

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    return do_nothing


# --------------------------------------------------------------------------------------------- random number generators


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    del device
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    del device
    torch.default_generator.set_state(new_state)


_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "tensor", "zeros", "Tensor.new_empty")
"""Those that Megatron-Core's training path calls with a GPU's name."""

_NO_CUDA = "raises without a GPU"
_NO_DEVICE = "would put the tensor on a GPU"

TORCH: tuple[Patch, ...] = (
    Patch(target="torch.cuda:current_device", replacement=lambda: 0, why="an index, as f'cuda:{...}' needs it"),
    Patch(target="torch.cuda:synchronize", replacement=_nothing(), why=_NO_CUDA),
    Patch(target="torch.cuda:Stream", replacement=NullStream, why=_NO_CUDA),
    Patch(target="torch.cuda:Event", replacement=NullEvent, why=_NO_CUDA),
    Patch(target="torch.cuda:stream", replacement=NullContext, why=_NO_CUDA),
    Patch(target="torch.cuda:current_stream", replacement=lambda device=None: _THE_STREAM, why=_NO_CUDA),
    Patch(target="torch.cuda:default_stream", replacement=lambda device=None: _THE_STREAM, why=_NO_CUDA),
    Patch(target="torch.cuda:is_current_stream_capturing", replacement=lambda: False, why="there are no CUDA graphs"),
    Patch(target="torch.cuda.nvtx:range_push", replacement=lambda message: 0, why=_NO_CUDA),
    Patch(target="torch.cuda.nvtx:range_pop", replacement=lambda: 0, why=_NO_CUDA),
    Patch(target="torch.cuda.nvtx:range", replacement=NullContext, why=_NO_CUDA),
    Patch(target="torch.cuda:manual_seed", replacement=_manual_seed, why="only noted for later without a GPU"),
    Patch(target="torch.cuda:get_rng_state", replacement=_get_rng_state, why=_NO_CUDA),
    Patch(target="torch.cuda:set_rng_state", replacement=_set_rng_state, why="only noted for later without a GPU"),
    Patch(target="torch.cuda.random:get_rng_state", replacement=_get_rng_state, why=_NO_CUDA),
    *(Patch(target=f"torch:{name}", replacement=_on_cpu, wraps=True, why=_NO_DEVICE) for name in _FACTORIES),
    Patch(target="torch:Tensor.to", replacement=_method_on_cpu, wraps=True, why=_NO_DEVICE),
    Patch(target="torch:Tensor.cuda", replacement=_unchanged, why=_NO_CUDA),
    Patch(target="torch:Tensor.pin_memory", replacement=_unchanged, why=_NO_CUDA),
    Patch(target="torch:Tensor.record_stream", replacement=_nothing(), why="not implemented for CPU tensors"),
)


# ----------------------------------------------------------------------------------------------------- Megatron-Core


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    del graph_safe
    _set_rng_state(new_state, device)


_TYPES_OF_A_GPU = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def _with_types_of_a_gpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """While the function runs, `Tensor.type()` names types of a GPU, `torch.cuda.FloatTensor` and the like."""
    with replaced(torch.Tensor, type=lambda self: _TYPES_OF_A_GPU.get(self.dtype, "torch.cuda.Tensor")):
        return original(*args, **kwargs)


def _split_sizes_as_numpy(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Convert split sizes to numpy. `maybe_move_tensor_to_cpu` does so only for tensors of a GPU."""
    if as_numpy and isinstance(tensor, torch.Tensor):
        return tensor.numpy()
    return original(tensor, as_numpy=as_numpy, record_stream=record_stream)


def _gathered_evenly(
    original: Callable[..., Any],
    input_: torch.Tensor,
    group: Any,
    output_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """A gather of shards of different lengths as a gather of equal ones, padded before and truncated afterwards."""
    if output_split_sizes is None or group.size() == 1:
        return original(input_, group, output_split_sizes, use_global_buffer)
    sizes = [int(size) for size in output_split_sizes]
    parts = original(_filled_up(input_, max(sizes)), group).chunk(len(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _filled_up(x: torch.Tensor, length: int) -> torch.Tensor:
    """`x` padded with zero rows. At least one row, because some collectives reject empty tensors."""
    missing = max(length, 1) - x.size(0)
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


class _NoSuchLayer:
    """A class without instances, for `isinstance` checks that must fail."""


def _mesh_of_cpus(original: Callable[..., Any], group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
    """A device mesh over existing groups, with the device type "cpu", from which DTensor derives the device of every
    shard."""
    return original(group, "cpu" if _means_cuda(device_type) else device_type, *args, **kwargs)


def _new_device(kind: Any, interface: str, process: int) -> Any:
    return kind.create_device(interface=interface) if interface else kind.create_default_device()


_device_of_one = functools.cache(_new_device)
"""Of all the groups of one rank in a process."""


def _one_thread(
    original: Callable[..., Any],
    self: Any,
    store: Any,
    rank: int,
    size: int,
    timeout: Any = timedelta(minutes=30),
    **kwargs: Any,
) -> None:
    """The constructor of a gloo group that runs its collectives in one thread instead of two, in order.

    Both threads write the name of their last collective into one string, without a lock (``ProcessGroupGloo::runLoop``,
    torch 2.13). Short names fit into the string object, but ALLGATHER_COALESCED and ALLREDUCE_COALESCED don't. If two
    of these end at once, the memory of the previous name is freed twice. Megatron-FSDP and overlapped reductions have
    several such collectives in flight.
    """
    options: Any = kwargs.pop("options", timeout)
    if isinstance(options, timedelta):
        kind = type(self)
        # The same options that torch uses if it is given a timeout.
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        interfaces = names.split(",") if len(names) > 1 else []
        options = kind._Options()
        options._timeout = timeout
        # A device has a thread that wakes every 10 ms and is waited for when its group ends. Groups of one rank send
        # nothing: most groups of a small layout, which would take a tenth of a second to destroy.
        device = _device_of_one if size == 1 else _new_device
        options._devices = [device(kind, name, os.getpid()) for name in interfaces or [""]]
        for name, value in kwargs.items():  # enable_reconfigure, from torch 2.15 on
            setattr(options, name, value)
    options._threads = 1
    original(self, store, rank, size, options)


def _built_on_cpu(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """A constructor that is told to build on the CPU instead of a GPU."""
    original(self, *args, **kwargs | {"use_cpu_initialization": True})


def _restored_by_copy(discarded: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give a discarded output its bytes back, below autograd, as Megatron-Core 0.16 does."""
    storage, source = discarded.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)


def megatron_patches() -> tuple[Patch, ...]:
    """The second table. For a machine without a GPU, where Transformer Engine's kernels cannot run even if it is
    installed."""
    from nemo2.base.backend.results_queue import getter, results_queue

    rng, optimizer = "megatron.core.tensor_parallel.random", "megatron.core.optimizer"
    moe = "megatron.core.transformer.moe.moe_utils"
    files = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    spawns = "the first save would spawn a process that imports the entry script again"
    return (
        Patch(
            target=f"{rng}:_set_cuda_rng_state",
            replacement=_set_cuda_rng_state,
            why="only noted for later without a GPU",
        ),
        recomputation_patch(),
        Patch(
            target=f"{rng}:_get_share_storage",
            replacement=lambda: _restored_by_copy,
            versions=">=0.17",
            why="the first backward with discarded outputs would compile a C++ extension",
        ),
        Patch(
            target=f"{moe}:maybe_move_tensor_to_cpu",
            replacement=_split_sizes_as_numpy,
            wraps=True,
            why="all_to_all_single rejects split sizes that are tensors",
        ),
        Patch(
            target="megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
            replacement=_gathered_evenly,
            wraps=True,
            why="gloo's gather rejects shards of different lengths",
        ),
        Patch(
            target=f"{moe}:te_general_gemm",
            replacement=None,
            may_be_absent=True,
            why="0.16 uses the name without defining it, and newer versions call Transformer Engine where it is installed",
        ),
        Patch(
            target="megatron.core.transformer.multi_latent_attention:HAVE_TE",
            replacement=False,
            versions="<0.19",
            why="Megatron-Core would take a stand-in for Transformer Engine",
        ),
        Patch(
            target="megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
            replacement=_built_on_cpu,
            wraps=True,
            why="`torch.device(0)` would name a GPU",
        ),
        Patch(
            target="torch.distributed.device_mesh:DeviceMesh.from_group",
            replacement=_mesh_of_cpus,
            wraps=True,
            why="torch would expect fully sharded parameters on GPUs",
        ),
        Patch(
            target="torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",
            replacement=_one_thread,
            wraps=True,
            why="gloo's two threads may free one string twice if several coalesced collectives of a group are in flight",
        ),
        Patch(
            target="megatron.core.distributed.fsdp.mcore_fsdp_adapter:TELinear",
            replacement=_NoSuchLayer,
            may_be_absent=True,
            versions="<0.19",
            why="Megatron-FSDP compares layers with a class of Transformer Engine that doesn't exist here",
        ),
        *(
            Patch(
                target=f"{optimizer}.{name}",
                replacement=_with_types_of_a_gpu,
                wraps=True,
                why="refuses tensors whose type() is not torch.cuda.*",
            )
            for name in (
                "optimizer:Float16OptimizerWithFloat16Params.__init__",
                "distrib_optimizer:DistributedOptimizer.__init__",
                "clip_grads:clip_grad_by_total_norm_fp32",
            )
        ),
        *adam_patches(),
        *kernel_patches(),
        Patch(target=f"{files}:{getter}", replacement=results_queue, why=spawns),
        Patch(
            target="megatron.core.dist_checkpointing.mapping:ShardedTensor.init_data",
            replacement=_method_on_cpu,  # its default for a factory was bound before the factories were replaced
            wraps=True,
            why="ranks that distribute the reading of a checkpoint would exchange tensors through GPU memory",
        ),
    )
