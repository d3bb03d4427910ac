# SPDX-License-Identifier: Apache-2.0
"""Hunyuan 0.5B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, hunyuan

RECIPE = hunyuan(name="hunyuan_500m", config_class="HunyuanConfig500M", parameters=0.539e9)
FINETUNE = FinetuneRecipe(of=RECIPE, weights="tencent/Hunyuan-0.5B-Pretrain")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
