# SPDX-License-Identifier: Apache-2.0
"""The whole stack against a bare Megatron-Core loop: same bytes, same seed, same numbers."""

from typing import Any

import pytest

from support import small_runs

STEPS = 5
TP, PP, VP = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2 with sequence parallel": {TP: 2, "sequence_parallel": True},
    "dp2 with the distributed optimizer": {"distributed": True},
    "pp2": {PP: 2},
    "pp2 vp2": {PP: 2, VP: 2, "layers": 4},
}


def bare(*, distributed: bool = False, layers: int = 2, **strategy: Any) -> dict[str, Any]:
    from support.bare_megatron import Settings, train

    model = small_runs.MODEL
    settings = Settings(
        layers=layers,
        hidden=model["hidden_size"],
        heads=model["num_attention_heads"],
        groups=model["num_query_groups"],
        ffn=model["ffn_hidden_size"],
        vocab=small_runs.VOCAB,
        seq=small_runs.SEQ,
        mbs=small_runs.MBS,
        gbs=small_runs.GBS,
        steps=STEPS,
        tp=strategy.get(TP, 1),
        pp=strategy.get(PP, 1),
        vp=strategy.get(VP),
        sequence_parallel=strategy.get("sequence_parallel", False),
        use_distributed_optimizer=distributed,
        lr=1e-2,
    )
    schedule = small_runs.cosine(STEPS)
    return train(settings, small_runs.global_batch, lr_at=lambda step: schedule.lr_at(step, settings.lr))


def ours(*, distributed: bool = False, layers: int = 2, **strategy: Any) -> dict[str, Any]:
    model = small_runs.build_llama(distributed=distributed, schedule=small_runs.cosine(STEPS), num_layers=layers)
    return small_runs.fit(model, max_steps=STEPS, **strategy)


def both(layouts: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    small_runs.quiet()
    pairs = []
    for layout in layouts:
        pairs.append((bare(**layout), ours(**layout)))
        small_runs.release()
    return pairs


@pytest.fixture(scope="module")
def pairs(run_on_ranks) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    found = {}
    for world in (1, 2):
        names = [name for name in LAYOUTS if (world == 1) == (name == "one process")]
        ranks = run_on_ranks(both, world, [LAYOUTS[name] for name in names])
        found |= dict(zip(names, ranks[0], strict=True))
    return found


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stack_trains_bit_by_bit_as_a_bare_megatron_loop(pairs, layout):
    expected, actual = pairs[layout]
    assert actual["losses"] == expected["losses"]
    assert actual["grad_norms"] == expected["grad_norms"]
    assert len(set(expected["losses"])) == STEPS
