# SPDX-License-Identifier: Apache-2.0
"""Parameter-efficient fine-tuning (PEFT) as a transform of the model: it freezes all parameters, and a method adds
trainable parameters.

A method is applied to each chunk of the model before the chunk is wrapped for training (`nemo2.mcore.parallel.transform`).
The frozen parameters therefore have no gradients, no buckets and no optimizer state. Your own method is a subclass with
`transform`:

    class OnlyNorms(PEFT):
        def transform(self, module, name=None, prefix=None):
            if "layernorm" in name:
                module.requires_grad_(True)
            return module
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Optional

from torch import nn

from nemo2.config.provenance import adjust
from nemo2.mcore.parallel.transform import walk


class PEFT(ABC):
    """A method of parameter-efficient fine-tuning, to be subclassed."""

    reads_weights: bool = False
    """Whether the adapters read the weights of their layers. Every call must then gather these weights. FSDPStrategy and
    Megatron-FSDP don't gather them and reject such a method."""

    @abstractmethod
    def transform(self, module: nn.Module, name: Optional[str] = None, prefix: Optional[str] = None) -> nn.Module:
        """Return the module that replaces ``module``: the module itself, changed or unchanged, or another module.

        Args:
            module: A module whose parameters are all frozen.
            name: The module's own name. "": the whole model.
            prefix: The full name of the parent module. Layers and experts are numbered over the whole model, from 0.
        """

    def __call__(self, model: nn.Module) -> nn.Module:
        """Freeze ``model``, one chunk of the model, and transform each of its modules, children first."""
        self.freeze_model(model)

        def of(module: nn.Module, name: str) -> nn.Module:
            prefix, _, last = name.rpartition(".")
            return self.transform(module, name=last, prefix=prefix)

        return walk(model, of)

    def freeze_model(self, model: nn.Module) -> None:
        """Freeze all parameters, and the biases by which routers select experts, which Megatron-Core updates without
        gradients. Only the parameters that `transform` adds or unfreezes are then trained. A subclass may freeze fewer
        parameters."""
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        config = getattr(model, "config", None)
        if getattr(config, "moe_router_enable_expert_bias", False):
            adjust(config, "moe_router_bias_update_rate", 0.0, why="the routers are frozen (peft)")

    def refuse_unknown_targets(self, linear_layers: Optional[Mapping[str, tuple[int, int]]]) -> None:  # noqa: B027
        """Check the method's targets before the model is built. A method without targets has nothing to check.

        Args:
            linear_layers: Outputs and inputs, over all ranks, of the model's linear layers, by full name. None:
                unknown.

        Raises:
            ConfigError: a target is not a layer of the model, or the settings don't fit its size.
        """

    def refuse_unknown_modules(self, modules: Optional[Collection[str]]) -> None:  # noqa: B027
        """Check the modules to train before the model is built.

        Args:
            modules: The full names of all modules with weights. None: unknown.

        Raises:
            ConfigError: a module to train is not in the model.
        """
