# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 120B at 4,096 tokens, for 8 nodes of 8 x 80 GB."""

from nemo2.recipes._families import ATTENTION, FinetuneRecipe, Layout, On, gpt_oss

RECIPE = gpt_oss(
    name="gpt_oss_120b",
    config_class="GPTOSSConfig120B",
    parameters=116.8e9,
    layout=Layout(tp=2, pp=4, ep=8, etp=1, sp=True),
    nodes=8,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="openai/gpt-oss-120b",
    lora=On(ep=8, etp=1),
    full=On(pp=4, ep=8, etp=1, nodes=8, packed_batch_size=16, strategy={"ckpt_async_save": False}),
    peft=ATTENTION,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
