# SPDX-License-Identifier: Apache-2.0
"""The model of one rank in the form of Megatron-Core's schedules, and the step that runs over it.

`MegatronParallel` holds this rank's pipeline chunks, each wrapped in Megatron-Core's DistributedDataParallel. A step
takes this data-parallel rank's part of a global batch, splits it into micro-batches, and passes a forward function to
the schedule (no pipelining, 1F1B, interleaved). That function consists of three steps. The user's LightningModule may
define each step, and callbacks may hook it (`nemo2.mcore.parallel.hooks`):

    data step        ``data_step(iterator) -> batch``                    fetch, move to the device, slice
    forward step     ``forward_step(batch) -> output``                   run this chunk
    loss reduction   ``training_loss_reduction.forward(batch, output)``  on the last stage

A module may also define ``forward_step(self, model, batch)`` and ``loss_reduction(self, model)``
(`nemo2.mcore.parallel.forms`).
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Optional, cast

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.base.names import listed
from nemo2.mcore.parallel.cuda_graphs import building_stream, kind_of
from nemo2.mcore.parallel.forms import reduction_of, with_model
from nemo2.mcore.parallel.hooks import CallbackConnector
from nemo2.mcore.parallel.loss import MegatronLossReduction, OutputCollection, ScalarLossReduction
from nemo2.mcore.parallel.parameter_counts import ParameterCounts, count_parameters
from nemo2.mcore.parallel.plain_chunk import PlainChunk
from nemo2.mcore.parallel.sharded_state import is_empty_state, sharded_state, states_may_be_unpickled
from nemo2.mcore.parallel.transform import (
    Transform,
    record_of,
    refuse_reading_weights,
    tell_of_loaded_weights,
    transformed,
)

if TYPE_CHECKING:
    from nemo2.mcore.parallel.step_graphs import StepGraphs


@dataclass
class MegatronStep:
    """The inputs of one step. A callback may return a changed copy from ``on_megatron_step_start``."""

    pipeline: "MegatronParallel"
    batch: Any
    """This data-parallel rank's part of the global batch: tensors [num_microbatches * micro_batch_size, ...]."""
    stage: str
    """"training", "validation", "test" or "predict"."""
    step_i: int
    num_microbatches: int
    seq_length: int
    """Tokens of a sequence before context parallelism splits it. Defines the shape of the tensors between pipeline
    stages."""
    micro_batch_size: int
    forward_only: bool
    decoder_seq_length: Optional[int] = None
    forward_step_func: Callable[..., Any] = field(repr=False, default=None)  # pyright: ignore[reportAssignmentType, reportArgumentType]

    @property
    def pl_module(self) -> pl.LightningModule:
        return self.pipeline.pl_module

    @property
    def trainer(self) -> pl.Trainer:
        return self.pl_module.trainer

    def microbatches(self) -> list[Any]:
        return self.batch if isinstance(self.batch, MicroBatches) else split_batch(self.batch, self.num_microbatches)

    def __call__(self) -> list[dict[str, Tensor]]:
        """Run Megatron-Core's schedule, within a CUDA graph if one is requested: forward and, unless ``forward_only``,
        backward over all micro-batches, then ``finalize_model_grads``.

        Returns the reports of the loss reduction, one per micro-batch, on the last pipeline stage, and [] on other
        stages.
        """
        microbatches = self.microbatches()
        chunks = list(self.pipeline)
        # Interleaved stages process the same micro-batches, each at its own pace.
        iterators: Any = [iter(microbatches) for _ in chunks] if len(chunks) > 1 else iter(microbatches)
        schedule = get_forward_backward_func()
        if self.pipeline.graphs is not None and self.stage == "training":
            schedule = self.pipeline.graphs.around(schedule, self)
        return schedule(
            forward_step_func=self.forward_step_func,
            data_iterator=iterators,
            model=chunks,
            num_microbatches=self.num_microbatches,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            decoder_seq_length=self.decoder_seq_length,
            forward_only=self.forward_only,
        )


class MicroBatches(list[Any]):
    """A step's batch that is already split."""


class MegatronParallel(nn.ModuleList):
    """This rank's pipeline chunks.

    Args:
        pipeline: The LightningModule, after ``configure_model``. Its ``module`` is the first or only chunk. Without
            ``module`` the LightningModule itself is the chunk. With virtual stages it must define
            ``build_chunk(vp_stage)``.
        precision_plugin: Converts chunks and inputs (`nemo2.mcore.precision.MegatronMixedPrecision`). None: no conversion.
        callbacks: The receivers of the step's hooks, to which ``pipeline`` is added. None: only ``pipeline``.
        data_step, forward_step, loss_reduction: Replacements for the module's definitions: functions
            ``data_step(iterator) -> batch`` and ``forward_step(model, batch) -> output``, and a
            `MegatronLossReduction`. ``model`` is the LightningModule, or on a virtual stage its twin for that stage. A
            ``data_step`` with two arguments receives ``model`` first. None: the module's.
        vp_size: Chunks on this rank. None: one.
        ddp_config: Wrap the chunks for training. None: no wrapping (validation, generation).
        device: The chunks' device before they are wrapped. None: this process's GPU, or the CPU where there is none.
        wrap_chunk: ``(config, chunk) -> wrapped chunk``, in place of Megatron-Core's wrapping and of the precision
            plugin's conversion. The result must be an instance of Megatron-Core's data-parallel base class.
        transform: A function that is applied to each chunk before it is wrapped (`nemo2.mcore.parallel.transform`). None: no
            transform.
        cpu: Keep the chunks on the CPU, unless ``device`` is set.
    """

    # nn.Module's annotations treat every undeclared attribute as a Tensor or a Module.
    loss_reduction: Optional[MegatronLossReduction]
    graphs: "Optional[StepGraphs]"
    """The CUDA graphs. None: none are requested, or nothing is trained."""
    parameter_counts: Optional[ParameterCounts]
    """The parameters of the whole model. None: the model is on meta tensors."""
    _twins: list[pl.LightningModule]
    stage_params: Optional[Callable[[], None]]
    """Stages parameters in the gradients' buffer, if the optimizer gathers them there. None: there is no such optimizer."""
    weight: Optional[Tensor]
    """The count behind the mean of the last step's reduced loss (`MegatronLossReduction.weight`), on every pipeline
    stage."""

    def __init__(
        self,
        pipeline: pl.LightningModule,
        precision_plugin: Any = None,
        callbacks: Optional[CallbackConnector] = None,
        data_step: Optional[Callable[..., Any]] = None,
        forward_step: Optional[Callable[[pl.LightningModule, Any], Any]] = None,
        loss_reduction: Optional[MegatronLossReduction] = None,
        vp_size: Optional[int] = None,
        ddp_config: Optional[DistributedDataParallelConfig] = None,
        device: Optional[torch.device] = None,
        wrap_chunk: Optional[Callable[[TransformerConfig, nn.Module], nn.Module]] = None,
        transform: Optional[Transform] = None,
        cpu: bool = False,
    ) -> None:
        super().__init__()
        device = device or (torch.device("cpu") if cpu else get_backend().device)
        self.callbacks = (callbacks or CallbackConnector()).add(pipeline)
        self.precision_plugin = precision_plugin
        self.data_step = data_step
        self.forward_step = forward_step
        self.ddp_config = ddp_config
        self.wrap_chunk = wrap_chunk
        self.config = _model_config(pipeline, precision_plugin)
        cores = [transformed(core, transform) for core in _chunks_of(pipeline, vp_size, self.config)]
        pipeline.__dict__[_CHUNKS] = cores
        if ddp_config is not None or wrap_chunk is not None:
            _refuse_parameters_outside(pipeline, cores)
        for core in cores:
            core.to(device)
            for parameter in core.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        self.parameter_counts = count_parameters(cores)
        self._refuse_to_train_nothing()
        with building_stream(self.config):
            self.extend([self._wrap(core, first=index == 0) for index, core in enumerate(cores)])
        self.__dict__["loss_reduction"] = loss_reduction  # no submodule: those of a module list are its items
        self.weight = None
        self.stage_params = None  # the optimizer's, once there is one
        self.graphs = self._step_graphs()
        self._twins = _twins(pipeline, list(self), cores)
        if ddp_config is not None:
            self._connect_gradient_functions(ddp_config)
        elif wrap_chunk is not None:
            cast(Any, self.config).finalize_model_grads_func = finalize_model_grads

    # ------------------------------------------------------------------------------------------------------ the step

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (a module list has none)
        self,
        data: Any,
        forward_only: bool = True,
        data_step: Optional[Callable[..., Any]] = None,
        forward_step: Optional[Callable[..., Any]] = None,
        loss_reduction: Optional[MegatronLossReduction] = None,
        seq_length: Optional[int] = None,
        micro_batch_size: Optional[int] = None,
        num_microbatches: Optional[int] = None,
        step_i: Optional[int] = None,
        wrap_forward_step: bool = True,
    ) -> Any:
        """Run one step over ``data`` with the given data step, forward step and loss reduction, under NeMo's names.

        Args:
            data: This data-parallel rank's part of a global batch, ``[num_microbatches * micro_batch_size, ...]``; or
                an iterator over micro-batches, of which ``num_microbatches`` are used.
            forward_only: Run only the forward, as in validation. False: as in training, gradients stay in the chunks'
                buffers; call `zero_grad_buffer` first.
            data_step: ``(iterator) -> batch``. None: the module's.
            forward_step: ``(model, batch) -> output`` with the LightningModule, or on a virtual stage its twin. None:
                the module's.
            loss_reduction: None: the module's.
            seq_length, micro_batch_size: The shape of the tensors between pipeline stages. None: derived from the data.
            num_microbatches: None: 1.
            step_i: The step number that hooks and the module's steps receive. None: 0.
            wrap_forward_step: False: ``forward_step`` is in Megatron-Core's form, ``(iterator, chunk) -> (output, loss
                function)``, and no data step or micro-batch hook runs.

        Returns:
            The loss reduction's result for the micro-batches' reports, the same on every pipeline stage.

        Raises:
            ConfigError: ``wrap_forward_step=False`` without a ``forward_step``.
        """
        count = num_microbatches or 1
        if not wrap_forward_step and forward_step is None:
            raise ConfigError(
                "MegatronParallel.forward(wrap_forward_step=False) requires a forward_step in Megatron-Core's form, "
                "(iterator, chunk) -> (output, loss function). Pass forward_step, or leave wrap_forward_step=True."
            )
        return self.run_step(
            "validation" if forward_only else "training",
            MicroBatches(islice(data, count)) if isinstance(data, Iterator) else data,
            step_i=step_i or 0,
            forward_only=forward_only,
            num_microbatches=count,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            data_step=data_step,
            forward_step=forward_step,
            loss_reduction=loss_reduction,
            wrap_forward_step=wrap_forward_step,
        )

    def training_step(self, batch: Any, *, step_i: int = 0, **shape: Any) -> Tensor:
        """Run forward and backward over this rank's part of a global batch. Returns the reduced loss (scalar, no
        graph), on every rank."""
        return self.run_step("training", batch, step_i=step_i, forward_only=False, **shape)

    def validation_step(self, batch: Any, *, step_i: int = 0, **shape: Any) -> Tensor:
        return self.run_step("validation", batch, step_i=step_i, forward_only=True, **shape)

    def test_step(self, batch: Any, *, step_i: int = 0, **shape: Any) -> Tensor:
        return self.run_step("test", batch, step_i=step_i, forward_only=True, **shape)

    def predict_step(self, batch: Any, *, step_i: int = 0, **shape: Any) -> Any:
        return self.run_step("predict", batch, step_i=step_i, forward_only=True, **shape)

    def run_step(
        self,
        stage: str,
        batch: Any,
        *,
        step_i: int,
        forward_only: bool,
        num_microbatches: int = 1,
        seq_length: Optional[int] = None,
        micro_batch_size: Optional[int] = None,
        decoder_seq_length: Optional[int] = None,
        data_step: Optional[Callable[..., Any]] = None,
        forward_step: Optional[Callable[..., Any]] = None,
        loss_reduction: Optional[MegatronLossReduction] = None,
        wrap_forward_step: bool = True,
    ) -> Tensor:
        """Run one step of ``stage``: schedule, reduction, hooks. The last four arguments are those of `forward`.

        The loss of the last pipeline stage is broadcast, so that every rank returns, logs and uses the same value.
        """
        inferred_micro_batch, inferred_seq = _batch_shape(batch, num_microbatches)
        loss_reduction = loss_reduction or self._loss_reduction(stage)
        step = MegatronStep(
            pipeline=self,
            batch=batch,
            stage=stage,
            step_i=step_i,
            num_microbatches=num_microbatches,
            seq_length=seq_length or inferred_seq,
            micro_batch_size=micro_batch_size or inferred_micro_batch,
            decoder_seq_length=decoder_seq_length,
            forward_only=forward_only,
        )
        step.forward_step_func = (
            self._forward_step_func(
                step, loss_reduction, data_step or self.data_step, forward_step or self.forward_step
            )
            if wrap_forward_step or forward_step is None
            else forward_step
        )
        step = self.callbacks.transform_event("on_megatron_step_start", step)
        self.callbacks.event("on_megatron_microbatches_start", step=step)
        outputs = step()
        self.callbacks.event("on_megatron_microbatches_end", step=step, microbatch_outputs=outputs)
        self.callbacks.event("on_megatron_reduce_microbatches_start", step=step, microbatch_outputs=outputs)
        reduced = self._reduce(loss_reduction, outputs, predicting=stage == "predict")
        self.callbacks.event(
            "on_megatron_reduce_microbatches_end",
            step=step,
            microbatch_outputs=outputs,
            loss_reduction=loss_reduction,
            reduced=reduced,
        )
        self.callbacks.event("on_megatron_step_end", step=step, microbatch_outputs=outputs, reduced=reduced)
        return reduced

    def _forward_step_func(
        self,
        step: MegatronStep,
        loss_reduction: MegatronLossReduction,
        data_step: Optional[Callable[..., Any]],
        own_forward_step: Optional[Callable[..., Any]],
    ) -> Callable[..., Any]:
        """Megatron-Core's ``(iterator, chunk) -> (output, loss function)``, made of the three steps.

        With ``return_schedule_plan`` the chunk comes without its wrappers, and the output is its `AbstractSchedulePlan`.
        """
        twins: dict[int, pl.LightningModule] = {id(chunk): twin for chunk, twin in zip(self, self._twins, strict=True)}
        twins |= {id(core): twin for core, twin in zip(self.unwrapped, self._twins, strict=True)}
        data_steps = {
            key: self._data_step(twin, step.stage) if data_step is None else with_model(data_step, twin)
            for key, twin in twins.items()
        }
        forward_steps = {
            key: _stage_step(twin, step) if own_forward_step is None else partial(own_forward_step, twin)
            for key, twin in twins.items()
        }

        def forward_step(
            iterator: Iterator[Any], chunk: nn.Module, return_schedule_plan: bool = False
        ) -> tuple[Any, Callable[..., Any]]:
            batch = data_steps[id(chunk)](iterator)
            run = forward_steps[id(chunk)]
            self.callbacks.event(
                "on_megatron_microbatch_start", step=step, batch=batch, forward_callback=loss_reduction
            )
            if return_schedule_plan:
                from nemo2.mcore.parallel.schedule_plans import schedule_plan

                run = partial(schedule_plan, chunk, run)
            output = run(batch)
            self.callbacks.event(
                "on_megatron_microbatch_end", step=step, batch=batch, forward_callback=loss_reduction, output=output
            )
            loss_reduction.setup(batch)
            return output, partial(loss_reduction, batch)

        return forward_step

    def _data_step(self, module: pl.LightningModule, stage: str) -> Callable[[Iterator[Any]], Any]:
        own = getattr(module, f"{stage}_data_step", None) or getattr(module, "data_step", None)
        return own or partial(default_data_step, precision_plugin=self.precision_plugin)

    def _loss_reduction(self, stage: str) -> MegatronLossReduction:
        if self.loss_reduction is not None:
            return self.loss_reduction
        reduction = reduction_of(self.pl_module, stage)
        if reduction is not None:
            return reduction
        if stage == "predict":
            return OutputCollection()
        return ScalarLossReduction(optional=stage != "training")

    def _reduce(
        self, loss_reduction: MegatronLossReduction, outputs: Sequence[dict[str, Tensor]], *, predicting: bool
    ) -> Any:
        if predicting or isinstance(loss_reduction, OutputCollection):
            return loss_reduction.reduce(outputs) if outputs else None  # any kind of result, on the stage with outputs
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            reduced = loss_reduction.reduce(outputs)
            self.weight = loss_reduction.weight
            return None if reduced is None else reduced.detach()
        message = torch.zeros(2, dtype=torch.float32, device=next(self.parameters()).device)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            reduced = loss_reduction.reduce(outputs)
            assert reduced is not None, "a model split into stages has a loss"
            weight = loss_reduction.weight if loss_reduction.weight is not None else torch.ones_like(reduced)
            message = torch.stack([reduced.detach().float().reshape(()), weight.float().reshape(())])
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(message, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        self.weight = message[1]
        return message[0]

    # ------------------------------------------------------------------------------------------------------ the chunks

    @property
    def pl_module(self) -> pl.LightningModule:
        return self._twins[0]

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule, which calls the first chunk."""
        return self._twins[0]

    @property
    def pipeline(self) -> "pl.LightningModule | list[pl.LightningModule]":
        """The LightningModule. With virtual stages a list with one per chunk."""
        return self._twins[0] if len(self) == 1 else list(self._twins)

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes on the LightningModule: ``trainer.model.optim``, ``.tokenizer``, ``.walk``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            twins = self.__dict__.get("_twins")
            if name.startswith("_") or not twins:
                raise
            return getattr(twins[0], name)

    @property
    def unwrapped(self) -> list[nn.Module]:
        """The chunks without DDP and precision wrappers."""
        return [unwrap(chunk) for chunk in self]

    def _wrap(self, core: nn.Module, *, first: bool) -> nn.Module:
        for module in core.modules():
            # Megatron-Core reads this attribute on the first and last stage, also of the user's own models.
            if hasattr(module, "pre_process") and not hasattr(module, "share_embeddings_and_output_weights"):
                setattr(module, "share_embeddings_and_output_weights", False)  # noqa: B010  # not a tensor or module
        if self.wrap_chunk is not None:
            return self.wrap_chunk(self.config, core)
        chunk = self.precision_plugin.convert_module(core) if self.precision_plugin is not None else core
        if self.ddp_config is None:
            return chunk
        if self.ddp_config.use_megatron_fsdp:
            from nemo2.mcore.parallel.fsdp import MegatronFSDPChunk, refuse_second_sharding

            if (record := record_of(core)) is not None:
                refuse_reading_weights(record.by, under="strategy.fsdp='megatron'")
            refuse_second_sharding(core, self.ddp_config)
            return MegatronFSDPChunk(
                config=self.config, ddp_config=self.ddp_config, module=chunk, disable_bucketing=not first
            )
        # Later chunks aren't bucketed: their reductions never overlap with the backward of the last micro-batch
        # (Megatron-LM training.get_model).
        wrapped = DistributedDataParallel(
            config=self.config, ddp_config=self.ddp_config, module=chunk, disable_bucketing=not first
        )
        weakref.finalize(self, _release, vars(wrapped)).atexit = False
        return wrapped

    def _refuse_to_train_nothing(self) -> None:
        counts = self.parameter_counts
        trains = self.ddp_config is not None or self.wrap_chunk is not None
        if trains and counts is not None and counts.total and not counts.trained:
            raise ConfigError(
                f"All {counts.total:,} parameters are frozen, so there is nothing to train. Keep requires_grad=True on "
                "some parameters, in model_transform or wherever the parameters are frozen."
            )

    def _step_graphs(self) -> "Optional[StepGraphs]":
        if self.ddp_config is None or kind_of(self.config) == "none":
            return None
        from nemo2.mcore.parallel.step_graphs import PER_MICROBATCH, StepGraphs

        return StepGraphs(
            list(self),
            self.config,
            pause_gathers=self._without_gathers,
            heard_per_microbatch=lambda: self.callbacks.listening(*PER_MICROBATCH),
        )

    @contextmanager
    def _without_gathers(self) -> Iterator[bool]:
        """Within this context forwards gather no parameters, because their results are not used. Yields whether they
        would have gathered."""
        self.pause_param_gather(whole=False)
        yield self.gathers_in_forward
        self.resume_param_gather()

    def _connect_gradient_functions(self, ddp_config: DistributedDataParallelConfig) -> None:
        """Connect the schedule to the functions that delay, start and finish gradient reductions and parameter
        gathers."""

        def one_or_all(functions: list[Any]) -> Any:
            return functions[0] if len(functions) == 1 else functions

        config: Any = self.config
        chunks: list[Any] = list(self)
        if ddp_config.overlap_grad_reduce:
            config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
            # All stages start their reductions together, when the schedule calls (Megatron-LM's align_grad_reduce).
            config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in chunks])
        if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
            config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in chunks])
        config.finalize_model_grads_func = finalize_model_grads

    def zero_grad_buffer(self) -> None:
        """Zero the gradients. MXFP8 parameters that are gathered through their buffer are staged there again."""
        for chunk in self:
            chunk.zero_grad_buffer()  # pyright: ignore[reportCallIssue]
        if self.stage_params is not None:
            self.stage_params()

    def broadcast_params(self) -> None:
        """Broadcast the parameters of replica 0 to every data-parallel replica."""
        for chunk in self:
            chunk.broadcast_params()  # pyright: ignore[reportCallIssue]

    @property
    def gathers_in_forward(self) -> bool:
        config = self.ddp_config
        return config is not None and config.overlap_param_gather and not config.use_megatron_fsdp

    def pause_param_gather(self, *, whole: bool = True) -> None:
        """Stop the gather of parameters in forwards that aren't training. ``whole`` gathers all parameters now."""
        if self.gathers_in_forward:
            if whole:
                self._stage_gathered_params()
            for chunk in self:
                chunk.disable_forward_pre_hook(param_sync=whole)  # pyright: ignore[reportCallIssue]

    def resume_param_gather(self) -> None:
        if self.gathers_in_forward:
            for chunk in self:
                chunk.enable_forward_pre_hook()  # pyright: ignore[reportCallIssue]

    def force_param_sync(self) -> None:
        """Gather all parameters now, as before a save, if their gather overlaps with the next forward."""
        if self.gathers_in_forward:
            self._stage_gathered_params()
            for chunk in self:
                chunk.start_param_sync(force_sync=True)  # pyright: ignore[reportCallIssue]

    def _stage_gathered_params(self) -> None:
        """Before a gather outside a step: gradients would be gathered as parameters."""
        if self.stage_params is not None and getattr(self.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            self.zero_grad_buffer()

    def sharded_state_dict(self, metadata: Optional[dict] = None) -> dict[str, Any]:
        """Megatron-Core's sharded state of the chunks: one dictionary, or ``model_0``, ``model_1`` … with virtual
        stages.

        Keys inside start with ``module.``, as in NeMo 2.0's checkpoints.
        """
        states = [sharded_state(core, metadata) for core in self.unwrapped]
        if len(states) == 1:
            return states[0]
        return {f"model_{index}": state for index, state in enumerate(states)}

    def load_chunks_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load the state that `sharded_state_dict` described and Megatron-Core filled in.

        Tensors that the state lacks keep their values. Unexpected gaps were reported when the checkpoint was read.
        """
        cores = self.unwrapped
        for index, core in enumerate(cores):
            part = state if len(cores) == 1 else state[f"model_{index}"]
            tensors = {
                key.removeprefix("module."): value for key, value in part.items() if not is_empty_state(key, value)
            }
            with states_may_be_unpickled():
                core.load_state_dict({**core.state_dict(), **tensors}, strict=strict)
            tell_of_loaded_weights(core, tensors)


def _stage_step(module: pl.LightningModule, step: MegatronStep) -> Callable[[Any], Any]:
    """The module's ``<stage>_step`` where this chunk ends the pipeline, else its ``forward_step``."""
    name, chunk = f"{step.stage}_step", unwrap(getattr(module, "module", module))
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and getattr(chunk, "post_process", True)
    own_stage_step = getattr(module, name, None)
    overridden = getattr(type(module), name, None) is not getattr(pl.LightningModule, name, None)
    if last and own_stage_step is not None and overridden:
        # By position, as in Lightning, because users name the argument freely. The class's signature is used, because
        # torch's wrappers of the instance's method hide its parameters.
        takes_index = len(inspect.signature(getattr(type(module), name)).parameters) > 2
        return (lambda batch: own_stage_step(batch, step.step_i)) if takes_index else own_stage_step
    forward_step = getattr(module, f"{step.stage}_forward_step", None) or getattr(module, "forward_step", None)
    if forward_step is None and type(module).forward is not pl.LightningModule.forward:
        return module  # as NeMo: called with the batch
    if forward_step is None:
        raise ConfigError(
            f"{type(module).__name__} defines no {step.stage}_step, forward_step or forward. Define "
            f"`{step.stage}_step(self, batch, batch_idx)`, which returns a loss, or `forward_step(self, batch)` and "
            f"`{step.stage}_loss_reduction`."
        )
    return with_model(forward_step, module)


def default_data_step(iterator: Iterator[Any], precision_plugin: Any = None) -> Any:
    """The next micro-batch, on the device, floating-point inputs in the model's dtype."""
    device = get_backend().device
    batch = next(iterator)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
    return precision_plugin.convert_input(batch) if precision_plugin is not None else batch


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split every tensor of a batch into ``num_microbatches`` equal parts along its first dimension (views, no copy).

    Raises:
        ConfigError: a tensor's first dimension isn't a multiple of ``num_microbatches``.
    """
    if num_microbatches == 1:
        return [batch]
    leaves, spec = tree_flatten(batch)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            columns.append([leaf] * num_microbatches)
            continue
        if leaf.shape[0] % num_microbatches:
            raise ConfigError(
                f"A batch tensor of shape {tuple(leaf.shape)} can't be split into {num_microbatches} micro-batches, "
                f"because its first dimension is not a multiple of {num_microbatches}. The data loader must yield this "
                "rank's whole part of a global batch."
            )
        columns.append(leaf.chunk(num_microbatches))
    return [tree_unflatten([column[index] for column in columns], spec) for index in range(num_microbatches)]


def unwrap(module: nn.Module) -> nn.Module:
    """The chunk without data-parallel and precision wrappers."""
    while isinstance(module, (_BaseDataParallel, Float16Module, MegatronFSDP, TorchFSDP)):
        module = cast(nn.Module, module.module)
    return module


def _model_config(module: pl.LightningModule, precision_plugin: Any) -> TransformerConfig:
    config = getattr(module, "config", None)
    if isinstance(config, TransformerConfig):
        return config
    # Megatron-Core reads its switches (dtypes, schedule functions) from a model's config, which a plain module lacks.
    # The sizes are placeholders that no plain module reads.
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    if precision_plugin is not None:
        precision_plugin.apply_to(config, path="model.config")
    return config


_CHUNKS = "_chunks_of_this_rank"
"""The attribute in which a LightningModule keeps its chunks. Virtual stages after the first are built here, and
transforms are applied once."""


def _chunks_of(module: pl.LightningModule, vp_size: Optional[int], config: TransformerConfig) -> list[nn.Module]:
    """The chunks that were built from this module before, which may be trained by now, or new chunks."""
    built: list[Any] = module.__dict__.get(_CHUNKS, [])
    if len(built) == (vp_size or 1) and _is_of(module, built[0]):
        for chunk in built:
            chunk.config = config
        return built
    if vp_size is not None and vp_size > 1:
        build_chunk = getattr(module, "build_chunk", None)
        if build_chunk is None:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size={vp_size}: {type(module).__name__} must define "
                "build_chunk(vp_stage), which builds the layers of one virtual stage. Define it, or leave "
                "virtual_pipeline_model_parallel_size unset."
            )
        first = getattr(module, "module", None)
        chunks = [unwrap(first) if stage == 0 and first is not None else build_chunk(stage) for stage in range(vp_size)]
    else:
        inside = getattr(module, "module", None)
        chunks = [module if inside is None else unwrap(inside)]
    wrapped: list[Any] = [chunk if isinstance(chunk, MegatronModule) else PlainChunk(config, chunk) for chunk in chunks]
    for stage, chunk in enumerate(wrapped):
        chunk.model_type = ModelType.encoder_or_decoder
        if len(wrapped) > 1:
            chunk.vp_stage = stage
    return wrapped


def _is_of(module: pl.LightningModule, chunk: nn.Module) -> bool:
    """Whether a chunk is still the module's, whose ``module`` may have been built anew."""
    inside = getattr(module, "module", None)
    return getattr(chunk, "module", None) is module if inside is None else chunk is unwrap(inside)


def _release(wrapper: dict[str, Any]) -> None:
    """Free the memory of Megatron-Core's wrapper of a chunk that no longer trains.

    Its gradient hooks hold the wrapper, and torch holds the hooks where Python's collector doesn't look. Models,
    optimizers and process groups would accumulate in a process that trains more than once.
    """
    wrapper.clear()
    wrapper["param_to_bucket_group"] = {}  # a hook that is left finds nothing to do


def _refuse_parameters_outside(module: pl.LightningModule, chunks: list[nn.Module]) -> None:
    """Check that all parameters are inside ``self.module``, if the module has this attribute. Other parameters would
    not be reduced, updated or saved.

    Raises:
        ConfigError: there are such parameters.
    """
    inside = getattr(module, "module", None)
    if inside is None:
        return
    held = {id(parameter) for part in (inside, *chunks) for parameter in part.parameters()}
    outside = [name for name, parameter in module.named_parameters() if id(parameter) not in held]
    if outside:
        raise ConfigError(
            f"{type(module).__name__}.module is the model that is trained, but it doesn't contain these parameters: "
            f"{listed(outside, 5)}. Move them into self.module, or rename the "
            "attribute `module`, so that the whole LightningModule is the model."
        )


def _twins(module: pl.LightningModule, wrapped: list[nn.Module], cores: list[nn.Module]) -> list[pl.LightningModule]:
    """The LightningModule bound to each chunk: itself for the first, shallow copies for the others."""
    twins = []
    for index, (chunk, core) in enumerate(zip(wrapped, cores, strict=True)):
        if isinstance(core, PlainChunk) and unwrap(core.module) is module:
            return [module]  # its layers are its own attributes: nothing to bind
        twin = module
        if index:
            twin = copy.copy(module)
            twin.__dict__["_modules"] = dict(module._modules)
        twin.module = chunk
        twins.append(twin)
    return twins


def _batch_shape(batch: Any, num_microbatches: int) -> tuple[int, int]:
    """Micro-batch size and sequence length, read off the first tensor with two dimensions or more."""
    if isinstance(batch, MicroBatches):
        batch, num_microbatches = batch[0], 1
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        return 1, 1
    first = next((tensor for tensor in tensors if tensor.dim() > 1), tensors[0])
    return first.shape[0] // num_microbatches, first.shape[1] if first.dim() > 1 else 1
