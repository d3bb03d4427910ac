# SPDX-License-Identifier: Apache-2.0
"""GPTConfig and GPTModel: what the machine changes, the vocabulary, the pipeline's chunks, the micro-batch steps."""

import copy
import dataclasses
import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError, DataError
from nemo2.config import notices
from nemo2.config.provenance import adjustments, record_of
from nemo2.models import gpt_step
from nemo2.models.gpt import GPTConfig, GPTModel, get_vocab_size
from nemo2.models.gpt_step import check_token_ids
from nemo2.models.llama import LlamaConfig, LlamaModel
from support import small_runs
from support.ranks import each

TINY: dict[str, Any] = {
    name: small_runs.MODEL[name] for name in small_runs.MODEL if name not in ("vocab_size", "num_query_groups")
}


def test_a_config_holds_what_was_asked_for_whatever_this_machine_can_do() -> None:
    asked = {"apply_rope_fusion": True, "gradient_accumulation_fusion": True, "cuda_graph_impl": "transformer_engine"}
    config = LlamaConfig(**TINY, **asked)
    config.tensor_model_parallel_size = 2
    config.__post_init__()
    assert {name: getattr(config, name) for name in asked} == asked
    assert not adjustments(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_moe_experts": 4, "moe_permute_fusion": True},
        {"rotary_interleaved": True},
        {"symmetric_ar_type": "one_shot"},
        {
            "fp8": "e4m3",
            "recompute_granularity": "selective",
            "recompute_modules": ["layernorm"],
            "fp8_recipe": "mxfp8",
        },
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_kernels_of_a_machine_elsewhere_can_be_asked_for_where_transformer_engine_is_missing(
    settings: dict[str, Any],
) -> None:
    config = LlamaConfig(**TINY, **settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_fused_kernels_are_dropped_without_a_gpu_said_once_and_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "_announced", set())
    with caplog.at_level(logging.INFO, logger="nemo2.config.notices"):
        for config in (first := LlamaConfig(**TINY), LlamaConfig(**TINY)):
            config.adjust_to_this_machine()
    assert first.apply_rope_fusion is False
    [note] = adjustments(first)["apply_rope_fusion"]
    assert "GPU" in note.why and record_of(first).steps["apply_rope_fusion"][0].value is True
    assert [record.getMessage().count("apply_rope_fusion") for record in caplog.records] == [1]


def test_a_setting_the_machine_can_honour_is_kept() -> None:
    config = LlamaConfig(**TINY, apply_rope_fusion=False)
    config.adjust_to_this_machine()
    assert "apply_rope_fusion" not in adjustments(config)


def test_every_config_is_still_a_transformer_config_to_megatron() -> None:
    from megatron.core.transformer import TransformerConfig

    assert {field.name for field in dataclasses.fields(TransformerConfig)} <= {
        f.name for f in dataclasses.fields(GPTConfig)
    }


@pytest.mark.parametrize(
    ("settings", "tokenizer_size", "rows"),
    [
        ({}, 100, 128),
        ({"tensor_model_parallel_size": 2}, 100, 256),
        ({"make_vocab_size_divisible_by": 8}, 100, 104),
        ({"vocab_size": 110, "tensor_model_parallel_size": 2}, 100, 110),
    ],
)
def test_the_vocabulary_is_padded_unless_it_is_given(settings: dict[str, Any], tokenizer_size: int, rows: int) -> None:
    config = GPTConfig(**TINY, **settings)
    assert config.padded_vocab_size(SimpleNamespace(vocab_size=tokenizer_size)) == rows


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: GPTConfig(**TINY).padded_vocab_size(None),
            "No tokenizer defines the vocabulary, and model.config.vocab_size is not set",
        ),
        (
            lambda: GPTConfig(**TINY, vocab_size=90).padded_vocab_size(SimpleNamespace(vocab_size=100)),
            "vocab_size=90 is smaller than the tokenizer's 100 tokens: raise it, or set None",
        ),
        (lambda: LlamaModel(), "LlamaModel needs a config"),
        (lambda: LlamaConfig(num_layer=2), "num_layers"),  # pyright: ignore[reportCallIssue]
    ],
)
def test_what_makes_no_model_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_the_default_optimizer_is_adam_at_1e_4() -> None:
    model = GPTModel(GPTConfig(**TINY, vocab_size=64))
    assert (model.optim.config.optimizer, model.optim.config.lr) == ("adam", 1e-4)
    assert model.optim.config.use_distributed_optimizer


@pytest.mark.parametrize("key", ["tokens", "labels"])
@pytest.mark.parametrize("bad", [-1, 64])
def test_an_id_outside_the_vocabulary_is_refused(key: str, bad: int) -> None:
    batch = {"tokens": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4), "loss_mask": torch.ones(2, 4)}
    batch[key][1, 2] = bad
    with pytest.raises(DataError, match=f"1 of 8 ids in '{key}' lie outside the vocabulary of 64"):
        check_token_ids(batch, 64)


def test_labels_that_the_mask_leaves_out_may_be_anything() -> None:
    batch = {"labels": torch.tensor([[1, -100]]), "loss_mask": torch.tensor([[1.0, 0.0]])}
    assert check_token_ids(batch, 64) is batch


def a_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(3))
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(2, 16),
        "position_ids": torch.arange(16).expand(2, 16).contiguous(),
        "something_else": torch.ones(2, 16),
    }


def one_micro_batch() -> dict[str, Any]:
    small_runs.start_megatron()
    model = LlamaModel(LlamaConfig(**TINY, vocab_size=64))
    model.configure_model()
    built = model.module
    model.configure_model()
    batch = model.data_step(iter([(a_batch(), 0, 0)]))
    bad = a_batch()
    bad["tokens"][0, 0] = 64
    refusals = []
    for faulty in (bad, {"tokens": a_batch()["tokens"]}, {**a_batch(), "loss_mask": torch.ones(2, 15)}):
        try:
            model.data_step(iter([faulty]))
        except DataError as error:
            refusals.append(str(error))
    return {
        "built_once": model.module is built,
        "keys": sorted(key for key, value in batch.items() if value is not None),
        "training": model.training_step(batch),
        "validation": model.validation_step(batch, 0),
        "reduction": type(model.training_loss_reduction).__name__,
        "kept": model.training_loss_reduction is model.training_loss_reduction,
        "validating": model.validation_loss_reduction.validation_step,
        "refusals": refusals,
    }


@pytest.mark.parametrize(("length", "nearest"), [(6, 8), (8 + 3, 8)])
def test_a_sequence_that_chunks_do_not_divide_gets_a_length_that_works(
    monkeypatch: pytest.MonkeyPatch, length: int, nearest: int
) -> None:
    monkeypatch.setattr(gpt_step.parallel_state, "get_context_parallel_world_size", lambda: 4)
    with pytest.raises(DataError, match=f"{length} tokens long.*a multiple of 8, such as {nearest}[.]"):
        gpt_step._shares({"tokens": torch.zeros(1, length)})


def test_a_model_fetches_checks_and_runs_a_micro_batch(run_on_ranks: Any) -> None:
    result = run_on_ranks(one_micro_batch, 1)[0]
    assert result["built_once"]
    assert result["keys"] == ["labels", "loss_mask", "position_ids", "tokens"]
    assert result["training"].shape == (2, 16)
    torch.testing.assert_close(result["training"], result["validation"])
    assert (result["reduction"], result["kept"], result["validating"]) == ("MaskedTokenLossReduction", True, True)
    assert "'tokens' lie outside the vocabulary of 64" in result["refusals"][0]
    assert "labels of shape [2, 16], loss_mask of shape [2, 15]. Return one shape for all" in result["refusals"][2]
    assert "The batch has no position_ids, labels, loss_mask, which a GPT needs" in result["refusals"][1]


def chunks_of_a_pipeline(virtual: int | None) -> list[tuple[int, bool, bool, list[str]]]:
    small_runs.start_megatron(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual)
    shape = TINY | {"num_layers": 4}
    config = LlamaConfig(
        **shape,
        vocab_size=64,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
    )
    model = LlamaModel(config)
    chunks = [model.build_chunk(stage) for stage in range(virtual)] if virtual else [model.build_chunk(None)]
    kept = sorted(key for key, value in model.data_step(iter([a_batch()])).items() if value is not None)
    return [(len(chunk.decoder.layers), chunk.pre_process, chunk.post_process, kept) for chunk in chunks]


def test_pipeline_stages_hold_their_layers_and_fetch_what_they_need_and_virtual_ones_an_end_each(
    run_on_ranks: Any,
) -> None:
    (first, virtual_first), (last, virtual_last) = run_on_ranks(each, 2, chunks_of_a_pipeline, [(None,), (2,)])
    assert first == [(2, True, False, ["position_ids", "tokens"])]
    assert last == [(2, False, True, ["labels", "loss_mask"])]
    assert [chunk[:3] for chunk in virtual_first] == [(1, True, False), (1, False, False)]
    assert [chunk[:3] for chunk in virtual_last] == [(1, False, False), (1, False, True)]


def share_of_a_sequence() -> tuple[torch.Tensor, str]:
    small_runs.start_megatron(context_parallel_size=2)
    model = LlamaModel(LlamaConfig(**TINY, vocab_size=64, context_parallel_size=2))
    tokens = model.data_step(iter([a_batch()]))["tokens"]
    try:
        model.data_step(iter([{key: value[:, :14] for key, value in a_batch().items()}]))
    except DataError as error:
        return tokens, str(error)
    raise AssertionError("a sequence of 14 was split into 4 chunks")


def test_context_parallel_ranks_take_one_chunk_from_each_end(run_on_ranks: Any) -> None:
    whole = a_batch()["tokens"].chunk(4, dim=1)
    (first, refusal), (second, _) = run_on_ranks(share_of_a_sequence, 2)
    assert torch.equal(first, torch.cat([whole[0], whole[3]], dim=1))
    assert torch.equal(second, torch.cat([whole[1], whole[2]], dim=1))
    assert "14 tokens long" in refusal and "such as 12" in refusal


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize(
    ("family", "home", "name"),
    [
        ("gpt_oss:GPTOSSConfig20B", "megatron.core.fusions.fused_bias_geglu", "quick_gelu"),
        ("nemotron:Nemotron3Config4B", "megatron.core.activations", "squared_relu"),
        ("ssm:NemotronHConfig8B", "megatron.core.activations", "squared_relu"),
    ],
)
def test_megatron_core_s_activation_is_known_compiled_or_not(
    monkeypatch: pytest.MonkeyPatch, family: str, home: str, name: str, ours: bool, theirs: bool
):
    """The CPU's backend takes compilation out of Megatron-Core's modules, maybe after ours have imported a function."""
    from megatron.core.transformer import transformer_config

    module, _, config = family.partition(":")
    known = getattr(import_module(home), name)
    plain = getattr(known, "_torchdynamo_orig_callable", known)
    kinds = {False: plain, True: torch.compile(plain)}
    for place in (import_module(home), transformer_config):
        if hasattr(place, name):
            monkeypatch.setattr(place, name, kinds[theirs])
    made = getattr(import_module(f"nemo2.models.{module}"), config)(activation_func=kinds[ours])
    assert made.activation_func is kinds[theirs]


def test_a_size_is_a_row_of_defaults_and_a_field_that_the_family_lacks_is_refused() -> None:
    from nemo2.config.capture import captured_arguments
    from nemo2.models.qwen3 import Qwen3Config, Qwen3Config8B

    assert [field.name for field in dataclasses.fields(Qwen3Config8B)] == [
        f.name for f in dataclasses.fields(Qwen3Config)
    ]
    assert captured_arguments(Qwen3Config8B(num_layers=2)) == {"num_layers": 2}
    with pytest.raises(AttributeError, match="num_layer'.*did you mean 'num_layers'"):
        type("Typo", (Qwen3Config,), {}, num_layer=2)

    class Wider(Qwen3Config8B, num_layers=2):
        own: int = 1

    for row, field in ((Qwen3Config8B(), "num_layers"), (Wider(), "own")):
        other = copy.copy(row)
        assert other == row and f"{field}={getattr(row, field)}" in repr(row)
        setattr(other, field, 3)
        assert other != row


@pytest.mark.parametrize(
    ("vocab", "divisible_by", "tp", "padded"),
    [(50257, 128, 1, 50304), (128256, 128, 8, 129024), (256, 128, 2, 256), (1, 1, 3, 3)],
)
def test_the_padded_vocabulary_divides_over_the_ranks(vocab, divisible_by, tp, padded):
    config = SimpleNamespace(tensor_model_parallel_size=tp)
    assert get_vocab_size(config, vocab, divisible_by) == padded
    with pytest.raises(ConfigError, match="must be 1 or more"):
        get_vocab_size(config, vocab, 0)
