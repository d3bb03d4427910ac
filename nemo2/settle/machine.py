# SPDX-License-Identifier: Apache-2.0
"""The machine that a question about a recipe is asked for: this one, or one with so many GPUs of a kind."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, Optional

from nemo2.backend.extras import ANY_VERSION
from nemo2.errors import ConfigError
from nemo2.gpus import DEFAULT, GPU, GPUS_PER_NODE, model_of, parse_gpus

HERE = "this machine"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a run: with the recipe, all that its settings follow from.

    Attributes:
        accelerator: "cuda" or "cpu", as the backends are called.
        gpu: the kind of GPU; None on CPUs, and where it isn't known.
        model: "h100", "b200" ...: the name under which settings were tuned for it; None as for ``gpu``.
        capability: compute capability of its GPUs; None as for ``gpu``.
        per_node: processes that a node has room for, one per GPU: what ``trainer.devices="auto"`` means.
        count: GPUs in all; None: as many as the recipe asks for.
        transformer_engine: the version of Transformer Engine; None: there is none, or no GPU for its kernels.
        te_missing: why; None where there is one.
        apex: whether Apex's kernel is there, which adds a weight's gradient to its buffer.
        local: it is this one.
        overrides: fields of the model's configuration that can't keep any value here: the value that works, and why.
        python, megatron_core: versions, as installed here.
    """

    accelerator: Literal["cuda", "cpu"] = "cuda"
    gpu: Optional[GPU] = None
    model: Optional[str] = None
    capability: Optional[tuple[int, int]] = None
    per_node: int = GPUS_PER_NODE
    count: Optional[int] = None
    transformer_engine: Optional[str] = ANY_VERSION
    te_missing: Optional[str] = None
    apex: bool = False
    local: bool = False
    overrides: Mapping[str, tuple[Any, str]] = field(default_factory=dict, compare=False)
    python: str = field(default_factory=platform.python_version)
    megatron_core: str = field(default_factory=lambda: version("megatron-core"))

    @classmethod
    def here(cls) -> "Machine":
        """This machine. Its GPUs are those that torch sees; without any, processes run on its CPUs, one unless asked for more."""
        import torch

        from nemo2.backend import get_backend
        from nemo2.backend.extras import APEX, has, have_te, installed, why_missing

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        model = model_of(torch.cuda.get_device_name()) if gpus else None
        return cls(
            accelerator="cuda" if gpus else "cpu",
            gpu=_sheet(model),
            model=model,
            capability=torch.cuda.get_device_capability() if gpus else None,
            per_node=max(1, gpus),
            transformer_engine=installed("transformer-engine") if have_te() else None,
            te_missing=None if have_te() else why_missing("transformer_engine"),
            apex=has(APEX),
            local=True,
            overrides=get_backend().config_overrides(),
        )

    @classmethod
    def named(cls, name: str = DEFAULT, *, option: str = "--gpus") -> "Machine":
        """ "H100x64", "H100" or "this machine". GPUs by name have Transformer Engine, and 8 of them make a node.

        ``option`` is what an error says is wrong. For GPUs whose kind isn't known, there is ``Machine()``.

        Raises:
            ConfigError: an unknown GPU, or a number that is none.
        """
        if name == HERE:
            return cls.here()
        gpu, count = parse_gpus(name, option=option)
        return cls(gpu=gpu, model=_model(gpu), capability=gpu.capability, count=count)

    @property
    def output_layer_can_fuse(self) -> bool:
        """Whether Megatron-Core's own linear layers, of which the output layer is one in every model, may be asked to add a
        weight's gradient to its buffer: beside Transformer Engine they do so with Apex only
        (`nemo2.models.fused_gradients`)."""
        return self.apex or self.transformer_engine is None

    def describe(self) -> str:
        """In a line that says which machine an answer is for: "H100", or "this machine's CPUs"."""
        if self.accelerator == "cpu":
            return "this machine's CPUs"
        kind = self.gpu.name if self.gpu else (self.model or "").upper()
        kind = f"this machine's {kind} GPUs".replace("  ", " ") if self.local else kind or "GPUs of any kind"
        return kind if self.transformer_engine else f"{kind} without Transformer Engine"


def _model(gpu: GPU) -> str:
    """Settings are tuned by model: an A100 of 40 GB takes those of the A100."""
    return gpu.name.partition("-")[0].lower()


def _sheet(model: Optional[str]) -> Optional[GPU]:
    try:
        return None if model is None else parse_gpus(model)[0]
    except ConfigError:
        return None
