# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3 at 4,096 tokens, for 128 nodes of 8 x 80 GB.

Five stages' worth of its 61 layers are uneven: three dense layers in the first, two and the loss in the last.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Optional

from nemo2.config.capture import configurable
from nemo2.recipes._assembler import AS_STATED
from nemo2.recipes._families import AVERAGED, LATENT, PADDED, FinetuneRecipe, Layout, On, deepseek
from nemo2.recipes._performance import finetuned, overlap_and_collect


def pretrain_performance_optimizations(recipe: Any) -> Any:
    """Gradients reduced in 16 bits, garbage collected more rarely. Edits ``recipe``."""
    from nemo2.callbacks import GarbageCollectionCallback

    for callback in recipe.trainer.callbacks:
        if isinstance(callback, GarbageCollectionCallback):
            callback.gc_interval_train = callback.gc_interval_val = 60
    return overlap_and_collect(recipe)


def _ends(first: int, last: int) -> dict[str, int]:
    """Layers of the first and the last stage."""
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


RECIPE = deepseek(
    name="deepseek_v3",
    config_class="DeepSeekV3Config",
    parameters=671e9,
    vocabulary=129_280,
    config={
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 0.1,
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj", "layernorm"],
    },
    layout=Layout(tp=2, pp=16, ep=64, etp=1, sp=True),
    strategy=_ends(3, 2),
    nodes=128,
    global_batch_size=4096,
    ddp={**AVERAGED, "grad_reduce_in_fp32": False},
    optimizer_config={"use_precision_aware_optimizer": True},
    callbacks={
        "nemo2.callbacks:GarbageCollectionCallback": {"gc_interval_train": 5, "gc_interval_val": 5},
        "nemo2.callbacks:MegatronCommOverlapCallback": {"tp_comm_overlap": False},
    },
    checkpoint={"save_top_k": 2, "train_time_interval": timedelta(minutes=60)},
    performance=pretrain_performance_optimizations,
)
_NEXT_TOKEN_ONLY = RECIPE.but(config={k: v for k, v in RECIPE.config.items() if not k.startswith("mtp_")})
FINETUNE = FinetuneRecipe(
    of=_NEXT_TOKEN_ONLY,
    weights="deepseek-ai/DeepSeek-V3-Base",
    lora=On(tp=8, pp=5, sp=True, nodes=5, strategy=_ends(13, 12)),
    full=On(pp=8, ep=64, nodes=64, strategy=_ends(6, 7), packed_batch_size=64),
    peft=LATENT,
    performance=partial(finetuned, gc_interval=60, targets=LATENT["target_modules"]),
    packed_when_fast=False,
    **PADDED,
)

trainer = RECIPE.trainer
finetune_recipe = FINETUNE.finetune_recipe


@configurable
def model(use_mtp: bool = False) -> Any:
    """The model as a config; ``use_mtp`` also predicts the token after the next."""
    return (RECIPE if use_mtp else _NEXT_TOKEN_ONLY).model()


@configurable
def pretrain_recipe(
    dir: Optional[str] = None,
    name: str = "default",
    num_nodes: int = AS_STATED,
    num_gpus_per_node: int = AS_STATED,
    fn: Optional[Callable[..., Any]] = None,
    use_mtp: bool = True,
    performance_mode: bool = False,
) -> Any:
    """The recipe of `PretrainRecipe.pretrain_recipe`; without ``use_mtp`` only the next token is predicted."""
    facts = RECIPE if use_mtp else _NEXT_TOKEN_ONLY
    return facts.pretrain_recipe(dir, name, num_nodes, num_gpus_per_node, performance_mode, fn)
