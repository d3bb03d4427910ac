# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of the time before the first step, such as the one of a run that is stopped while it starts."""

from pathlib import Path
from typing import Any

import pytest
import torch

CASES = {
    "plain": (False, "32"),
    "half": (False, "bf16-mixed"),
    "distributed": (True, "32"),
    "distributed, half": (True, "bf16-mixed"),
}


def save_and_resume(directory: str) -> dict[str, Any]:
    """Losses of a run that saves before its first step, of one that doesn't, and of one that begins with what was saved."""
    import lightning.pytorch as pl

    from support import small_runs

    class Early(pl.Callback):
        def __init__(self, path: str) -> None:
            self.path = path

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(self.path)

    found = {}
    for name, (distributed, precision) in CASES.items():
        path = str(Path(directory) / name)
        runs = []
        for options in ({"callbacks": [Early(path)]}, {}, {"ckpt_path": path}):
            small_runs.release()
            model = small_runs.build_llama(distributed=distributed)
            runs.append(small_runs.fit(model, max_steps=2, precision=precision, **options)["losses"])
        found[name] = runs
    return found


@pytest.fixture(scope="module")
def runs(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(save_and_resume, 2, str(tmp_path_factory.mktemp("early")))


@pytest.mark.parametrize("name", CASES)
def test_it_is_written_and_resumed_as_if_nothing_had_happened(runs: list[dict[str, Any]], name: str) -> None:
    for rank in runs:
        saving, plain, resumed = rank[name]
        assert saving == plain == resumed


def test_torch_s_adam_counts_from_zero_after_it() -> None:
    """It counts with each parameter, and doesn't begin to where it finds moments."""
    from types import SimpleNamespace

    from nemo2.optim.megatron import MegatronOptimizer

    def moments(inner: Any, config: Any) -> None:
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                inner.state[parameter].setdefault("exp_avg_sq", torch.zeros_like(parameter))

    def updated(saved_before: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.arange(4.0))
        inner = torch.optim.AdamW([weight], lr=0.1)
        config: Any = SimpleNamespace(lr=0.1, weight_decay=0.01)
        part = SimpleNamespace(
            optimizer=inner,
            config=config,
            init_state_fn=moments,
            param_groups=inner.param_groups,
            sharded_state_dict=lambda *state, **options: {},
        )
        if saved_before:
            MegatronOptimizer(part, config).sharded_state_dict({})
        weight.grad = torch.ones(4)
        inner.step()
        return weight.detach()

    assert torch.equal(updated(True), updated(False))
