# SPDX-License-Identifier: Apache-2.0
# Written by `make fmt` from the files of this folder.
from nemo2.mcore.parallel.layout import Layout as Layout
from nemo2.recipes._assembler import PretrainRecipe as PretrainRecipe
from nemo2.recipes._find import get as get
from nemo2.recipes._find import own as own
from nemo2.recipes._shipped import names as names
from nemo2.recipes._typed import aya_8b as aya_8b
from nemo2.recipes._typed import baichuan2_7b as baichuan2_7b
from nemo2.recipes._typed import chatglm3_6b as chatglm3_6b
from nemo2.recipes._typed import command_a_111b as command_a_111b
from nemo2.recipes._typed import command_r7b as command_r7b
from nemo2.recipes._typed import command_r_32b as command_r_32b
from nemo2.recipes._typed import command_r_35b as command_r_35b
from nemo2.recipes._typed import deepseek_v2 as deepseek_v2
from nemo2.recipes._typed import deepseek_v2_lite as deepseek_v2_lite
from nemo2.recipes._typed import deepseek_v3 as deepseek_v3
from nemo2.recipes._typed import ernie45_21b_a3b as ernie45_21b_a3b
from nemo2.recipes._typed import ernie45_300b_a47b as ernie45_300b_a47b
from nemo2.recipes._typed import ernie45_300m as ernie45_300m
from nemo2.recipes._typed import gemma2_2b as gemma2_2b
from nemo2.recipes._typed import gemma2_9b as gemma2_9b
from nemo2.recipes._typed import gemma2_27b as gemma2_27b
from nemo2.recipes._typed import gemma3_1b as gemma3_1b
from nemo2.recipes._typed import gemma3_4b as gemma3_4b
from nemo2.recipes._typed import gemma3_12b as gemma3_12b
from nemo2.recipes._typed import gemma3_27b as gemma3_27b
from nemo2.recipes._typed import gemma_2b as gemma_2b
from nemo2.recipes._typed import gemma_7b as gemma_7b
from nemo2.recipes._typed import glm45 as glm45
from nemo2.recipes._typed import glm45_air as glm45_air
from nemo2.recipes._typed import glm46 as glm46
from nemo2.recipes._typed import gpt3_175b as gpt3_175b
from nemo2.recipes._typed import gpt_oss_20b as gpt_oss_20b
from nemo2.recipes._typed import gpt_oss_120b as gpt_oss_120b
from nemo2.recipes._typed import granite3_1b_a400m as granite3_1b_a400m
from nemo2.recipes._typed import granite3_2b as granite3_2b
from nemo2.recipes._typed import granite3_3b_a800m as granite3_3b_a800m
from nemo2.recipes._typed import granite3_8b as granite3_8b
from nemo2.recipes._typed import hunyuan_1p8b as hunyuan_1p8b
from nemo2.recipes._typed import hunyuan_4b as hunyuan_4b
from nemo2.recipes._typed import hunyuan_7b as hunyuan_7b
from nemo2.recipes._typed import hunyuan_80b_a13b as hunyuan_80b_a13b
from nemo2.recipes._typed import hunyuan_500m as hunyuan_500m
from nemo2.recipes._typed import kimi_k2 as kimi_k2
from nemo2.recipes._typed import llama2_7b as llama2_7b
from nemo2.recipes._typed import llama3_8b as llama3_8b
from nemo2.recipes._typed import llama3_8b_16k as llama3_8b_16k
from nemo2.recipes._typed import llama3_8b_64k as llama3_8b_64k
from nemo2.recipes._typed import llama3_8b_128k as llama3_8b_128k
from nemo2.recipes._typed import llama3_70b as llama3_70b
from nemo2.recipes._typed import llama3_70b_16k as llama3_70b_16k
from nemo2.recipes._typed import llama3_70b_64k as llama3_70b_64k
from nemo2.recipes._typed import llama4_e16 as llama4_e16
from nemo2.recipes._typed import llama4_e128 as llama4_e128
from nemo2.recipes._typed import llama31_8b as llama31_8b
from nemo2.recipes._typed import llama31_8b_24gb as llama31_8b_24gb
from nemo2.recipes._typed import llama31_70b as llama31_70b
from nemo2.recipes._typed import llama31_405b as llama31_405b
from nemo2.recipes._typed import llama31_nemotron_70b as llama31_nemotron_70b
from nemo2.recipes._typed import llama31_nemotron_nano_8b as llama31_nemotron_nano_8b
from nemo2.recipes._typed import llama31_nemotron_ultra_253b as llama31_nemotron_ultra_253b
from nemo2.recipes._typed import llama32_1b as llama32_1b
from nemo2.recipes._typed import llama32_1b_80gb as llama32_1b_80gb
from nemo2.recipes._typed import llama32_3b as llama32_3b
from nemo2.recipes._typed import llama33_nemotron_super_49b as llama33_nemotron_super_49b
from nemo2.recipes._typed import llama_tiny as llama_tiny
from nemo2.recipes._typed import mamba2_1_3b as mamba2_1_3b
from nemo2.recipes._typed import mamba2_2_7b as mamba2_2_7b
from nemo2.recipes._typed import mamba2_8b as mamba2_8b
from nemo2.recipes._typed import mamba2_130m as mamba2_130m
from nemo2.recipes._typed import mamba2_370m as mamba2_370m
from nemo2.recipes._typed import mamba2_780m as mamba2_780m
from nemo2.recipes._typed import mamba2_hybrid_8b as mamba2_hybrid_8b
from nemo2.recipes._typed import minimax_m2 as minimax_m2
from nemo2.recipes._typed import ministral3_3b as ministral3_3b
from nemo2.recipes._typed import ministral3_8b as ministral3_8b
from nemo2.recipes._typed import ministral3_14b as ministral3_14b
from nemo2.recipes._typed import mistral_7b as mistral_7b
from nemo2.recipes._typed import mistral_nemo_12b as mistral_nemo_12b
from nemo2.recipes._typed import mixtral_8x7b as mixtral_8x7b
from nemo2.recipes._typed import mixtral_8x7b_16k as mixtral_8x7b_16k
from nemo2.recipes._typed import mixtral_8x7b_64k as mixtral_8x7b_64k
from nemo2.recipes._typed import mixtral_8x22b as mixtral_8x22b
from nemo2.recipes._typed import mixtral_8x22b_64k as mixtral_8x22b_64k
from nemo2.recipes._typed import moonlight_16b_a3b as moonlight_16b_a3b
from nemo2.recipes._typed import nemotron3_4b as nemotron3_4b
from nemo2.recipes._typed import nemotron3_8b as nemotron3_8b
from nemo2.recipes._typed import nemotron3_22b as nemotron3_22b
from nemo2.recipes._typed import nemotron3_22b_16k as nemotron3_22b_16k
from nemo2.recipes._typed import nemotron3_22b_64k as nemotron3_22b_64k
from nemo2.recipes._typed import nemotron3_nano_30b_a3b as nemotron3_nano_30b_a3b
from nemo2.recipes._typed import nemotron4_15b as nemotron4_15b
from nemo2.recipes._typed import nemotron4_15b_16k as nemotron4_15b_16k
from nemo2.recipes._typed import nemotron4_15b_64k as nemotron4_15b_64k
from nemo2.recipes._typed import nemotron4_340b as nemotron4_340b
from nemo2.recipes._typed import nemotron_nano_9b_v2 as nemotron_nano_9b_v2
from nemo2.recipes._typed import nemotron_nano_12b_v2 as nemotron_nano_12b_v2
from nemo2.recipes._typed import nemotronh_4b as nemotronh_4b
from nemo2.recipes._typed import nemotronh_8b as nemotronh_8b
from nemo2.recipes._typed import nemotronh_47b as nemotronh_47b
from nemo2.recipes._typed import nemotronh_56b as nemotronh_56b
from nemo2.recipes._typed import olmo2_7b as olmo2_7b
from nemo2.recipes._typed import olmo2_13b as olmo2_13b
from nemo2.recipes._typed import olmo2_32b as olmo2_32b
from nemo2.recipes._typed import olmo3_7b as olmo3_7b
from nemo2.recipes._typed import olmo3_32b as olmo3_32b
from nemo2.recipes._typed import olmoe_7b_a1b as olmoe_7b_a1b
from nemo2.recipes._typed import phi3_mini_4k_instruct as phi3_mini_4k_instruct
from nemo2.recipes._typed import phi4_14b as phi4_14b
from nemo2.recipes._typed import phi4_mini as phi4_mini
from nemo2.recipes._typed import qwen2_1p5b as qwen2_1p5b
from nemo2.recipes._typed import qwen2_7b as qwen2_7b
from nemo2.recipes._typed import qwen2_57b_a14b as qwen2_57b_a14b
from nemo2.recipes._typed import qwen2_72b as qwen2_72b
from nemo2.recipes._typed import qwen2_500m as qwen2_500m
from nemo2.recipes._typed import qwen3_1p7b as qwen3_1p7b
from nemo2.recipes._typed import qwen3_4b as qwen3_4b
from nemo2.recipes._typed import qwen3_8b as qwen3_8b
from nemo2.recipes._typed import qwen3_14b as qwen3_14b
from nemo2.recipes._typed import qwen3_30b_a3b as qwen3_30b_a3b
from nemo2.recipes._typed import qwen3_32b as qwen3_32b
from nemo2.recipes._typed import qwen3_235b_a22b as qwen3_235b_a22b
from nemo2.recipes._typed import qwen3_600m as qwen3_600m
from nemo2.recipes._typed import qwen3_600m_24gb as qwen3_600m_24gb
from nemo2.recipes._typed import qwen3_next_80b_a3b as qwen3_next_80b_a3b
from nemo2.recipes._typed import qwen15_moe_a2p7b as qwen15_moe_a2p7b
from nemo2.recipes._typed import qwen25_1p5b as qwen25_1p5b
from nemo2.recipes._typed import qwen25_7b as qwen25_7b
from nemo2.recipes._typed import qwen25_14b as qwen25_14b
from nemo2.recipes._typed import qwen25_32b as qwen25_32b
from nemo2.recipes._typed import qwen25_72b as qwen25_72b
from nemo2.recipes._typed import qwen25_500m as qwen25_500m
from nemo2.recipes._typed import qwen35_9b as qwen35_9b
from nemo2.recipes._typed import qwen35_35b_a3b as qwen35_35b_a3b
from nemo2.recipes._typed import seed_oss_36b as seed_oss_36b
from nemo2.recipes._typed import smollm3_3b as smollm3_3b
from nemo2.recipes._typed import starcoder2_3b as starcoder2_3b
from nemo2.recipes._typed import starcoder2_7b as starcoder2_7b
from nemo2.recipes._typed import starcoder2_15b as starcoder2_15b
from nemo2.recipes._typed import starcoder_15b as starcoder_15b

__all__ = [
    "aya_8b",
    "baichuan2_7b",
    "chatglm3_6b",
    "command_a_111b",
    "command_r7b",
    "command_r_32b",
    "command_r_35b",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "ernie45_21b_a3b",
    "ernie45_300b_a47b",
    "ernie45_300m",
    "gemma2_27b",
    "gemma2_2b",
    "gemma2_9b",
    "gemma3_12b",
    "gemma3_1b",
    "gemma3_27b",
    "gemma3_4b",
    "gemma_2b",
    "gemma_7b",
    "glm45",
    "glm45_air",
    "glm46",
    "gpt3_175b",
    "gpt_oss_120b",
    "gpt_oss_20b",
    "granite3_1b_a400m",
    "granite3_2b",
    "granite3_3b_a800m",
    "granite3_8b",
    "hunyuan_1p8b",
    "hunyuan_4b",
    "hunyuan_500m",
    "hunyuan_7b",
    "hunyuan_80b_a13b",
    "kimi_k2",
    "llama2_7b",
    "llama31_405b",
    "llama31_70b",
    "llama31_8b",
    "llama31_8b_24gb",
    "llama31_nemotron_70b",
    "llama31_nemotron_nano_8b",
    "llama31_nemotron_ultra_253b",
    "llama32_1b",
    "llama32_1b_80gb",
    "llama32_3b",
    "llama33_nemotron_super_49b",
    "llama3_70b",
    "llama3_70b_16k",
    "llama3_70b_64k",
    "llama3_8b",
    "llama3_8b_128k",
    "llama3_8b_16k",
    "llama3_8b_64k",
    "llama4_e128",
    "llama4_e16",
    "llama_tiny",
    "mamba2_130m",
    "mamba2_1_3b",
    "mamba2_2_7b",
    "mamba2_370m",
    "mamba2_780m",
    "mamba2_8b",
    "mamba2_hybrid_8b",
    "minimax_m2",
    "ministral3_14b",
    "ministral3_3b",
    "ministral3_8b",
    "mistral_7b",
    "mistral_nemo_12b",
    "mixtral_8x22b",
    "mixtral_8x22b_64k",
    "mixtral_8x7b",
    "mixtral_8x7b_16k",
    "mixtral_8x7b_64k",
    "moonlight_16b_a3b",
    "nemotron3_22b",
    "nemotron3_22b_16k",
    "nemotron3_22b_64k",
    "nemotron3_4b",
    "nemotron3_8b",
    "nemotron3_nano_30b_a3b",
    "nemotron4_15b",
    "nemotron4_15b_16k",
    "nemotron4_15b_64k",
    "nemotron4_340b",
    "nemotron_nano_12b_v2",
    "nemotron_nano_9b_v2",
    "nemotronh_47b",
    "nemotronh_4b",
    "nemotronh_56b",
    "nemotronh_8b",
    "olmo2_13b",
    "olmo2_32b",
    "olmo2_7b",
    "olmo3_32b",
    "olmo3_7b",
    "olmoe_7b_a1b",
    "phi3_mini_4k_instruct",
    "phi4_14b",
    "phi4_mini",
    "qwen15_moe_a2p7b",
    "qwen25_14b",
    "qwen25_1p5b",
    "qwen25_32b",
    "qwen25_500m",
    "qwen25_72b",
    "qwen25_7b",
    "qwen2_1p5b",
    "qwen2_500m",
    "qwen2_57b_a14b",
    "qwen2_72b",
    "qwen2_7b",
    "qwen35_35b_a3b",
    "qwen35_9b",
    "qwen3_14b",
    "qwen3_1p7b",
    "qwen3_235b_a22b",
    "qwen3_30b_a3b",
    "qwen3_32b",
    "qwen3_4b",
    "qwen3_600m",
    "qwen3_600m_24gb",
    "qwen3_8b",
    "qwen3_next_80b_a3b",
    "seed_oss_36b",
    "smollm3_3b",
    "starcoder2_15b",
    "starcoder2_3b",
    "starcoder2_7b",
    "starcoder_15b",
]
