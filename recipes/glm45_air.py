# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5-Air 106B-A12B at 4,096 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, glm45

RECIPE = glm45(
    name="glm45_air",
    config_class="GLM45AirConfig106B_A12B",
    parameters=106.9e9,
    layout=Layout(tp=2, pp=2, ep=16, etp=1, sp=True),
    nodes=8,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="zai-org/GLM-4.5-Air-Base",
    lora=On(pp=2, ep=8, nodes=2),
    full=On(tp=2, pp=2, ep=16, etp=1, sp=True, nodes=8, packed_batch_size=16),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
