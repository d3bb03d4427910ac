# SPDX-License-Identifier: Apache-2.0
"""Facts that the recipes of a family share: model class, vocabulary, and the training settings of NeMo 2.0's recipes.

Each table is a recipe with missing facts. Calling it with these facts makes the recipe. Sources: layouts, batches and
optimizers from NeMo 2.0's recipes (docs/recipes-differences.md lists the differences); vocabularies from the released
tokenizers; architectures in ``nemo2.models``.
"""

from functools import partial
from typing import Any

from nemo2.recipes._assembler import Layout as Layout
from nemo2.recipes._assembler import PretrainRecipe
from nemo2.recipes._finetuning import FinetuneRecipe as FinetuneRecipe
from nemo2.recipes._finetuning import On as On
from nemo2.recipes._performance import overlap
from nemo2.recipes._signatures import HybridFinetune as HybridFinetune
from nemo2.recipes._signatures import HybridRecipe, KeywordRecipe

# ------------------------------------------------------------------------------------------------------- three schools

OVERLAPPED: dict[str, Any] = {
    "check_for_nan_in_grad": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
"""The reduction of gradients and the gather of parameters overlap with forward and backward."""
AVERAGED = {**OVERLAPPED, "average_in_collective": True}
"""The collective itself averages the gradients."""
SHARDED = {**AVERAGED, "data_parallel_sharding_strategy": "optim_grads_params"}
"""Parameters, gradients and optimizer state are sharded if ``fsdp="megatron"`` is set. Otherwise the last field has
no effect."""

LONG: dict[str, Any] = {
    "seq_length": 8192,
    "global_batch_size": 512,
    "micro_batch_size": 1,
    "max_steps": 1_168_251,
    "max_lr": 3e-4,
    "ddp": AVERAGED,
}
SHORT: dict[str, Any] = {
    "seq_length": 4096,
    "global_batch_size": 32,
    "micro_batch_size": 2,
    "max_steps": 300_000,
    "max_lr": 3e-4,
    "optimizer": {"warmup_steps": 500, "min_lr": 3e-5},
    "trainer_settings": {"limit_test_batches": 32, "val_check_interval": 500},
    "ddp": AVERAGED,
}
"""Small batches; the layout and schedule are arguments of ``pretrain_recipe``."""
BRIEF: dict[str, Any] = {
    "seq_length": 8192,
    "global_batch_size": 768,
    "micro_batch_size": 1,
    "nodes": 8,
    "max_steps": 10,
    "max_lr": 3e-4,
    "ddp": {**OVERLAPPED, "overlap_param_gather": False},
    "strategy": {"ckpt_async_save": False, "ckpt_load_strictness": "log_all"},
    "checkpoint": {"save_top_k": 5, "every_n_train_steps": 10, "train_time_interval": None},
    "trainer_settings": {"val_check_interval": 10, "num_sanity_val_steps": 0},
}
"""Ten steps, to be raised by whoever trains in earnest."""

# ------------------------------------------------------------------------------------------------------------ families

_llama = partial(PretrainRecipe, model_class="nemo2.models.llama:LlamaModel", **LONG)
llama2 = partial(_llama, family="Llama 2", vocabulary=32_000)
llama3 = partial(_llama, family="Llama 3", vocabulary=128_256)
llama31 = partial(_llama, family="Llama 3.1", vocabulary=128_256)
llama32 = partial(_llama, family="Llama 3.2", vocabulary=128_256)
llama4 = partial(_llama, family="Llama 4", vocabulary=202_048, ddp=SHARDED)
llama_nemotron = partial(
    _llama,
    family="Llama-Nemotron",
    model_class="nemo2.models.llama_nemotron:LlamaNemotronModel",
    vocabulary=128_256,
)
gpt3 = partial(PretrainRecipe, family="GPT-3", model_class="nemo2.models.gpt:GPTModel", vocabulary=51_200, **LONG)
gemma = partial(
    PretrainRecipe,
    family="Gemma",
    model_class="nemo2.models.gemma:GemmaModel",
    vocabulary=256_000,
    performance=overlap,
    **{**LONG, "ddp": OVERLAPPED},
)
baichuan2 = partial(
    gemma, family="Baichuan 2", model_class="nemo2.models.baichuan:Baichuan2Model", vocabulary=125_696
)  # fmt: skip
chatglm = partial(gemma, family="ChatGLM", model_class="nemo2.models.chatglm:ChatGLMModel", vocabulary=65_024)
mistral = partial(
    PretrainRecipe,
    family="Mistral",
    model_class="nemo2.models.mistral:MistralModel",
    **{**LONG, "ddp": OVERLAPPED},
)
mixtral = partial(
    PretrainRecipe,
    family="Mixtral",
    model_class="nemo2.models.mixtral:MixtralModel",
    vocabulary=32_000,
    **{**LONG, "seq_length": 4096},
)
RECOMPUTED: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Every layer is computed again in the backward."""
deepseek = partial(
    PretrainRecipe,
    family="DeepSeek",
    model_class="nemo2.models.deepseek:DeepSeekModel",
    **{**LONG, "seq_length": 4096, "trainer_settings": {"num_sanity_val_steps": 0}},
)
gpt_oss = partial(
    PretrainRecipe,
    family="GPT-OSS",
    model_class="nemo2.models.gpt_oss:GPTOSSModel",
    vocabulary=201_088,
    **{**LONG, "seq_length": 4096},
)
phi3 = partial(
    KeywordRecipe,
    family="Phi-3",
    model_class="nemo2.models.phi3:Phi3Model",
    vocabulary=32_064,
    # As in the other families: from the tokenizer, that of the mock data or a named one. Phi-3's own is 32,064.
    config={"vocab_size": None},
    **{**LONG, "seq_length": 4096},
)
gemma3 = partial(KeywordRecipe, family="Gemma 3", model_class="nemo2.models.gemma3:Gemma3Model", **LONG)
gemma2 = partial(
    KeywordRecipe,
    family="Gemma 2",
    model_class="nemo2.models.gemma2:Gemma2Model",
    vocabulary=256_000,
    # Soft-capped scores are stored and are half of all activations. With their recomputation in the backward, 80 GB are
    # enough.
    config={"recompute_granularity": "selective"},
    **{**SHORT, "max_steps": 1_168_251},
)
_nemotron = partial(
    KeywordRecipe,
    model_class="nemo2.models.nemotron:NemotronModel",
    vocabulary=256_000,
    **{**SHORT, "trainer_settings": {"limit_test_batches": 32}},
)
nemotron3 = partial(_nemotron, family="Nemotron 3")
nemotron4 = partial(_nemotron, family="Nemotron 4")
_qwen = partial(KeywordRecipe, model_class="nemo2.models.qwen2:Qwen2Model", vocabulary=151_936, **SHORT)
qwen2 = partial(_qwen, family="Qwen 2")
qwen25 = partial(_qwen, family="Qwen 2.5")
qwen3 = partial(_qwen, family="Qwen 3", model_class="nemo2.models.qwen3:Qwen3Model", ddp=SHARDED)
_today = partial(PretrainRecipe, **{**LONG, "seq_length": 4096, "ddp": SHARDED})
smollm3 = partial(_today, family="SmolLM 3", model_class="nemo2.models.smollm3:SmolLM3Model", vocabulary=128_256)
seed_oss = partial(_today, family="Seed-OSS", model_class="nemo2.models.seed_oss:SeedOSSModel", vocabulary=155_136)
granite3 = partial(
    _today,
    family="Granite 3",
    model_class="nemo2.models.granite:GraniteModel",
    vocabulary=49_152,
    config={"vocab_size": None},
)
cohere = partial(_today, family="Cohere", model_class="nemo2.models.cohere:CohereModel", vocabulary=256_000)
cohere2 = partial(cohere, family="Cohere 2", model_class="nemo2.models.cohere2:Cohere2Model")
granite3_moe = partial(granite3, model_class="nemo2.models.granite_moe:GraniteMoEModel")
phi4 = partial(_today, family="Phi-4", model_class="nemo2.models.phi3:Phi3Model", config={"vocab_size": None})
qwen2_moe = partial(_today, family="Qwen 2 MoE", model_class="nemo2.models.qwen2_moe:Qwen2MoEModel", vocabulary=151_936)
qwen3_next = partial(
    _today, family="Qwen3-Next", model_class="nemo2.models.qwen3_next:Qwen3NextModel", vocabulary=151_936
)
qwen35 = partial(_today, family="Qwen 3.5", model_class="nemo2.models.qwen3_next:Qwen3NextModel", vocabulary=248_320)
olmo2 = partial(_today, family="OLMo 2", model_class="nemo2.models.olmo2:OLMo2Model", vocabulary=100_352)
olmo3 = partial(_today, family="OLMo 3", model_class="nemo2.models.olmo3:OLMo3Model", vocabulary=100_278)
ministral3 = partial(
    _today, family="Ministral 3", model_class="nemo2.models.ministral3:Ministral3Model", vocabulary=131_072
)
ernie45 = partial(_today, family="ERNIE 4.5", model_class="nemo2.models.ernie45:ERNIE45Model", vocabulary=103_424)
ernie45_moe = partial(ernie45, model_class="nemo2.models.ernie45_moe:ERNIE45MoEModel")
hunyuan = partial(_today, family="Hunyuan", model_class="nemo2.models.hunyuan:HunyuanModel", vocabulary=120_818)
hunyuan_moe = partial(hunyuan, model_class="nemo2.models.hunyuan_moe:HunyuanMoEModel", vocabulary=128_167)
olmoe = partial(_today, family="OLMoE", model_class="nemo2.models.olmoe:OLMoEModel", vocabulary=50_304)
minimax_m2 = partial(
    _today, family="MiniMax M2", model_class="nemo2.models.minimax_m2:MiniMaxM2Model", vocabulary=200_064
)
glm45 = partial(_today, family="GLM-4.5", model_class="nemo2.models.glm4_moe:GLM4MoEModel", vocabulary=151_552)
_starcoder = partial(
    KeywordRecipe,
    vocabulary=49_152,
    **{**SHORT, "trainer_settings": {"limit_test_batches": 32, "val_check_interval": 1000}},
)
starcoder = partial(_starcoder, family="StarCoder", model_class="nemo2.models.starcoder:StarcoderModel")
starcoder2 = partial(_starcoder, family="StarCoder 2", model_class="nemo2.models.starcoder2:Starcoder2Model")
_hybrid = partial(HybridRecipe, model_class="nemo2.models.ssm:MambaModel")
mamba2 = partial(
    _hybrid,
    family="Mamba 2",
    vocabulary=50_288,
    tokenizer_name="EleutherAI/gpt-neox-20b",
    **{
        **LONG,
        "seq_length": 4096,
        "global_batch_size": 8,
        "max_steps": 100,
        "strategy": {"ckpt_async_save": False},
        "trainer_settings": {"val_check_interval": 100},
    },
)
nvidia_mamba2 = partial(mamba2, vocabulary=256_000, tokenizer_name=None, layout=Layout(tp=8))
nemotronh = partial(_hybrid, family="Nemotron-H", vocabulary=131_072, timed=True, **BRIEF)
nemotron_nano = partial(nemotronh, family="Nemotron Nano v2")

# --------------------------------------------------------------------------------------------------------- fine-tuning

ATTENTION: dict[str, Any] = {"target_modules": ["linear_qkv", "linear_proj"]}
"""Adapters for the layers of attention but not for experts."""
LINEAR: dict[str, Any] = {"target_modules": [*ATTENTION["target_modules"], "in_proj", "out_proj"]}
"""Adapters for the layers of full and of linear attention but not for experts."""
LATENT: dict[str, Any] = {
    "target_modules": [
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "linear_proj",
    ]
}
"""Adapters for the layers of latent attention but not for experts."""
PADDED: dict[str, Any] = {
    "frozen_model": {"cross_entropy_loss_fusion": False},
    "frozen_optimizer": {"use_distributed_optimizer": False},
    "packed_dataset": {"pad_to_max_length": True},
}
"""The loss and the optimizer of LoRA and DoRA, and packed batches, of NeMo 2.0's newer recipes."""
RANK_8: dict[str, Any] = {**PADDED, "peft": {"dim": 8, "alpha": 16}, "packed_length": 4096}
RANK_16: dict[str, Any] = {**RANK_8, "peft": {"dim": 16, "alpha": 32}}
"""The settings of `PADDED`, with adapters of a lower rank than `nemo2.models.peft.LoRA`'s default, and longer packed rows."""
