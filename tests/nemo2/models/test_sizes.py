# SPDX-License-Identifier: Apache-2.0
"""Every size of every family has as many parameters as were published."""

import re
from importlib import import_module
from typing import Any

import pytest

from nemo2.models.conversion.settings import meaning
from nemo2.models.walker import shape_of
from support.families import named_sizes

# (vocabulary, parameters). Whole numbers: weights in the released files, by the safetensors index on Hugging Face (tied
# embeddings once). Gemma 3: embedding and other parameters of arXiv:2503.19786, table 1, without the vision tower.
# Others, with the digits they were published with: the paper or model card that the family's module names.
PUBLISHED: dict[str, dict[str, tuple[int, float]]] = {
    "llama": {
        "Llama2Config7B": (32_000, 6_738_415_616),
        "Llama2Config13B": (32_000, 13_015_864_320),
        "Llama2Config70B": (32_000, 68_976_648_192),
        "Llama3Config8B": (128_256, 8_030_261_248),
        "Llama3Config70B": (128_256, 70_553_706_496),
        "Llama31Config8B": (128_256, 8_030_261_248),
        "Llama31Config70B": (128_256, 70_553_706_496),
        "Llama31Config405B": (128_256, 405_853_388_800),
        "Llama32Config1B": (128_256, 1_235_814_400),
        "Llama32Config3B": (128_256, 3_212_749_824),
        "CodeLlamaConfig7B": (32_016, 6_738_546_688),
        "CodeLlamaConfig13B": (32_016, 13_016_028_160),
        "CodeLlamaConfig34B": (32_000, 33_743_970_304),
        "CodeLlamaConfig70B": (32_016, 68_976_910_336),
    },
    "llama_nemotron": {
        "Llama31NemotronNano8BConfig": (128_256, 8_030_261_248),
        "Llama31Nemotron70BConfig": (128_256, 70_553_706_496),
        "Llama33NemotronSuper49BConfig": (128_256, 49_867_145_216),
    },
    "mistral": {
        "MistralConfig7B": (32_000, 7_241_732_096),
        "MistralNeMoConfig12B": (131_072, 12_247_782_400),
        "MistralNeMoConfig123B": (32_768, 122_610_069_504),
    },
    "mixtral": {
        "MixtralConfig8x7B": (32_000, 46_702_792_704),
        "MixtralConfig8x22B": (32_000, 140_620_634_112),
    },
    "qwen2": {
        "Qwen2Config500M": (151_936, 494_032_768),
        "Qwen2Config1P5B": (151_936, 1_543_714_304),
        "Qwen2Config7B": (152_064, 7_615_616_512),
        "Qwen2Config72B": (152_064, 72_706_203_648),
        "Qwen25Config500M": (151_936, 494_032_768),
        "Qwen25Config1P5B": (151_936, 1_543_714_304),
        "Qwen25Config3B": (151_936, 3_085_938_688),
        "Qwen25Config7B": (152_064, 7_615_616_512),
        "Qwen25Config14B": (152_064, 14_770_033_664),
        "Qwen25Config32B": (152_064, 32_763_876_352),
        "Qwen25Config72B": (152_064, 72_706_203_648),
    },
    "qwen3": {
        "Qwen3Config600M": (151_936, 596_049_920),
        "Qwen3Config1P7B": (151_936, 1_720_574_976),
        "Qwen3Config4B": (151_936, 4_022_468_096),
        "Qwen3Config8B": (151_936, 8_190_735_360),
        "Qwen3Config14B": (151_936, 14_768_307_200),
        "Qwen3Config32B": (151_936, 32_762_123_264),
        "Qwen3Config30B_A3B": (151_936, 30_532_122_624),
        "Qwen3Config235B_A22B": (151_936, 235_093_634_560),
    },
    "gemma": {
        "GemmaConfig2B": (256_000, 2_506_172_416),
        "GemmaConfig7B": (256_000, 8_537_680_896),
        "CodeGemmaConfig2B": (256_000, 2_506_172_416),
        "CodeGemmaConfig7B": (256_000, 8_537_680_896),
    },
    "gemma2": {
        "Gemma2Config2B": (256_000, 2_614_341_888),
        "Gemma2Config9B": (256_000, 9_241_705_984),
        "Gemma2Config27B": (256_000, 27_227_128_320),
    },
    "gemma3": {
        "Gemma3Config1B": (262_144, 999_885_952),
        "Gemma3Config12B": (262_208, 1_012e6 + 10_759e6),
    },
    "deepseek": {
        "DeepSeekV2Config": (102_400, 235_741_434_880),
        "DeepSeekV2LiteConfig": (102_400, 15_706_484_224),
    },
    "smollm3": {"SmolLM3Config3B": (128_256, 3_075_098_624)},
    "granite_moe": {"Granite3Config1B_A400M": (49_152, 1.334e9)},
    "cohere": {"CommandRConfig35B": (256_000, 34_980_831_232)},
    "olmo2": {"OLMo2Config13B": (100_352, 13.7e9)},
    "olmo3": {"OLMo3Config7B": (100_278, 7_298_011_136), "OLMo3Config32B": (100_278, 32_233_522_176)},
    "ministral3": {"Ministral3Config14B": (131_072, 13.5e9)},
    "ernie45": {"ERNIE45Config300M": (103_424, 360_748_032)},
    "hunyuan": {
        "HunyuanConfig500M": (120_818, 0.539e9),
        "HunyuanConfig1P8B": (120_818, 1.79e9),
    },
    "qwen2_moe": {"Qwen15MoEConfigA2P7B": (151_936, 14.3e9)},
    "qwen3_next": {
        "Qwen3NextConfig80B_A3B": (151_936, 79_674_391_296),
        "Qwen35Config9B": (248_320, 8_953_803_264),
        "Qwen35Config35B_A3B": (248_320, 34_660_610_688),
    },
    "glm4_moe": {"GLM46Config355B_A32B": (151_552, 352.8e9)},
    "nemotron": {"Nemotron4Config15B": (256_000, 3.1e9 + 12.5e9)},
    "phi3": {
        "Phi3ConfigMini": (32_064, 3_821_079_552),
        "Phi4Config14B": (100_352, 14_659_507_200),
        "Phi4MiniConfig3P8B": (200_064, 3_836_021_760),
    },
    "starcoder": {
        "StarcoderConfig15B": (49_152, 15_517_456_384),
    },
    "starcoder2": {
        "Starcoder2Config3B": (49_152, 3_030_371_328),
        "Starcoder2Config7B": (49_152, 7_173_923_840),
        "Starcoder2Config15B": (49_152, 15_957_889_024),
    },
    "baichuan": {"Baichuan2Config7B": (125_696, 7_505_973_248)},
    "chatglm": {"ChatGLM2Config6B": (65_024, 6_243_584_000), "ChatGLM3Config6B": (65_024, 6_243_584_000)},
    "ssm": {
        "BaseMambaConfig130M": (50_288, 128_989_632),
        "BaseMambaConfig370M": (50_288, 368e6),
        "BaseMambaConfig780M": (50_288, 780e6),
        "BaseMambaConfig1_3B": (50_288, 1.344e9),
        "NVIDIAMambaConfig8B": (256_000, 8.24e9),
        "NVIDIAMambaHybridConfig8B": (256_000, 8.66e9),
        "NemotronHConfig4B": (131_072, 4.49e9),
        "NemotronHConfig8B": (131_072, 8.1e9),
        "NemotronNano9Bv2": (131_072, 8.89e9),
        "NemotronNano12Bv2": (131_072, 12.31e9),
    },
}
SIZES = [(family, name) for family, sizes in PUBLISHED.items() for name in sizes]
PARAMETERS = re.compile(r"([\d,.]+) B parameters")
VOCABULARY = re.compile(r"([\d,]+)-token vocabulary|vocabulary of ([\d,]+)")


# Numbers of the papers that no weight shows. What a family computes with its numbers is compared with transformers' model
# (conversion/test_parity.py), whose config.json has them.
SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
NUMBERS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "Llama3Config8B"): {"rotary_base": 5e5, "layernorm_epsilon": 1e-5},
    ("llama", "Llama31Config8B"): {"rotary_base": 5e5, "scale_factor": 8.0, **SCALED},
    ("llama", "Llama32Config1B"): {"rotary_base": 5e5, "scale_factor": 32.0, **SCALED},
    ("qwen2", "Qwen2Config500M"): {"rotary_base": 1e6, "layernorm_epsilon": 1e-6},
    ("qwen3", "Qwen3Config600M"): {"rotary_base": 1e6, "layernorm_epsilon": 1e-6},
    ("chatglm", "ChatGLM3Config6B"): {"rotary_percent": 0.5, "layernorm_epsilon": 1e-5},
    ("gemma", "GemmaConfig2B"): {"layernorm_epsilon": 1e-6},
    ("gemma2", "Gemma2Config9B"): {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "softmax_scale": 256.0,
    },
    ("nemotron", "Nemotron4Config15B"): {"rotary_percent": 0.5, "layernorm_epsilon": 1e-5},
}


def config_of(family: str, name: str) -> Any:
    return getattr(import_module(f"nemo2.models.{family}"), name)()


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_a_size_has_the_published_number_of_parameters(family: str, name: str) -> None:
    vocab_size, published = PUBLISHED[family][name]
    config = config_of(family, name)
    tolerance = 0 if isinstance(published, int) else 0.005
    assert shape_of(config, vocab_size).parameters == pytest.approx(published, rel=tolerance)
    if config.vocab_size is not None:
        assert config.vocab_size == vocab_size


@pytest.mark.parametrize(("family", "name"), NUMBERS)
def test_a_size_has_the_numbers_of_its_paper(family: str, name: str) -> None:
    settings = meaning(config_of(family, name))
    assert {one: settings[one] for one in NUMBERS[family, name]} == NUMBERS[family, name]


def test_a_size_has_as_many_parameters_as_its_docstring_says() -> None:
    """Which is the only place that a new size needs its number in."""
    unstated = set()
    for name, kind in named_sizes().items():
        stated, rows = PARAMETERS.search(kind.__doc__ or ""), VOCABULARY.search(kind.__doc__ or "")
        if stated is None:
            unstated.add(name)
            continue
        number, vocab_size = stated[1].replace(",", ""), kind.vocab_size
        if rows is not None:
            vocab_size = int((rows[1] or rows[2]).replace(",", ""))
        digit = 10 ** (9 - len(number.partition(".")[2]))
        parameters = shape_of(kind(), vocab_size).parameters
        assert abs(parameters - float(number) * 1e9) <= digit, (name, parameters)
    published = {f"{family}:{name}" for family, name in SIZES}
    assert {name for name in unstated if not name.endswith("Config")} <= published


@pytest.mark.parametrize("name", ["GPTConfig126M", "GPTConfig5B", "GPTConfig20B", "GPTConfig40B", "GPTConfig175B"])
def test_a_gpt_3_has_as_many_parameters_as_its_widths_say(name: str) -> None:
    """Narayanan et al. 2021, arXiv:2104.04473, equation 2, and the norm behind the last layer."""
    config, vocab_size = config_of("gpt3", name), 51_200
    layers, hidden = config.num_layers, config.hidden_size
    ratio = 1 + 13 / (12 * hidden) + (vocab_size + config.seq_length) / (12 * layers * hidden)
    assert config.ffn_hidden_size == 4 * hidden
    assert shape_of(config, vocab_size).parameters == pytest.approx(12 * layers * hidden**2 * ratio + 2 * hidden)
