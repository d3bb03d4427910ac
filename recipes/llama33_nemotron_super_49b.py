# SPDX-License-Identifier: Apache-2.0
"""Llama 3.3 Nemotron Super 49B at 8,192 tokens, for 4 nodes of 8 x 80 GB."""

from nemo2.recipes._families import RANK_8, FinetuneRecipe, Layout, On, llama_nemotron
from nemo2.recipes._performance import packed_only

RECIPE = llama_nemotron(
    name="llama33_nemotron_super_49b",
    config_class="Llama33NemotronSuper49BConfig",
    parameters=49.9e9,
    layout=Layout(tp=8, pp=2, sp=True),
    nodes=4,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="nvidia/Llama-3_3-Nemotron-Super-49B-v1",
    lora=On(tp=4),
    full=On(tp=8, pp=2, nodes=4),  # 85.9 GiB on 2
    performance=packed_only,
    **RANK_8,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
