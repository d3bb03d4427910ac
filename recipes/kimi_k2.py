# SPDX-License-Identifier: Apache-2.0
"""Kimi K2 1T-A32B at 4,096 tokens, for 128 nodes of 8 x 80 GB."""

from nemo2.recipes._families import LATENT, PADDED, RECOMPUTED, FinetuneRecipe, Layout, On, deepseek


def _ends(first: int, last: int) -> dict[str, int]:
    """Layers of the first and the last stage."""
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


RECIPE = deepseek(
    name="kimi_k2",
    config_class="KimiK2Config1T_A32B",
    parameters=1026e9,
    vocabulary=163_840,
    config=RECOMPUTED,
    layout=Layout(tp=2, pp=16, ep=64, etp=1, sp=True),
    strategy=_ends(3, 2),
    nodes=128,
    global_batch_size=4096,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="moonshotai/Kimi-K2-Base",
    lora=On(tp=8, pp=5, sp=True, nodes=5, strategy=_ends(13, 12)),
    full=On(pp=16, ep=32, nodes=64, strategy=_ends(3, 2), packed_batch_size=32),
    peft=LATENT,
    **PADDED,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
