# SPDX-License-Identifier: Apache-2.0
"""Stretched rotary positions: transformers' frequencies at every length, the rule of Llama 3.1, and what they can't go with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.models.conversion.families import conversion_for, conversion_of
from nemo2.models.llama import Llama31Config8B, LlamaConfig
from nemo2.models.rotary import DynamicNTK, LongRope, Yarn, scale_rotary_frequencies
from support.plain_decoder import scaled_by_wavelength

BASE, WIDTH, ORIGINAL, LONGEST = 10_000.0, 16, 32, 128
CHANNELS = {"short_factor": [1.0 + 0.1 * n for n in range(8)], "long_factor": [2.0 + n for n in range(8)]}
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, all told": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 16.0, "beta_slow": 2.0,
        "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.1,
    },
    "yarn, amplitude told": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **CHANNELS},
    "longrope, factor told": {
        "rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, "factor": 9.0, **CHANNELS,
    },
    "longrope, amplitude told": {
        "rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, "attention_factor": 0.9, **CHANNELS,
    },
    "longrope, not longer": {"rope_type": "longrope", "original_max_position_embeddings": 2 * LONGEST, **CHANNELS},
}  # fmt: skip


def told_by(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LONGEST,
        "rope_parameters": {"rope_theta": BASE, **KINDS[kind]}, **fields,
    }  # fmt: skip


def read(told: dict[str, Any]) -> Any:
    return conversion_for(told).config(told)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_transformers(kind: str) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    told = told_by(kind)
    theirs: Any = transformers.LlamaConfig(
        **{name: told[name] for name in told if name not in ("architectures", "model_type")}
    )
    stretching = read(told).rope_stretching
    plain = BASE ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    for length in (1, ORIGINAL, ORIGINAL + 1, LONGEST, LONGEST + 1, 3 * LONGEST):
        expected, amplitude = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](theirs, seq_len=length)
        found = stretching.frequencies(plain, base=BASE, length=length)
        torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
        assert stretching.amplitude == pytest.approx(amplitude, rel=1e-12)
        alike = stretching.longest_alike(length)
        assert alike is None or alike >= length
        torch.testing.assert_close(found, stretching.frequencies(plain, base=BASE, length=alike or 10 * LONGEST))


@pytest.mark.parametrize(
    ("scale", "low", "high", "old"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 3.0, 512)]
)
def test_the_scaling_of_llama_3_1_is_the_published_rule(scale: float, low: float, high: float, old: int) -> None:
    plain = [500_000 ** (-i / 64) for i in range(64)]
    ours = scale_rotary_frequencies(
        torch.tensor(plain, dtype=torch.float64),
        scale_factor=scale, low_freq_factor=low, high_freq_factor=high, old_context_len=old,
    )  # fmt: skip
    assert ours.tolist() == pytest.approx(scaled_by_wavelength(plain, scale, low, high, old), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_is_the_same_stretching(kind: str) -> None:
    ours = read(told_by(kind))
    told = conversion_of(ours).hf_config(ours) | {"architectures": ["LlamaForCausalLM"]}
    assert read(told).rope_stretching == ours.rope_stretching
    old = {name: value for name, value in told.items() if name != "rope_parameters"}  # transformers 4 reads these
    assert read(old).rope_stretching == ours.rope_stretching


def test_a_long_phi_keeps_the_fields_of_its_release() -> None:
    """Those of Phi-3-mini-128k-instruct, its original length beside the scaling; transformers 4 takes no further ones."""
    scaling = {"type": "su", **CHANNELS}
    told = told_by("longrope") | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_scaling": scaling}
    del told["rope_parameters"]
    told["original_max_position_embeddings"] = ORIGINAL
    ours = read(told)
    assert (ours.rope_stretching.original_length, ours.rope_stretching.factor) == (ORIGINAL, LONGEST / ORIGINAL)
    back = conversion_of(ours).hf_config(ours)
    assert back["rope_scaling"] == {**scaling, "type": "longrope"}
    assert (back["original_max_position_embeddings"], back["max_position_embeddings"]) == (ORIGINAL, LONGEST)
    ours.seq_length = 2 * ORIGINAL  # trained on at another length: the factor is told
    assert conversion_of(ours).hf_config(ours)["rope_scaling"]["factor"] == LONGEST / ORIGINAL


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"position_embedding_type": "none"},
            'needs rotary positions, but position_embedding_type="none": set position_embedding_type="rope"',
        ),
        ({"seq_len_interpolation_factor": 2.0}, "seq_len_interpolation_factor=2.0 both change rotary frequencies"),
        (
            {"apply_rope_fusion": True},
            "by 1.13863, which the kernel of apply_rope_fusion=True doesn't do: set apply_rope_fusion=False",
        ),
    ],
)
def test_what_stretching_can_t_go_with_is_refused(fields: dict[str, Any], words: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "apply_rope_fusion": False}
    stretching = Yarn(original_length=ORIGINAL, factor=4.0)
    with pytest.raises(ConfigError, match=words):
        LlamaConfig(**sizes | fields, rope_stretching=stretching)


def test_classes_with_a_scaling_of_their_own_refuse_another() -> None:
    from nemo2.models.gemma3 import Gemma3Config1B

    for kind in (Llama31Config8B, Gemma3Config1B):
        with pytest.raises(ConfigError, match="both change rotary frequencies: keep only one"):
            kind(rope_stretching=DynamicNTK(original_length=64, factor=2.0))


def on_context_ranks(ranks: int) -> torch.Tensor:
    """Logits of this rank's tokens, by their places."""
    from megatron.core import parallel_state as ps

    from support import hf_parity as parity

    parity.start(context_parallel_size=ranks)
    long = LongRope(original_length=16, factor=4.0, short_factors=[1.0] * 4, long_factors=[1.5, 2.0, 4.0, 8.0])
    config = LlamaConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=64, rope_stretching=long,
        apply_rope_fusion=False, context_parallel_size=ranks, seq_length=32,
    )  # fmt: skip
    chunk: Any = config.configure_model(SimpleNamespace(vocab_size=64)).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in chunk.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    rank, pieces = ps.get_context_parallel_rank(), torch.arange(32).chunk(2 * ranks)
    mine = torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])
    tokens = torch.randint(0, 64, (1, 32), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = chunk(tokens[:, mine], mine[None], None)[0]
    found = torch.zeros(32, 64)
    found[mine] = logits
    return found


def test_ranks_that_share_a_sequence_turn_by_its_whole_length(run_on_ranks: Any) -> None:
    (whole,) = run_on_ranks(on_context_ranks, 1, 1)
    torch.testing.assert_close(sum(run_on_ranks(on_context_ranks, 2, 2)), whole, rtol=0, atol=1e-5)
