# SPDX-License-Identifier: Apache-2.0
"""GLM-4.6 355B-A32B at 4,096 tokens, for 32 nodes of 8 x 80 GB."""

from nemo2.recipes import glm45

RECIPE = glm45.RECIPE.but(name="glm46", config_class="GLM46Config355B_A32B")
FINETUNE = glm45.FINETUNE.but(of=RECIPE, weights="zai-org/GLM-4.6")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
