# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet against transformers' own: gradients and steps at every layout. Its logits and its greedy tokens are in
`tests/nemo2/models/conversion/test_parity.py`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo2.models.layers.rules import delta_net_problems
from nemo2.models.qwen3_next import Qwen3NextConfig80B_A3B
from nemo2.preflight.rehearse.shrink import SEQUENCE, VOCABULARY, small_sizes
from support import hf_parity as parity
from support.hf_models import ROWS
from support.nightly import daily_and_nightly, each_case

DENSE, OF_EXPERTS = "Qwen 3.5", "Qwen3-Next"
LAYOUTS: dict[str, dict[str, Any]] = {
    DENSE: {"tensor_model_parallel_size": 2},
    OF_EXPERTS: {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": True},
}
STEPS = 3


def gradients_of_linear_attention(folder: str, name: str, **layout: Any) -> dict[str, Any]:
    """This rank's parts of the gradients of the layers with linear attention, by stored tensor, each with its place."""
    parity.start(**layout)
    place = Path(folder) / name
    if not place.is_dir():
        (row,) = (row for row in ROWS if row.name == name)
        parity.make(row, place)
    released = parity.Released(place)
    chunk = released.chunk(released.config(**layout))
    ids = parity.tokens()
    chunk(ids, torch.arange(ids.size(1)).expand_as(ids), None, labels=ids.roll(-1, dims=1)).mean().backward()
    for parameter in chunk.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    parts = [leaf for leaf in parity.shards(chunk) if any(part in leaf.key for part in ("in_proj.w", "conv1d", "out_"))]
    parts += [leaf for leaf in parity.shards(chunk) if leaf.key.endswith(("A_log", "dt_bias"))]
    return {leaf.key: (parity.place(leaf), leaf.data.detach().clone()) for leaf in parts}


@pytest.mark.parametrize("name", each_case(LAYOUTS, [OF_EXPERTS]))
def test_gradients_of_tensor_parallel_halves_are_those_of_the_whole(
    run_on_ranks: Any, tmp_path: Path, name: str
) -> None:
    (whole,) = run_on_ranks(gradients_of_linear_attention, 1, str(tmp_path), name, timeout=240)
    for half in run_on_ranks(gradients_of_linear_attention, 2, str(tmp_path), name, timeout=240, **LAYOUTS[name]):
        assert half.keys() == whole.keys()
        for key, (place, gradient) in half.items():
            expected = whole[key][1][place]
            assert float((gradient - expected).norm()) < 1e-4 * float(expected.norm()), key


def losses(directory: str, expert_parallel: int, **sizes: Any) -> list[float]:
    """Of some steps on a batch each. The first run, of one process, writes the weights that all start from."""
    from megatron.core import parallel_state, tensor_parallel

    import support.bare_megatron as bare
    from nemo2.config import Config
    from nemo2.mcore.parallel.groups import destroy_model_parallel

    settings = bare.Settings(
        layers=8, vocab=VOCABULARY, seq=SEQUENCE, mbs=2, gbs=4, steps=STEPS, lr=5e-3,
        sequence_parallel=sizes.get("tp", 1) > 1, **sizes,
    )  # fmt: skip
    layout: dict[str, Any] = {
        "tensor_model_parallel_size": settings.tp,
        "pipeline_model_parallel_size": settings.pp,
        "expert_model_parallel_size": expert_parallel,
    }

    def start_parallel(settings: Any) -> None:
        destroy_model_parallel()
        parallel_state.initialize_model_parallel(**layout)
        tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)

    def build(pre: bool, post: bool, vp: int | None) -> Any:
        small = small_sizes(Config(Qwen3NextConfig80B_A3B), tp=2) | {"num_layers": 8, "vocab_size": VOCABULARY}
        config = Qwen3NextConfig80B_A3B(
            **small, **layout, sequence_parallel=settings.tp > 1, pipeline_dtype=torch.float32, moe_aux_loss_coeff=0.0
        )
        return config.configure_model(None, pre, post, vp)

    bare.start_parallel = start_parallel  # the bare loop's own knows no experts
    weights = Path(directory) / "weights"
    where: dict[str, Any] = {"load_weights_from" if weights.is_dir() else "save_weights_to": str(weights)}
    return bare.train(settings, bare.random_batches(settings), build_model=build, **where)["losses"]


@pytest.mark.parametrize("layouts", daily_and_nightly([(1, {"tp": 2}), (1, {"pp": 2}), (2, {})], [(1, {"pp": 2})]))
def test_steps_are_the_same_at_every_layout(run_on_ranks: Any, tmp_path: Path, layouts: Any) -> None:
    (alone,) = run_on_ranks(losses, 1, str(tmp_path), 1, timeout=240)
    for expert_parallel, sizes in layouts:
        for found in run_on_ranks(losses, 2, str(tmp_path), expert_parallel, timeout=240, **sizes):
            assert found == pytest.approx(alone, rel=1e-5), (expert_parallel, sizes)


@pytest.mark.parametrize(
    ("field", "changes", "tp", "cp"),
    [
        ("context_parallel_size", {}, 1, 2),
        ("linear_num_key_heads", {"linear_num_key_heads": 4}, 8, 1),
        ("linear_num_value_heads", {"linear_num_key_heads": 24, "linear_num_value_heads": 36}, 8, 1),
        ("mtp_num_layers", {"mtp_num_layers": 1}, 2, 1),
    ],
)
def test_one_sentence_for_each_broken_rule(field: str, changes: dict[str, int], tp: int, cp: int) -> None:
    config = SimpleNamespace(
        **{
            "experimental_attention_variant": "gated_delta_net",
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        }
        | changes
    )
    (problem,) = delta_net_problems(config, tp=tp, cp=cp)
    assert field in problem
