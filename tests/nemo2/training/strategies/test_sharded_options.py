# SPDX-License-Identifier: Apache-2.0
"""The options of FSDP2Strategy and FSDPStrategy, each in a real run of two ranks beside the run without it."""

import contextlib
import copy
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from torch.utils.data import DataLoader

import nemo2 as nl
from nemo2.base.errors import ConfigError
from nemo2.checkpoint.torch_io import TorchCheckpointIO
from nemo2.training.run_dir.progress_line import parse_line
from nemo2.training.strategies.fsdp2 import fsdp2_strategy_parallelize
from support import small_runs

BF16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
PLAN = {"up": "colwise", "down": "rowwise"}


class Environment(TorchElasticEnvironment):
    """The user's own."""


class Perceptron(pl.LightningModule):
    """Two matrices; which share of each its ranks hold is seen in the first step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)
        self.widths: set[int] = set()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = self.up(batch).relu()
        self.widths.add(hidden.shape[-1])
        loss = self.down(hidden).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def points() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(2))


def trained(strategy: Any, *, precision: Any = "32", inspect: Any = None, data: Any = None) -> dict[str, Any]:
    try:
        return small_runs.fit(
            small_runs.build_llama(), data, max_steps=2, strategy=strategy, precision=precision, inspect=inspect
        )
    finally:
        small_runs.release()


def cut_by_a_plan(**options: Any) -> dict[str, Any]:
    model = Perceptron()
    trainer = nl.Trainer(
        devices=2, max_steps=2, strategy=nl.FSDP2Strategy(tensor_parallel_size=2, **options), enable_progress_bar=False
    )
    try:
        trainer.fit(model, DataLoader(points(), batch_size=8))  # pyright: ignore[reportArgumentType]
    except ConfigError as error:
        return {"refused": str(error)}
    finally:
        small_runs.release()
    return {"widths": model.widths, "losses": model.losses}


def kept(*names: str) -> Any:
    """What of the user's objects the strategy has."""
    return lambda trainer: {name: getattr(trainer.strategy, name) for name in names}


def lines(strategy: Any) -> tuple[list[str], int]:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        trainer = nl.Trainer(
            devices=2, max_steps=4, strategy=strategy, limit_val_batches=0, log_every_n_steps=1,
            plugins=nl.MegatronMixedPrecision("32"),
        )  # fmt: skip
        trainer.fit(small_runs.build_llama(), small_runs.TokenData())
    small_runs.release()
    shown = [type(one).__name__ for one in trainer.callbacks if isinstance(one, pl.callbacks.ProgressBar)]  # pyright: ignore
    return shown, sum(parse_line(line) is not None for line in said.getvalue().splitlines())


def on_two_ranks() -> dict[str, Any]:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    small_runs.quiet()
    given: list[dict[str, Any]] = []

    def own(model: nn.Module, **options: Any) -> nn.Module:
        given.append(options)
        return fsdp2_strategy_parallelize(model, **options)

    environment, writer = Environment(), TorchCheckpointIO()
    users: dict[str, Any] = {
        "cluster_environment": environment,
        "checkpoint_io": writer,
        "parallel_devices": small_runs.devices(2),
        "data_sampler": small_runs.TokenData().data_sampler,
    }
    found: dict[str, Any] = {}
    for kind in (nl.FSDP2Strategy, nl.FSDPStrategy):
        told = trained(
            kind(process_group_backend="gloo", **users), inspect=kept(*users), data=DataLoader(small_runs.Tokens())
        )
        found[kind.__name__] = {
            "default": trained(kind())["losses"],
            "bf16": trained(kind(), precision="bf16-mixed")["losses"],
            "users": [name for name, one in users.items() if told["inspected"][name] is not one],
            "users' losses": told["losses"],
            "progress": [lines(kind(progress_interval=2)), lines(kind(replace_progress_bar=False))],
        }
    found["FSDP2Strategy"] |= {
        "data_parallel_size": trained(nl.FSDP2Strategy(data_parallel_size=2))["losses"],
        "offload_policy": trained(nl.FSDP2Strategy(offload_policy=CPUOffloadPolicy()))["losses"],
        "mp_policy": trained(nl.FSDP2Strategy(mp_policy=MixedPrecisionPolicy(**BF16)))["losses"],
        "parallelize_fn": trained(nl.FSDP2Strategy(parallelize_fn=own, mp_policy=MixedPrecisionPolicy()))["losses"],
        "given": [sorted(options) for options in given],
        "custom_tp_plan": cut_by_a_plan(custom_tp_plan=PLAN),
        "use_hf_tp_plan": cut_by_a_plan(use_hf_tp_plan=False),
    }
    found["FSDPStrategy"] |= {
        "sharding_strategy": trained(nl.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"))["losses"],
        "cpu_offload": trained(nl.FSDPStrategy(cpu_offload=CPUOffload(True)))["losses"],
        "mixed_precision": trained(nl.FSDPStrategy(mixed_precision=MixedPrecision(**BF16)))["losses"],
        "auto_wrap_policy": trained(nl.FSDPStrategy(auto_wrap_policy={TransformerLayer}))["losses"],
    }
    return found


@pytest.fixture(scope="module")
def found(run_on_ranks: Any) -> dict[str, Any]:
    return run_on_ranks(on_two_ranks, 2, timeout=280)[0]


SAME = {
    "FSDP2Strategy": ("data_parallel_size", "offload_policy", "parallelize_fn"),
    "FSDPStrategy": ("sharding_strategy", "cpu_offload", "auto_wrap_policy"),
}


@pytest.mark.parametrize(("kind", "option"), [(kind, option) for kind, options in SAME.items() for option in options])
def test_where_shards_are_and_what_is_gathered_together_changes_no_number(
    found: dict[str, Any], kind: str, option: str
) -> None:
    assert found[kind][option] == pytest.approx(found[kind]["default"], rel=1e-6)


@pytest.mark.parametrize(("kind", "option"), [("FSDP2Strategy", "mp_policy"), ("FSDPStrategy", "mixed_precision")])
def test_torchs_own_policy_of_dtypes_is_used(found: dict[str, Any], kind: str, option: str) -> None:
    losses = found[kind][option]
    assert losses != pytest.approx(found[kind]["default"], rel=1e-7), "this wasn't bf16"
    assert losses == pytest.approx(found[kind]["bf16"], rel=1e-3)


def test_a_function_of_the_users_shards_the_model(found: dict[str, Any]) -> None:
    options = ["device_mesh", "mp_policy", "offload_policy", "tp_shard_plan"]
    assert found["FSDP2Strategy"]["given"] == [options], "parallelize_fn"


def test_tensors_are_cut_by_the_users_plan_and_by_none_where_there_is_none(found: dict[str, Any]) -> None:
    cut, without = (found["FSDP2Strategy"][name] for name in ("custom_tp_plan", "use_hf_tp_plan"))
    model, data = Perceptron(), points()
    optimizer, expected = model.configure_optimizers(), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.training_step(data)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert cut["widths"] == {8} and cut["losses"] == pytest.approx(expected, rel=1e-5)
    assert "(strategy.use_hf_tp_plan=False). Set strategy.custom_tp_plan" in without["refused"]


@pytest.mark.parametrize("kind", SAME)
def test_the_users_objects_are_used_and_progress_is_ours_at_the_interval_or_lightnings(
    found: dict[str, Any], kind: str
) -> None:
    """cluster_environment, checkpoint_io, parallel_devices, data_sampler, process_group_backend, progress_interval and
    replace_progress_bar."""
    assert found[kind]["users"] == [] and found[kind]["users' losses"] == found[kind]["default"]
    (ours, every_second), ([theirs], none) = found[kind]["progress"]
    assert (ours, every_second) == (["ProgressPrinter"], 2)
    assert theirs in ("RichProgressBar", "TQDMProgressBar") and none == 0


def block_and_head() -> dict[str, Any]:
    """A model with layers before and behind its blocks, in bf16: sharded, and as plain PyTorch computes it."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(5)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), "head": nn.Linear(8, 3)})
    plain = copy.deepcopy(model).bfloat16()

    class Net(nn.Module):
        def __init__(self, parts: nn.ModuleDict) -> None:
            super().__init__()
            self.blocks, self.head = parts["blocks"], parts["head"]

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                x = x + block(x).relu()
            return self.head(x)

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tp"))
    sharded = fsdp2_strategy_parallelize(Net(model), mesh, MixedPrecisionPolicy(output_dtype=torch.float32, **BF16))
    given, found = torch.randn(4, 8), {}
    sharded.blocks[0].register_forward_hook(lambda module, inputs, output: found.update(block=output.dtype))  # pyright: ignore
    found["output"], found["expected"] = sharded(given).detach(), Net(plain)(given.bfloat16()).detach()
    return found


def test_only_a_models_output_is_fp32_so_that_layers_behind_the_blocks_run(run_on_ranks: Any) -> None:
    [found] = run_on_ranks(block_and_head, 1)
    assert found["block"] == torch.bfloat16 and found["output"].dtype == torch.float32
    assert torch.equal(found["output"], found["expected"].float())
