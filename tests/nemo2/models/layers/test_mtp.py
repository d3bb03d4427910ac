# SPDX-License-Identifier: Apache-2.0
"""The further losses of multi-token prediction: by their formulas, and over context-parallel ranks. Whole models are rows of the
parity table."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from nemo2 import llm
from nemo2.models import hybrid_pattern
from nemo2.models.layers.mtp import _MEAN_PER_TOKEN, FurtherLosses, _Weighted
from nemo2.models.walker import mtp_layer_name
from support import small_runs
from support.plain_decoder import PlainDecoder
from support.small_runs import device

HYBRID = ["SSMConfig"] if hasattr(hybrid_pattern._allocation(), "parse_hybrid_pattern") else []
"""Hybrids have further predictions from Megatron-Core 0.19 on."""
FACTOR = 0.3
MASK = [1, 1, 0, 1, 1, 0, 0, 1]
# Two ranks hold one chunk from each end: tokens 0, 1, 6, 7 and tokens 2 to 5.
SHARES = ([0, 1, 6, 7], [2, 3, 4, 5])
# Shifted by one the mask keeps tokens 0, 2, 3 and 6; by two, 1, 2 and 5.
KEPT = ([2, 1], [2, 2])


def weights_of(mask: list[int], per_token: bool) -> list[float]:
    """Losses of this rank's share, for a second and a third token."""

    from nemo2.models import step_tokens

    small_runs.start_megatron(context_parallel_size=2)
    config = SimpleNamespace(mtp_num_layers=2, calculate_per_token_loss=per_token)
    groups = SimpleNamespace(cp=parallel_state.get_context_parallel_group())
    chunk = SimpleNamespace(
        config=config, pg_collection=groups, compute_language_model_loss=lambda labels, logits: logits
    )
    further = FurtherLosses(chunk)
    step_tokens.count_step_tokens([{"loss_mask": torch.tensor([mask])}], mtp_num_layers=2)
    share = torch.tensor([[mask[place] for place in SHARES[torch.distributed.get_rank()]]], dtype=torch.float32)
    share = share.to(device())
    labels = torch.zeros_like(share)
    further.look_at_the_batch(None, (), {"labels": labels, "loss_mask": share})
    ones = torch.ones_like(share)
    weights = [float(further.loss(labels.clone(), ones).mean()) for _ in range(2)]
    if per_token and _MEAN_PER_TOKEN:  # what Megatron-Core multiplies by besides
        own = share.sum()
        weights = [
            weight * float(own) / kept for weight, kept in zip(weights, KEPT[torch.distributed.get_rank()], strict=True)
        ]
    assert torch.equal(further.loss(labels, ones), ones), "the model's own loss is left alone"
    return weights


def both_ways() -> tuple[list[float], list[float]]:
    return weights_of(MASK, False), weights_of(MASK, True)


def test_a_share_weighs_by_the_further_tokens_that_its_mask_keeps(run_on_ranks: Any) -> None:
    found = run_on_ranks(both_ways, 2)
    totals, whole = [4, 3], 5
    for rank, (means, per_token) in enumerate(found):
        assert means == pytest.approx([2 * KEPT[rank][n] / totals[n] for n in range(2)])
        assert per_token == pytest.approx([whole / totals[n] for n in range(2)])


def test_a_share_without_tokens_has_a_gradient_of_zero_whatever_is_divided_by_them() -> None:
    losses = torch.ones(4, requires_grad=True)
    (_Weighted.apply(losses, torch.zeros(())) / torch.zeros(())).sum().backward()
    assert losses.grad is not None and torch.equal(losses.grad, torch.zeros(4))


def further_losses_and_gradients(depth: int) -> dict[str, Any]:
    """Of a Llama with further predictions: its losses, and how far its gradients are from those of the formulas."""

    from nemo2.models.tracked_losses import report_tracked_losses

    small_runs.start_megatron()
    further: dict[str, Any] = {"mtp_num_layers": depth, "mtp_loss_scaling_factor": FACTOR}
    config = llm.LlamaConfig(**small_runs.MODEL, **further, layernorm_epsilon=1e-5)
    config.params_dtype = torch.float32
    chunk = config.configure_model(None, True, True).to(device())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    tokens = torch.randint(1, 64, (2, 17), generator=generator).to(device())
    mask = (torch.rand(2, 16, generator=generator) > 0.3).float().to(device())
    ids, labels, places = (
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        torch.arange(16).to(tokens).expand(2, 16),
    )
    losses = chunk(ids, places, None, labels=labels, loss_mask=mask)
    own = (losses * mask).sum() / mask.sum()
    own.backward()
    weights = {name: p.detach().double().requires_grad_() for name, p in chunk.named_parameters()}
    expected = by_the_formulas(weights, config, ids, labels, mask)
    (expected[0] + FACTOR / depth * sum(expected[1:])).backward()
    apart = {}
    for name, parameter in chunk.named_parameters():
        mine, theirs = parameter.grad, weights[name].grad
        assert mine is not None and theirs is not None and theirs.norm() > 0, name
        apart[name] = float((mine - theirs).norm() / theirs.norm())
    tracked = report_tracked_losses(config, microbatches=1).values()
    return {"losses": [float(own), *tracked], "expected": [float(one) for one in expected], "gradients": apart}


def by_the_formulas(
    weights: dict[str, torch.Tensor], config: Any, ids: Any, labels: Any, mask: Any
) -> list[torch.Tensor]:
    """The losses of arXiv:2412.19437, equations 21 to 25: of the next token, and of each further one."""
    model = PlainDecoder({}, config)
    model.weights = weights  # that autograd knows, and not copies
    output = weights["output_layer.weight"]

    def cross_entropy(hidden: torch.Tensor, labels: Any, mask: Any) -> torch.Tensor:
        each = torch.nn.functional.cross_entropy((hidden @ output.T).flatten(0, 1), labels.flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    def block(prefix: str, x: torch.Tensor) -> torch.Tensor:
        layer = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        x = x + model.grouped(layer, model.norm(x, layer["input_layernorm.weight"]), 0)
        return x + model.feed_forward(layer, "mlp", model.norm(x, layer["pre_mlp_layernorm.weight"]))

    x = weights["embedding.word_embeddings.weight"][ids]
    for index in range(config.num_layers):
        x = block(f"decoder.layers.{index}.", x)
    x = model.norm(x, weights["decoder.final_layernorm.weight"])
    found = [cross_entropy(x, labels, mask)]
    for depth in range(config.mtp_num_layers):
        # Each place looks at the token one further on; the last ones have none, and no loss.
        ids, labels, mask = (
            torch.cat([one[:, 1:], torch.zeros_like(one[:, :1])], dim=1) for one in (ids, labels, mask)
        )
        prefix = f"mtp.layers.{depth}."
        ahead = model.norm(weights["embedding.word_embeddings.weight"][ids], weights[f"{prefix}enorm.weight"])
        both = torch.cat([ahead, model.norm(x, weights[f"{prefix}hnorm.weight"])], dim=-1)
        x = block(f"{prefix}{mtp_layer_name()}.", both @ weights[f"{prefix}eh_proj.weight"].T)
        x = model.norm(x, weights[f"{prefix}final_layernorm.weight"])
        found.append(cross_entropy(x, labels, mask))
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_further_losses_and_all_gradients_are_those_of_the_formulas(run_on_ranks: Any, depth: int) -> None:
    [found] = run_on_ranks(further_losses_and_gradients, 1, depth)
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
    assert max(found["gradients"].values()) < 1e-4, found["gradients"]


def tokens_counted_by_routers(padding: list[list[bool]], kind: str) -> list[float]:
    """The choices of experts that the routers count, the further layers' last."""

    from nemo2.models.layers.moe import WeightedRouter

    small_runs.start_megatron()
    config = getattr(llm, kind)(
        num_layers=1, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, vocab_size=64,
        seq_length=8, num_moe_experts=4, moe_router_topk=1, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True, moe_token_dispatcher_type="alltoall", mtp_num_layers=2,
        **({} if kind == "MixtralConfig" else {"hybrid_override_pattern": "E/E/E"}),
    )  # fmt: skip
    config.params_dtype = torch.float32
    chunk = config.configure_model(None, True, True).to(device())
    mask = torch.tensor(padding, device=device())
    tokens = torch.ones_like(mask, dtype=torch.int64)
    places = torch.arange(mask.shape[1], device=device()).expand_as(tokens)
    chunk(tokens, places, None, labels=tokens, loss_mask=(~mask).float(), padding_mask=mask)
    return [float(one.local_tokens_per_expert.sum()) for one in chunk.modules() if isinstance(one, WeightedRouter)]


@pytest.mark.parametrize("kind", ["MixtralConfig", *HYBRID])
def test_padding_is_not_counted_in_the_routers_of_further_layers(run_on_ranks: Any, kind: str) -> None:
    """A layer of further predictions sees the token one further on, so its padding begins one earlier. The end of a row
    counts: Megatron-Core shifts in a 0 there."""
    (counted,) = run_on_ranks(tokens_counted_by_routers, 1, [[False] * 8, [False] * 3 + [True] * 5], kind)
    assert counted == [8 + 3, 8 + 2 + 1, 8 + 1 + 2]


def end_of_a_tied_pipeline(kind: str) -> dict[str, Any]:
    """Of the last of two stages of a model with a further prediction whose output layer is the embedding."""
    from nemo2.mcore.parallel.sharded_state import sharded_state

    small_runs.start_megatron(pipeline_model_parallel_size=2)
    sizes: dict[str, Any] = {
        "mtp_num_layers": 1,
        "share_embeddings_and_output_weights": True,
        "pipeline_model_parallel_size": 2,
    }
    if kind in HYBRID:
        sizes |= {"num_layers": 2, "hybrid_override_pattern": "M|*/M", "mamba_head_dim": 8, "mamba_num_groups": 2}
    sizes |= {"pipeline_dtype": torch.float32, "params_dtype": torch.float32}
    config = getattr(llm, kind)(**small_runs.MODEL | sizes)
    chunk = config.configure_model(None).to(device())
    if not chunk.post_process:
        return {"keys": [*sharded_state(chunk)]}
    chunk.set_input_tensor(torch.ones(16, 2, config.hidden_size, device=device()))
    embedding = chunk.embedding.word_embeddings.weight
    places, logits = torch.arange(16, device=device()).expand(2, 16), []
    for factor in (1.0, 2.0):
        with torch.no_grad():
            embedding *= factor
            logits.append(chunk(torch.zeros(2, 16, dtype=torch.long, device=device()), places, None).norm())
    return {"keys": [*sharded_state(chunk)], "ratio": float(logits[1] / logits[0])}


@pytest.mark.parametrize("kind", ["LlamaConfig", *HYBRID])
def test_the_end_of_a_pipeline_whose_output_layer_is_the_embedding_can_be_saved_and_asked(
    run_on_ranks: Any, kind: str
) -> None:
    _, last = run_on_ranks(end_of_a_tied_pipeline, 2, kind)
    assert "module.embedding.word_embeddings.weight" in last["keys"]
    assert "module.output_layer.weight" not in last["keys"]
    assert last["ratio"] == pytest.approx(2.0), "the logits without labels are the embedding's"
