# SPDX-License-Identifier: Apache-2.0
"""Adapters on Mamba's mixers, whose input projection is stored in parts: they start over a checkpoint as over a release, and
saved alone they go on as without the break, in the same layout, in another, and where parameters are sharded."""

from typing import Any, Optional

import pytest

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hybrid_override_pattern": "M-",
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 4,
}
STEPS, BREAK = 4, 2


def trained(
    directory: str,
    steps: int,
    *,
    save: str = "",
    resume: Optional[str] = None,
    base: str = "{}/base/saved-step=1",
    kind: str = "MegatronStrategy",
    **strategy: Any,
) -> list[float]:
    import torch

    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from nemo2.models.peft import LoRA
    from nemo2.models.ssm import MambaModel, NemotronHConfig8B
    from support import sharded_runs, small_runs

    torch.manual_seed(1)
    model = MambaModel(NemotronHConfig8B(**small_runs.MODEL | SIZES), optim=small_runs.build_llama().optim)
    keep = ModelCheckpoint(
        dirpath=f"{directory}/{save}", filename="saved-{step}", save_last=False, save_optim_on_train_end=True
    )
    if save != "base":
        model.model_transform = LoRA(
            target_modules=["in_proj", "out_proj"], dim=4, lora_A_init_method="uniform", lora_B_init_method="normal"
        )
        strategy["ckpt_save_part"] = "trained"
        if resume is None:
            strategy["restore_config"] = RestoreConfig(path=base.format(directory))
    callbacks, chosen = [keep] if save else [], sharded_runs.strategies()[kind](**strategy)
    try:
        return small_runs.fit(model, max_steps=steps, callbacks=callbacks, ckpt_path=resume, strategy=chosen)["losses"]
    finally:
        small_runs.release()


def alone(directory: str) -> dict[str, list[float]]:
    from nemo2.hugging_face.exporting import export_weights

    trained(directory, 1, save="base")
    export_weights(f"{directory}/base/saved-step=1", f"{directory}/release")
    whole = trained(directory, STEPS)
    trained(directory, BREAK, save="broken")
    return {
        "whole": whole,
        "from a release": trained(directory, BREAK, base="hf://{}/release"),
        "resumed": trained(directory, STEPS, resume=f"{directory}/broken/saved-step=2"),
    }


def two_ranks(directory: str) -> dict[str, list[float]]:
    saved, sharded = f"{directory}/broken/saved-step=2", "FSDP2Strategy"
    return {
        "resumed": trained(directory, STEPS, resume=saved, tensor_model_parallel_size=2),
        "in parts, from a checkpoint": trained(directory, BREAK, tensor_model_parallel_size=2),
        "sharded, resumed": trained(directory, STEPS, resume=saved, kind=sharded),
        "sharded, from a checkpoint": trained(directory, BREAK, kind=sharded),
        "sharded, from a release": trained(directory, BREAK, base="hf://{}/release", kind=sharded),
    }


def test_adapters_of_a_mixer_start_and_go_on_in_the_same_and_in_another_layout(
    run_on_ranks: Any, tmp_path: Any
) -> None:
    found = run_on_ranks(alone, 1, str(tmp_path))[0]
    whole = found["whole"]
    assert len(set(whole)) == STEPS and found["resumed"] == whole[BREAK:] and found["from a release"] == whole[:BREAK]
    for runs in run_on_ranks(two_ranks, 2, str(tmp_path)):
        for case, losses in runs.items():
            assert losses == pytest.approx(whole[BREAK:] if "resumed" in case else whole[:BREAK], rel=2e-5), case
