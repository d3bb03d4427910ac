# SPDX-License-Identifier: Apache-2.0
"""``from nemo2 import llm``: what a training script names, imported on first use.

The entry points (``pretrain``, ``validate``, ``generate``), models and their sizes, data modules, and every recipe by
name (``llm.llama3_8b.pretrain_recipe()``).
"""

from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names
from nemo2.recipes import names as _recipe_names

if TYPE_CHECKING:
    from nemo2.data.demo import StdlibDataModule as StdlibDataModule
    from nemo2.data.mock import MockDataModule as MockDataModule
    from nemo2.data.pretraining import PreTrainingDataModule as PreTrainingDataModule
    from nemo2.llm.api import generate as generate
    from nemo2.llm.api import pretrain as pretrain
    from nemo2.llm.api import train as train
    from nemo2.llm.api import validate as validate
    from nemo2.models.baichuan import Baichuan2Config as Baichuan2Config
    from nemo2.models.baichuan import Baichuan2Config7B as Baichuan2Config7B
    from nemo2.models.baichuan import Baichuan2Model as Baichuan2Model
    from nemo2.models.chatglm import ChatGLM2Config6B as ChatGLM2Config6B
    from nemo2.models.chatglm import ChatGLM3Config6B as ChatGLM3Config6B
    from nemo2.models.chatglm import ChatGLMConfig as ChatGLMConfig
    from nemo2.models.chatglm import ChatGLMModel as ChatGLMModel
    from nemo2.models.deepseek import DeepSeekConfig as DeepSeekConfig
    from nemo2.models.deepseek import DeepSeekModel as DeepSeekModel
    from nemo2.models.deepseek import DeepSeekV2Config as DeepSeekV2Config
    from nemo2.models.deepseek import DeepSeekV2LiteConfig as DeepSeekV2LiteConfig
    from nemo2.models.deepseek import DeepSeekV3Config as DeepSeekV3Config
    from nemo2.models.gemma import CodeGemmaConfig2B as CodeGemmaConfig2B
    from nemo2.models.gemma import CodeGemmaConfig7B as CodeGemmaConfig7B
    from nemo2.models.gemma import GemmaConfig as GemmaConfig
    from nemo2.models.gemma import GemmaConfig2B as GemmaConfig2B
    from nemo2.models.gemma import GemmaConfig7B as GemmaConfig7B
    from nemo2.models.gemma import GemmaModel as GemmaModel
    from nemo2.models.gemma2 import Gemma2Config as Gemma2Config
    from nemo2.models.gemma2 import Gemma2Config2B as Gemma2Config2B
    from nemo2.models.gemma2 import Gemma2Config9B as Gemma2Config9B
    from nemo2.models.gemma2 import Gemma2Config27B as Gemma2Config27B
    from nemo2.models.gemma2 import Gemma2Model as Gemma2Model
    from nemo2.models.gemma3 import Gemma3Config as Gemma3Config
    from nemo2.models.gemma3 import Gemma3Config1B as Gemma3Config1B
    from nemo2.models.gemma3 import Gemma3Config4B as Gemma3Config4B
    from nemo2.models.gemma3 import Gemma3Config12B as Gemma3Config12B
    from nemo2.models.gemma3 import Gemma3Config27B as Gemma3Config27B
    from nemo2.models.gemma3 import Gemma3Model as Gemma3Model
    from nemo2.models.gpt import GPTConfig as GPTConfig
    from nemo2.models.gpt import GPTModel as GPTModel
    from nemo2.models.gpt3 import GPTConfig5B as GPTConfig5B
    from nemo2.models.gpt3 import GPTConfig7B as GPTConfig7B
    from nemo2.models.gpt3 import GPTConfig20B as GPTConfig20B
    from nemo2.models.gpt3 import GPTConfig40B as GPTConfig40B
    from nemo2.models.gpt3 import GPTConfig126M as GPTConfig126M
    from nemo2.models.gpt3 import GPTConfig175B as GPTConfig175B
    from nemo2.models.gpt_oss import GPTOSSConfig as GPTOSSConfig
    from nemo2.models.gpt_oss import GPTOSSConfig20B as GPTOSSConfig20B
    from nemo2.models.gpt_oss import GPTOSSConfig120B as GPTOSSConfig120B
    from nemo2.models.gpt_oss import GPTOSSModel as GPTOSSModel
    from nemo2.models.gpt_step import gpt_data_step as gpt_data_step
    from nemo2.models.gpt_step import gpt_forward_step as gpt_forward_step
    from nemo2.models.llama import CodeLlamaConfig7B as CodeLlamaConfig7B
    from nemo2.models.llama import CodeLlamaConfig13B as CodeLlamaConfig13B
    from nemo2.models.llama import CodeLlamaConfig34B as CodeLlamaConfig34B
    from nemo2.models.llama import CodeLlamaConfig70B as CodeLlamaConfig70B
    from nemo2.models.llama import Llama2Config7B as Llama2Config7B
    from nemo2.models.llama import Llama2Config13B as Llama2Config13B
    from nemo2.models.llama import Llama2Config70B as Llama2Config70B
    from nemo2.models.llama import Llama3Config as Llama3Config
    from nemo2.models.llama import Llama3Config8B as Llama3Config8B
    from nemo2.models.llama import Llama3Config70B as Llama3Config70B
    from nemo2.models.llama import Llama31Config as Llama31Config
    from nemo2.models.llama import Llama31Config8B as Llama31Config8B
    from nemo2.models.llama import Llama31Config70B as Llama31Config70B
    from nemo2.models.llama import Llama31Config405B as Llama31Config405B
    from nemo2.models.llama import Llama32Config1B as Llama32Config1B
    from nemo2.models.llama import Llama32Config3B as Llama32Config3B
    from nemo2.models.llama import LlamaConfig as LlamaConfig
    from nemo2.models.llama import LlamaModel as LlamaModel
    from nemo2.models.llama4 import Llama4Config as Llama4Config
    from nemo2.models.llama4 import Llama4Experts16Config as Llama4Experts16Config
    from nemo2.models.llama4 import Llama4Experts128Config as Llama4Experts128Config
    from nemo2.models.llama_nemotron import Llama31Nemotron70BConfig as Llama31Nemotron70BConfig
    from nemo2.models.llama_nemotron import Llama31NemotronNano8BConfig as Llama31NemotronNano8BConfig
    from nemo2.models.llama_nemotron import Llama31NemotronUltra253BConfig as Llama31NemotronUltra253BConfig
    from nemo2.models.llama_nemotron import Llama33NemotronSuper49BConfig as Llama33NemotronSuper49BConfig
    from nemo2.models.llama_nemotron import LlamaNemotronModel as LlamaNemotronModel
    from nemo2.models.mistral import MistralConfig7B as MistralConfig7B
    from nemo2.models.mistral import MistralModel as MistralModel
    from nemo2.models.mistral import MistralNeMoConfig12B as MistralNeMoConfig12B
    from nemo2.models.mistral import MistralNeMoConfig123B as MistralNeMoConfig123B
    from nemo2.models.mixtral import MixtralConfig as MixtralConfig
    from nemo2.models.mixtral import MixtralConfig8x3B as MixtralConfig8x3B
    from nemo2.models.mixtral import MixtralConfig8x7B as MixtralConfig8x7B
    from nemo2.models.mixtral import MixtralConfig8x22B as MixtralConfig8x22B
    from nemo2.models.mixtral import MixtralModel as MixtralModel
    from nemo2.models.nemotron import Nemotron3Config4B as Nemotron3Config4B
    from nemo2.models.nemotron import Nemotron3Config8B as Nemotron3Config8B
    from nemo2.models.nemotron import Nemotron3Config22B as Nemotron3Config22B
    from nemo2.models.nemotron import Nemotron4Config15B as Nemotron4Config15B
    from nemo2.models.nemotron import Nemotron4Config340B as Nemotron4Config340B
    from nemo2.models.nemotron import NemotronConfig as NemotronConfig
    from nemo2.models.nemotron import NemotronModel as NemotronModel
    from nemo2.models.phi3 import Phi3Config as Phi3Config
    from nemo2.models.phi3 import Phi3ConfigMini as Phi3ConfigMini
    from nemo2.models.phi3 import Phi3Model as Phi3Model
    from nemo2.models.qwen2 import Qwen2Config as Qwen2Config
    from nemo2.models.qwen2 import Qwen2Config1P5B as Qwen2Config1P5B
    from nemo2.models.qwen2 import Qwen2Config7B as Qwen2Config7B
    from nemo2.models.qwen2 import Qwen2Config72B as Qwen2Config72B
    from nemo2.models.qwen2 import Qwen2Config500M as Qwen2Config500M
    from nemo2.models.qwen2 import Qwen2Model as Qwen2Model
    from nemo2.models.qwen2 import Qwen25Config1P5B as Qwen25Config1P5B
    from nemo2.models.qwen2 import Qwen25Config3B as Qwen25Config3B
    from nemo2.models.qwen2 import Qwen25Config7B as Qwen25Config7B
    from nemo2.models.qwen2 import Qwen25Config14B as Qwen25Config14B
    from nemo2.models.qwen2 import Qwen25Config32B as Qwen25Config32B
    from nemo2.models.qwen2 import Qwen25Config72B as Qwen25Config72B
    from nemo2.models.qwen2 import Qwen25Config500M as Qwen25Config500M
    from nemo2.models.qwen3 import Qwen3Config as Qwen3Config
    from nemo2.models.qwen3 import Qwen3Config1P7B as Qwen3Config1P7B
    from nemo2.models.qwen3 import Qwen3Config4B as Qwen3Config4B
    from nemo2.models.qwen3 import Qwen3Config8B as Qwen3Config8B
    from nemo2.models.qwen3 import Qwen3Config14B as Qwen3Config14B
    from nemo2.models.qwen3 import Qwen3Config30B_A3B as Qwen3Config30B_A3B
    from nemo2.models.qwen3 import Qwen3Config32B as Qwen3Config32B
    from nemo2.models.qwen3 import Qwen3Config235B_A22B as Qwen3Config235B_A22B
    from nemo2.models.qwen3 import Qwen3Config600M as Qwen3Config600M
    from nemo2.models.qwen3 import Qwen3Model as Qwen3Model
    from nemo2.models.qwen3 import Qwen3MoEConfig as Qwen3MoEConfig
    from nemo2.models.ssm import BaseMambaConfig1_3B as BaseMambaConfig1_3B
    from nemo2.models.ssm import BaseMambaConfig2_7B as BaseMambaConfig2_7B
    from nemo2.models.ssm import BaseMambaConfig130M as BaseMambaConfig130M
    from nemo2.models.ssm import BaseMambaConfig370M as BaseMambaConfig370M
    from nemo2.models.ssm import BaseMambaConfig780M as BaseMambaConfig780M
    from nemo2.models.ssm import MambaModel as MambaModel
    from nemo2.models.ssm import NemotronHConfig4B as NemotronHConfig4B
    from nemo2.models.ssm import NemotronHConfig8B as NemotronHConfig8B
    from nemo2.models.ssm import NemotronHConfig47B as NemotronHConfig47B
    from nemo2.models.ssm import NemotronHConfig56B as NemotronHConfig56B
    from nemo2.models.ssm import NemotronHConfigBase as NemotronHConfigBase
    from nemo2.models.ssm import NemotronNano9Bv2 as NemotronNano9Bv2
    from nemo2.models.ssm import NemotronNano12Bv2 as NemotronNano12Bv2
    from nemo2.models.ssm import NVIDIAMambaConfig8B as NVIDIAMambaConfig8B
    from nemo2.models.ssm import NVIDIAMambaHybridConfig8B as NVIDIAMambaHybridConfig8B
    from nemo2.models.ssm import SSMConfig as SSMConfig
    from nemo2.models.starcoder import Starcoder2Config as Starcoder2Config
    from nemo2.models.starcoder import Starcoder2Config3B as Starcoder2Config3B
    from nemo2.models.starcoder import Starcoder2Config7B as Starcoder2Config7B
    from nemo2.models.starcoder import Starcoder2Config15B as Starcoder2Config15B
    from nemo2.models.starcoder import Starcoder2Model as Starcoder2Model
    from nemo2.models.starcoder import StarcoderConfig as StarcoderConfig
    from nemo2.models.starcoder import StarcoderConfig15B as StarcoderConfig15B
    from nemo2.models.starcoder import StarcoderModel as StarcoderModel
    from nemo2.recipes import baichuan2_7b as baichuan2_7b
    from nemo2.recipes import chatglm3_6b as chatglm3_6b
    from nemo2.recipes import deepseek_v2 as deepseek_v2
    from nemo2.recipes import deepseek_v2_lite as deepseek_v2_lite
    from nemo2.recipes import deepseek_v3 as deepseek_v3
    from nemo2.recipes import gemma2_2b as gemma2_2b
    from nemo2.recipes import gemma2_9b as gemma2_9b
    from nemo2.recipes import gemma2_27b as gemma2_27b
    from nemo2.recipes import gemma3_1b as gemma3_1b
    from nemo2.recipes import gemma_2b as gemma_2b
    from nemo2.recipes import gemma_7b as gemma_7b
    from nemo2.recipes import gpt3_175b as gpt3_175b
    from nemo2.recipes import llama2_7b as llama2_7b
    from nemo2.recipes import llama3_8b as llama3_8b
    from nemo2.recipes import llama3_8b_16k as llama3_8b_16k
    from nemo2.recipes import llama3_8b_64k as llama3_8b_64k
    from nemo2.recipes import llama3_8b_128k as llama3_8b_128k
    from nemo2.recipes import llama3_70b as llama3_70b
    from nemo2.recipes import llama3_70b_16k as llama3_70b_16k
    from nemo2.recipes import llama3_70b_64k as llama3_70b_64k
    from nemo2.recipes import llama4_e16 as llama4_e16
    from nemo2.recipes import llama4_e128 as llama4_e128
    from nemo2.recipes import llama31_8b as llama31_8b
    from nemo2.recipes import llama31_70b as llama31_70b
    from nemo2.recipes import llama31_405b as llama31_405b
    from nemo2.recipes import llama31_nemotron_70b as llama31_nemotron_70b
    from nemo2.recipes import llama31_nemotron_nano_8b as llama31_nemotron_nano_8b
    from nemo2.recipes import llama32_1b as llama32_1b
    from nemo2.recipes import llama32_3b as llama32_3b
    from nemo2.recipes import llama_tiny as llama_tiny
    from nemo2.recipes import mamba2_1_3b as mamba2_1_3b
    from nemo2.recipes import mamba2_2_7b as mamba2_2_7b
    from nemo2.recipes import mamba2_8b as mamba2_8b
    from nemo2.recipes import mamba2_130m as mamba2_130m
    from nemo2.recipes import mamba2_370m as mamba2_370m
    from nemo2.recipes import mamba2_780m as mamba2_780m
    from nemo2.recipes import mamba2_hybrid_8b as mamba2_hybrid_8b
    from nemo2.recipes import mistral_7b as mistral_7b
    from nemo2.recipes import mistral_nemo_12b as mistral_nemo_12b
    from nemo2.recipes import mixtral_8x7b as mixtral_8x7b
    from nemo2.recipes import mixtral_8x7b_16k as mixtral_8x7b_16k
    from nemo2.recipes import mixtral_8x7b_64k as mixtral_8x7b_64k
    from nemo2.recipes import mixtral_8x22b as mixtral_8x22b
    from nemo2.recipes import mixtral_8x22b_64k as mixtral_8x22b_64k
    from nemo2.recipes import nemotron3_4b as nemotron3_4b
    from nemo2.recipes import nemotron3_8b as nemotron3_8b
    from nemo2.recipes import nemotron3_22b as nemotron3_22b
    from nemo2.recipes import nemotron3_22b_16k as nemotron3_22b_16k
    from nemo2.recipes import nemotron3_22b_64k as nemotron3_22b_64k
    from nemo2.recipes import nemotron4_15b as nemotron4_15b
    from nemo2.recipes import nemotron4_15b_16k as nemotron4_15b_16k
    from nemo2.recipes import nemotron4_15b_64k as nemotron4_15b_64k
    from nemo2.recipes import nemotron4_340b as nemotron4_340b
    from nemo2.recipes import nemotron_nano_9b_v2 as nemotron_nano_9b_v2
    from nemo2.recipes import nemotron_nano_12b_v2 as nemotron_nano_12b_v2
    from nemo2.recipes import nemotronh_4b as nemotronh_4b
    from nemo2.recipes import nemotronh_8b as nemotronh_8b
    from nemo2.recipes import nemotronh_47b as nemotronh_47b
    from nemo2.recipes import nemotronh_56b as nemotronh_56b
    from nemo2.recipes import phi3_mini_4k_instruct as phi3_mini_4k_instruct
    from nemo2.recipes import qwen2_1p5b as qwen2_1p5b
    from nemo2.recipes import qwen2_7b as qwen2_7b
    from nemo2.recipes import qwen2_72b as qwen2_72b
    from nemo2.recipes import qwen2_500m as qwen2_500m
    from nemo2.recipes import qwen3_1p7b as qwen3_1p7b
    from nemo2.recipes import qwen3_4b as qwen3_4b
    from nemo2.recipes import qwen3_8b as qwen3_8b
    from nemo2.recipes import qwen3_14b as qwen3_14b
    from nemo2.recipes import qwen3_30b_a3b as qwen3_30b_a3b
    from nemo2.recipes import qwen3_32b as qwen3_32b
    from nemo2.recipes import qwen3_235b_a22b as qwen3_235b_a22b
    from nemo2.recipes import qwen3_600m as qwen3_600m
    from nemo2.recipes import qwen25_1p5b as qwen25_1p5b
    from nemo2.recipes import qwen25_7b as qwen25_7b
    from nemo2.recipes import qwen25_14b as qwen25_14b
    from nemo2.recipes import qwen25_32b as qwen25_32b
    from nemo2.recipes import qwen25_72b as qwen25_72b
    from nemo2.recipes import qwen25_500m as qwen25_500m
    from nemo2.recipes import starcoder2_3b as starcoder2_3b
    from nemo2.recipes import starcoder2_7b as starcoder2_7b
    from nemo2.recipes import starcoder2_15b as starcoder2_15b
    from nemo2.recipes import starcoder_15b as starcoder_15b

_HOMES = {
    "Baichuan2Config": "nemo2.models.baichuan",
    "Baichuan2Config7B": "nemo2.models.baichuan",
    "Baichuan2Model": "nemo2.models.baichuan",
    "BaseMambaConfig130M": "nemo2.models.ssm",
    "BaseMambaConfig1_3B": "nemo2.models.ssm",
    "BaseMambaConfig2_7B": "nemo2.models.ssm",
    "BaseMambaConfig370M": "nemo2.models.ssm",
    "BaseMambaConfig780M": "nemo2.models.ssm",
    "ChatGLM2Config6B": "nemo2.models.chatglm",
    "ChatGLM3Config6B": "nemo2.models.chatglm",
    "ChatGLMConfig": "nemo2.models.chatglm",
    "ChatGLMModel": "nemo2.models.chatglm",
    "CodeGemmaConfig2B": "nemo2.models.gemma",
    "CodeGemmaConfig7B": "nemo2.models.gemma",
    "CodeLlamaConfig13B": "nemo2.models.llama",
    "CodeLlamaConfig34B": "nemo2.models.llama",
    "CodeLlamaConfig70B": "nemo2.models.llama",
    "CodeLlamaConfig7B": "nemo2.models.llama",
    "DeepSeekConfig": "nemo2.models.deepseek",
    "DeepSeekModel": "nemo2.models.deepseek",
    "DeepSeekV2Config": "nemo2.models.deepseek",
    "DeepSeekV2LiteConfig": "nemo2.models.deepseek",
    "DeepSeekV3Config": "nemo2.models.deepseek",
    "GPTConfig": "nemo2.models.gpt",
    "GPTConfig126M": "nemo2.models.gpt3",
    "GPTConfig175B": "nemo2.models.gpt3",
    "GPTConfig20B": "nemo2.models.gpt3",
    "GPTConfig40B": "nemo2.models.gpt3",
    "GPTConfig5B": "nemo2.models.gpt3",
    "GPTConfig7B": "nemo2.models.gpt3",
    "GPTModel": "nemo2.models.gpt",
    "GPTOSSConfig": "nemo2.models.gpt_oss",
    "GPTOSSConfig120B": "nemo2.models.gpt_oss",
    "GPTOSSConfig20B": "nemo2.models.gpt_oss",
    "GPTOSSModel": "nemo2.models.gpt_oss",
    "Gemma2Config": "nemo2.models.gemma2",
    "Gemma2Config27B": "nemo2.models.gemma2",
    "Gemma2Config2B": "nemo2.models.gemma2",
    "Gemma2Config9B": "nemo2.models.gemma2",
    "Gemma2Model": "nemo2.models.gemma2",
    "Gemma3Config": "nemo2.models.gemma3",
    "Gemma3Config12B": "nemo2.models.gemma3",
    "Gemma3Config1B": "nemo2.models.gemma3",
    "Gemma3Config27B": "nemo2.models.gemma3",
    "Gemma3Config4B": "nemo2.models.gemma3",
    "Gemma3Model": "nemo2.models.gemma3",
    "GemmaConfig": "nemo2.models.gemma",
    "GemmaConfig2B": "nemo2.models.gemma",
    "GemmaConfig7B": "nemo2.models.gemma",
    "GemmaModel": "nemo2.models.gemma",
    "Llama2Config13B": "nemo2.models.llama",
    "Llama2Config70B": "nemo2.models.llama",
    "Llama2Config7B": "nemo2.models.llama",
    "Llama31Config": "nemo2.models.llama",
    "Llama31Config405B": "nemo2.models.llama",
    "Llama31Config70B": "nemo2.models.llama",
    "Llama31Config8B": "nemo2.models.llama",
    "Llama31Nemotron70BConfig": "nemo2.models.llama_nemotron",
    "Llama31NemotronNano8BConfig": "nemo2.models.llama_nemotron",
    "Llama31NemotronUltra253BConfig": "nemo2.models.llama_nemotron",
    "Llama32Config1B": "nemo2.models.llama",
    "Llama32Config3B": "nemo2.models.llama",
    "Llama33NemotronSuper49BConfig": "nemo2.models.llama_nemotron",
    "Llama3Config": "nemo2.models.llama",
    "Llama3Config70B": "nemo2.models.llama",
    "Llama3Config8B": "nemo2.models.llama",
    "Llama4Config": "nemo2.models.llama4",
    "Llama4Experts128Config": "nemo2.models.llama4",
    "Llama4Experts16Config": "nemo2.models.llama4",
    "LlamaConfig": "nemo2.models.llama",
    "LlamaModel": "nemo2.models.llama",
    "LlamaNemotronModel": "nemo2.models.llama_nemotron",
    "MambaModel": "nemo2.models.ssm",
    "MistralConfig7B": "nemo2.models.mistral",
    "MistralModel": "nemo2.models.mistral",
    "MistralNeMoConfig123B": "nemo2.models.mistral",
    "MistralNeMoConfig12B": "nemo2.models.mistral",
    "MixtralConfig": "nemo2.models.mixtral",
    "MixtralConfig8x22B": "nemo2.models.mixtral",
    "MixtralConfig8x3B": "nemo2.models.mixtral",
    "MixtralConfig8x7B": "nemo2.models.mixtral",
    "MixtralModel": "nemo2.models.mixtral",
    "MockDataModule": "nemo2.data.mock",
    "NVIDIAMambaConfig8B": "nemo2.models.ssm",
    "NVIDIAMambaHybridConfig8B": "nemo2.models.ssm",
    "Nemotron3Config22B": "nemo2.models.nemotron",
    "Nemotron3Config4B": "nemo2.models.nemotron",
    "Nemotron3Config8B": "nemo2.models.nemotron",
    "Nemotron4Config15B": "nemo2.models.nemotron",
    "Nemotron4Config340B": "nemo2.models.nemotron",
    "NemotronConfig": "nemo2.models.nemotron",
    "NemotronHConfig47B": "nemo2.models.ssm",
    "NemotronHConfig4B": "nemo2.models.ssm",
    "NemotronHConfig56B": "nemo2.models.ssm",
    "NemotronHConfig8B": "nemo2.models.ssm",
    "NemotronHConfigBase": "nemo2.models.ssm",
    "NemotronModel": "nemo2.models.nemotron",
    "NemotronNano12Bv2": "nemo2.models.ssm",
    "NemotronNano9Bv2": "nemo2.models.ssm",
    "Phi3Config": "nemo2.models.phi3",
    "Phi3ConfigMini": "nemo2.models.phi3",
    "Phi3Model": "nemo2.models.phi3",
    "PreTrainingDataModule": "nemo2.data.pretraining",
    "Qwen25Config14B": "nemo2.models.qwen2",
    "Qwen25Config1P5B": "nemo2.models.qwen2",
    "Qwen25Config32B": "nemo2.models.qwen2",
    "Qwen25Config3B": "nemo2.models.qwen2",
    "Qwen25Config500M": "nemo2.models.qwen2",
    "Qwen25Config72B": "nemo2.models.qwen2",
    "Qwen25Config7B": "nemo2.models.qwen2",
    "Qwen2Config": "nemo2.models.qwen2",
    "Qwen2Config1P5B": "nemo2.models.qwen2",
    "Qwen2Config500M": "nemo2.models.qwen2",
    "Qwen2Config72B": "nemo2.models.qwen2",
    "Qwen2Config7B": "nemo2.models.qwen2",
    "Qwen2Model": "nemo2.models.qwen2",
    "Qwen3Config": "nemo2.models.qwen3",
    "Qwen3Config14B": "nemo2.models.qwen3",
    "Qwen3Config1P7B": "nemo2.models.qwen3",
    "Qwen3Config235B_A22B": "nemo2.models.qwen3",
    "Qwen3Config30B_A3B": "nemo2.models.qwen3",
    "Qwen3Config32B": "nemo2.models.qwen3",
    "Qwen3Config4B": "nemo2.models.qwen3",
    "Qwen3Config600M": "nemo2.models.qwen3",
    "Qwen3Config8B": "nemo2.models.qwen3",
    "Qwen3MoEConfig": "nemo2.models.qwen3",
    "Qwen3Model": "nemo2.models.qwen3",
    "SSMConfig": "nemo2.models.ssm",
    "Starcoder2Config": "nemo2.models.starcoder",
    "Starcoder2Config15B": "nemo2.models.starcoder",
    "Starcoder2Config3B": "nemo2.models.starcoder",
    "Starcoder2Config7B": "nemo2.models.starcoder",
    "Starcoder2Model": "nemo2.models.starcoder",
    "StarcoderConfig": "nemo2.models.starcoder",
    "StarcoderConfig15B": "nemo2.models.starcoder",
    "StarcoderModel": "nemo2.models.starcoder",
    "StdlibDataModule": "nemo2.data.demo",
    "generate": "nemo2.llm.api",
    "gpt_data_step": "nemo2.models.gpt_step",
    "gpt_forward_step": "nemo2.models.gpt_step",
    "pretrain": "nemo2.llm.api",
    "recipes": "nemo2.recipes",
    "train": "nemo2.llm.api",
    "validate": "nemo2.llm.api",
    **{name: f"nemo2.recipes.{name}" for name in _recipe_names()},
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
