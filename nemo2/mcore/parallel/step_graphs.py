# SPDX-License-Identifier: Apache-2.0
"""The training loop's part in CUDA graphs: when a step is captured, what it must not do, and freeing it.

`nemo2.mcore.parallel.cuda_graphs` has the kinds of graphs and the sources.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.cuda_graphs import kind_of

_log = logging.getLogger(__name__)
PER_MICROBATCH = ("on_megatron_microbatch_start", "on_megatron_microbatch_end")
"""Hooks that Python calls inside the part that a whole step's graph replays without Python."""


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
            _log.warning(
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
