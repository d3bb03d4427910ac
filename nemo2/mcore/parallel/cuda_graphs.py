# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: the kernels of a training step, recorded once and launched together.

Megatron-Core records and replays the graphs. This module does what Megatron-Core leaves to the training loop.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from nemo2.config.provenance import adjust
from nemo2.errors import ConfigError

Kind = Literal["none", "local", "transformer_engine", "full_iteration"]
PER_MICROBATCH = ("on_megatron_microbatch_start", "on_megatron_microbatch_end")
"""Hooks that Python calls inside the part that a whole step's graph replays without Python."""


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
    return tuple(name for name in (getattr(one, "name", str(one)) for one in modules) if name != "full")


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


class StepGraphs:
    """The training loop's part in the graphs of one rank's chunks. `MegatronParallel` creates it if graphs are
    requested.

    Args:
        chunks: This rank's wrapped chunks.
        config: The model's configuration.
        pause_gathers: A function that returns a context in which forwards gather no parameters.
        heard_per_microbatch: The names of listeners to hooks that a whole step's graph doesn't call, for a warning.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        config: Any,
        *,
        pause_gathers: Callable[[], Any],
        heard_per_microbatch: Callable[[], list[str]],
    ) -> None:
        self.kind = kind_of(config)
        self.optimizers: list[Any] = []
        """Megatron-Core's optimizers, whose gradients are zeroed after the capture."""
        self._chunks = list(chunks)
        self._config = config
        self._pause_gathers = pause_gathers
        self._heard_per_microbatch = heard_per_microbatch
        self._steps = 0
        self._shape: dict[str, int] = {}
        self._helper: Any = None
        self._whole_step: Any = None
        if self.kind == "full_iteration":
            reset_full_iteration_graphs()

    def around(self, schedule: Callable[..., Any], step: Any) -> Callable[..., Any]:
        """The function to call in place of ``schedule`` for a training step. It captures after the warm-up.

        Raises:
            ConfigError: the batch has another shape than the captured one, or can't be captured.
        """
        self._refuse_what_cannot_replay(step)
        if self.kind == "transformer_engine" and self._steps == self._config.cuda_graph_warmup_steps:
            self._capture_layers(step)
        self._steps += 1
        if self.kind != "full_iteration":
            return schedule
        if self._whole_step is None:
            self._whole_step = self._wrap(schedule)
        return self._whole_step

    @property
    def captured(self) -> bool:
        """Whether steps are already replayed."""
        if self.kind == "local":
            from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord

            return bool(_CudagraphGlobalRecord.cudagraph_created)
        if self.kind == "transformer_engine":
            return self._helper is not None and bool(self._helper.graphs_created())
        return self._whole_step is not None and self._whole_step.cuda_graph["training"] is not None

    def close(self) -> None:
        """Free the graphs, so that this process can train another model."""
        if self.kind == "transformer_engine" and self.captured:
            self._helper.delete_cuda_graphs()
        if self.kind == "local" and self._steps:
            from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

            delete_cuda_graphs()
        if self.kind == "full_iteration":
            reset_full_iteration_graphs()
        self._helper = self._whole_step = None

    def _refuse_what_cannot_replay(self, step: Any) -> None:
        batch = step.batch[0] if isinstance(step.batch, (tuple, list)) and step.batch else step.batch
        setting = f"model.config.cuda_graph_impl={self.kind!r}"
        if isinstance(batch, dict) and batch.get("cu_seqlens") is not None:
            raise ConfigError(
                f"{setting} with packed sequences: the sequence boundaries change from batch to batch, but a captured "
                "graph can't change. Set cuda_graph_impl='none', or train without packing, on samples of one length."
            )
        if self.kind == "full_iteration" and not isinstance(batch, dict):
            raise ConfigError(
                f"{setting} requires batches that are dictionaries of tensors, but this batch is a "
                f"{type(batch).__name__}. Return a dictionary from the dataset, or set cuda_graph_impl='local' to "
                "capture layers instead."
            )
        shape = {"samples in a micro-batch": step.micro_batch_size, "tokens in a sample": step.seq_length}
        if self.kind == "full_iteration" or self._config.pipeline_model_parallel_size > 1:
            shape["micro-batches"] = step.num_microbatches
        if not self._shape:
            self._shape = shape
            self._warn_of_skipped_hooks()
        elif shape != self._shape:
            was, now = (", ".join(f"{count} {name}" for name, count in sizes.items()) for sizes in (self._shape, shape))
            raise ConfigError(
                f"{setting} requires equal sizes in all steps. The first step had {was}, but this step has {now}. Leave "
                "data.rampup_batch_size unset, or set cuda_graph_impl='none'."
            )

    def _warn_of_skipped_hooks(self) -> None:
        names = self._heard_per_microbatch() if self.kind == "full_iteration" else []
        if names:
            import logging

            logging.getLogger(__name__).warning(
                "%s: %s is no longer called after the step has been captured, because a CUDA graph replays kernels "
                "without Python (model.config.cuda_graph_impl).",
                ", ".join(names),
                " or ".join(PER_MICROBATCH),
            )

    def _capture_layers(self, step: Any) -> None:
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        self._helper = TECudaGraphHelper(
            model=self._chunks,
            config=self._config,
            seq_length=step.seq_length,
            micro_batch_size=step.micro_batch_size,
            optimizers=self.optimizers,
        )
        with self._pause_gathers() as paused:
            refuse_hooks(self._helper.flattened_callables)
            self._helper.create_cudagraphs()
        if paused:
            # The replay of a graph calls no module hooks, so parameters are gathered explicitly.
            self._helper.cuda_graph_set_manual_hooks()

    def _wrap(self, schedule: Callable[..., Any]) -> Any:
        from inspect import signature

        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        options = {
            "cuda_graph_warmup_steps": self._config.cuda_graph_warmup_steps,
            "use_single_mempool": getattr(self._config, "cuda_graph_use_single_mempool", False),
        }
        parameters = signature(FullCudaGraphWrapper.__init__).parameters  # 0.16 has one pool per stage
        return FullCudaGraphWrapper(schedule, **{name: value for name, value in options.items() if name in parameters})


def refuse_hooks(layers: Sequence[Any]) -> None:
    """Check that no layer has hooks. Transformer Engine captures no such layer, and hooks inside a layer would run in
    the capture only.

    Raises:
        ConfigError: hooks are registered.
    """
    for layer in layers:
        for name, module in layer.named_modules():
            hooks = [hook for kind in _HOOKS for hook in getattr(module, kind).values()]
            own_hooks = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith(_LIBRARIES)]
            if own_hooks:
                names = ", ".join(sorted({getattr(hook, "__qualname__", type(hook).__name__) for hook in own_hooks}))
                raise ConfigError(
                    f"model.config.cuda_graph_impl='transformer_engine' with hooks on {name or 'a layer'} of layer "
                    f"{layer.layer_number}: {names}. A graph replays kernels and calls no hooks. Remove the hooks "
                    "before step cuda_graph_warmup_steps, or set cuda_graph_impl='none'."
                )


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("megatron.", "transformer_engine.")


def reset_full_iteration_graphs() -> None:
    """Delete the graph, its results and its inputs, which Megatron-Core keeps on classes. Otherwise an earlier run's
    graph would be replayed."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    for stage in ("training", "validation"):
        FullCudaGraphWrapper.curr_iteration[stage] = 0
        FullCudaGraphWrapper.cuda_graph[stage] = None
        FullCudaGraphWrapper.result[stage] = None
        StaticBufferLoader.static_buffers[stage] = []


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
