# SPDX-License-Identifier: Apache-2.0
"""A shrunken version of every family trains, and its tensor-parallel halves train as the whole does."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.config import Config
from nemo2.preflight.rehearse.shrink import SEQUENCE, VOCABULARY, small_sizes
from support.nightly import daily_and_nightly

STEPS = 2
# The configuration of each family that is shrunk, and what it is trained with beside its own settings.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 2": ("llama", "Llama2Config7B", {}),
    "Llama 3": ("llama", "Llama3Config8B", {}),
    "Llama 3.2": ("llama", "Llama32Config1B", {}),
    "Llama 3.1": ("llama", "Llama31Config8B", {}),
    "Llama 4": ("llama4", "Llama4Experts16Config", {}),
    "Llama-Nemotron": ("llama_nemotron", "Llama33NemotronSuper49BConfig", {}),
    "Mistral": ("mistral", "MistralConfig7B", {}),
    "Mistral-NeMo": ("mistral", "MistralNeMoConfig12B", {}),
    "Mixtral": ("mixtral", "MixtralConfig8x7B", {}),
    "Qwen 2": ("qwen2", "Qwen2Config500M", {}),
    "Qwen 2.5": ("qwen2", "Qwen25Config500M", {}),
    "Qwen 3": ("qwen3", "Qwen3Config600M", {}),
    "Qwen 3 MoE": ("qwen3", "Qwen3Config30B_A3B", {}),
    "Gemma": ("gemma", "GemmaConfig2B", {"num_query_groups": 2}),
    "Gemma 2": ("gemma2", "Gemma2Config2B", {}),
    "Gemma 3": ("gemma3", "Gemma3Config4B", {}),
    # Before V2-Lite: Megatron-Core keeps one table of auxiliary losses per process, as long as its first model.
    "DeepSeek V3": ("deepseek", "DeepSeekV3Config", {"mtp_num_layers": 1, "moe_router_dtype": "fp32"}),
    "DeepSeek V2-Lite": ("deepseek", "DeepSeekV2LiteConfig", {}),
    "DeepSeek V2": ("deepseek", "DeepSeekV2Config", {}),
    "Nemotron 3": ("nemotron", "Nemotron3Config4B", {}),
    "Nemotron 4": ("nemotron", "Nemotron4Config15B", {}),
    "GPT-3": ("gpt3", "GPTConfig175B", {}),
    "GPT-OSS": ("gpt_oss", "GPTOSSConfig20B", {}),
    "Phi-3": ("phi3", "Phi3ConfigMini", {}),
    "StarCoder": ("starcoder", "StarcoderConfig15B", {"num_query_groups": 4}),
    "StarCoder 2": ("starcoder2", "Starcoder2Config3B", {}),
    "Baichuan 2": ("baichuan", "Baichuan2Config7B", {}),
    "ChatGLM": ("chatglm", "ChatGLM3Config6B", {}),
    "SmolLM 3": ("smollm3", "SmolLM3Config3B", {}),
    "Seed-OSS": ("seed_oss", "SeedOSSConfig36B", {}),
    "Granite 3": ("granite", "Granite3Config2B", {}),
    "Granite 3 MoE": ("granite_moe", "Granite3Config1B_A400M", {}),
    "Phi-4": ("phi3", "Phi4Config14B", {}),
    "OLMo 2": ("olmo2", "OLMo2Config32B", {}),
    "OLMo 3": ("olmo3", "OLMo3Config32B", {}),
    "Ministral 3": ("ministral3", "Ministral3Config8B", {}),
    "ERNIE 4.5": ("ernie45", "ERNIE45Config300M", {}),
    "Hunyuan": ("hunyuan", "HunyuanConfig7B", {}),
    "Hunyuan MoE": ("hunyuan_moe", "HunyuanConfig80B_A13B", {}),
    "ERNIE 4.5 MoE": ("ernie45_moe", "ERNIE45Config21B_A3B", {}),
    "Cohere": ("cohere", "CommandRConfig32B", {}),
    "Cohere 2": ("cohere2", "CommandR7BConfig", {}),
    "OLMoE": ("olmoe", "OLMoEConfig7B_A1B", {}),
    "Qwen 2 MoE": ("qwen2_moe", "Qwen15MoEConfigA2P7B", {}),
    "Qwen3-Next": ("qwen3_next", "Qwen3NextConfig80B_A3B", {}),
    "Qwen 3.5": ("qwen3_next", "Qwen35Config9B", {}),
    "GLM-4.5": ("glm4_moe", "GLM45Config355B_A32B", {}),
    "MiniMax M2": ("minimax_m2", "MiniMaxM2Config230B_A10B", {}),
    "Moonlight": ("deepseek", "MoonlightConfig16B_A3B", {}),
    "Mamba 2": ("ssm", "BaseMambaConfig130M", {}),
    "Nemotron-H": ("ssm", "NemotronHConfig8B", {}),
    "Nemotron Nano v2": ("ssm", "NemotronNano9Bv2", {}),
}

DAILY = (
    "Llama 4",
    "Llama-Nemotron",
    "Qwen 3 MoE",
    "Gemma 3",
    "Nemotron 4",
    "StarCoder",
    "OLMo 2",
    "Cohere 2",
    "Granite 3 MoE",
    "Nemotron-H",
)
"""A family for each kind of layer that tensor-parallel ranks split in its own way, but those of tests/nemo2/models/layers. What
the others compute at such ranks is compared with transformers' (tests/nemo2/models/conversion/test_parity.py)."""

# Whole experts, shared out over the tensor-parallel ranks, instead of a slice of each; biases allow nothing else.
WHOLE_EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SHARED_OUT = ("GPT-OSS", "Qwen 3 MoE")


def shrunk(family: str, **layout: Any) -> Any:
    """The family's configuration as `nemo2 rehearse --tiny` shrinks it: what it has beyond the Llama stays, sizes don't."""
    module, name, fields = FAMILIES[family]
    made = getattr(import_module(f"nemo2.models.{module}"), name)
    sizes = small_sizes(Config(made), tp=2)
    exact = {"vocab_size": VOCABULARY, "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_router_dtype": None}
    return made(**sizes | exact | fields | layout)


def train_each(families: list[str], tp: int, directory: str) -> dict[str, Any]:
    """Losses of some steps on one batch, by family; two ranks start from the weights that one rank started from."""
    from megatron.core import parallel_state, tensor_parallel

    import support.bare_megatron as bare
    from nemo2.mcore.parallel.groups import destroy_model_parallel
    from nemo2.models.tracked_losses import forget_tracked_losses

    # Experts and latent attention need sequence parallelism with tensor parallelism; to the others it must not matter.
    settings = bare.Settings(
        vocab=VOCABULARY, seq=SEQUENCE, mbs=2, gbs=4, steps=STEPS, tp=tp, sequence_parallel=tp > 1, lr=5e-3
    )
    batch = bare.random_batches(settings)(0)
    results = {}
    for family in families:
        layout: dict[str, Any] = {"tensor_model_parallel_size": tp}
        if tp > 1 and family in SHARED_OUT:
            layout |= WHOLE_EXPERTS

        def start_parallel(settings: Any, layout: dict[str, Any] = layout) -> None:
            destroy_model_parallel()
            parallel_state.initialize_model_parallel(**layout)
            torch.manual_seed(settings.seed)
            tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)

        def build(pre: bool, post: bool, vp: int | None, family: str = family, layout: Any = layout) -> Any:
            config = shrunk(family, sequence_parallel=tp > 1, **layout)
            forget_tracked_losses()  # as the module that builds a configuration's model
            return config.configure_model(None, pre, post, vp)

        bare.start_parallel = start_parallel  # the bare loop's own knows no experts
        weights = str(Path(directory) / family.replace(" ", "_"))
        where: dict[str, Any] = {"save_weights_to": weights} if tp == 1 else {"load_weights_from": weights}
        results[family] = bare.train(settings, lambda step: batch, build_model=build, **where)["losses"]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("families", daily_and_nightly(FAMILIES, DAILY))
def test_every_family_trains_and_its_tensor_parallel_halves_train_as_the_whole(
    run_on_ranks: Any, tmp_path: Path, families: list[str]
) -> None:
    (whole,) = run_on_ranks(train_each, 1, families, 1, str(tmp_path), timeout=400)
    halves, _ = run_on_ranks(train_each, 2, families, 2, str(tmp_path), timeout=400)
    for family, losses in whole.items():
        assert losses[-1] < losses[0], family
        assert halves[family] == pytest.approx(losses, rel=2e-4), family
