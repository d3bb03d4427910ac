# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2 230B-A10B at 4,096 tokens, for 16 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, RECOMPUTED, FinetuneRecipe, Layout, On, minimax_m2

RECIPE = minimax_m2(
    name="minimax_m2",
    config_class="MiniMaxM2Config230B_A10B",
    parameters=228.7e9,
    layout=Layout(tp=2, pp=2, ep=32, etp=1, sp=True),
    nodes=16,
    config=RECOMPUTED,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="MiniMaxAI/MiniMax-M2",
    lora=On(tp=2, pp=2, ep=16, etp=1, sp=True, nodes=4),
    full=On(tp=2, pp=2, ep=32, etp=1, sp=True, nodes=16, packed_batch_size=32),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
