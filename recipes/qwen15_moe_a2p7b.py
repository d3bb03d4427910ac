# SPDX-License-Identifier: Apache-2.0
"""Qwen 1.5 MoE A2.7B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, qwen2_moe

RECIPE = qwen2_moe(name="qwen15_moe_a2p7b", config_class="Qwen15MoEConfigA2P7B", parameters=14.3e9, layout=Layout(ep=4))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="Qwen/Qwen1.5-MoE-A2.7B", lora=On(ep=4), full=On(ep=4), peft=ATTENTION)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
