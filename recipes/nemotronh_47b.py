# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H 47B at 8,192 tokens, for 32 nodes of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import HybridFinetune, Layout, nemotronh
from nemo2.recipes._performance import overlap

RECIPE = nemotronh(
    name="nemotronh_47b",
    config_class="NemotronHConfig47B",
    parameters=46.8e9,
    layout=Layout(tp=8, sp=True),
    nodes=32,
    tokenizer_name="nvidia/Nemotron-H-47B-Base-8K",
    precision="nemo2.recipes.precision.mixed_precision:nemotron_h_bf16_with_fp8_current_scaling_mixed",
    trainer_settings={"val_check_interval": 10, "num_sanity_val_steps": 0, "log_every_n_steps": 1},
    performance=partial(overlap, tp_comm_overlap=True),
)
FINETUNE = HybridFinetune(of=RECIPE, weights="nvidia/Nemotron-H-47B-Base-8K")

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
tokenizer = RECIPE.tokenizer
performance_optimizations = RECIPE.performance
