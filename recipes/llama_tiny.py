# SPDX-License-Identifier: Apache-2.0
"""A Llama for laptops: trains on the Python standard library in a few minutes, tensor-parallel over two CPU processes.

Ours; the path is that of the large recipes, only the sizes differ.
"""

from nemo2.recipes._assembler import Layout, PretrainRecipe
from nemo2.recipes._finetuning import FinetuneRecipe, On

# Small, so that the frequent tokens are seen often within half a million of them.
VOCAB_SIZE = 2048

RECIPE = PretrainRecipe(
    name="llama_tiny",
    family="Llama",
    parameters=3.67e6,
    model_class="nemo2.models.llama:LlamaModel",
    config_class="nemo2.models.llama:LlamaConfig",
    config={
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 768,
        "share_embeddings_and_output_weights": True,
    },
    seq_length=128,
    global_batch_size=16,
    micro_batch_size=8,
    data_class="nemo2.data.demo:StdlibDataModule",
    data={"vocab_size": VOCAB_SIZE},
    gpus_per_node=2,
    layout=Layout(tp=2, sp=True),
    # MegatronStrategy's own default, stated so that `recipe.strategy.ddp_config` is there to be edited.
    ddp={"check_for_nan_in_grad": True},
    max_steps=300,
    max_lr=4e-3,
    optimizer={"warmup_steps": 25},
    trainer_settings={
        "val_check_interval": 50,
        "limit_val_batches": 4,
        "limit_test_batches": 4,
        "log_every_n_steps": 5,
    },
    checkpoint={"every_n_train_steps": 100, "train_time_interval": None, "save_top_k": 2},
)

FINETUNE = FinetuneRecipe(
    of=RECIPE,
    weights=None,
    lora=On(gpus_per_node=2, micro_batch_size=8),
    data_class="nemo2.data.finetuning.docstrings:StdlibDocstringDataModule",
    peft={"dim": 16},
    global_batch_size=16,
    seq_length=128,
    packed_length=128,
)

model, trainer, pretrain_recipe, finetune_recipe = FINETUNE.factories
