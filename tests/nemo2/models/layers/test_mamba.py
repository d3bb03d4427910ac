# SPDX-License-Identifier: Apache-2.0
"""Mamba 2 in plain PyTorch against its recurrence, step by step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo2.base.errors import ConfigError
from nemo2.models import hybrid_pattern
from nemo2.models.layers.mamba import selective_scan
from nemo2.models.ssm import NemotronHConfig8B
from support import small_runs
from support.small_runs import device

SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hybrid_override_pattern": "M",
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 4,
    "vocab_size": 32,
    "seq_length": 12,
}


def recurrence(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Equation 1 of arXiv:2405.21060 with a scalar decay per head, one step after the other."""
    heads = x.size(2)
    b, c = (t.repeat_interleave(heads // t.size(2), dim=2) for t in (b, c))
    state = torch.zeros(x.size(0), heads, b.size(-1), x.size(-1), dtype=x.dtype, device=x.device)
    outputs = []
    for t in range(x.size(1)):
        kept = (dt[:, t] * decay).exp()[..., None, None]
        state = kept * state + b[:, t].unsqueeze(-1) * (dt[:, t, :, None] * x[:, t]).unsqueeze(-2)
        outputs.append((c[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize(("length", "chunk"), [(12, 4), (13, 4), (5, 8), (8, 1)])
def test_the_scan_in_chunks_is_the_recurrence(length: int, chunk: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, length, 4, 3, dtype=torch.float64, requires_grad=True)
    dt = torch.rand(2, length, 4, dtype=torch.float64, requires_grad=True)
    decay = -torch.rand(4, dtype=torch.float64) * 4
    b, c = (torch.randn(2, length, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (ours, last), theirs = selective_scan(x, dt, decay, b, c, chunk=chunk), recurrence(x, dt, decay, b, c)
    first, state = selective_scan(x[:, :3], dt[:, :3], decay, b[:, :3], c[:, :3], chunk=chunk)
    rest, after = selective_scan(x[:, 3:], dt[:, 3:], decay, b[:, 3:], c[:, 3:], chunk=chunk, state=state)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(after, last, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(ours)
    for mine, reference in zip(
        torch.autograd.grad((ours * weights).sum(), (x, dt, b, c)),
        torch.autograd.grad((theirs * weights).sum(), (x, dt, b, c)),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-11)


def test_a_strong_decay_over_a_long_chunk_stays_finite() -> None:
    x = torch.ones(1, 256, 1, 1, requires_grad=True)
    dt, decay, one = torch.full((1, 256, 1), 10.0), torch.tensor([-16.0]), torch.ones(1, 256, 1, 1)
    y, _ = selective_scan(x, dt, decay, one, one)
    y.sum().backward()
    assert y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()


def model_and_formula() -> tuple[Tensor, Tensor]:
    """Logits of one mixer between embedding and output layer, and the same from arXiv:2405.21060, figure 6."""
    small_runs.start_megatron()
    config = NemotronHConfig8B(**SIZES, account_for_embedding_in_pipeline_split=True)  # of no pipeline
    model = config.configure_model(None).to(device())
    tokens = torch.arange(24, device=device()).view(2, 12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        weights = dict(model.state_dict())

        def of(name: str) -> Tensor:
            return weights[f"decoder.layers.0.{name}"]

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

        x = weights["embedding.word_embeddings.weight"][tokens]
        z, xbc, dt = (norm(x, of("norm.weight")) @ of("mixer.in_proj.weight").T).split([32, 48, 4], dim=-1)
        before = F.pad(xbc, (0, 0, 3, 0))
        kernel = of("mixer.conv1d.weight")[:, 0]
        xbc = F.silu(sum(before[:, k : k + 12] * kernel[:, k] for k in range(4)) + of("mixer.conv1d.bias"))
        inner, b, c = xbc.split([32, 8, 8], dim=-1)
        heads = inner.unflatten(-1, (4, 8))
        step = F.softplus(dt + of("mixer.dt_bias"))
        y = recurrence(heads, step, -of("mixer.A_log").exp(), b.unflatten(-1, (2, 4)), c.unflatten(-1, (2, 4)))
        y = ((y + heads * of("mixer.D")[:, None]).flatten(2) * F.silu(z)).unflatten(-1, (2, 16))
        y = norm(y, of("mixer.norm.weight").view(2, 16)).flatten(2)
        x = x + y @ of("mixer.out_proj.weight").T
        logits = norm(x, weights["decoder.final_norm.weight"]) @ weights["output_layer.weight"].T
        return model(tokens, None, None), logits


def test_a_mixer_computes_what_the_paper_says(run_on_ranks: Any) -> None:
    ours, theirs = run_on_ranks(model_and_formula, 1)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def adapted_names() -> tuple[set[str], set[str], set[str]]:
    """Names of a mixer's tensors with adapters, in its sharded and in its plain state, and the keys they are stored under."""

    from nemo2.mcore.parallel.sharded_state import sharded_state
    from nemo2.mcore.parallel.transform import transformed
    from nemo2.models.peft import LoRA

    small_runs.start_megatron()
    model = transformed(
        NemotronHConfig8B(**SIZES).configure_model(None), LoRA(target_modules=["in_proj", "out_proj"], dim=4)
    )
    state = sharded_state(model)
    keys = {leaf.key for leaf in state.values() if hasattr(leaf, "key")}
    return {name.removeprefix("module.") for name in state}, set(model.state_dict()), keys


def test_a_mixer_with_adapters_is_stored_under_its_own_keys(run_on_ranks: Any) -> None:
    sharded, plain, keys = run_on_ranks(adapted_names, 1)[0]
    assert "decoder.layers.0.mixer.in_proj.to_wrap.weight" in sharded
    assert {name for name in plain if "_proj." in name} <= sharded
    assert not any("to_wrap" in key for key in keys)


def refusals() -> list[str]:
    small_runs.start_megatron()
    said = []
    for changes in ({"hybrid_override_pattern": "MM"}, {"mamba_num_groups": 3}, {"context_parallel_size": 2}):
        with pytest.raises(ConfigError) as error:
            NemotronHConfig8B(**{**SIZES, **changes}).configure_model(None)
        said.append(str(error.value))
    return said


def test_what_cannot_be_built_is_refused_in_words(run_on_ranks: Any) -> None:
    pattern, groups, context = run_on_ranks(refusals, 1)[0]
    assert "names 2 layers, but model.config.num_layers=1" in pattern
    assert "4 heads and model.config.mamba_num_groups=3 can't be sharded" in groups
    assert "context_parallel_size=2" in context


def stages_built(sizes: dict[str, Any]) -> list[Any]:
    """Of each of three pipeline stages how many layers Megatron-Core builds, or why none are."""

    from nemo2 import llm

    small_runs.start_megatron(pipeline_model_parallel_size=3)
    found = []
    for layers, options in sizes.items():
        pattern, chunks = options.pop("pattern", "M*-" * 3), options.get("virtual_pipeline_model_parallel_size")
        kinds = pattern if "|" in pattern else pattern[: int(layers)]
        config = llm.SSMConfig(**SIZES | {"num_layers": int(layers), "hybrid_override_pattern": kinds})
        for name, value in {"pipeline_model_parallel_size": 3, "pipeline_dtype": torch.float32, **options}.items():
            setattr(config, name, value)
        try:
            stages: Any = range(chunks) if chunks else (None,)
            built = [config.configure_model(None, vp_stage=stage).decoder.layers for stage in stages]
            found.append(sum(map(len, built)))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_a_pipeline_has_every_layer_of_the_pattern_or_is_refused(run_on_ranks: Any) -> None:
    """Megatron-Core 0.16 leaves the last ones out where the stages don't divide them, and counts no embedding as one."""
    first = {"num_layers_in_first_pipeline_stage": 2}
    counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    ranks = run_on_ranks(
        stages_built,
        3,
        {
            "3": {},
            "4": first,
            "5": {},
            "6": first | {"num_layers_in_last_pipeline_stage": 3},
            "7": counted,
            "8": {"virtual_pipeline_model_parallel_size": 2},
            "9": {"virtual_pipeline_model_parallel_size": 2, "pattern": "M|*-|M*|-|M*|-"},
        },
    )
    built = list(zip(*ranks, strict=True))
    assert built[0] == (1, 1, 1) and built[1] == (2, 1, 1) and built[3] == (2, 1, 3)
    assert all("num_layers=5 leaves 5 layers for 3 stages, which cannot be split evenly" in told for told in built[2])
    assert all("strategy.account_for_embedding_in_pipeline_split=True" in told for told in built[4])
    assert all("separate 6 stages by '|'" in told for told in built[5])
    if hasattr(hybrid_pattern._allocation(), "parse_hybrid_pattern"):
        assert built[6] == (2, 4, 3)
    else:
        assert all("requires Megatron-Core 0.19" in told for told in built[6])
