# SPDX-License-Identifier: Apache-2.0
"""OLMoE 7B-A1B at 4,096 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, olmoe

RECIPE = olmoe(name="olmoe_7b_a1b", config_class="OLMoEConfig7B_A1B", parameters=6.92e9, layout=Layout(ep=8))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="allenai/OLMoE-1B-7B-0924", lora=On(ep=8), full=On(ep=8), peft=ATTENTION)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
