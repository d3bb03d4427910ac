# SPDX-License-Identifier: Apache-2.0
"""GLM-4.6 355B-A32B at 4,096 tokens, for 32 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, RECOMPUTED, FinetuneRecipe, Layout, On, glm45

RECIPE = glm45(
    name="glm46",
    config_class="GLM46Config355B_A32B",
    parameters=352.8e9,
    layout=Layout(tp=2, pp=4, ep=32, etp=1, sp=True),
    nodes=32,
    config=RECOMPUTED,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="zai-org/GLM-4.6",
    lora=On(tp=2, pp=4, ep=16, etp=1, sp=True, nodes=8),
    full=On(tp=2, pp=4, ep=32, etp=1, sp=True, nodes=32, packed_batch_size=32),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
