# SPDX-License-Identifier: Apache-2.0
"""GPT-3 175B at 2,048 tokens, for 64 nodes of 8 x 80 GB."""

from functools import partial

from nemo2.recipes._families import Layout, gpt3
from nemo2.recipes._performance import DEFERRED, overlap_and_collect

RECIPE = gpt3(
    name="gpt3_175b",
    config_class="nemo2.models.gpt3:GPTConfig175B",
    parameters=174.6e9,
    layout=Layout(tp=4, pp=8, vp=6, sp=True),
    nodes=64,
    seq_length=2048,
    global_batch_size=2048,
    max_lr=9e-5,
    performance=partial(
        overlap_and_collect,
        tp_comm_overlap=True,
        tp_comm_overlap_cfg="userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048",
        wgrad_deferral_limit=50,
        **DEFERRED,
    ),
)

model, trainer, pretrain_recipe = RECIPE.model, RECIPE.trainer, RECIPE.pretrain_recipe
pretrain_performance_optimizations = RECIPE.performance
