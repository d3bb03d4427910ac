# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: the kernels of a training step, recorded once and launched together.

Megatron-Core records and replays the graphs, and `nemo2.mcore.parallel.step_graphs` does what it leaves to the training loop.
``model.config.cuda_graph_impl`` selects one of three kinds:

    "local"               layers, captured by Megatron-Core itself when the first step has ended
    "transformer_engine"  layers, by Transformer Engine's ``make_graphed_callables``, when the loop requests it
    "full_iteration"      forward and backward of a step as one graph; to Megatron-Core before 0.19 this is "local" with
                          ``cuda_graph_scope=["full_iteration"]``

``cuda_graph_modules`` (``cuda_graph_scope`` before 0.19) selects the captured parts of a layer, by default all of it.
The last two kinds run ``cuda_graph_warmup_steps`` steps first. Validation, test and prediction are never captured as a
whole, and neither is the optimizer's step.

Sources: Megatron-LM's training.py and arguments.py of the branches core_r0.16.0 and core_r0.19.0.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from nemo2.config.provenance import adjust

Kind = Literal["none", "local", "transformer_engine", "full_iteration"]


def kind_of(config: Any) -> Kind:
    """The kind of graphs that ``config`` requests, under any version's name. "none" for other models."""
    kind: Any = getattr(config, "cuda_graph_impl", "none") or "none"
    if getattr(config, "enable_cuda_graph", False):
        kind = "local"
    elif getattr(config, "external_cuda_graph", False):
        kind = "transformer_engine"
    return "full_iteration" if kind == "local" and "full_iteration" in modules_of(config) else kind


def modules_of(config: Any) -> tuple[str, ...]:
    """The names of the captured parts of a layer. (): all of it."""
    modules = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ()
    if isinstance(modules, str):
        modules = modules.split(",")
    elif not isinstance(modules, (list, tuple)):
        modules = (modules,)
    return tuple(name for name in (getattr(module, "name", str(module)) for module in modules) if name != "full")


def spell_as_installed(config: Any) -> None:
    """Translate the requested kind to the installed version's settings.

    NeMo's switches become `cuda_graph_impl`, because Megatron-Core rejects them when it checks a configuration a second
    time. 0.16 receives its own names for a whole step, which 0.19 also accepts.
    """
    if getattr(config, "cuda_graph_impl", None) == "none":
        for switch, kind in (("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")):
            if getattr(config, switch, False):
                adjust(config, "cuda_graph_impl", kind, why=f"model.config.{switch}")
                adjust(config, switch, False, why="Megatron-Core reads model.config.cuda_graph_impl")
    if getattr(config, "cuda_graph_impl", None) == "full_iteration" and not hasattr(config, "cuda_graph_modules"):
        from megatron.core.transformer.enums import CudaGraphScope

        why = "before Megatron-Core 0.19 a whole step is a scope of local graphs"
        adjust(config, "cuda_graph_scope", [CudaGraphScope.full_iteration], why=why)
        adjust(config, "cuda_graph_impl", "local", why=why)


@contextlib.contextmanager
def building_stream(config: Any) -> Iterator[None]:
    """A context for making the gradient buffers of chunks whose step is to be captured.

    The buffers' hooks remember the stream, and a stream outside the capture would break it.
    """
    kind = kind_of(config)
    if kind == "none":
        yield
        return
    import torch

    stream = _stream_of_captures() if kind == "full_iteration" else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _stream_of_captures() -> Any:
    try:
        from megatron.core.full_cuda_graph import get_shared_capture_stream  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # before 0.19 each capture has its own stream
        import torch

        return torch.cuda.Stream()
    return get_shared_capture_stream()
