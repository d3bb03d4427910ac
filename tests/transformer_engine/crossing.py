# SPDX-License-Identifier: Apache-2.0
"""One process with Transformer Engine's layers (the stand-in's) and with plain ones: under which names both store every family,
runs that go on from the other's checkpoint, and additions beside both.

A process of its own, because Megatron-Core takes the package's classes as bases when it is imported.
Leaves what it found as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

STOP, STEPS = 1, 2
TRAINED = {"Qwen 3 MoE, mixed": True, "DeepSeek V3": False, "DeepSeek V2": True}
"""By row whether Transformer Engine's layers come first: dense layers and experts, latent attention, a further prediction."""


def main(results: Path, work: Path, names: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import adapted
    import stand_in

    stand_in.install()
    switch = stand_in.as_on_a_gpu()
    import torch

    torch.set_num_threads(1)
    stand_in.use(stand_in.VERSIONS[-1])
    torch.distributed.init_process_group("gloo", init_method=f"file://{work / 'store'}", rank=0, world_size=1)
    from support import small_runs
    from support.hf_models import ROWS

    small_runs.quiet()
    small_runs.freeze_what_is_loaded()
    found: dict[str, Any] = {"names": {}, "runs": {}}
    rows = [row for row in ROWS if row.name in names]
    for row in rows:
        found["names"][row.name] = _told(_names, row, switch)
    for row in rows:
        if row.name in TRAINED:
            found["runs"][row.name] = _told(_cross, row, switch, TRAINED[row.name], work / str(ROWS.index(row)))
    found["adapted"] = adapted.each(work, [name for name in names if name in adapted.ADAPTERS], switch)
    found["threads"] = len(os.listdir("/proc/self/task"))
    results.write_text(json.dumps(found))
    os._exit(0)


def _told(function: Any, *arguments: Any) -> Any:
    import traceback

    try:
        return function(*arguments)
    except Exception:
        return traceback.format_exc()


def _config(row: Any) -> Any:
    from nemo2.config.provenance import adjust
    from nemo2.models.conversion.families import conversion_for
    from support import small_runs
    from support.hf_models import released_config

    hf = released_config(row)
    config = conversion_for(hf).config(json.loads(json.dumps(hf)))
    for field, value in {"moe_aux_loss_coeff": 0.0, "seq_length": small_runs.SEQ}.items():
        adjust(config, field, value, why="of this test")
    return config


def _names(row: Any, switch: dict[str, bool]) -> list[dict[str, Any]]:
    """Shapes by name, of both."""
    from support import hf_parity as parity

    found = []
    for switch["on"] in (True, False):
        parity.start()
        chunk = _config(row).configure_model(None, True, True)
        found.append({leaf.key: list(leaf.global_shape) for leaf in parity.shards(chunk)})
    return found


def _cross(row: Any, switch: dict[str, bool], te_first: bool, folder: Path) -> dict[str, Any]:
    """Train, save at `STOP`, train on; then load that into the other's layers, save it again, train on."""
    import lightning.pytorch as pl
    import torch

    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from support import small_runs
    from support.resharding import whole_tensors

    class SaveAgain(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(str(folder / "again"))

    def fit(callback: Any, **options: Any) -> list[float]:
        small_runs.release()
        return small_runs.fit(_model(row), max_steps=STEPS, callbacks=[callback], **options)["losses"]

    switch["on"] = te_first
    keep = ModelCheckpoint(
        dirpath=str(folder), filename="{step}", every_n_train_steps=STOP, save_top_k=-1, save_last=False, verbose=False
    )
    expected = fit(keep)[STOP:]
    switch["on"] = not te_first
    losses = fit(SaveAgain(), ckpt_path=folder / f"step={STOP}")
    small_runs.release()
    saved, again = (whole_tensors(folder / name) for name in (f"step={STOP}", "again"))
    different = [name for name in saved if name not in again or not torch.equal(saved[name], again[name])]
    states = sum("exp_avg." in name for name in saved)
    return {"expected": expected, "losses": losses, "different": different, "only": sorted(again.keys() - saved.keys()),
            "states": states, "parameters": sum(name.startswith("module.") for name in saved)}  # fmt: skip


def _model(row: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.mcore.optim.megatron import MegatronOptimizerModule
    from nemo2.models.conversion.families import conversion_of

    config = _config(row)
    optimizer = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=True)
    return conversion_of(config).model(config=config, optim=MegatronOptimizerModule(optimizer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
