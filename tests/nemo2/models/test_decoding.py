# SPDX-License-Identifier: Apache-2.0
"""Generation over a cache, beside transformers' own models of every family and at several layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.base.backend.extras import has
from support import hf_parity as parity
from support.hf_models import ROWS, VOCABULARY, released_config
from support.nightly import daily_and_nightly

LENGTHS, NEW, SOME, FEWER = (3, 7, 7, 17), 24, 12, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_model_parallel_size": 2},
    "TP 2, SP": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": True},
    "TP 2, EP 2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    },
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
"""The families that are tried at more layouts, and write ``SOME`` tokens without a cache; the others write ``FEWER`` there, as
all do at other layouts."""
DAILY = (*SPREAD, "Llama 4 Scout", "GPT-OSS", "StarCoder", "Qwen3-Next", "Ministral 3")
"""A row for each kind of layer that looks at where a sequence begins, or keeps something of it. Of all families the parity
compares greedy tokens over a cache every day (conversion/test_parity.py)."""


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


class WithoutCache:
    """A decoder that processes all tokens again in each call."""

    def __init__(self, core: Any, **sizes: int) -> None:
        self.core, self.tokens = core, []

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        from nemo2.models.decoding import logits_of_stage

        self.tokens.append(tokens)
        logits = logits_of_stage(self.core, torch.cat(self.tokens, dim=1))
        assert logits is not None
        return logits[:, -1].float()


def answers_without_a_cache(chunk: Any, row: Any, *, new: int) -> list[tuple[list[int], list[float]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo2.models.generate.CachedDecoder", WithoutCache)
        return answers(chunk, row, new=new)


def one_process(root: str, names: list[str]) -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parity.start()
    found = {}
    for place, row in enumerate(ROWS):
        if row.name not in names:
            continue
        folder = Path(root) / str(place)
        folder.mkdir()
        model = parity.make(row, folder)
        released = parity.Released(folder)
        chunk = released.chunk(released.config())
        cached = answers(chunk, row)
        found[row.name] = {
            "answers": cached,
            "without": answers_without_a_cache(chunk, row, new=SOME if row.name in SPREAD else FEWER),
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


def spread(root: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """By layout, what each family that is tried there answers."""
    rows = [(row, parity.Released(Path(root) / str(place))) for place, row in enumerate(ROWS) if row.name in names]
    found: dict[str, dict[str, Any]] = {}
    for name, layout in LAYOUTS.items():
        parity.start(**layout)
        found[name] = {
            row.name: answers(released.chunk(released.config(**layout)), row, new=FEWER)
            for row, released in rows
            if runs_at(released.config(), row, layout)
        }
    return found


def runs_at(config: Any, row: Any, layout: dict[str, Any]) -> bool:
    """Whether a family is tried at a layout, and can be."""
    if layout == LAYOUTS["PP 2"]:
        return True
    if row.like_another:
        return False
    if layout == LAYOUTS["EP 2"]:
        return bool(config.num_moe_experts) and row.name in SPREAD
    if layout == LAYOUTS["TP 2, EP 2"]:  # experts with biases
        return "expert_model_parallel_size" in row.with_tp
    if layout == LAYOUTS["TP 2"]:  # experts and latent attention need sequence parallelism
        one_group = row.name == "Mamba 2"
        latent = getattr(config, "multi_latent_attention", False)
        # Over a cache sequences are whole with sequence parallelism too: rows that run with it needn't without.
        return not (config.num_moe_experts or latent or one_group or row.name in SPREAD)
    # Experts with biases can't be split over tensor-parallel ranks.
    return bool(config.num_moe_experts and not config.add_bias_linear or row.name in SPREAD)


@pytest.fixture(scope="module", params=daily_and_nightly([row.name for row in ROWS], DAILY))
def names(request: pytest.FixtureRequest) -> list[str]:
    return request.param


@pytest.fixture(scope="module")
def root(names: list[str], tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("decoding")


@pytest.fixture(scope="module")
def alone(run_on_ranks: Any, root: Path, names: list[str]) -> dict[str, Any]:
    return run_on_ranks(one_process, 1, str(root), names, timeout=420)[0]


def test_every_family_takes_the_tokens_that_transformers_takes_with_a_cache_and_without(
    alone: dict[str, Any], names: list[str]
) -> None:
    """What transformers' own ``generate`` writes with a model of ours: conversion/test_parity.py."""
    for name in names:
        for same, apart in alone[name]["apart"]:
            assert same, name
            assert apart <= 1e-5, name
        assert_same(alone[name]["without"], alone[name]["answers"], name)


@pytest.fixture(scope="module")
def laid_out(run_on_ranks: Any, alone: dict[str, Any], root: Path, names: list[str]) -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(spread, 2, str(root), names, timeout=600)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_the_same_tokens(
    laid_out: list[dict[str, dict[str, Any]]], alone: dict[str, Any], names: list[str], layout: str
) -> None:
    for rank in laid_out:
        assert rank[layout] or SPREAD[0] not in names
        for name, theirs in rank[layout].items():
            assert_same(theirs, alone[name]["answers"], name)
        if layout == "PP 2":
            assert len(rank[layout]) == len(names)


def assert_same(
    found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]], name: str
) -> None:
    """The same tokens as far as ``found`` goes, at the same log-probabilities."""
    for (tokens, log_probs), (all_tokens, all_log_probs) in zip(found, expected, strict=True):
        assert tokens and tokens == all_tokens[: len(tokens)], name
        assert log_probs == pytest.approx(all_log_probs[: len(tokens)], abs=1e-5), name


def test_no_family_is_left_out() -> None:
    from nemo2.models.conversion.families import conversion_for, families

    tried = {conversion_for(released_config(row)).architectures for row in ROWS}
    assert tried == {family.architectures for family in families()}


def asked_of_the_dynamic_cache() -> str:
    """What Megatron-Core's attention lacks here to read a token over its cache of requests that come and go."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.inference_request import DynamicInferenceRequest
    from megatron.core.inference.sampling_params import SamplingParams

    from nemo2.models.llama import LlamaConfig

    parity.start()
    config = LlamaConfig(num_layers=1, hidden_size=64, num_attention_heads=2, ffn_hidden_size=32, vocab_size=32)
    chunk: Any = config.configure_model(None).eval()
    sizes: dict[str, Any] = {"max_sequence_length": 64, "buffer_size_gb": 0.01, "block_size_tokens": 16}
    try:
        from megatron.core.inference.config import InferenceConfig  # pyright: ignore[reportMissingImports]
    except ImportError:
        shape = {"num_layers": 1, "kv_channels": 32, "num_attention_heads": 2, "params_dtype": torch.float32}
        context: Any = DynamicInferenceContext(**shape, **sizes)
    else:
        context = DynamicInferenceContext(config, InferenceConfig(**sizes))  # pyright: ignore
        context.initialize_all_tensors()
    asked = SamplingParams(num_tokens_to_generate=4)
    context.add_request(DynamicInferenceRequest(request_id=0, prompt_tokens=torch.arange(5), sampling_params=asked))
    context.initialize_attention_state()
    tokens, positions = context.current_input_and_position_ids()
    try:
        with torch.no_grad():
            chunk(tokens, positions, None, inference_context=context)
    except ImportError as error:
        return str(error.name)
    return "nothing"


@pytest.mark.skipif(has("flash_attn"), reason="Megatron-Core's dynamic cache has its kernels")
def test_megatron_cores_dynamic_cache_has_no_attention_but_flash_attns(run_on_ranks: Any) -> None:
    assert run_on_ranks(asked_of_the_dynamic_cache, 1) == ["flash_attn"], "docs/use.md says so"


def test_several_tokens_over_a_cache_are_refused(run_on_ranks: Any) -> None:
    [answer] = run_on_ranks(fed_twice, 1)
    assert answer.startswith("feed: a call after the first takes one token per row, not ")


def switched(sequence_parallel: bool) -> tuple[list[bool], list[bool], bool]:
    """Whether a small model's modules split sequences, while it generates and afterwards, and whether its cache was used."""
    from nemo2.models import decoding
    from nemo2.models.generate import generate
    from nemo2.models.llama import LlamaConfig

    parity.start(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    config = LlamaConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=VOCABULARY,
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    model: Any = config.configure_model(None)
    inside: list[bool] = []
    cached = decoding.CachedDecoder.feed

    def watched(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        inside.append(splits(model) or model.config.sequence_parallel)
        assert multiplies_plainly(model)
        return cached(self, tokens)

    decoding.CachedDecoder.feed = watched
    before = splits(model)
    generate(model, Numbers(), ["1 2 3"], max_new_tokens=2, temperature=0)
    assert not multiplies_plainly(model)
    return inside, [before, splits(model)], model.config.sequence_parallel


def splits(model: Any) -> bool:
    names = ("sequence_parallel", "reduce_scatter_embeddings")
    return any(getattr(module, name, False) is True for module in model.modules() for name in names)


def multiplies_plainly(model: Any) -> bool:
    """Whether linear layers of the model make no autograd function of a product."""
    return any("_forward_impl" in vars(module) for module in model.modules())


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_sequences_are_whole_over_a_cache_and_split_again_afterwards(
    run_on_ranks: Any, sequence_parallel: bool
) -> None:
    for inside, outside, config in run_on_ranks(switched, 2, sequence_parallel):
        assert len(inside) >= 2 and not any(inside)
        assert outside == [sequence_parallel, sequence_parallel] and config == sequence_parallel


def fed_twice() -> str:
    from nemo2.models.decoding import CachedDecoder
    from nemo2.models.llama import LlamaConfig

    parity.start()
    config = LlamaConfig(num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=32)
    decoder = CachedDecoder(config.configure_model(None).eval(), batch_size=1, max_sequence_length=8)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        decoder.feed(tokens)
        assert decoder.context.is_decode_only(), "Transformer Engine's attention asks it"
        try:
            decoder.feed(tokens)
        except ValueError as error:
            return str(error)
    return "not refused"
