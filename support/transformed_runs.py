# SPDX-License-Identifier: Apache-2.0
"""Small runs of transformed models in every layout, from the weights of one process."""

import re
from typing import Any

import lightning.pytorch as pl
import torch

from support import small_runs, transforms

STEPS = 3
LAST_STEP = STEPS + 2
"""Of a resumed run: the loss of its second step is the first that the optimizer's loaded state decides."""
GLOBAL_BATCH_SIZE = 4
"""Two micro-batches in a pipeline of two stages: the fewest that fill it. A third of a run's time goes to messages of each."""
DEEP = {"num_layers": 4, "num_query_groups": 4}
EXPERTS = DEEP | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
# Only the last layers have an adapter: tensors of the other layers would be missing from a stack of layers.
DENSE = ("layers.2.self_attention.linear_qkv", "layers.3.self_attention.linear_qkv")
EVERY_LAYER = (".linear_qkv",)
RECOMPUTED: dict[str, dict[str, Any]] = {
    "kept": {},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}
OF_EXPERTS = (*DENSE, ".linear_fc1")
RESUMED = ("tp2 sp", "pp2", "fsdp1", "fsdp2", "mfsdp")
ADDED = re.compile(r"linear_\w+\.[ab]\b")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2 vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "do": {},
    "fsdp2": {},
    "fsdp1": {},
    "mfsdp": {"fsdp": "megatron"},
}


def train(
    directory: str,
    name: str = "",
    *,
    wrapped: tuple[str, ...] = (),
    save: bool = False,
    to: str | None = None,
    resume: str | None = None,
    transform: Any = None,
    base: bool = True,
    callback: bool = False,
    steps: int | None = None,
    strategy: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """``STEPS`` steps of a model whose weights come from ``base`` in the directory; losses, and how parameters changed."""
    import nemo2 as nl
    import nemo2.callbacks
    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    small_runs.release()
    model = small_runs.build_llama(
        distributed=name in ("do", "mfsdp"), schedule=small_runs.cosine(8), **(DEEP | config)
    )
    transform = transform if transform is not None else transforms.FreezeAndAdd(*wrapped)
    model.model_transform = None if callback else transform
    options = dict(strategy if strategy is not None else LAYOUTS.get(name, {}))
    if base and not resume:
        options["restore_config"] = RestoreConfig(path=f"{directory}/base-step=1")
    if name in ("fsdp1", "fsdp2"):
        options = {"strategy": {"fsdp1": nl.FSDPStrategy, "fsdp2": nl.FSDP2Strategy}[name](**options)}
    before: dict[str, torch.Tensor] = {}
    found: dict[str, Any] = {"seen": getattr(transform, "seen", [])}

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            before.update(_values(trainer))
            found["counts"] = tuple(trainer.strategy.megatron_parallel.parameter_counts)

    callbacks: list[Any] = [Watch(), *([nl.callbacks.ModelTransform(transform)] if callback else [])]
    if save:
        keep = ModelCheckpoint(
            dirpath=f"{to or directory}/{name or 'one'}",
            save_optim_on_train_end=True,
            filename="{step}",
            save_last=False,
        )
        callbacks.append(keep)
    found |= small_runs.fit(
        model,
        small_runs.TokenData(global_batch_size=GLOBAL_BATCH_SIZE),
        max_steps=steps or (LAST_STEP if resume else STEPS),
        callbacks=callbacks,
        ckpt_path=resume,
        inspect=_values,
        **options,
    )
    after = found.pop("inspected")
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    found["changed"], found["same"] = sorted(changed), sorted(after.keys() - changed)
    return found


def _values(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's values of every parameter; of those that no longer have their names, torch's shards."""
    strategy = trainer.strategy
    if hasattr(strategy.form, "shards"):
        return {
            f"{shard.key}{shard.offset}": shard.tensor.detach().clone()
            for shard in strategy.form.shards(optimizer=False)
        }
    return small_runs.parameters(trainer)


def base(directory: str, **config: Any) -> None:
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    small_runs.release()
    model = small_runs.build_llama(**(DEEP | config))
    keep = ModelCheckpoint(dirpath=directory, filename="base-{step}", save_last=False, save_optim_on_train_end=True)
    small_runs.fit(model, max_steps=1, callbacks=[keep])
