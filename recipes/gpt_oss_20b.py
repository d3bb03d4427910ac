# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B at 4,096 tokens, for two nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, gpt_oss

RECIPE = gpt_oss(
    name="gpt_oss_20b", config_class="GPTOSSConfig20B", parameters=20.9e9, layout=Layout(ep=8, etp=1), nodes=2
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="openai/gpt-oss-20b",
    lora=On(etp=1, micro_batch_size=2),
    full=On(pp=2, ep=4, etp=1, strategy={"ckpt_async_save": False}),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
