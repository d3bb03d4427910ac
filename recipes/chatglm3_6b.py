# SPDX-License-Identifier: Apache-2.0
"""ChatGLM 3 6B at 8,192 tokens, for one node of 8 x 80 GB."""

from nemo2.recipes._families import FinetuneRecipe, Layout, On, chatglm

RECIPE = chatglm(name="chatglm3_6b", config_class="ChatGLM3Config6B", parameters=6.24e9, layout=Layout(cp=2))
FINETUNE = FinetuneRecipe(of=RECIPE, weights="THUDM/chatglm3-6b", full=On(tp=2))

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
pretrain_recipe_performance = RECIPE.pretrain_recipe_performance
