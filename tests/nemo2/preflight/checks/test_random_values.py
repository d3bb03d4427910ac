# SPDX-License-Identifier: Apache-2.0
"""Random recipes with values at the edges of what their fields may have: what `check` calls legal trains, and what it refuses for
Megatron-Core's sake doesn't. `python -m tests.long.random_values` looks at thousands of them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.long.random_values import Drawn, Results, drawn, judge, rules_against


@pytest.mark.parametrize("count", [8, pytest.param(48, marks=pytest.mark.nightly)])
def test_what_is_legal_trains_two_steps_and_what_is_refused_does_not(count: int) -> None:
    found, made = Results(), drawn(count)
    with ThreadPoolExecutor(2) as pool:
        for one, answer in zip(made, pool.map(judge, made), strict=True):
            found.add(one, *answer)
    assert not found.disagreements, "\n".join(found.disagreements)
    assert found.kinds["legal, and ran"] >= count // 5 and found.kinds["refused, and fails"] >= count // 8, found.kinds


@pytest.mark.parametrize(
    ("one", "rules"),
    [
        (Drawn("experts", 1, {"optim.config.decoupled_lr": 0.0}), ["schedule-ends-below-its-peak"]),
        (Drawn("latent", 1, {"model.config.add_bias_linear": True}), ["shared-experts-have-no-bias"]),
        (Drawn("experts", 1, {"model.config.gated_linear_unit": False}), []),
        (Drawn("dense", 1, {"model.config.window_size": -1}), ["values-have-their-types"]),
        (Drawn("dense", 1, {"model.config.window_attn_skip_freq": [1]}), []),
        (
            Drawn(
                "dense",
                2,
                {
                    "model.config.window_size": (8, 0),
                    "model.config.window_attn_skip_freq": [1],
                    "model.config.cp_comm_type": "all_gather",
                    "trainer.strategy.context_parallel_size": 2,
                },
            ),
            ["layer-pattern-has-every-layer"],
        ),
        (Drawn("dense", 1, {"data.num_train_samples": 1}), ["samples-for-a-step"]),
        (Drawn("dense", 1, {"data.num_val_samples": 1}), []),
        (Drawn("dense", 1, {"data.num_val_samples": 1, "trainer.limit_val_batches": 1}), ["samples-for-a-step"]),
        (
            Drawn(
                "latent", 2, {"model.config.max_position_embeddings": 1, "trainer.strategy.context_parallel_size": 2}
            ),
            ["yarn-positions-in-twice-the-context-ranks"],
        ),
        (
            Drawn("experts", 1, {"model.config.num_microbatches_with_partial_activation_checkpoints": 1}),
            ["partial-checkpoints-have-a-reader"],
        ),
        (Drawn("dense", 1, {"log.name": "a run"}), ["run-name-is-a-folder"]),
        (Drawn("dense", 2, {}), []),
    ],
)
def test_what_longer_sweeps_have_found(one: Drawn, rules: list[str]) -> None:
    """The run's verdict on each: refused by the schedule, refused by Megatron-Core, trains."""
    assert rules_against(one) == rules
