# SPDX-License-Identifier: Apache-2.0
"""Builds one rank of any world in this process, with its strategy, model, gradient buffers and optimizer, and runs it
for a step.

The code is that of a real rank (`MegatronStrategy`, Megatron-Core's DistributedDataParallel, schedule and optimizer),
on meta tensors and with a silent process group. Fewer micro-batches than the recipe's are enough, because a schedule
repeats itself after its warm-up. Counts that grow with the micro-batches are scaled (`counts.py`).
"""

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import megatron.core
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemo2.base.backend import chosen, cpu_patches
from nemo2.base.backend.attention_variables import attention_restored
from nemo2.base.backend.base import Override
from nemo2.base.backend.cpu import CpuBackend
from nemo2.base.backend.patching import Patch, Patcher
from nemo2.base.backend.te_stub import transformer_engine_stub
from nemo2.base.errors import CannotBuild, Nemo2Error, RuntimeFault, message_of
from nemo2.base.variables import all_set, environment, replaced
from nemo2.mcore.parallel.groups import destroy_model_parallel
from nemo2.preflight.rehearse.silent_group import BACKEND, Call, listen, register
from nemo2.preflight.rehearse.tracker import WORK, Sums, Tracker
from nemo2.training.strategies.distillation import DistillationCallback
from nemo2.training.strategies.set_up import set_up


@dataclass
class Ran:
    """The records of one rank's step."""

    strategy: Any
    tracker: Tracker
    state: dict[str, int]
    """Bytes of model state by kind; see `state_bytes`."""
    at_peak: Sums
    """The bytes alive at the peak, by holder and part. For model state `state` is authoritative."""
    saved_peak: int
    calls: list[tuple[str, Call]]
    """The collectives in order, each with its phase: ``build``, ``schedule``, ``forward``, ``backward``, ``finalize`` or
    ``optimizer``."""
    num_microbatches: int
    """Micro-batches of the rehearsed step."""
    num_microbatches_of_step: int
    """Micro-batches of a step of the recipe, on one data-parallel rank."""


def run_rank(
    parts: Callable[[], tuple[Any, Any, Any]],
    *,
    rank: int,
    world_size: int,
    as_on_gpu: bool,
    patches: tuple[Patch, ...] = (),
    microbatches: Optional[int] = None,
    weights_in_eight_bits: bool = False,
    inspect: Callable[[Ran], Any],
) -> Any:
    """Build and run rank ``rank`` of ``world_size``, and return the result of ``inspect``, which is called before the rank
    is torn down.

    Args:
        parts: Builds a new (model, data, trainer). Ranks share no objects.
        microbatches: The number of micro-batches to run. None: as many as the schedule needs to reach its peak.
        weights_in_eight_bits: Count the 8-bit copies that Transformer Engine keeps of the weights of matrix products:
            one for the forward, and one transposed for the backward.
    """
    stub = transformer_engine_stub() if as_on_gpu else contextlib.nullcontext()
    with stub, attention_restored(), rehearsing(as_on_gpu=as_on_gpu, patches=patches), _world(rank, world_size):
        try:
            ran = _run(*parts(), microbatches=microbatches)
            if weights_in_eight_bits:
                ran.state["buffers"] += 2 * _weights_of_products(ran.strategy)
            return inspect(ran)
        finally:
            destroy_model_parallel()
            # A process has one communication buffer of Megatron-Core. The next rank allocates its own.
            parallel_state.destroy_global_memory_buffer()
            gc.collect()


def _run(model: Any, data: Any, trainer: Any, *, microbatches: Optional[int]) -> Ran:
    strategy = trainer.strategy
    calls: list[tuple[str, Call]] = []
    tracker = Tracker(lambda module: PARTS.get(type(module).__name__))

    def hear(call: Call, tensors: list[Tensor]) -> None:
        calls.append((tracker.phase, call))
        tracker.message(tensors, "pipeline" if call.kind == "receive" else None)

    stop = listen(hear)
    try:
        with tracker, _passes(tracker), contextlib.ExitStack() as torn_down:
            with tracker.part("build"):
                _set_up(model, data, trainer, torn_down)
            parallel = strategy.megatron_parallel
            for chunk in parallel.unwrapped:
                if hasattr(chunk, "output_layer"):
                    tracker.name(chunk.output_layer, "logits")
            state = {kind: tracker.own(tensors) for kind, tensors in state_tensors(strategy).items()}
            shape = strategy._batch_shape("train")
            whole = shape.pop("num_microbatches", 1)
            count = min(whole, microbatches or _enough_microbatches(strategy))
            batch = _batch(strategy, count=count, **shape)
            inputs = tracker.own([tensor for tensor in batch.values() if tensor is not None])
            state["buffers"] += inputs * whole // count
            teachers = [callback for callback in trainer.callbacks if isinstance(callback, DistillationCallback)]
            state["teacher"] = tracker.own(tensor for one in teachers for tensor in _tensors_of(one, tracker))
            tracker.start_peak()
            # A teacher runs its forward before the schedule begins.
            tracker.phase = "forward" if teachers else "schedule"
            parallel.config.finalize_model_grads_func = _entering(
                "finalize", tracker, parallel.config.finalize_model_grads_func
            )
            parallel.zero_grad_buffer()
            parallel.training_step(batch, step_i=0, num_microbatches=count, **shape)
            peak, at_peak, saved_peak = tracker.peak, tracker.at_peak, tracker.saved_peak
            if waiting := sum(teacher.kept_bytes for teacher in teachers) * (whole - count):
                at_peak[WORK, "logits"] = at_peak.get((WORK, "logits"), 0) + waiting
            tracker.phase = "optimizer"
            tracker.start_peak()
            for optimizer in strategy.optimizers:
                with tracker.part("optimizer"):
                    optimizer.step()
            created = {kind: tracker.own(tensors) for kind, tensors in state_tensors(strategy).items()}
            state |= {kind: state[kind] + size for kind, size in created.items()}
            # The optimizer states that the first step allocates exist during the schedule of every later step.
            if tracker.peak > peak + sum(created.values()):
                at_peak = tracker.at_peak
                # These states are counted in `state`.
                at_peak[WORK, "optimizer"] = max(0, at_peak.get((WORK, "optimizer"), 0) - sum(created.values()))
    finally:
        stop()
    return Ran(
        strategy=strategy,
        tracker=tracker,
        state=state,
        at_peak=at_peak,
        saved_peak=saved_peak,
        calls=calls,
        num_microbatches=count,
        num_microbatches_of_step=whole,
    )


def _set_up(model: Any, data: Any, trainer: Any, torn_down: contextlib.ExitStack) -> None:
    """Set the rank up with `set_up` on meta tensors, without writing to disk.

    Raises:
        CannotBuild: the rank of a run would end in this error too.
        Exception: another error, also of a callback, which may need what only the run's machine has.
    """
    strategy, last = trainer.strategy, _LastCallback()
    strategy.replace_progress_bar = False
    strategy.cluster_environment = _Environment(trainer.num_devices)
    strategy._groups["create_gloo_process_groups"] = False
    callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, (Checkpoint, ProgressBar))]
    try:
        torn_down.enter_context(set_up(trainer, model, data, stage="fit", callbacks=[*callbacks, last], device=META))
    except Exception as error:
        # nemo2's own errors may be of this machine, which lacks the kernels of a GPU, and PyTorch's of tensors without values.
        if isinstance(error, Nemo2Error | RuntimeError) or not last.is_set_up or not _is_raised_by_a_build(error):
            raise
        raise CannotBuild(f"{type(error).__name__}: {message_of(error)}") from error


class _LastCallback(pl.Callback):
    """Tells errors of callbacks from those of the model, the strategy and the optimizer, which are set up after them."""

    is_set_up = False

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.is_set_up = True


_OWN = Path(__file__).parents[2]
_BUILDERS = Path(megatron.core.__file__).parent, _OWN
_STAND_INS = Path(__file__).parent, _OWN / "base" / "backend"


def _is_raised_by_a_build(error: Exception) -> bool:
    """Whether code that a run executes too raised an error, and not what stands in for a GPU."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    within = [any(map(raised_in.is_relative_to, places)) for places in (_BUILDERS, _STAND_INS)]
    return within == [True, False]


def _tensors_of(teaching: DistillationCallback, tracker: Tracker) -> list[Tensor]:
    """The parameters and buffers of a teacher. Its output layer's tensors are counted as logits."""
    if hasattr(teaching.core, "output_layer"):
        tracker.name(teaching.core.output_layer, "logits")
    return [*(parameter.data for parameter in teaching.core.parameters()), *teaching.core.buffers()]


def state_tensors(strategy: Any) -> dict[str, list[Tensor]]:
    """The tensors of a rank's model state by kind: ``parameters``, ``gradients``, ``main_parameters``,
    ``optimizer_states``, ``buffers``. A parameter that is its own main parameter, as in fp32 models, is listed under
    ``parameters``."""
    parallel = strategy.megatron_parallel
    chunks = list(parallel)
    kinds: dict[str, list[Tensor]] = {"parameters": [parameter.data for parameter in parallel.parameters()]}
    gradients = []
    for chunk in chunks:
        for buffer in [*getattr(chunk, "buffers", []), *getattr(chunk, "expert_parallel_buffers", [])]:
            if isinstance(buffer, Tensor) or not hasattr(buffer, "grad_data"):
                continue
            gradients.append(buffer.grad_data)
            if buffer.param_data is not None:
                kinds["parameters"].append(buffer.param_data)
    kinds["gradients"] = gradients
    kinds["buffers"] = [tensor for chunk in chunks for tensor in nn.Module.buffers(chunk)]
    main, states = [], []
    for optimizer in _torch_optimizers(strategy):
        main += [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
        states += [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    kinds["main_parameters"] = main
    kinds["optimizer_states"] = states
    return kinds


def _weights_of_products(strategy: Any) -> int:
    """The number of elements in the weights of Transformer Engine's linear layers: all except the embedding and the output
    layer."""
    linear = (ColumnParallelLinear, RowParallelLinear)
    return sum(
        module.weight.numel()
        for chunk in strategy.megatron_parallel
        for name, module in chunk.named_modules()
        if isinstance(module, linear) and module.weight is not None and not name.endswith("output_layer")
    )


def _torch_optimizers(strategy: Any) -> Iterator[Any]:
    """The torch optimizers inside Megatron-Core's optimizers."""
    waiting = [getattr(optimizer, "mcore_optimizer", optimizer) for optimizer in strategy.optimizers]
    while waiting:
        optimizer = waiting.pop()
        inner = getattr(optimizer, "chained_optimizers", None)
        if inner is not None:
            waiting += inner
        elif getattr(optimizer, "optimizer", None) is not None:
            waiting.append(optimizer.optimizer)
        elif hasattr(optimizer, "param_groups"):
            yield optimizer


# ------------------------------------------------------------------------------------------------------- the step


def _enough_microbatches(strategy: Any) -> int:
    """The number of micro-batches after which this stage has finished its warm-up and alternates forward and backward."""
    config = strategy.megatron_parallel.config
    stages = strategy.layout.pp
    if stages == 1:
        return 2
    chunks = len(strategy.megatron_parallel)
    behind = stages - 1 - parallel_state.get_pipeline_model_parallel_rank()
    if chunks == 1:
        return behind + 2
    group = config.microbatch_group_size_per_vp_stage or stages
    # Megatron-Core, schedules.get_pp_rank_microbatches.
    warm_up = behind * 2 + (chunks - 1) * group
    needed = -(-(warm_up + 2) // chunks)
    return -(-needed // group) * group


def _batch(
    strategy: Any, *, count: int, micro_batch_size: int, seq_length: int, **_: Any
) -> dict[str, Optional[Tensor]]:
    size = [count * micro_batch_size, seq_length]
    integers = torch.empty(size, dtype=torch.int64, device=META)
    return {
        "tokens": integers,
        "labels": torch.empty_like(integers),
        "position_ids": torch.empty_like(integers),
        "loss_mask": torch.empty(size, dtype=torch.float32, device=META),
    }


def _passes(tracker: Tracker) -> contextlib.AbstractContextManager[None]:
    """The tracker's phase, and the part that its allocations belong to, in each pass that Megatron-Core's schedule runs. A
    `ScheduleNode` is a layer's part of a pass, where a micro-batch's forward and another's backward run side by side
    (overlap_moe_expert_parallel_comm)."""
    places: list[tuple[Any, str, str]] = []
    for phase in ("forward", "backward"):
        places += [(schedules, f"{phase}_step", phase), (ScheduleNode, phase, phase)]
    return all_set([(owner, name, _during(phase, tracker)(getattr(owner, name))) for owner, name, phase in places])


@contextlib.contextmanager
def _during(phase: str, tracker: Tracker) -> Iterator[None]:
    with replaced(tracker, phase=phase), tracker.part("backward") if phase == "backward" else contextlib.nullcontext():
        yield


def _entering(phase: str, tracker: Tracker, function: Callable[..., Any]) -> Callable[..., Any]:
    def entering(*args: Any, **kwargs: Any) -> Any:
        tracker.phase = phase
        return function(*args, **kwargs)

    return entering


PARTS = {
    "GPTModel": "logits",  # work outside the layers is the loss
    "MambaModel": "logits",
    "HybridModel": "logits",
    "LanguageModelEmbedding": "embedding",
    "RotaryEmbedding": "embedding",
    "TransformerBlock": "residual",
    "TransformerLayer": "residual",
    "MambaLayer": "residual",
    "SelfAttention": "attention",
    "LocalMLA": "attention",
    "SDPAttention": "core attention",
    "MLP": "mlp",
    "TorchNorm": "norm",
    "GroupedRMSNorm": "norm",
    "MoELayer": "experts",
    "TopKRouter": "router",
    "WeightedRouter": "router",
    "TorchMambaMixer": "mamba",
    "GatedDeltaNet": "linear attention",
    "MultiTokenPredictionLayer": "multi-token prediction",
}
"""The part of the model that a class of modules belongs to. Other modules belong to the part around them."""


# ------------------------------------------------------------------------------------------------------- the world


@contextlib.contextmanager
def _world(rank: int, world_size: int) -> Iterator[None]:
    """torch.distributed as rank ``rank`` of ``world_size`` sees it."""
    if torch.distributed.is_initialized():
        raise RuntimeError("A rehearsal needs a process in which torch.distributed is not initialized.")
    register()
    # A launcher sets these variables, and the strategy compares them with the trainer.
    with environment({"RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        torch.distributed.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


class _Environment(TorchElasticEnvironment):
    """A cluster that started this process as one rank of many. Its rank and its world are those of `_world`."""

    def __init__(self, ranks_per_node: int):
        self._ranks_per_node = ranks_per_node

    def local_rank(self) -> int:
        return self.global_rank() % self._ranks_per_node

    def node_rank(self) -> int:
        return self.global_rank() // self._ranks_per_node


META = torch.device("meta")

_AS_ON_THE_GPU = ("deallocate_pipeline_outputs", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
"""Settings that the CPU backend overrides and a rehearsal keeps, because nothing is computed."""


class MetaBackend(CpuBackend):
    """`as_on_gpu`: keep settings that need a GPU's kernels where a rehearsal has a counterpart for them."""

    process_group_backend = BACKEND

    def __init__(self, *, as_on_gpu: bool) -> None:
        super().__init__()
        self._as_on_gpu = as_on_gpu

    @property
    def device(self) -> torch.device:
        return META

    def config_overrides(self) -> dict[str, Override]:
        overrides = super().config_overrides()
        if self._as_on_gpu:
            overrides = {name: value for name, value in overrides.items() if name not in _AS_ON_THE_GPU}
        return overrides


@contextlib.contextmanager
def rehearsing(*, as_on_gpu: bool, patches: tuple[Patch, ...] = ()) -> Iterator[MetaBackend]:
    """A context in which a `MetaBackend` is installed and `get_backend()` returns it. ``patches`` are applied on top.

    Raises:
        RuntimeFault: this process sees a GPU, on which the CPU backend's patches must not be active.
    """
    if torch.cuda.is_available():
        raise RuntimeFault(
            "A rehearsal replaces parts of torch.cuda, so its process must not see a GPU. Set CUDA_VISIBLE_DEVICES='' before "
            "the process starts, as `nemo2 rehearse` does."
        )
    before = chosen._backend
    already = isinstance(before, CpuBackend) and before._patcher is not None
    backend = MetaBackend(as_on_gpu=as_on_gpu)
    if already:
        backend._patcher = before._patcher  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    backend.install()
    patcher = Patcher(rebind_in=("megatron", "nemo2"))
    cpu, cpu_patches._CPU = cpu_patches._CPU, META
    chosen._backend = backend
    try:
        patcher.apply([*_ON_META, *patches])
        yield backend
    finally:
        patcher.undo()
        chosen._backend = before
        cpu_patches._CPU = cpu
        if not already:
            # The CPU backend stays installed after its first use, under the backend that owns it.
            owner = before if isinstance(before, CpuBackend) else CpuBackend()
            owner._patcher, chosen._backend = backend._patcher, owner


def _answered(value: Any) -> Callable[..., Any]:
    """A method that reads a tensor's value, replaced on meta by ``value``."""

    def method(original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return value if self.device.type == "meta" else original(self, *args, **kwargs)

    return method


def _to(original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.cuda` of a rehearsal, which moves the tensor to meta."""
    return self if self.device.type == "meta" else self.to(META)


_NO_VALUE = "a tensor on meta has no value"
_ON_META = (
    Patch(target="torch:Tensor.item", replacement=_answered(0.0), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.tolist", replacement=_answered([0.0]), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.__bool__", replacement=_answered(False), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.__float__", replacement=_answered(0.0), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.__int__", replacement=_answered(0), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.cuda", replacement=_to, wraps=True, why="there is no GPU"),
    *(
        Patch(
            target=f"megatron.core.transformer.{scaler}.main_loss_backward_scale",
            replacement=None,
            why="a process has one such tensor, which the first step makes; a step after the rehearsal would write to meta",
        )
        for scaler in (
            "moe.moe_utils:MoEAuxLossAutoScaler",
            "experimental_attention_variant.dsa:DSAIndexerLossAutoScaler",
        )
    ),
)
