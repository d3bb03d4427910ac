# SPDX-License-Identifier: Apache-2.0
"""The machine that a question about a recipe refers to: this machine, or a number of GPUs of a kind."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Optional

from nemo2.base.backend.extras import ANY_VERSION, APEX, has, have_te, version_of, why_missing
from nemo2.base.errors import ConfigError

if TYPE_CHECKING:
    from nemo2.base.gpus import GPU

HERE = "this machine"
_GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a run. The recipe and the machine together determine all settings of the run.

    Attributes:
        accelerator: "cuda" or "cpu", the name of the backend.
        gpu: the kind of GPU. None: CPUs, or unknown.
        model: "h100", "b200" ...: the name under which settings were tuned for the GPU. None as for ``gpu``.
        capability: the compute capability of the GPUs. None as for ``gpu``.
        per_node: the processes per node, one per GPU: the meaning of ``trainer.devices="auto"``.
        count: the total number of GPUs. None: as many as the recipe asks for.
        transformer_engine: the version of Transformer Engine. None: it isn't installed, or there is no GPU for its
            kernels.
        te_missing: the reason why Transformer Engine is missing. None: it isn't missing.
        apex: whether Apex's kernel is available, which adds a weight's gradient to its buffer.
        local: whether this is the local machine.
        overrides: fields of the model's configuration that this machine restricts, with the required value and the
            reason.
        python, megatron_core: versions, as installed here.
    """

    accelerator: Literal["cuda", "cpu"] = "cuda"
    gpu: "Optional[GPU]" = None
    model: Optional[str] = None
    capability: Optional[tuple[int, int]] = None
    per_node: int = _GPUS_PER_NODE
    count: Optional[int] = None
    transformer_engine: Optional[str] = ANY_VERSION
    te_missing: Optional[str] = None
    apex: bool = False
    local: bool = False
    overrides: Mapping[str, tuple[Any, str]] = field(default_factory=dict, compare=False)
    python: str = field(default_factory=platform.python_version)
    megatron_core: str = field(default_factory=lambda: version_of("megatron-core") or ANY_VERSION)

    @classmethod
    def here(cls) -> "Machine":
        """This machine. Its GPUs are those that torch sees. Without GPUs, processes run on its CPUs, one unless the
        recipe asks for more."""
        import torch

        from nemo2.base.backend import get_backend

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        model, sheet = _gpu_here() if gpus else (None, None)
        return cls(
            accelerator="cuda" if gpus else "cpu",
            gpu=sheet,
            model=model,
            capability=torch.cuda.get_device_capability() if gpus else None,
            per_node=max(1, gpus),
            transformer_engine=(version_of("transformer-engine") or ANY_VERSION) if have_te() else None,
            te_missing=None if have_te() else why_missing("transformer_engine"),
            apex=has(APEX),
            local=True,
            overrides=get_backend().config_overrides(),
        )

    @classmethod
    def named(cls, name: str, *, option: str = "--gpus") -> "Machine":
        """A machine by name: "H100x64", "H100" or "this machine". Named GPUs have Transformer Engine, and a node has 8
        of them.

        ``option`` is the option that errors name. For unknown GPUs use ``Machine()``.

        Raises:
            ConfigError: an unknown GPU, or an invalid number.
        """
        if name == HERE:
            return cls.here()
        from nemo2.base.gpus import parse_gpus

        gpu, count = parse_gpus(name, option=option)
        # Settings are tuned under a GPU's name without its size: an A100 of 40 GB uses those of the A100.
        return cls(gpu=gpu, model=gpu.name.partition("-")[0].lower(), capability=gpu.capability, count=count)

    @property
    def output_layer_can_fuse(self) -> bool:
        """Whether Megatron-Core's own linear layers may add a weight's gradient to its buffer.

        Every model has such a layer, the output layer. Beside Transformer Engine's layers it needs Apex
        (`nemo2.models.fused_gradients`).
        """
        return self.apex or self.transformer_engine is None

    @property
    def lacks_its_gpus(self) -> bool:
        """Whether these are GPUs that were named for a run on this machine, which has others or none."""
        return self.local and self.gpu is not None and self.gpu.name.partition("-")[0].lower() != self.model

    def describe(self) -> str:
        """The machine's name for messages: "H100", or "this machine's CPUs"."""
        if self.accelerator == "cpu":
            return "this machine's CPUs"
        if self.gpu and self.lacks_its_gpus:
            return f"{self.gpu.name} GPUs that this machine lacks"
        kind = self.gpu.name if self.gpu else (self.model or "").upper()
        kind = f"this machine's {kind} GPUs".replace("  ", " ") if self.local else kind or "GPUs of any kind"
        return kind if self.transformer_engine else f"{kind} without Transformer Engine"

    def lacking(self, devices: int) -> str:
        """What to add to the machine's name where a node of it has fewer GPUs than ``devices``. "": it has them."""
        if not self.local or self.accelerator == "cpu" or self.lacks_its_gpus or devices <= self.per_node:
            return ""
        return f" (it has {self.per_node})"

    def counted(self, count: int) -> str:
        """``count`` of its devices for messages: "8 H100", or "2 of this machine's CPUs"."""
        name = self.describe()
        if count == 1:
            name = name.replace("GPUs of any kind", "GPU of any kind")
        name += self.lacking(count)
        return f"{count} of {name}" if name.startswith("this machine's") else f"{count} {name}"


def _gpu_here() -> "tuple[Optional[str], Optional[GPU]]":
    import torch

    from nemo2.base.gpus import model_of, parse_gpus

    model = model_of(torch.cuda.get_device_name())
    try:
        return model, None if model is None else parse_gpus(model)[0]
    except ConfigError:
        return model, None
