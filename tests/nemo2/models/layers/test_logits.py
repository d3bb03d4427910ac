# SPDX-License-Identifier: Apache-2.0
"""Rows that pad a vocabulary have no probability and no gradient, whoever computes the loss and however it is split."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from nemo2.base.errors import DataError
from nemo2.models.layers.logits import PaddingMask
from support.small_runs import start_megatron
from tests.nemo2.models.test_gpt import TINY

UNIT = 32
LAST_RANK_HOLDS_FIVE, LAST_RANK_HOLDS_NONE = 37, 30
"""Tokens of vocabularies that two tensor-parallel ranks pad to 64 rows."""


def built(tokens: int, tp: int = 1, family: str = "llama", **settings: Any) -> Any:
    """A model of `family` with a tokenizer of `tokens`, on this rank."""
    from nemo2.models import GPTModel, LlamaConfig, SSMConfig

    config = {"llama": LlamaConfig, "ssm": SSMConfig}[family](
        **TINY | {"make_vocab_size_divisible_by": UNIT, "tensor_model_parallel_size": tp, "normalization": "RMSNorm"},
        sequence_parallel=tp > 1,
        **settings,
    )
    model = GPTModel(config, tokenizer=SimpleNamespace(vocab_size=tokens))
    model.configure_model()
    return model


def batch_of(tokens: int) -> dict[str, Any]:
    text = torch.randint(tokens, (2, 17), generator=torch.Generator().manual_seed(5))
    places = torch.arange(16).expand(2, 16).contiguous()
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "position_ids": places,
        "attention_mask": None,
    }


def whole(logits: torch.Tensor) -> torch.Tensor:
    """Of all ranks, without a gradient."""
    parts = [torch.empty_like(logits) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, logits.detach().contiguous())
    return torch.cat(parts, dim=-1)


def loss_against_torch(tokens: int, tp: int, fused: bool, settings: dict[str, Any]) -> dict[str, Any]:
    start_megatron(tensor_model_parallel_size=tp)
    model = built(tokens, tp, **settings)
    model.config.cross_entropy_loss_fusion = fused
    batch = batch_of(tokens)
    logits = whole(model.forward_step({**batch, "labels": None}))
    loss = model.forward_step(batch)
    loss.sum().backward()
    weight = model.module.output_layer.weight
    kept = max(0, min(weight.shape[0], tokens - weight.shape[0] * torch.distributed.get_rank()))
    return {
        "loss": loss.detach(),
        "of torch": cross_entropy(logits[..., :tokens].transpose(1, 2), batch["labels"], reduction="none"),
        "of all rows": logits.logsumexp(-1) - logits.gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1),
        "kept": float(weight.grad[:kept].abs().sum()),
        "padding": float(weight.grad[kept:].abs().sum()),
        "rows of padding": len(weight.grad) - kept,
    }


HYBRID: dict[str, Any] = {"family": "ssm", "hybrid_override_pattern": "*-", "num_query_groups": 2}
CASES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    f"{tokens} on {tp}{', fused' if fused else ''}": (tokens, tp, fused, {})
    for tokens, tp in ((LAST_RANK_HOLDS_FIVE, 1), (LAST_RANK_HOLDS_FIVE, 2), (LAST_RANK_HOLDS_NONE, 2))
    for fused in (False, True)
}
CASES["capped"] = (LAST_RANK_HOLDS_FIVE, 2, False, {"final_logit_softcapping": 3.0})
CASES["hybrid"] = (LAST_RANK_HOLDS_FIVE, 2, False, HYBRID)
CASES["capped hybrid"] = (LAST_RANK_HOLDS_FIVE, 2, False, HYBRID | {"final_logit_softcapping": 3.0})


def losses_on(ranks: int) -> dict[str, Any]:
    return {name: loss_against_torch(*case) for name, case in CASES.items() if case[1] == ranks}


def in_one_process(tokens: int) -> dict[str, Any]:
    refused = {masked: an_id_of_padding(tokens, masked) for masked in (True, False)}
    return losses_on(1) | {"refused": refused, "nemo's way": nemos_way(tokens)}


def on_two_ranks(tokens: int) -> dict[str, Any]:
    return losses_on(2) | {"further": further_losses(tokens), "gathered": gathered_logits(tokens)}


@pytest.fixture(scope="module")
def one(run_on_ranks: Any) -> list[dict[str, Any]]:
    return run_on_ranks(in_one_process, 1, LAST_RANK_HOLDS_FIVE)


@pytest.fixture(scope="module")
def two(run_on_ranks: Any) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, LAST_RANK_HOLDS_FIVE)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_tokens_alone(one: Any, two: Any, name: str) -> None:
    tokens, tp, _, settings = CASES[name]
    ranks = [rank[name] for rank in (one if tp == 1 else two)]
    for found in ranks:
        torch.testing.assert_close(found["loss"], found["of torch"], rtol=1e-6, atol=1e-6)
        assert found["padding"] == 0.0
        if not settings:
            torch.testing.assert_close(found["of torch"], found["of all rows"])
    assert sum(found["rows of padding"] for found in ranks) == UNIT * tp * -(-tokens // (UNIT * tp)) - tokens


def further_losses(tokens: int) -> list[float]:
    """What multi-token prediction reports, with the padding's rows as they are and then turned up."""
    from nemo2.models.tracked_losses import forget_tracked_losses, report_tracked_losses

    start_megatron(tensor_model_parallel_size=2)
    model = built(tokens, 2, mtp_num_layers=1)
    reported = []
    for factor in (1.0, 100.0):
        weight = model.module.output_layer.weight
        weight.data[max(0, tokens - len(weight) * torch.distributed.get_rank()) :] *= factor
        forget_tracked_losses()
        model.forward_step(batch_of(tokens)).sum().backward()
        reported.append(report_tracked_losses(model.module.config, microbatches=1)["mtp_1_loss"])
    return reported


def test_further_predictions_do_not_see_padding_either(two: Any) -> None:
    for as_drawn, turned_up in (rank["further"] for rank in two):
        assert as_drawn == turned_up > 1.0


def gathered_logits(tokens: int) -> torch.Tensor:
    start_megatron(tensor_model_parallel_size=2)
    batch = batch_of(tokens)
    model = built(tokens, 2, share_embeddings_and_output_weights=False).module
    with torch.no_grad():
        return model(batch["tokens"], batch["position_ids"], None, runtime_gather_output=True)


def test_logits_that_are_gathered_hold_the_padding_at_their_end(two: Any) -> None:
    for logits in (rank["gathered"] for rank in two):
        probabilities = logits.softmax(-1)
        assert logits.shape == (2, 16, 64) and logits.isfinite().all()
        assert probabilities[..., LAST_RANK_HOLDS_FIVE:].count_nonzero() == 0
        assert probabilities[..., :LAST_RANK_HOLDS_FIVE].min() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_hold_the_mask_and_it_travels(dtype: torch.dtype) -> None:
    mask = pickle.loads(pickle.dumps(PaddingMask(tokens=5, rows=8, first=0)))
    logits = torch.zeros(2, 8, dtype=dtype)
    mask(torch.nn.Identity(), (), (logits, None))
    assert logits.isfinite().all() and logits.float().softmax(-1)[:, 5:].count_nonzero() == 0


def an_id_of_padding(tokens: int, mask: bool) -> str:
    start_megatron()
    batch = batch_of(tokens) | {"loss_mask": torch.ones(2, 16)}
    batch["labels"][1, 3] = tokens
    try:
        built(tokens, mask_vocab_padding=mask).data_step(iter([batch]))
    except DataError as error:
        return str(error)
    return ""


def test_an_id_without_a_probability_is_refused(one: Any) -> None:
    said = one[0]["refused"]
    assert "outside the vocabulary of 37" in said[True] and said[False] == ""


def nemos_way(tokens: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    start_megatron()
    model = built(tokens, mask_vocab_padding=False)
    batch = batch_of(tokens)
    logits = model.forward_step({**batch, "labels": None}).detach()
    loss = model.forward_step(batch)
    loss.sum().backward()
    expected = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return loss.detach(), expected, float(model.module.output_layer.weight.grad[tokens:].abs().sum())


def test_a_switch_gives_padding_its_share_as_nemo_does(one: Any) -> None:
    loss, expected, of_padding = one[0]["nemo's way"]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert of_padding > 0
