# SPDX-License-Identifier: Apache-2.0
"""Hunyuan 80B-A13B at 4,096 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, RECOMPUTED, FinetuneRecipe, Layout, On, hunyuan_moe

RECIPE = hunyuan_moe(
    name="hunyuan_80b_a13b",
    config_class="HunyuanConfig80B_A13B",
    parameters=80.4e9,
    layout=Layout(tp=2, pp=2, ep=16, etp=1, sp=True),
    nodes=8,
    config=RECOMPUTED,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="tencent/Hunyuan-A13B-Pretrain",
    lora=On(pp=2, ep=8, nodes=2),
    full=On(tp=2, pp=2, ep=16, etp=1, sp=True, nodes=8, packed_batch_size=16),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
