# SPDX-License-Identifier: Apache-2.0
"""Parameter-efficient fine-tuning (PEFT) as a transform of the model: everything is frozen, and a method adds what is trained.

A method is applied to each chunk of the model before it is wrapped for training (`nemo2.parallel.transform`), so that the
frozen parameters get no gradients, no buckets and no optimizer state. A method of your own is a subclass with `transform`:

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

from nemo2.parallel.transform import walk


class PEFT(ABC):
    """A method of parameter-efficient fine-tuning. Made to be subclassed."""

    reads_weights: bool = False
    """Whether what it adds reads the weights of layers beside it, which then have to be whole whenever that is called: not so
    under FSDPStrategy and Megatron-FSDP, which refuse such a method."""

    @abstractmethod
    def transform(self, module: nn.Module, name: Optional[str] = None, prefix: Optional[str] = None) -> nn.Module:
        """The module that stands in a module's place: the module itself, changed or not, or another.

        Args:
            module: All its parameters are frozen.
            name: Its own name; "" for the model as a whole.
            prefix: The full name of the module that has it; layers and experts are numbered over the whole model, from 0 on.
        """

    def __call__(self, model: nn.Module) -> nn.Module:
        """The transform of a run: freeze ``model``, one chunk of it, and transform each of its modules, children first."""
        self.freeze_model(model)

        def of(module: nn.Module, name: str) -> nn.Module:
            prefix, _, last = name.rpartition(".")
            return self.transform(module, name=last, prefix=prefix)

        return walk(model, of)

    def freeze_model(self, model: nn.Module) -> None:
        """Leave nothing to train but what `transform` adds or thaws. A subclass may freeze less."""
        for parameter in model.parameters():
            parameter.requires_grad_(False)

    def refuse_unknown_targets(self, linear_layers: Optional[Mapping[str, tuple[int, int]]]) -> None:  # noqa: B027
        """Called before anything is built. A method without targets has nothing to refuse.

        Args:
            linear_layers: Outputs and inputs over all ranks of the model's linear layers, by full name; None where they aren't
                known.

        Raises:
            ConfigError: the method is asked for a layer that the model doesn't have, or for more than it can be given.
        """

    def refuse_unknown_modules(self, modules: Optional[Collection[str]]) -> None:  # noqa: B027
        """Called before anything is built, with the full names of all modules that have weights; None where they aren't known.

        Raises:
            ConfigError: the method is asked to train a module that the model doesn't have.
        """
