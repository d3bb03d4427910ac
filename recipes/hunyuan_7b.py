# SPDX-License-Identifier: Apache-2.0
"""Hunyuan 7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, hunyuan

RECIPE = hunyuan(
    name="hunyuan_7b", config_class="HunyuanConfig7B", parameters=7.50e9, vocabulary=128_167, layout=Layout(tp=2)
)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="tencent/Hunyuan-7B-Pretrain", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
