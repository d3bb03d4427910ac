# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of the time before the first step, such as the one of a run that is stopped while it starts."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from nemo2.mcore.optim.megatron import MegatronOptimizer
from support import small_runs
from support.nightly import each_case, requested

SGD = {"optimizer": "sgd"}
CASES: dict[str, tuple[bool, str, dict[str, Any]]] = {
    "plain": (False, "32", {}),
    "half": (False, "bf16-mixed", {}),
    "distributed": (True, "32", {}),
    "distributed, half": (True, "bf16-mixed", {}),
    "SGD": (False, "32", SGD),
    "SGD, half": (False, "bf16-mixed", SGD),
    "SGD without momentum": (False, "32", SGD | {"sgd_momentum": 0.0}),
    "offloaded": (True, "bf16-mixed", {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}),
}


def save_and_resume(directory: str, names: list[str]) -> dict[str, Any]:
    """Losses of a run that saves before its first step, of one that doesn't, and of one that begins with what was saved."""
    import lightning.pytorch as pl

    class Early(pl.Callback):
        def __init__(self, path: str) -> None:
            self.path = path

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(self.path)

    found = {}
    for name in names:
        distributed, precision, optimizer = CASES[name]
        if torch.cuda.is_available() and name == "offloaded":  # on a GPU it can't be resumed otherwise
            optimizer = optimizer | {"use_precision_aware_optimizer": True}
        path = str(Path(directory) / name)
        runs = []
        for options in ({"callbacks": [Early(path)]}, {}, {"ckpt_path": path}):
            small_runs.release()
            model = small_runs.build_llama(distributed=distributed, optimizer=optimizer)
            runs.append(small_runs.fit(model, max_steps=2, precision=precision, **options)["losses"])
        found[name] = runs
    return found


@pytest.fixture(scope="module")
def runs(request: Any, run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(save_and_resume, 2, str(tmp_path_factory.mktemp("early")), requested(request, "name"))


@pytest.mark.parametrize("name", each_case(CASES, ("half", "distributed, half", "SGD", "offloaded")))
def test_it_is_written_and_resumed_as_if_nothing_had_happened(runs: list[dict[str, Any]], name: str) -> None:
    for rank in runs:
        saving, plain, resumed = rank[name]
        assert saving == plain == resumed


def gpu_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied of a parameter isn't on a GPU."""
    stream = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: torch.Tensor(tensor.data.numpy().copy()))


class OnGPU(torch.nn.Parameter):
    """A parameter that says it is on a GPU; what is copied of it isn't."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


def moments(inner: Any, config: Any) -> None:
    for parameter in inner.param_groups[0]["params"]:
        inner.state[parameter] |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("fraction", [None, 1.0, 0.5], ids=["torch's own", "offloaded", "half offloaded"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_states_begin_as_their_first_update_would_find_them(
    monkeypatch: pytest.MonkeyPatch, kind: str, fraction: float | None
) -> None:
    """Torch's Adam counts steps with each parameter, and doesn't begin to where it finds moments. Offloaded: Megatron-Core's
    own class, with parameters on a GPU that is a name only."""
    if fraction is not None:
        gpu_by_name_only(monkeypatch)
    adam = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    classes, settings = {
        "adam": (torch.optim.AdamW, adam),
        "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    }[kind]

    def updated(saved_before: bool) -> list[torch.Tensor]:
        parameter = torch.nn.Parameter if fraction is None else OnGPU
        weights: list[Any] = [parameter(torch.arange(4.0) + n) for n in range(2)]
        inner: Any = classes(weights, **settings) if fraction is None else HybridDeviceOptimizer(
            weights, offload_fraction=fraction, cpu_optimizer_cls=classes, gpu_optimizer_cls=classes,
            overlap_cpu_optimizer_d2h_h2d=False, pin_cpu_grads=False, param_update_in_fp32=True, **settings,
        )  # fmt: skip
        config: Any = SimpleNamespace(lr=0.1, weight_decay=0.01, optimizer=kind, sgd_momentum=0.9)
        part = SimpleNamespace(
            optimizer=inner, config=config, param_groups=inner.param_groups,
            init_state_fn=moments if fraction is None and kind == "adam" else None,
            sharded_state_dict=lambda *state, **options: {},
        )  # fmt: skip
        if saved_before:
            MegatronOptimizer(part, config).sharded_state_dict({})
            held = [one for one in inner.state.values() if "exp_avg" in one or "momentum_buffer" in one]
            assert len(held) == 2
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones(4)
            inner.step()
        return [weight.detach().clone() for weight in weights]

    for one, other in zip(updated(True), updated(False), strict=True):
        assert torch.equal(one, other)
