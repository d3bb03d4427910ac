# SPDX-License-Identifier: Apache-2.0
"""Parameter counts against models that are really built, and against what was published."""

from typing import Any

import pytest

from nemo2.models import llama
from nemo2.models.gpt import GPTConfig
from nemo2.models.parameters import count_parameters

# Weights in the released files, by Hugging Face's safetensors index of meta-llama/Llama-2-*-hf, Meta-Llama-3-*,
# Llama-3.1-* and Llama-3.2-*.
PUBLISHED = {
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
}

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "ffn_hidden_size": 80,
    "seq_length": 24,
    "vocab_size": 96,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_llama_has_the_published_number_of_parameters(name: str) -> None:
    vocab_size, published = PUBLISHED[name]
    assert count_parameters(getattr(llama, name)(), vocab_size) == published


def built_and_counted(shapes: list[dict[str, Any]]) -> list[tuple[int, int]]:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from nemo2.backend import get_backend

    get_backend().install()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    counts = []
    for shape in shapes:
        config = GPTConfig(**shape)
        if config.num_moe_experts:
            config.transformer_layer_spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        chunk = config.configure_model(None)
        counts.append((sum(p.numel() for p in chunk.parameters()), count_parameters(config, 96)))
    return counts


def test_the_count_is_that_of_the_built_model(run_on_ranks: Any) -> None:
    rope = {"position_embedding_type": "rope"}
    shapes = [
        TINY,
        TINY | rope | {"num_query_groups": 2, "add_bias_linear": False, "gated_linear_unit": True},
        TINY | rope | {"normalization": "RMSNorm", "add_qkv_bias": True, "add_bias_linear": False},
        TINY | rope | {"share_embeddings_and_output_weights": False, "kv_channels": 16},
        TINY | rope | {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "add_bias_linear": False},
    ]
    for built, counted in run_on_ranks(built_and_counted, 1, shapes)[0]:
        assert counted == built
