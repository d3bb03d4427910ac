# SPDX-License-Identifier: Apache-2.0
"""Parameter counts against what was published; `test_walker` has those of models that are really built."""

import pytest

from nemo2.models import llama
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_llama_has_the_published_number_of_parameters(name: str) -> None:
    vocab_size, published = PUBLISHED[name]
    assert count_parameters(getattr(llama, name)(), vocab_size) == published
