# SPDX-License-Identifier: Apache-2.0
"""The preconditions of a Transformer Engine version for capturing layers as CUDA graphs, before, during and after the
capture.

Layers are captured by `nemo2.mcore.parallel.cuda_graphs` through Megatron-Core's helper and the version's own
``make_graphed_callables``, replayed in a step, and reset; only captures are absent: a captured graph is empty, and a
replay leaves its outputs unchanged. Requires `tests.transformer_engine.steps.prepare`.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.transformer_engine.kernels import gpu
from tests.transformer_engine.steps import GPUS, RECIPES, SIZE, enter, model, step, words

MICROBATCH = {"seq_length": SIZE, "micro_batch_size": 1, "num_microbatches": 1}
_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}


def graphs() -> dict[str, Any]:
    """The result of a captured step by format, and in bf16 for each unmet precondition. None: no refusal."""
    with _captures():
        found: dict[str, Any] = {"bf16": _on("9.0", lambda: _captured_step(_chunk(None)))}
        for recipe in RECIPES:
            able = [name for name in GPUS if _on(name, lambda recipe=recipe: enter(recipe)) is None]
            if able:
                found[recipe] = _on(able[-1], lambda recipe=recipe: _captured_step(_chunk(recipe)))
        mixed = {"first_last_layers_bf16": True}
        found["some layers in 16 bits"] = _on("9.0", lambda: _captured_step(_chunk("tensorwise", **mixed)))
        found |= {name: _on("9.0", call) for name, call in _CONDITIONS.items()}
    return found


def _on(name: str, call: Callable[[], Any]) -> str | None:
    major, _, minor = name.partition(".")
    with gpu(int(major), int(minor)):
        return words(call)


# --------------------------------------------------------------------------------------------------------- conditions


def _hooked() -> None:
    """A hook on a captured layer, as a callback may leave it."""
    chunk = _chunk(None)
    chunk.module.decoder.layers[0].register_forward_hook(lambda *rest: None)
    _captured_step(chunk)


def _gathers() -> None:
    """The hooks that gather parameters before a layer, not paused."""
    chunk = _chunk(None, overlap_param_gather=True)
    _close(_capture(chunk))


def _gathers_paused() -> None:
    chunk = _chunk(None, overlap_param_gather=True)
    chunk.disable_forward_pre_hook(param_sync=False)
    graphs = _capture(chunk)
    chunk.enable_forward_pre_hook()
    _close(graphs)


def _half_in_training() -> None:
    chunk = _chunk(None)
    chunk.module.decoder.layers[0].eval()
    _captured_step(chunk)


def _under_autocast() -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        _close(_capture(_chunk(None)))
    finally:
        torch.set_autocast_enabled("cuda", False)


def _twice() -> None:
    graphs = _capture(_chunk(None))
    graphs._helper.create_cudagraphs()


def _after_reset() -> None:
    """A step without graphs, as a validation behind the training is."""
    chunk = _chunk(None)
    _captured_step(chunk)
    step(chunk)


def _again() -> None:
    """A second run in one process: capture, close, capture again."""
    for _ in range(2):
        _captured_step(_chunk(None))


_CONDITIONS: dict[str, Callable[[], None]] = {
    "a hook on a layer": _hooked,
    "hooks that gather parameters": _gathers,
    "these hooks, paused": _gathers_paused,
    "one layer in evaluation": _half_in_training,
    "inside torch.autocast": _under_autocast,
    "norms recomputed": lambda: _captured_step(_chunk(None, **_RECOMPUTED)),
    "captured twice": _twice,
    "a second run of the process": _again,
    "a step after their end": _after_reset,
}


# ------------------------------------------------------------------------------------------------------------- a chunk


def _chunk(recipe: str | None, *, overlap_param_gather: bool = False, **changes: Any) -> Any:
    """The model of the steps with gradient buffers of Megatron-Core around it, as a strategy makes it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    built = model(recipe, cuda_graph_impl="transformer_engine", cuda_graph_warmup_steps=1, **changes)
    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_param_gather=overlap_param_gather,
        overlap_grad_reduce=overlap_param_gather,
    )
    return DistributedDataParallel(built.config, buffers, built)


def _capture(chunk: Any) -> Any:
    """Through our part in the loop: one step that warms up, and the capture before the next."""
    from megatron.core import num_microbatches_calculator as microbatches

    from nemo2.mcore.parallel.step_graphs import StepGraphs

    microbatches.unset_num_microbatches_calculator()
    microbatches.init_num_microbatches_calculator(0, None, 1, 1, 1)
    graphs = StepGraphs([chunk], chunk.config, pause_gathers=_no_pause, heard_per_microbatch=list)
    asked = SimpleNamespace(batch={}, **MICROBATCH)
    for _ in range(2):
        graphs.around(lambda **call: None, asked)
    assert graphs.captured
    return graphs


@contextmanager
def _no_pause() -> Iterator[bool]:
    yield False


def _captured_step(chunk: Any) -> None:
    graphs = _capture(chunk)
    for layer in chunk.module.decoder.layers:
        layer.current_microbatch = 0
    chunk.module.set_is_first_microbatch()
    step(chunk)
    _close(graphs)


def _close(graphs: Any) -> None:
    graphs.close()
    assert not graphs.captured


# ------------------------------------------------------------------------------------------------------ no real capture


class _Stream(torch.Generator):
    """A stream of random numbers that a capture may take along, which those of a CPU refuse."""

    def graphsafe_get_state(self) -> torch.Generator:
        return self

    def graphsafe_set_state(self, state: Any) -> Any:
        return self

    def clone_state(self) -> torch.Generator:
        return self


class _Graph:
    """A CUDA graph that holds nothing."""

    def register_generator_state(self, state: Any) -> None: ...

    def replay(self) -> None: ...

    def reset(self) -> None: ...


@contextmanager
def _captures() -> Iterator[None]:
    module: Any = importlib.import_module("transformer_engine.pytorch.graph")
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph = _Graph, _recorded
    cuda.empty_cache, cuda.default_generators = lambda: None, (_Stream(),)
    distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda *args, **kwargs: _Stream()
    module._graph_pool_handle = module.graph_pool_handle = lambda: (0, 0)
    if hasattr(module, "make_weak_ref"):
        module.make_weak_ref = lambda given: given
    yield


@contextmanager
def _recorded(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield
