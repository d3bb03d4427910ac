# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 235B-A22B at 4,096 tokens, for 16 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, qwen3

RECIPE = qwen3(
    name="qwen3_235b_a22b",
    config_class="Qwen3Config235B_A22B",
    parameters=235.1e9,
    layout=Layout(tp=4, pp=16, cp=2, ep=8, etp=1, sp=True),
    nodes=16,
    micro_batch_size=1,
    strategy={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="Qwen/Qwen3-235B-A22B",
    lora=On(tp=4, pp=4, ep=4, etp=1, sp=True, nodes=8, strategy=RECIPE.strategy),
    full=On(tp=4, pp=16, ep=4, etp=1, sp=True, nodes=16, strategy=RECIPE.strategy),  # 78.4 GiB on 8
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
