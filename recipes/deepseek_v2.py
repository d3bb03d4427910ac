# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2 at 4,096 tokens, for 16 nodes of 8 x 80 GB."""

from nemo2.recipes._families import LATENT, PADDED, FinetuneRecipe, Layout, On, deepseek

RECIPE = deepseek(
    name="deepseek_v2",
    config_class="DeepSeekV2Config",
    parameters=235.7e9,
    layout=Layout(pp=4, ep=32),
    nodes=16,
    vocabulary=102_400,
    config={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="deepseek-ai/DeepSeek-V2",
    lora=On(ep=16, nodes=2, packed_batch_size=16),
    full=On(pp=4, ep=32, nodes=16, packed_batch_size=32),
    peft=LATENT,
    **PADDED,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
