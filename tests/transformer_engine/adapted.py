# SPDX-License-Identifier: Apache-2.0
"""Additions beside experts that Transformer Engine's layers (the stand-in's) would group, and beside plain ones: a part of
crossing.py."""

from pathlib import Path
from typing import Any

STEPS = 3
ADAPTERS = ("LoRA", "DoRA", "CanonicalDoRA")
"""The last has what the others have."""


def each(work: Path, adapters: list[str], switch: dict[str, bool]) -> dict[str, Any]:
    """Of each adapter what `tuned` says with plain layers and with Transformer Engine's."""
    import crossing

    found: dict[str, Any] = {}
    for adapter in adapters:
        for name, switch["on"] in (("plain", False), ("engine", True)):
            found.setdefault(adapter, {})[name] = crossing._told(tuned, work, adapter)
    return found


def tuned(work: Path, adapter: str) -> dict[str, Any]:
    """Losses of a few steps, the class of the experts, and the keys of what is stored of the additions. The first call leaves a
    checkpoint that the second begins with."""
    import crossing
    import torch

    import nemo2.models.peft
    from nemo2.checkpoint.auto_resume import RestoreConfig
    from support import small_runs
    from support.hf_models import ROWS

    row = next(row for row in ROWS if row.name == next(iter(crossing.TRAINED)))
    small_runs.release()
    small_runs.quiet()
    torch.manual_seed(5)
    model = crossing._model(row)
    assert model.config.moe_grouped_gemm
    model.model_transform = getattr(nemo2.models.peft, adapter)(dim=4, alpha=8, lora_B_init_method="normal")
    base = work / adapter
    again = {"restore_config": RestoreConfig(path=str(base))} if base.exists() else {}
    seen: dict[str, Any] = {}

    def look(trainer: Any) -> None:
        core = trainer.strategy.megatron_parallel.unwrapped[0]
        layers = [module for name, module in core.named_modules() if name.endswith("mlp.experts")]
        seen["experts"] = sorted({type(layer).__name__ for layer in layers})
        seen["inside"] = sorted(
            {
                type(one.to_wrap).__name__
                for name, one in core.named_modules()
                if name.endswith("local_experts.0.linear_fc1")
            }
        )
        state = trainer.strategy.megatron_parallel.sharded_state_dict(metadata={})
        seen["keys"] = sorted(leaf.key for leaf in state.values() if ".adapter." in getattr(leaf, "key", ""))

    class Begin(small_runs.pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if not base.exists():
                trainer.save_checkpoint(str(base), weights_only=True)

    found = small_runs.fit(model, max_steps=STEPS, callbacks=[Begin()], inspect=look, **again)
    return {"losses": found["losses"], **seen}
