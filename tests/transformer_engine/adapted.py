# SPDX-License-Identifier: Apache-2.0
"""One process: additions beside experts that Transformer Engine's layers (the stand-in's) would group, and beside plain ones.

A process of its own, because Megatron-Core takes the package's classes as bases when it is imported.
Leaves what it found as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

STEPS = 3
ADAPTERS = ("LoRA", "DoRA", "CanonicalDoRA")
"""The last has what the others have."""


def main(results: Path, work: Path, adapters: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import stand_in

    stand_in.install()
    switch = stand_in.as_on_a_gpu()
    import crossing
    import torch

    torch.set_num_threads(1)
    stand_in.use(stand_in.VERSIONS[-1])
    torch.distributed.init_process_group("gloo", init_method=f"file://{work / 'store'}", rank=0, world_size=1)
    found: dict[str, Any] = {}
    for adapter in adapters:
        for name, on in (("plain", False), ("engine", True)):
            switch["on"] = on
            found.setdefault(adapter, {})[name] = crossing._told(tuned, work, adapter)
    results.write_text(json.dumps(found))
    os._exit(0)


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
