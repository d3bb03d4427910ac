# SPDX-License-Identifier: Apache-2.0
"""Sequences packed into one row train as they would one by one, alone and over ranks."""

from typing import Any

import pytest
import torch

from nemo2.base.errors import DataError
from support import small_runs
from support.small_runs import device

LENGTHS = (8, 4, 12)  # each divides by 2 * cp; 24 of the row's 32 tokens, the rest is padding
ROW, VOCAB = 32, 64
CONFIG: dict[str, Any] = small_runs.MODEL | {"seq_length": ROW, "hidden_dropout": 0.0}


def row(*, with_argmin: bool = False) -> dict[str, torch.Tensor]:
    """As a data set for fine-tuning collates it: `cu_seqlens` is padded with -1."""
    text = torch.randint(VOCAB, (1, ROW + 1), generator=torch.Generator().manual_seed(3))
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist(), -1, -1])
    batch = {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": (torch.arange(ROW) < sum(LENGTHS)).float()[None],
        "position_ids": torch.cat([torch.arange(n) for n in (*LENGTHS, ROW - sum(LENGTHS))])[None],
        "attention_mask": torch.ones(1),
        "cu_seqlens": ends[None].int(),
        "max_seqlen": torch.tensor([ROW]),
    }
    return batch | ({"cu_seqlens_argmin": torch.tensor([[4]])} if with_argmin else {})


def losses(layout: dict[str, int], kind: str, cut: bool) -> tuple[list[float], dict[str, float]]:
    """The summed loss of each sequence and the norm of each gradient, from weights that are the same in every layout."""

    from nemo2.models.llama import Llama3Config, LlamaModel

    small_runs.start_megatron(**layout)
    model = LlamaModel(Llama3Config(**CONFIG, **layout, cp_comm_type=kind))
    model.configure_model()
    model.to(device())
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    whole = row()
    if cut:
        bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
        names = ("tokens", "labels", "loss_mask", "position_ids")
        batches = [{n: whole[n][:, a:b] for n in names} for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    else:
        batches = [whole]
    sums = []
    for batch in batches:
        own = model.data_step(iter([batch]))
        per_token = model.forward_step(own) * own["loss_mask"]
        per_token.sum().backward()
        sums.append(float(per_token.detach().sum()))
    total = torch.tensor(sum(sums), device=device())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for value in (total, *grads.values()):
        torch.distributed.all_reduce(value)
    assert len(grads) == len(list(model.parameters()))
    return [float(total)], {name: float(g.double().sum()) for name, g in grads.items()} | {
        f"{name} norm": float(g.norm()) for name, g in grads.items()
    }


def ways() -> dict[str, Any]:
    return {
        kind: losses({"context_parallel_size": torch.distributed.get_world_size()}, kind, False)
        for kind in ("all_gather", "p2p", "a2a")
    }


def one_by_one() -> tuple[Any, Any]:
    layout = {"context_parallel_size": 1}
    return losses(layout, "p2p", True), losses(layout, "p2p", False)


def test_a_pack_trains_as_its_sequences_one_by_one_and_over_context_parallel_ranks(run_on_ranks):
    expected, packed = run_on_ranks(one_by_one, 1)[0]
    for name, (loss, gradients) in {"packed": packed, **run_on_ranks(ways, 2)[0]}.items():
        assert loss == pytest.approx(expected[0], rel=1e-6), name
        norms = {key: value for key, value in expected[1].items() if key.endswith("norm")}
        for key, norm in norms.items():
            assert gradients[key] == pytest.approx(norm, rel=1e-5), (name, key)
            plain = key.removesuffix(" norm")
            assert gradients[plain] == pytest.approx(expected[1][plain], rel=1e-4, abs=1e-5 * norm), (name, plain)


def steps() -> dict[str, Any]:
    from nemo2.models.gpt_step import gpt_data_step

    small_runs.start_megatron()
    answers: dict[str, Any] = {}
    for name, batch in {"by -1": row(), "by argmin": row(with_argmin=True)}.items():
        params: Any = gpt_data_step(iter([batch]))["packed_seq_params"]
        answers[name] = (params.cu_seqlens_q.tolist(), params.max_seqlen_q)
    answers["mask"] = gpt_data_step(iter([row()]))["attention_mask"]
    two = {key: value.repeat(2, 1) if value.dim() == 2 else value for key, value in row().items()}
    for name, batch in {
        "two rows": two,
        "falling": row() | {"cu_seqlens": torch.tensor([0, 9, 5, 24])},
        "too long": row() | {"cu_seqlens": torch.tensor([0, 40])},
    }.items():
        with pytest.raises(DataError) as caught:
            gpt_data_step(iter([batch]))
        answers[name] = str(caught.value)
    return answers


def test_the_data_step_says_where_sequences_are_and_refuses_what_cannot_be(run_on_ranks):
    answers = run_on_ranks(steps, 1)[0]
    # The padding behind the last sequence counts as one; the longest is what is there, not what the data says.
    assert answers["by -1"] == answers["by argmin"] == ([0, 8, 12, 24, 32], 12)
    assert answers["mask"] is None
    assert "has 2. Set micro_batch_size=1" in answers["two rows"]
    assert (
        "never decrease, and end at or before the row's 32 tokens; this batch has [0, 9, 5, 24]" in answers["falling"]
    )
    assert "at or before the row's 32 tokens; this batch has [0, 40]" in answers["too long"]
