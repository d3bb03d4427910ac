# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizer, with mixed precision and optional sharding, for Lightning's loops and torch's
schedules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor
from torch.nn import Parameter

from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.config.notices import warn_about_unread, warn_without_effect
from nemo2.mcore.optim.base import OptimizerModule, ParamCondition, check_lr_mult
from nemo2.mcore.optim.lr_scheduler import LR_FACTOR, LRSchedulerModule

if TYPE_CHECKING:
    from nemo2.mcore.parallel.megatron_parallel import MegatronParallel


@configurable
@dataclass(eq=False)
class MegatronOptimizerModule(OptimizerModule):
    """Train with Megatron-Core's optimizer.

    Raises:
        ConfigError: ``config.lr`` is missing, or ``lr_mult`` is set without ``scale_lr_cond``.
    """

    config: OptimizerConfig
    """Megatron-Core's ``OptimizerConfig``. Its ``lr`` is the peak of the schedule."""
    lr_scheduler: Optional[LRSchedulerModule] = None
    """The learning-rate schedule. None: constant at ``config.lr``."""
    no_weight_decay_cond: Optional[ParamCondition] = None
    """``(name, parameter) -> bool``. Parameters for which it returns True have no weight decay. None: Megatron-Core's rule, no
    weight decay for biases and one-dimensional parameters."""
    scale_lr_cond: Optional[ParamCondition] = None
    """``(name, parameter) -> bool``. Parameters for which it returns True have their learning rate multiplied by
    ``lr_mult``."""
    lr_mult: float = 1.0
    """The factor for the parameters that ``scale_lr_cond`` selects."""

    def __post_init__(self) -> None:
        if self.config.lr is None:
            raise ConfigError("optim.config.lr is unset. Set the peak learning rate, e.g. optim.config.lr=3e-4.")
        check_lr_mult(self.lr_mult, self.scale_lr_cond, "optim.config.lr")
        self._warn_about_settings_of_other_optimizers()

    def optimizers(self, model: "MegatronParallel") -> list[torch.optim.Optimizer]:
        """The optimizer of the wrapped chunks, in a list of one: Megatron-Core's, or torch's if torch shards the
        chunks.

        Raises:
            ConfigError: the chunks aren't wrapped for training.
        """
        if not getattr(model.config, "qk_layernorm", True):
            warn_without_effect(
                "The model normalizes no queries and keys: model.config.qk_layernorm is off.",
                apply_wd_to_qk_layernorm=(getattr(self.config, "apply_wd_to_qk_layernorm", False), False),
            )
        if self.lr_scheduler is None:
            rates = {name: (getattr(self.config, name, None), None) for name in ("min_lr", "decoupled_min_lr")}
            why = "The learning rate is constant, because optim.lr_scheduler is unset."
            warn_without_effect(why, **{f"optim.config.{name}": value for name, value in rates.items()})
        width: float = model.config.mup_width_mult if getattr(model.config, "use_mup", False) else 1.0
        if getattr(model, "wrap_chunk", None) is not None:
            from nemo2.mcore.optim.sharded import ShardedOptimizer, torch_optimizer

            inner = torch_optimizer(self.config, list(model), self._overrides(width))
            optimizer = ShardedOptimizer(inner, self.config, shard_group=getattr(model[0], "shard_group", None))
            return [self._at_own_rates(optimizer, width)]
        if model.ddp_config is None:
            raise ConfigError(
                "MegatronOptimizerModule requires chunks that are wrapped for training. Create them with "
                "MegatronParallel(ddp_config=...)."
            )
        mcore = get_megatron_optimizer(
            self.config,
            list(model),  # pyright: ignore[reportArgumentType]
            config_overrides=self._overrides(width),
            use_gloo_process_groups=getattr(model, "use_gloo_process_groups", True),
        )
        return [self._at_own_rates(MegatronOptimizer(_without_stub_optimizers(mcore), self.config), width)]

    def _warn_about_settings_of_other_optimizers(self) -> None:
        """Not about those of Adam, which recipes set."""
        used, names = self.config.optimizer, ["sgd", "lion", "soap", "adaptive_muon"]
        if used in ("adam", "sgd", "lion"):
            names.append("muon")
        else:  # for matrices. The other parameters have their own, which is a setting of muon.
            used += f" with {getattr(self.config, 'muon_scalar_optimizer', 'adam')}"
        for name in names:
            if name not in used:
                warn_about_unread(self.config, f"{name}_", f"The optimizer is {used}.")

    def _at_own_rates(self, optimizer: torch.optim.Optimizer, width: float) -> torch.optim.Optimizer:
        """``optimizer`` with the peak of each group as its rate, which Megatron-Core leaves to its own scheduler."""
        assert self.config.lr is not None
        factors = [self.lr_mult] if self.scale_lr_cond is not None else []
        factors += [1.0 / width, width] if width != 1.0 else []
        for group in optimizer.param_groups:
            group["lr"] = group["max_lr"]
            for factor in factors:
                if group["max_lr"] == self.config.lr * factor:
                    group[LR_FACTOR] = factor
        return optimizer

    def _overrides(self, width: float) -> dict[ParamKey, Any]:
        """Megatron-Core's per-parameter rules, replaced or extended by the user's conditions.

        Args:
            width: The width of a model under MuP (``model.config.use_mup``) over its base's, by which MuP scales rates.
        """
        overrides: dict[ParamKey, Any] = dict(get_standard_config_overrides(self.config))
        if width != 1.0:
            # Megatron-LM's training script adds them, not Megatron-Core's optimizer.
            from megatron.core.optimizer import get_mup_config_overrides  # pyright: ignore[reportAttributeAccessIssue]

            overrides |= get_mup_config_overrides(self.config, width, self.config.optimizer)
        if self.no_weight_decay_cond is not None:
            overrides = {key: value for key, value in overrides.items() if "wd_mult" not in value}
            overrides[_key("no_weight_decay_cond", self.no_weight_decay_cond)] = {"wd_mult": 0.0}
        if self.scale_lr_cond is not None and self.lr_mult != 1.0:
            assert self.config.lr is not None
            scaled: dict[str, float] = {"max_lr": self.config.lr * self.lr_mult}
            if self.config.min_lr is not None:
                scaled["min_lr"] = self.config.min_lr * self.lr_mult
            overrides[_key("scale_lr_cond", self.scale_lr_cond)] = scaled
        return overrides


class MegatronOptimizer(torch.optim.Optimizer):
    """Megatron-Core's optimizer behind torch's interface.

    Its state is saved and loaded through Megatron-Core's ``sharded_state_dict``, so a resumed run may use another
    layout.
    """

    def __init__(self, mcore_optimizer: Any, config: OptimizerConfig) -> None:
        # torch's __init__ would register the parameters, which Megatron-Core already holds.
        self.mcore_optimizer = mcore_optimizer
        self.config = config
        for part in self._parts():
            # Megatron-Core gives SGD no such function, but calls it on load.
            if type(getattr(part, "optimizer", None)).__name__.endswith("SGD") and part.init_state_fn is None:
                part.init_state_fn = _make_momentum_buffers
            if hasattr(part, "_get_main_param_and_optimizer_states"):
                _store_whole_main_params(part)
        self.defaults: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        self.grad_norm: Optional[float] = None
        """The global gradient norm of the last step before clipping. None before the first step, or if it isn't
        computed."""
        self.num_zeros_in_grad: Optional[int] = None
        self.update_successful: bool = True
        """False if the last step was skipped because its gradients weren't finite (fp16)."""
        self.apply_config()

    def apply_config(self) -> None:
        """Write the configuration's values into the parameter groups.

        This is repeated after a checkpoint is loaded, because its groups hold the configuration at the time of the
        save.
        """
        for group in self.param_groups:
            # Megatron-LM's parameter scheduler multiplies these. Without it nothing else would.
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
            group.setdefault("max_lr", self.config.lr)
            group.setdefault("lr", group["max_lr"])

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mcore_optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mcore_optimizer.state

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        self.update_successful, self.grad_norm, self.num_zeros_in_grad = self.mcore_optimizer.step()
        if self.update_successful and not self.grad_norm and self.config.clip_grad <= 0:
            # An optimizer that isn't one of a chain (Megatron-FSDP's) computes it only to clip, and returns 0.
            self.grad_norm = self.mcore_optimizer.get_grad_norm()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.mcore_optimizer.zero_grad(set_to_none)

    @property
    def loss_scale(self) -> Optional[float]:
        """The current factor of the loss. None: not fp16."""
        return float(self.mcore_optimizer.get_loss_scale()) if self.config.fp16 else None

    def stage_params(self) -> None:
        """Write the main parameters into the buffer that the next forward gathers parameters from, where that is the gradients'
        (``reuse_grad_buf_for_mxfp8_param_ag``): Megatron-LM's ``train_step`` does it, and no part of Megatron-Core."""
        for part in self._parts():
            buffers: Any = getattr(part, "ddp_config", None)
            reused = getattr(buffers, "reuse_grad_buf_for_mxfp8_param_ag", False)
            if reused and buffers.overlap_param_gather and not part.is_stub_optimizer:
                part._copy_main_params_to_param_buffer()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the current loss scale, which is 1 except with fp16."""
        return self.mcore_optimizer.scale_loss(loss)

    def reload_model_params(self) -> None:
        """Copy the model's newly loaded parameters into the optimizer's main parameters."""
        self.mcore_optimizer.reload_model_params()

    def sharded_state_dict(self, model_state: dict[str, Any], *, is_loading: bool = False, **options: Any) -> Any:
        if not is_loading:
            self.make_state()
        return self.mcore_optimizer.sharded_state_dict(model_state, is_loading=is_loading, **options)

    def _parts(self) -> list[Any]:
        """The inner optimizers: one, or one for each kind of parameters."""
        return getattr(self.mcore_optimizer, "chained_optimizers", [self.mcore_optimizer])

    def make_state(self) -> None:
        """Create the state of parameters that were never updated, with the values before a first update.

        A checkpoint can't be loaded into an optimizer without state, and the distributed optimizer can't save one.
        """
        for part in self._parts():
            inner, make = getattr(part, "optimizer", None), getattr(part, "init_state_fn", None)
            if isinstance(inner, HybridDeviceOptimizer):
                _make_offloaded_state(inner, part.config)
            if inner is None or make is None:
                continue
            make(inner, part.config)
            _make_step_counts(inner)

    def state_dict(self) -> dict[str, Any]:
        return self.mcore_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Megatron-Core writes main parameters in place, which autograd rejects for those of an fp32 model.
        with torch.no_grad():
            self.mcore_optimizer.load_state_dict(state_dict)
            for part in self._parts():
                if isinstance(inner := getattr(part, "optimizer", None), HybridDeviceOptimizer):
                    _move_state_to_its_parameters(inner)
                elif inner is not None and not _counts_per_group(inner):
                    # A checkpoint has the count in the groups of all optimizers of a chain. Where it stood still, the chain
                    # would have two counts, and no next save.
                    for group in inner.param_groups:
                        group.pop("step", None)
        self.apply_config()


def _without_stub_optimizers(whole: Any) -> Any:
    """A chain of optimizers without those that have no parameters. A chain of only such optimizers is returned
    unchanged.

    Megatron-Core makes an optimizer for the dense parameters even where only experts are trained, and asks it for its
    steps when the chain is saved.
    """
    parts = getattr(whole, "chained_optimizers", [])
    busy = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
    return ChainedOptimizer(busy) if busy and len(busy) < len(parts) else whole


def join_main_params(params: Tensor, remainders: Tensor) -> Tensor:
    """The fp32 main parameters of bf16 ``params`` and the ``remainders`` (int16, same shape) that Transformer Engine's fused
    Adam keeps with ``store_param_remainders``.

    Its kernel rounds the upper half of a main parameter up where the lower half, as a signed number, is negative
    (``AdamFunctorMasterParamRemainder`` in Transformer Engine's multi_tensor_apply).
    """
    return ((params.view(torch.int16).to(torch.int32) << 16) + remainders.to(torch.int32)).view(torch.float32)


def split_main_params(main_params: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `join_main_params`: the bf16 parameters and the remainders of fp32 ``main_params``."""
    bits = main_params.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def _store_whole_main_params(part: Any) -> None:
    """Let the distributed optimizer ``part`` save and load fp32 main parameters also where it keeps only remainders.

    Megatron-Core stores the remainders as if they were the parameters. It can't load them in another layout, because
    Transformer Engine requires int16 and gets fp32, and an optimizer that keeps whole main parameters would take them for
    parameters.
    """
    read, write = part._get_main_param_and_optimizer_states, part._set_main_param_and_optimizer_states

    def shard_of(param: Parameter) -> Tensor:
        group, index = part.model_param_group_index_map[param]
        return part.optimizer.param_groups[group]["params"][index]

    def read_whole(param: Parameter) -> dict[str, Any]:
        tensors = read(param)
        if tensors["param"].dtype == torch.int16:
            tensors["param"] = join_main_params(shard_of(param).detach(), tensors["param"])
        return tensors

    def write_whole(param: Parameter, tensors: dict[str, Any]) -> None:
        shard = shard_of(param)
        keeps_remainders = getattr(part.optimizer, "store_param_remainders", False) and shard.dtype == torch.bfloat16
        if keeps_remainders and tensors["param"].dtype == torch.float32:
            rounded, remainders = split_main_params(tensors["param"])
            shard.data.copy_(rounded)
            tensors = {**tensors, "param": remainders}
        write(param, tensors)

    part._get_main_param_and_optimizer_states, part._set_main_param_and_optimizer_states = read_whole, write_whole


def _make_momentum_buffers(inner: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """SGD's momentum before its first update, for parameters without one."""
    for group in inner.param_groups if config.sgd_momentum else ():
        for parameter in group["params"]:
            inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def _make_step_counts(inner: torch.optim.Optimizer) -> None:
    """Adam's number of steps before its first update, where it has none."""
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):  # the count is in each parameter's state
        for state in inner.state.values():
            state.setdefault("step", torch.tensor(0.0))
    elif _counts_per_group(inner):
        for group in inner.param_groups:
            if group["params"]:
                group.setdefault("step", 0)


def _counts_per_group(inner: torch.optim.Optimizer) -> bool:
    """Whether an optimizer counts its updates in each group, as Transformer Engine's, Apex's and a CPU's Adam."""
    return type(inner).__name__ == "FusedAdam"


def _make_offloaded_state(inner: HybridDeviceOptimizer, config: OptimizerConfig) -> None:
    """As `MegatronOptimizer.make_state`, for an optimizer that is spread over both memories. Its own way to create
    state moves the parameters."""
    for optimizer in inner.sub_optimizers:
        if config.optimizer == "sgd":
            _make_momentum_buffers(optimizer, config)
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter.data))
        _make_step_counts(optimizer)
    inner._sync_sub_optimizers_state_to_hdo()


def _move_state_to_its_parameters(inner: HybridDeviceOptimizer) -> None:
    """What was read from a checkpoint is in host memory. Megatron-Core tells the two kinds of optimizers by their classes,
    which are one without Transformer Engine."""
    for optimizer in inner.sub_optimizers:
        for parameter, state in optimizer.state.items():
            state |= {name: value.to(parameter.device) for name, value in state.items() if isinstance(value, Tensor)}
    inner._sync_sub_optimizers_state_to_hdo()


def _key(name: str, condition: ParamCondition) -> ParamKey:
    return ParamKey(
        with_name_predicate=ParamWithNamePredicate(name=name, fn=lambda param, path: condition(path, param))
    )
