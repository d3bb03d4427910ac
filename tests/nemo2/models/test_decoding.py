# SPDX-License-Identifier: Apache-2.0
"""Generation over a cache, beside transformers' own models of every family and at several layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import hf_parity as parity
from support.hf_models import ROWS, VOCABULARY

LENGTHS, NEW, FEWER = (3, 7, 7, 17), 64, 12
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_model_parallel_size": 2},
    "TP 2, SP": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
}
SPREAD = (
    "Llama 3.1, Nemotron Nano and 70B",
    "Llama, dynamic scaling",
    "Phi-3 mini and medium, 128k",
    "Gemma 3",
    "Qwen 3 MoE",
    "DeepSeek V2",
    "Nemotron-H, Nemotron Nano v2",
)
"""The families that write ``NEW`` tokens at other layouts too, and without a cache; the others write ``FEWER`` there."""
BY_LENGTH = ("Llama, dynamic scaling", "Phi-3 mini and medium, 128k")


class Numbers:
    """Tokens written as numbers."""

    vocab_size = VOCABULARY

    def text_to_ids(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def ids_to_text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def prompts() -> list[str]:
    generator = torch.Generator().manual_seed(1)
    return [
        Numbers().ids_to_text(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())
        for length in LENGTHS
    ]


def answers(chunk: Any, row: Any, *, new: int = NEW, **settings: Any) -> list[tuple[list[int], list[float]]]:
    from nemo2.models.generate import generate

    most = row.fields.get("n_positions")  # of a table of learned positions
    found = generate(
        chunk, Numbers(), prompts(), max_new_tokens=new, temperature=0, max_sequence_length=most, **settings
    )
    return [(answer.token_ids, answer.log_probs) for answer in found]


def one_process(root: str) -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parity.start()
    found = {}
    for place, row in enumerate(ROWS):
        folder = Path(root) / str(place)
        folder.mkdir()
        model = parity.make(row, folder)
        released = parity.Released(folder)
        chunk = released.chunk(released.config())
        cached = answers(chunk, row)
        found[row.name] = {
            "answers": cached,
            "without": answers(chunk, row, new=NEW if row.name in SPREAD else FEWER, use_cache=False),
            "apart": [beside(model, *pair) for pair in zip(prompts(), cached, strict=True)],
        }
    return found


def beside(model: Any, prompt: str, answer: tuple[list[int], list[float]]) -> tuple[bool, float]:
    """Whether transformers' model takes the same tokens, and how far its log-probabilities of them are."""
    ids = Numbers().text_to_ids(prompt)
    whole = torch.tensor([ids + answer[0]])
    # A sequence that grows may turn its positions otherwise at each length.
    by_length = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope")
    with torch.no_grad():
        if by_length:
            growing = range(len(ids), whole.size(1))
            logits = torch.cat([model(whole[:, :length], use_cache=False).logits[0, -1:] for length in growing])
        else:
            logits = model(whole, use_cache=False).logits[0, len(ids) - 1 : -1]
    picked = torch.tensor(answer[0])
    log_probs = logits.float().log_softmax(-1).gather(-1, picked[:, None])[:, 0]
    return logits.argmax(-1).tolist() == answer[0], float((log_probs - torch.tensor(answer[1])).abs().max())


def spread(root: str, layout: dict[str, Any]) -> dict[str, Any]:
    parity.start(**layout)
    found = {}
    for place, row in enumerate(ROWS):
        new = NEW if row.name in SPREAD else FEWER
        released = parity.Released(Path(root) / str(place))
        if runs_at(released.config(), row, layout):
            found[row.name] = answers(released.chunk(released.config(**layout)), row, new=new)
    return found


def runs_at(config: Any, row: Any, layout: dict[str, Any]) -> bool:
    """Whether a family is tried at a layout, and can be."""
    if layout == LAYOUTS["PP 2"]:
        return True
    if layout == LAYOUTS["EP 2"]:
        return bool(config.num_moe_experts) and row.name in SPREAD
    if layout == LAYOUTS["TP 2"]:  # experts and latent attention need sequence parallelism
        one_group = row.name == "Mamba 2"
        return not (config.num_moe_experts or getattr(config, "multi_latent_attention", False) or one_group)
    # Sequence parallelism pads the length, by which some turn their positions: these are refused.
    # Experts with biases can't be split over tensor-parallel ranks.
    experts = config.num_moe_experts and not config.add_bias_linear
    return row.name not in BY_LENGTH and bool(experts or row.name in SPREAD)


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("decoding")


@pytest.fixture(scope="module")
def alone(run_on_ranks: Any, root: Path) -> dict[str, Any]:
    return run_on_ranks(one_process, 1, str(root), timeout=300)[0]


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_every_family_takes_the_tokens_that_transformers_takes(alone: dict[str, Any], name: str) -> None:
    for same, apart in alone[name]["apart"]:
        assert same
        assert apart <= 1e-5


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_every_family_takes_the_same_tokens_without_a_cache(alone: dict[str, Any], name: str) -> None:
    assert_same(alone[name]["without"], alone[name]["answers"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_the_same_tokens(run_on_ranks: Any, alone: dict[str, Any], root: Path, layout: str) -> None:
    for found in run_on_ranks(spread, 2, str(root), LAYOUTS[layout], timeout=300):
        assert found
        for name, theirs in found.items():
            assert_same(theirs, alone[name]["answers"])
    if layout == "PP 2":
        assert len(found) == len(ROWS)


def assert_same(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    """The same tokens as far as ``found`` goes, at the same log-probabilities."""
    for (tokens, log_probs), (all_tokens, all_log_probs) in zip(found, expected, strict=True):
        assert tokens and tokens == all_tokens[: len(tokens)]
        assert log_probs == pytest.approx(all_log_probs[: len(tokens)], abs=1e-5)


def test_several_tokens_over_a_cache_are_refused(run_on_ranks: Any) -> None:
    assert run_on_ranks(fed_twice, 1) == ["Megatron-Core lets several tokens of a later call see each other: feed one."]


def fed_twice() -> str:
    from nemo2.models.decoding import CachedDecoder
    from nemo2.models.llama import LlamaConfig

    parity.start()
    config = LlamaConfig(num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=32)
    decoder = CachedDecoder(config.configure_model(None).eval(), batch_size=1, max_sequence_length=8)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        decoder.feed(tokens)
        try:
            decoder.feed(tokens)
        except ValueError as error:
            return str(error)
    return "not refused"
