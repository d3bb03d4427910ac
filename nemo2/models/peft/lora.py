# SPDX-License-Identifier: Apache-2.0
"""LoRA: low-rank adapters of linear layers (Hu et al., arXiv:2106.09685)."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Optional

import torch
from torch import Tensor, nn

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.aliases import register_gone
from nemo2.config.capture import configurable
from nemo2.config.domains import Choice, Domain, refuse_out_of_range
from nemo2.config.value_types import refuse_misfits
from nemo2.mcore.parallel.norm_names import module_of_key
from nemo2.models.peft.adapter import (
    INIT_METHODS,
    Adapted,
    InitMethod,
    LowRank,
    prepare,
    required_placement,
    sections_of,
)
from nemo2.models.peft.base import PEFT
from nemo2.models.peft.placement import placement_of
from nemo2.models.peft.targets import ModuleMatcher, refuse_unmet, takes_all_of

TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
"""The default targets of NeMo 2.0's LoRA and DoRA."""
_DOMAINS = {
    "dim": Domain("[1, inf)", "the rank of the adapters", "whole"),
    "alpha": Domain("(0, inf)", "the adapters' output is multiplied by alpha / dim"),
    "dropout": Domain("[0, 1)", "the probability with which a channel is dropped"),
    "dropout_position": Choice(("pre", "post"), "before A, or after the adapter"),
    **dict.fromkeys(("lora_A_init_method", "lora_B_init_method"), Choice(INIT_METHODS, "the factor's initial values")),
}


_SAME_RESULTS = "it changes NeMo's communication or memory, not the results. Leave it out."
register_gone(
    "nemo2.models.peft.lora:LoRA",
    a2a_experimental=_SAME_RESULTS,
    dropout_recompute=_SAME_RESULTS,
    canonical_mapping="target_modules decides it. Leave it out.",
)


@configurable
class LoRA(PEFT):
    """Fine-tune with LoRA: ``y = W x + alpha / dim * B A x`` in each target layer, with W frozen.

    A fused layer (queries, keys and values; gate and up projection) has one A for all its parts. `CanonicalLoRA` gives
    each part its own A. In the layers of routed experts each expert has its own adapter, with any expert-parallel size.

    Args:
        target_modules: Names of linear layers, or patterns of full names (`nemo2.models.peft.targets`). None: `TARGETS`, the
            layers of attention and of the feed-forward network. Empty, as in NeMo: every linear layer, the output layer
            too.
        exclude_modules: Names or patterns to exclude from the targets. None: no exclusions.
        dim: The rank of the adapters.
        alpha: The output of the adapters is scaled by ``alpha / dim``.
        dropout: The probability with which a channel is dropped during training.
        dropout_position: "pre": drop channels of the input of A, as in the paper. "post": drop channels of the output of
            the adapter.
        lora_A_init_method, lora_B_init_method: The initial values of A and B (`nemo2.models.peft.adapter.first_values`). With
            B at zero the model starts equal to the base model.
        lora_dtype: The dtype of A and B. `MegatronStrategy` takes only that of the model's parameters. None: the layer's dtype.
        modules_to_save: Modules that are trained in full and saved with the adapters, as in `peft`. Names or patterns
            like those of targets (``word_embeddings``, ``output_layer``, ``*_layernorm``, ``*.layers.0-3.mlp``). Where
            Transformer Engine fuses a norm, use the name that the norm has in plain layers. None: no modules.

    Raises:
        ConfigError: a value is out of range.
    """

    default_targets: Sequence[str] = TARGETS
    """The targets if ``target_modules`` is None."""

    def __init__(
        self,
        target_modules: Optional[list[str]] = None,
        exclude_modules: Optional[list[str]] = None,
        dim: int = 32,
        alpha: float = 32,
        dropout: float = 0.0,
        dropout_position: Literal["pre", "post"] = "pre",
        lora_A_init_method: InitMethod = "xavier",
        lora_B_init_method: InitMethod = "zero",
        lora_dtype: Optional[torch.dtype] = None,
        modules_to_save: Optional[list[str]] = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        refuse_misfits(LoRA, arguments, of="peft")
        refuse_out_of_range(arguments, "peft", _DOMAINS)
        self.named = target_modules is not None
        """Whether the user named the targets, in which case each target must exist."""
        self.target_modules = list(self.default_targets if target_modules is None else target_modules)
        self.exclude_modules = list(exclude_modules or ())
        self.dim, self.alpha, self.dropout = dim, alpha, dropout
        self.dropout_position: Literal["pre", "post"] = dropout_position
        self.lora_A_init_method, self.lora_B_init_method = lora_A_init_method, lora_B_init_method
        self.lora_dtype = lora_dtype
        self.modules_to_save = list(modules_to_save or ())
        self.refuse_contradictions()

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for settings that contradict each other."""
        if self.lora_A_init_method == self.lora_B_init_method == "zero":
            raise ConfigError(
                "peft.lora_A_init_method='zero' and peft.lora_B_init_method='zero': the gradient of each factor is a multiple of "
                "the other, so the adapters would stay zero. Set one of them to another method, such as 'xavier'."
            )

    @property
    def matcher(self) -> ModuleMatcher:
        return ModuleMatcher(self.target_modules, self.exclude_modules)

    def transform(self, module: nn.Module, name: Optional[str] = None, prefix: Optional[str] = None) -> nn.Module:
        full = f"{prefix}.{name}" if prefix else name or ""
        pattern = self.matcher.match(name or "", prefix or "") if name else None
        if pattern is None or not is_meant(module, pattern):
            return self.unfreeze_saved(module, full)
        return self.with_adapter(module, full)

    def unfreeze_saved(self, module: nn.Module, full: str) -> nn.Module:
        """The module. Its own parameters are unfrozen if they belong to ``modules_to_save``."""
        for name, parameter in module.named_parameters(recurse=False):
            if self.trains_whole(owner_of(parameter, f"{full}.{name}")):
                parameter.requires_grad_(True)
        return module

    def trains_whole(self, full: str) -> bool:
        """Whether the module with the full name ``full`` belongs to ``modules_to_save``."""
        return any(takes_all_of(pattern, full) for pattern in self.modules_to_save)

    def with_adapter(self, module: nn.Module, full: str) -> nn.Module:
        """The linear layer with the full name ``full``, with an adapter."""
        placement = required_placement(module, full)
        weight: Any = module.weight
        prepare(module)
        sections = sections_of(module, full, placement)
        return self.adapted(module, LowRank(placement, like=weight, name=full, sections=sections, **self.factors))

    @property
    def factors(self) -> dict[str, Any]:
        """The arguments of `LowRank` that don't depend on the layer."""
        return {
            "rank": self.dim,
            "scale": self.alpha / self.dim,
            "dropout": self.dropout,
            "dropout_position": self.dropout_position,
            "a_init": self.lora_A_init_method,
            "b_init": self.lora_B_init_method,
            "dtype": self.lora_dtype,
        }

    def adapted(self, layer: nn.Module, adapter: nn.Module) -> nn.Module:
        return Adapted(layer, adapter)

    def refuse_unknown_targets(self, linear_layers: Optional[Mapping[str, tuple[int, int]]]) -> None:
        if linear_layers is None:
            return
        names = self.targets_among(linear_layers)
        refuse_unmet(self.target_modules, names, each=self.named)
        refuse_unmet(self.exclude_modules, {*names, *linear_layers}, each=True, field="exclude_modules")
        targets = [name for name in linear_layers if self.num_first_factors(name)]
        if not targets and not self.modules_to_save:
            raise ConfigError(
                f"peft.exclude_modules={self.exclude_modules} excludes every layer of peft.target_modules, so nothing would be "
                "trained. Exclude fewer layers, or name modules in peft.modules_to_save."
            )
        for name in targets:
            outputs, inputs = linear_layers[name]
            if self.trains_whole(name):
                raise ConfigError(
                    f"peft.modules_to_save trains {name} in full, and peft.target_modules gives it an adapter. Keep one of them: "
                    "name the layer in peft.exclude_modules, or remove it from peft.modules_to_save."
                )
            if self.dim > min(outputs, inputs):
                raise ConfigError(
                    f"peft.dim={self.dim}: {name} has {inputs:,} inputs and {outputs:,} outputs, so an adapter's rank can be at "
                    f"most {min(outputs, inputs):,}. Lower peft.dim, or name the layer in peft.exclude_modules."
                )

    def refuse_unknown_modules(self, modules: Optional[Collection[str]]) -> None:
        unmet = [
            pattern
            for pattern in self.modules_to_save
            if modules is not None and not any(takes_all_of(pattern, name) for name in modules)
        ]
        if unmet:
            known = sorted({name.rpartition(".")[2] for name in modules or ()})
            hint = did_you_mean(unmet[0], known, listed=True)
            raise ConfigError(
                f"peft.modules_to_save: {unmet[0]!r} matches no module with weights in this model{hint} "
                f"The modules with weights are {', '.join(known)}. If the output layer shares the embedding's weight "
                "(share_embeddings_and_output_weights=True), name word_embeddings."
            )

    def num_first_factors(self, full: str) -> int:
        """The number of first factors for the linear layer of this full name. 0: the layer gets no adapter."""
        prefix, _, name = full.rpartition(".")
        return int(self.matcher.match(name, prefix) is not None)

    def is_beside_experts(self, linear_layers: Iterable[str]) -> bool:
        """Whether any of these full names is a routed expert's layer with an adapter."""
        return any(".experts." in name and self.num_first_factors(name) for name in linear_layers)

    def targets_among(self, linear_layers: Iterable[str]) -> Collection[str]:
        """The full names that patterns of targets select among."""
        return [*linear_layers]


class LinearAdapter(nn.Linear):
    """A plain linear layer with LoRA, for models without a strategy. The layer's parameters keep their names and are
    frozen; ``lora_a`` and ``lora_b`` stand beside them.

    Args:
        orig_linear: A ``torch.nn.Linear``, whose weights are copied.
        dim, alpha, dropout, dropout_position, lora_A_init_method, lora_dtype: As in `LoRA`.

    Raises:
        ConfigError: ``orig_linear`` isn't a plain linear layer, or a value is out of range.
    """

    def __init__(
        self,
        orig_linear: nn.Linear,
        dim: int = 8,
        alpha: float = 32,
        dropout: float = 0.0,
        dropout_position: Literal["pre", "post"] = "post",
        lora_A_init_method: InitMethod = "xavier",
        lora_dtype: Optional[torch.dtype] = None,
    ) -> None:
        nn.Module.__init__(self)
        method = LoRA(None, None, dim, alpha, dropout, dropout_position, lora_A_init_method, lora_dtype=lora_dtype)
        adapted: Any = method.with_adapter(orig_linear, "linear")
        self.__dict__.update(copy.deepcopy(orig_linear).__dict__)
        self.requires_grad_(False)
        self.__dict__["_adapter"] = adapted.adapter  # not registered: its factors are, under NeMo's names
        self.lora_a, self.lora_b = adapted.adapter.linear_in, adapted.adapter.linear_out

    def forward(self, input: Tensor) -> Tensor:
        adapter: Any = self.__dict__["_adapter"]
        adapter.training = self.training
        return super().forward(input) + adapter(input)


def patch_linear_module(
    orig_linear: nn.Linear,
    dim: int = 8,
    alpha: float = 32,
    dropout: float = 0.0,
    dropout_position: Literal["pre", "post"] = "post",
    lora_A_init_method: InitMethod = "xavier",
    lora_dtype: Optional[torch.dtype] = None,
) -> LinearAdapter:
    """Make a ``torch.nn.Linear`` a `LinearAdapter` in place, so that whatever holds the layer calls the adapter too.

    Args:
        orig_linear, dim, alpha, dropout, dropout_position, lora_A_init_method, lora_dtype: As in `LinearAdapter`.

    Returns:
        ``orig_linear``.

    Raises:
        ConfigError: as in `LinearAdapter`.
    """
    parameters = dict(orig_linear.named_parameters())
    adapter = LinearAdapter(orig_linear, dim, alpha, dropout, dropout_position, lora_A_init_method, lora_dtype)
    for name, parameter in parameters.items():  # an optimizer may already know the layer's own
        setattr(adapter, name, parameter.requires_grad_(False))
    layer: Any = orig_linear
    layer.__class__, layer.__dict__ = LinearAdapter, adapter.__dict__
    return layer


def owner_of(parameter: Any, full: str) -> str:
    """The full name of the module that `modules_to_save` names for a parameter, from the parameter's own full name."""
    if getattr(parameter, "shared_embedding", False):  # the last pipeline stage's copy is its output layer
        return "embedding.word_embeddings"
    return module_of_key(full)


def is_meant(module: nn.Module, pattern: str) -> bool:
    """Whether a matching module gets an adapter. A pattern with wildcards applies only to linear layers."""
    return not any(sign in pattern for sign in "*?") or placement_of(module) is not None
