# SPDX-License-Identifier: Apache-2.0
"""Llama 3.1 Nemotron Ultra 253B at 8,192 tokens, for 18 nodes of 8 x 80 GB."""

from nemo2.recipes._families import RANK_8, FinetuneRecipe, Layout, On, llama_nemotron
from nemo2.recipes._performance import packed_only

RECIPE = llama_nemotron(
    name="llama31_nemotron_ultra_253b",
    config_class="Llama31NemotronUltra253BConfig",
    parameters=253e9,
    layout=Layout(tp=8, pp=9, cp=2, sp=True),
    nodes=18,
)
FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights="nvidia/Llama-3_1-Nemotron-Ultra-253B-v1",
    lora=On(tp=8, pp=2, nodes=2),
    full=On(tp=8, pp=9, sp=True, nodes=18),  # 93.3 GiB on 9, 75.4 on 18 without sequence parallelism
    performance=packed_only,
    **RANK_8,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
