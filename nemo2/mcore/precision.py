# SPDX-License-Identifier: Apache-2.0
"""Precision as one value that sets the dtypes of the model, the gradient buffers and the optimizer together.

`MegatronMixedPrecision` is a Lightning `MixedPrecision` plugin. Before the model is built, the strategy copies the
plugin's fields into the fields of the same name in the model, optimizer and DDP configurations. A value that the user
set explicitly in one of these configurations stays and applies to the others too. If it contradicts the plugin's
explicit value, or another configuration's, the error names both.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Optional, Union

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nemo2.base.backend import get_backend
from nemo2.base.backend.extras import have_te
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.aliases import NOT_HERE, register_elsewhere
from nemo2.config.capture import configurable
from nemo2.config.derivations import Setting
from nemo2.config.notices import warn_once
from nemo2.config.provenance import adjust, adjusting, adjustments
from nemo2.config.requested import at, explicit_fields, explicit_values, where_set

_PRECISIONS: dict[str, torch.dtype] = {"32": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_SPELLINGS = {
    "32-true": "32",
    "fp32": "32",
    "bf16": "bf16-mixed",
    "16": "16-mixed",
    "fp16": "16-mixed",
}
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
_OF_FP8 = (
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
)
_LAYERS_IN_BF16 = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_WAS_SET = " was set"
_SCALING = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
OF_EIGHT_BITS = (*_OF_FP8, "fp4_recipe", *_LAYERS_IN_BF16)
"""Arguments of `MegatronMixedPrecision` that have no effect without fp8 or fp4."""


@dataclass
class DtypeConfig:
    """The fields that are copied into the model, optimizer and DDP configurations. The names are Megatron-Core's."""

    fp32: bool
    fp16: bool
    bf16: bool
    params_dtype: torch.dtype
    pipeline_dtype: torch.dtype
    autocast_dtype: torch.dtype
    autocast_enabled: bool
    enable_autocast: bool
    grad_reduce_in_fp32: bool
    fp8: Optional[str] = None
    fp8_recipe: str = "delayed"
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_param: bool = False
    fp8_param_gather: bool = False
    fp4: Optional[str] = None
    fp4_recipe: str = "nvfp4"
    loss_scale: Optional[float] = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    reuse_grad_buf_for_mxfp8_param_ag: bool = False

    @classmethod
    def of(cls, precision: str, arguments: Mapping[str, Any]) -> "DtypeConfig":
        """The fields for a precision of `_PRECISIONS` and all arguments of `MegatronMixedPrecision`."""
        dtype = _PRECISIONS[precision]
        values = {field.name: arguments[_ARGUMENT_OF.get(field.name, field.name)] for field in fields(cls)}
        gather = arguments["fp8_params" if arguments["fp8_param_gather"] is None else "fp8_param_gather"]
        values |= {
            "fp32": dtype is torch.float32,
            "fp16": dtype is torch.float16,
            "bf16": dtype is torch.bfloat16,
            "params_dtype": dtype,
            "pipeline_dtype": values["pipeline_dtype"] or dtype,
            "autocast_dtype": values["autocast_dtype"] or dtype,
            "fp8_recipe": values["fp8_recipe"] or "delayed",  # NeMo's scripts pass None without fp8
            "fp8_param": bool(gather),
            "fp8_param_gather": bool(gather),
        }
        return cls(**values)


_ARGUMENT_OF = {
    "fp32": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "params_dtype": "precision",
    "enable_autocast": "autocast_enabled",
    "fp8_param": "fp8_param_gather",
    **{field: f"fp16_{field}" for field in _SCALING},
}
"""The arguments of `MegatronMixedPrecision` by the fields of `DtypeConfig`, where the names differ."""


_BUFFERS = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
_OPTIMIZER = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
_MODEL = "megatron.core.transformer.transformer_config:TransformerConfig"


@configurable
class MegatronMixedPrecision(MixedPrecision):
    """Train in mixed precision as Megatron-Core does.

    Parameters and arithmetic are in 16 bit, or in fp8 inside matrix products. The optimizer keeps its own copy of the
    parameters in fp32.

    Args:
        precision: "32", "bf16-mixed" or "16-mixed". "fp32" and 32 mean "32", "bf16" means "bf16-mixed", and "16",
            "fp16" and 16 mean "16-mixed".
        params_dtype: The dtype of the model's parameters. It must agree with ``precision``. None: derived from
            ``precision``.
        pipeline_dtype: The dtype of the tensors that pipeline stages send to each other. None: ``params_dtype``.
        autocast_dtype: The dtype of torch autocast. None: ``params_dtype``.
        autocast_enabled: Run the forward under torch autocast. Not needed, because the whole model is converted.
        grad_reduce_in_fp32: Accumulate and reduce gradients in fp32.
        fp8: "hybrid" or "e4m3". Needs Transformer Engine and a GPU of compute capability 8.9 or newer. None: no fp8.
        fp8_recipe: "delayed", "tensorwise" (current scaling), "blockwise" or "mxfp8". None: only without fp8.
        first_last_layers_bf16: Keep the first and last layers in bf16. Needs fp8 with another recipe than "delayed".
        fp8_margin: Margin of the scaling factor, as a power of two.
        fp8_amax_history_len: Steps whose largest values "delayed" remembers.
        fp8_amax_compute_algo: The value that "delayed" takes from this history: "most_recent" or "max".
        fp8_wgrad: Compute gradients of weights in fp8. False: in 16 bit.
        fp8_dot_product_attention: Compute the attention scores and their product with the values in fp8.
        fp8_multi_head_attention: Keep the tensors between the projections and the attention in fp8.
        fp8_params: The deprecated name of ``fp8_param_gather``.
        fp8_param_gather: Keep parameters in fp8 and gather them in fp8. None: False.
        fp4, fp4_recipe: The same as ``fp8`` and ``fp8_recipe``, for 4 bit. Need a Blackwell GPU.
        fp16_loss_scale: A fixed loss scale. None: a dynamic loss scale, which starts at ``fp16_initial_loss_scale``,
            halves at each overflow from the ``fp16_hysteresis``-th on until it has doubled, and doubles after
            ``fp16_loss_scale_window`` steps without an overflow.
        fp16_initial_loss_scale: The first value of a dynamic loss scale.
        fp16_min_loss_scale: The least value of a dynamic loss scale.
        fp16_loss_scale_window: Steps without an overflow after which a dynamic loss scale doubles.
        fp16_hysteresis: The first of the overflows at which a dynamic loss scale halves.
        num_layers_at_start_in_bf16: First layers to keep in bf16, with ``first_last_layers_bf16``.
        num_layers_at_end_in_bf16: Last layers to keep in bf16, with ``first_last_layers_bf16``.
        reuse_grad_buf_for_mxfp8_param_ag: With "mxfp8": gather parameters through the buffer of gradients, which saves
            memory.

    Raises:
        ConfigError: an unknown precision, fp8 format or recipe, or parameters in a dtype other than the precision's.
    """

    def __init__(
        self,
        precision: Union[str, int] = "bf16-mixed",
        params_dtype: Optional[torch.dtype] = None,
        pipeline_dtype: Optional[torch.dtype] = None,
        autocast_dtype: Optional[torch.dtype] = None,
        autocast_enabled: bool = False,
        grad_reduce_in_fp32: bool = True,
        # fp8
        fp8: Optional[Literal["hybrid", "e4m3"]] = None,
        fp8_recipe: Optional[Literal["delayed", "tensorwise", "blockwise", "mxfp8"]] = "delayed",
        first_last_layers_bf16: bool = False,
        fp8_margin: int = 0,
        fp8_amax_history_len: int = 1,
        fp8_amax_compute_algo: str = "most_recent",
        fp8_wgrad: bool = True,
        fp8_dot_product_attention: bool = False,
        fp8_multi_head_attention: bool = False,
        fp8_params: Optional[bool] = None,
        fp8_param_gather: Optional[bool] = None,
        fp4: Optional[str] = None,
        fp4_recipe: str = "nvfp4",
        # fp16 loss scaling
        fp16_loss_scale: Optional[float] = None,
        fp16_initial_loss_scale: float = 2.0**32,
        fp16_min_loss_scale: float = 1.0,
        fp16_loss_scale_window: int = 1000,
        fp16_hysteresis: int = 2,
        num_layers_at_start_in_bf16: int = 0,
        num_layers_at_end_in_bf16: int = 0,
        reuse_grad_buf_for_mxfp8_param_ag: bool = False,
    ) -> None:
        arguments = dict(locals())
        super(MixedPrecision, self).__init__()  # Lightning's would make a gradient scaler
        name = _SPELLINGS.get(str(precision), str(precision))
        if name not in _PRECISIONS:
            raise ConfigError(
                f"trainer.plugins.precision={precision!r}: must be one of {', '.join(_PRECISIONS)}"
                f"{did_you_mean(str(precision), _PRECISIONS, listed=True)}"
            )
        if fp8_params is not None and fp8_param_gather not in (None, fp8_params):
            raise ConfigError(
                f"fp8_params={fp8_params} is the old name of fp8_param_gather={fp8_param_gather}, and the two "
                "values differ. Remove fp8_params."
            )
        if fp8 not in (None, "hybrid", "e4m3"):
            raise ConfigError(f"trainer.plugins.fp8={fp8!r}: must be 'hybrid', 'e4m3' or None.")
        if fp8_recipe not in FP8_RECIPES and (fp8, fp8_recipe) != (None, None):
            raise ConfigError(
                f"trainer.plugins.fp8_recipe={fp8_recipe!r}: must be one of {', '.join(FP8_RECIPES)}"
                f"{did_you_mean(str(fp8_recipe), FP8_RECIPES, listed=True)}"
            )
        dtype = _PRECISIONS[name]
        self.precision = name  # pyright: ignore[reportAttributeAccessIssue]
        if params_dtype not in (None, dtype):
            raise ConfigError(
                f"trainer.plugins.params_dtype={params_dtype} contradicts trainer.plugins.precision={name!r}, which "
                f"makes the model's parameters {dtype}. Leave params_dtype unset, or choose another precision."
            )
        self.dtype_config = DtypeConfig.of(name, arguments)

    # The plugin is an instance of Lightning's class for callers that check the class. It doesn't use torch's autocast
    # and gradient scaler: the whole model is converted, and Megatron-Core's optimizer scales the loss.
    scaler = None
    pre_backward = Precision.pre_backward
    forward_context = Precision.forward_context  # pyright: ignore[reportAssignmentType]
    state_dict = Precision.state_dict
    load_state_dict = Precision.load_state_dict

    @property
    def device(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The device type that torch's autocast would use."""
        return get_backend().name

    def autocast_context_manager(self) -> torch.autocast:
        """An autocast context, active only with ``autocast_enabled``, which is off by default."""
        config = self.dtype_config
        return torch.autocast(self.device, dtype=config.autocast_dtype, enabled=config.autocast_enabled)

    def apply_to(self, config: Any, *, path: str) -> None:
        """Call `apply_to_all` with one configuration."""
        self.apply_to_all({path: config})

    def apply_to_all(self, configs: Mapping[str, Any]) -> None:
        """Copy the dtype fields into the fields of the same name in all of a run's configurations at once.

        A value that the user set in one configuration also applies to the others.

        Args:
            configs: Megatron-Core's configurations by the name that errors call them ("strategy.ddp_config"). Changed
                in place.

        Raises:
            ConfigError: the user set two places to different values. Each sentence of the message names both places.
        """
        self._follow(configs)
        for config in configs.values():
            changed = set()
            followed = adjustments(self.dtype_config)
            for field in fields(self.dtype_config):
                value = getattr(self.dtype_config, field.name)
                if not hasattr(config, field.name) or getattr(config, field.name) == value:
                    continue
                steps = followed.get(field.name)
                argument = _ARGUMENT_OF.get(field.name, field.name)
                adjust(config, field.name, value, why=steps[-1].why if steps else f"trainer.plugins.{argument}")
                changed.add(field.name)
            if self.dtype_config.fp8 and changed & {"fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"}:
                _derive_again(config)

    def _follow(self, configs: Mapping[str, Any]) -> None:
        """Adopt the explicit values of the configurations in fields that the plugin leaves unset."""
        ours = {
            name for name, value in explicit_values(self).items() if value is not None or name not in _NONE_IS_UNSET
        }
        if "fp8_params" in ours:
            ours.add("fp8_param_gather")
        settings: dict[str, Setting] = {}
        problems = []
        for setting in _dtypes_of(configs, self.dtype_config):
            name = _ONE_VALUE.get(setting.name, (setting.name,))[0]
            first = settings.setdefault(name, setting)
            if first.value != setting.value:
                problems.append(f"{first} contradicts {setting}. {_ONE_THING}")
            current, argument = getattr(self.dtype_config, name), _ARGUMENT_OF.get(name, name)
            if first is not setting or current == setting.value:
                continue
            if argument in ours:
                problems.append(
                    f"{setting} contradicts trainer.plugins.{argument}{at(self, argument)}, which sets it to {current}. "
                    f"{_ONE_THING}"
                )
            elif name in _DECIDED_BY_PRECISION:
                # Adopting one of these fields alone would leave parameters in one dtype and their optimizer in another.
                problems.append(
                    f"{setting} contradicts trainer.plugins.precision={self.precision!r} (the default), which sets it "
                    f"to {current}. Remove {setting.owner}.{setting.name}, and set trainer.plugins.precision, which "
                    "controls the model, the optimizer and the gradient buffers."
                )
        if problems:
            raise ConfigError("\n".join(problems))
        for name, setting in settings.items():
            for field in _ONE_VALUE.get(name, (name,)):
                adjust(self.dtype_config, field, setting.value, why=f"{setting.owner}.{setting.name}{_WAS_SET}")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the chunk to the model's dtype. 16-bit chunks are wrapped so that their inputs and outputs are
        cast too."""
        from megatron.core.transformer.module import Float16Module

        if self.dtype_config.fp16 or self.dtype_config.bf16:
            return Float16Module(module.config, module)  # pyright: ignore[reportArgumentType]
        return module

    def convert_input(self, data: Any) -> Any:
        """Cast the floating-point tensors of a plain module's batch to the model's dtype. Megatron models cast their
        own inputs."""
        if self.dtype_config.params_dtype is torch.float32:
            return data
        return tree_map_only(
            Tensor, lambda t: t.to(self.dtype_config.params_dtype) if t.is_floating_point() else t, data
        )

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0, gradient_clip_algorithm: Any = None) -> None:
        """Do nothing: Megatron-Core clips inside the optimizer step, by the norm over all model-parallel ranks. The strategy
        has refused a trainer that clips too."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        raise TypeError(
            "MegatronMixedPrecision requires MegatronStrategy, which runs Megatron-Core's optimizer step. Set "
            "strategy to a MegatronStrategy, or use a precision plugin of Lightning."
        )

    def ineffective(self) -> list[str]:
        """One sentence for each explicit argument that has no effect because the feature it belongs to is off, and for each such
        field of a configuration that the plugin has adopted."""
        config = self.dtype_config
        reasons = {name: steps[-1].why for name, steps in adjustments(config).items()}
        requested = {  # each argument's setting and place
            _ARGUMENT_OF.get(name, name): (why.removesuffix(_WAS_SET), "")
            for name, why in reasons.items()
            if why.endswith(_WAS_SET)
        }
        requested |= {name: (f"trainer.plugins.{name}", at(self, name)) for name in explicit_fields(self)}
        settings = [
            f"{requested[name][0]}={value!r}{requested[name][1]} does not take effect: {owner} is off."
            for owner, on, names in (
                ("trainer.plugins.fp8", config.fp8, (*_OF_FP8, "first_last_layers_bf16")),
                ("trainer.plugins.fp4", config.fp4, ("fp4_recipe",)),
                ("trainer.plugins.first_last_layers_bf16", config.first_last_layers_bf16, _LAYERS_IN_BF16),
                (
                    "fp16 (trainer.plugins.precision='16-mixed')",
                    config.fp16,
                    tuple(f"fp16_{name}" for name in _SCALING),
                ),
            )
            for name in names
            if not on and name in requested
            if (value := getattr(config, name.removeprefix("fp16_")))
            != getattr(DtypeConfig, name.removeprefix("fp16_"))
        ]
        if config.fp8 and config.first_last_layers_bf16 and not any(getattr(config, name) for name in _LAYERS_IN_BF16):
            settings.append(
                f"trainer.plugins.first_last_layers_bf16=True does not take effect: {' and '.join(_LAYERS_IN_BF16)} "
                "are 0."
            )
        return settings

    def check_hardware(self, machine: Any) -> None:
        """Check that a machine supports the precision, and warn of settings without effect. The strategy calls this before it
        creates a process group.

        Args:
            machine: The machine of this process (`nemo2.mcore.settle.machine.Machine`).

        Raises:
            ConfigError: fp8 or fp4 without a GPU that supports it, or without Transformer Engine.
        """
        for sentence in self.ineffective():
            warn_once(sentence)
        if problem := next(format_problems(self.dtype_config, machine, cuda=torch.version.cuda), None):
            raise ConfigError(problem)


def format_problems(dtypes: DtypeConfig, machine: Any, *, cuda: Optional[str] = None) -> Iterator[str]:
    """Why a machine can't compute in the formats below 16 bits. Empty: it can, or there are none.

    Args:
        machine: A `nemo2.mcore.settle.machine.Machine`.
        cuda: As in `what_is_lacking`.
    """
    for name in ("fp8", "fp4"):
        value, recipe = getattr(dtypes, name), getattr(dtypes, f"{name}_recipe")
        setting, version = f"trainer.plugins.{name}={value!r}", machine.transformer_engine
        if value is None:
            continue
        if version is None:
            yield (
                f"{setting}: {name} requires a GPU with Transformer Engine ({machine.te_missing}). Leave {name} unset on this "
                "machine. bf16-mixed runs on any machine."
            )
            continue
        if Version(version) < Version(SINCE.get(recipe, "0")):
            yield (
                f"trainer.plugins.{name}_recipe={recipe!r}: Transformer Engine {version} does not support this recipe. "
                f"Install Transformer Engine {SINCE[recipe]} or newer, or choose another recipe."
            )
        if lacking := what_is_lacking(recipe, capability=machine.capability, transformer_engine=version, cuda=cuda):
            yield f"{setting} with recipe {recipe!r} {lacking}"


def what_is_lacking(
    recipe: str,
    *,
    capability: Optional[tuple[int, int]] = None,
    transformer_engine: Optional[str] = None,
    cuda: Optional[str] = None,
) -> Optional[str]:
    """Say what a machine lacks for an fp8 or fp4 recipe, in words that complete a sentence after the machine's name.

    An argument that is None is unknown and counts as present.

    Sources: the checks of Transformer Engine's versions, measured in tests/transformer_engine.
    """
    if capability is not None:
        this, needed = f"this GPU has {capability[0]}.{capability[1]}", REQUIRED_CAPABILITY.get(recipe, (0, 0))
        if capability < needed:
            return (
                f"requires a GPU of compute capability {needed[0]}.{needed[1]} or newer, but {this}. Leave it unset on "
                "this GPU."
            )
        if recipe == "mxfp8" and capability >= (12, 0):
            return (
                f"requires a GPU of compute capability 10.0 to 11.x and lacks matrix products for 12.0 ({this}). Use "
                "'tensorwise'."
            )
        older = transformer_engine is not None and Version(transformer_engine) < Version(_BLOCKS_ON_BLACKWELL)
        if recipe == "blockwise" and capability >= (10, 0) and older:
            return (
                f"requires Transformer Engine {_BLOCKS_ON_BLACKWELL} or newer on a GPU of compute capability 10.0 "
                f"({this}), but {transformer_engine} is installed. Install a newer version, or use 'mxfp8'."
            )
    if recipe == "blockwise" and cuda is not None and Version(cuda) < Version(_CUDA_OF_BLOCKS):
        return (
            f"requires CUDA {_CUDA_OF_BLOCKS} or newer, but PyTorch was built for CUDA {cuda}. Install a PyTorch for a "
            "newer CUDA, or use 'tensorwise'."
        )
    return None


_ONE_THING = "Both control the same setting. Remove one of them, or set both to the same value."


def _reading(field: str) -> Callable[[Any], Any]:
    """Return a function that reads a field of `DtypeConfig` from a node of the plugin."""

    def read(plugin: Any) -> Any:
        name = _SPELLINGS.get(str(plugin.precision), str(plugin.precision)) if hasattr(plugin, "precision") else None
        if name not in _PRECISIONS:
            return NOT_HERE
        if field == "check_for_nan_in_grad":
            return False if name == "16-mixed" and plugin.fp16_loss_scale is None else NOT_HERE
        return getattr(DtypeConfig.of(name, {**_DEFAULTS, **plugin.__arguments__}), field)

    return read


_DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(MegatronMixedPrecision).parameters.items()
}
for _owner in (_BUFFERS, _OPTIMIZER, _MODEL):
    # The dtype between stages depends on the number of stages too.
    _names = [field.name for field in fields(DtypeConfig) if field.name != "pipeline_dtype"]
    register_elsewhere(_owner, "trainer.plugins", **{name: _reading(name) for name in _names})
register_elsewhere(
    "nemo2.training.strategy:MegatronStrategy", "trainer.plugins", pipeline_dtype=_reading("pipeline_dtype")
)
register_elsewhere(
    "nemo2.mcore.precision:MegatronMixedPrecision",
    "",
    **{name: _reading(name) for name in ("params_dtype", "pipeline_dtype", "autocast_dtype")},
)
register_elsewhere(_BUFFERS, "trainer.plugins", check_for_nan_in_grad=_reading("check_for_nan_in_grad"))

_ONE_VALUE = {
    name: names
    for names in (("fp8_param_gather", "fp8_param"), ("autocast_enabled", "enable_autocast"))
    for name in names
}
"""Fields that hold the same value under different names in different configurations, by each of the names."""
_NONE_IS_UNSET = ("pipeline_dtype", "autocast_dtype", "fp8_params", "fp8_param_gather")
_DECIDED_BY_PRECISION = ("fp32", "fp16", "bf16", "params_dtype")


def _dtypes_of(configs: Mapping[str, Any], dtypes: DtypeConfig) -> Iterator[Setting]:
    """The fields of ``dtypes`` that the user set in the configurations."""
    for path, config in configs.items():
        theirs = explicit_fields(config)
        for field in fields(dtypes):
            if field.name not in theirs or not hasattr(config, field.name):
                continue
            value = getattr(config, field.name)
            if value is not None or field.name not in _NONE_IS_UNSET:
                yield Setting(field.name, path, value, where_set(config, field.name))


def _derive_again(config: Any) -> None:
    """Repeat what ``OptimizerConfig.__post_init__`` derives from the fp8 recipe, which it read before the plugin set
    ours.

    By this recipe Megatron-Core's optimizer chooses between two places to look for gradients.
    """
    if not hasattr(config, "use_precision_aware_optimizer"):
        return
    if config.use_precision_aware_optimizer and not have_te():
        return  # this machine only explains the recipe; Megatron-Core would reject it here
    try:
        with adjusting(config, why="derived by Megatron-Core from the fp8 recipe"):
            config.__post_init__()
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"Megatron-Core rejects optim.config with the fp8 settings of trainer.plugins: {error}"
        ) from error


# Transformer Engine at commit d0067d0d (2.20), transformer_engine/pytorch/quantization.py, _compute_fp8_support and its like.
# The answers of its wheels from 2.2 to 2.20 are in tests/transformer_engine.
REQUIRED_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""The compute capability that each fp8 and fp4 recipe needs."""
BLOCKS = {"delayed": (8, 16), "tensorwise": (8, 16), "blockwise": (8, 16), "mxfp8": (32, 32), "nvfp4": (16, 16)}
"""Multiples that the token count and the widths of a matrix product must have, by recipe."""
_BLOCKS_ON_BLACKWELL, _CUDA_OF_BLOCKS = "2.9", "12.9"
SINCE = {"tensorwise": "2.2", "blockwise": "2.3", "mxfp8": "2.1", "nvfp4": "2.8"}
"""The first version of Transformer Engine with each recipe. Delayed scaling is older than every version that
Megatron-Core supports."""
