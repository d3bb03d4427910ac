# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizer behind torch's interface: which parameters decay and at which rate."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from nemo2.base.errors import ConfigError
from nemo2.mcore.optim.lr_scheduler import CosineAnnealingScheduler
from nemo2.mcore.optim.megatron import MegatronOptimizer, MegatronOptimizerModule, join_main_params, split_main_params
from nemo2.mcore.parallel.megatron_parallel import MegatronParallel
from support import small_runs


def test_a_missing_rate_and_a_multiplier_for_nothing_are_refused():
    with pytest.raises(ConfigError, match="optim.config.lr is unset"):
        MegatronOptimizerModule(OptimizerConfig())
    with pytest.raises(ConfigError, match="optim.lr_mult=0.1 has no effect without optim.scale_lr_cond"):
        MegatronOptimizerModule(OptimizerConfig(lr=1.0), lr_mult=0.1)


def test_a_final_rate_without_a_schedule_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture):
    unwrapped = SimpleNamespace(config=None, ddp_config=None)
    for scheduler, count in ((schedule(), 0), (None, 1)):
        module = MegatronOptimizerModule(OptimizerConfig(lr=1.0, min_lr=0.123), scheduler)
        with pytest.raises(ConfigError, match="wrapped for training"):
            module.optimizers(unwrapped)  # pyright: ignore[reportArgumentType]
        assert caplog.text.count("optim.config.min_lr=0.123 has no effect. The learning rate is constant") == count


HAS_MUP = hasattr(TransformerConfig, "use_mup")
"""Newer versions of Megatron-Core have it."""


def is_embedding(name: str, parameter: torch.nn.Parameter) -> bool:
    return "embedding" in name


def schedule(min_lr: float = 0.0) -> CosineAnnealingScheduler:
    return CosineAnnealingScheduler(max_steps=10, warmup_steps=3, constant_steps=0, min_lr=min_lr)


def groups(
    lr_scheduler: Any = None, config: dict[str, Any] | None = None, **options: Any
) -> dict[str, tuple[float, float]]:
    """Weight decay and learning rate of each parameter in the second step."""
    seen: dict[str, tuple[float, float]] = {}

    def look(trainer: Any) -> None:
        optimizer = trainer.strategy.optimizers[0].mcore_optimizer.chained_optimizers[0]
        names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen[names[id(parameter)].rpartition("module.")[2]] = (group["weight_decay"], group["lr"])

    model = small_runs.build_llama(**(config or {}))
    MegatronOptimizerModule(model.optim.config, lr_scheduler=lr_scheduler, **options).connect(model)
    small_runs.fit(model, max_steps=1, inspect=look)
    return seen


def all_groups() -> dict[str, dict[str, tuple[float, float]]]:
    return {
        "standard": groups(schedule()),
        "no decay": groups(schedule(), no_weight_decay_cond=is_embedding),
        "scaled": groups(schedule(min_lr=5e-3), scale_lr_cond=is_embedding, lr_mult=0.1),
        "scaled, constant": groups(scale_lr_cond=is_embedding, lr_mult=0.1),
        "wider": groups(schedule(min_lr=6e-3), {"use_mup": True, "mup_base_hidden_size": 16}) if HAS_MUP else {},
    }


def test_conditions_pick_parameters_by_name(run_on_ranks):
    found = run_on_ranks(all_groups, 1)[0]
    rate = 1e-2 * 2 / 4  # the second step of a warm-up over three
    for name, (decay, lr) in found["standard"].items():
        assert decay == (0.0 if "norm" in name else 0.01), name
        assert lr == pytest.approx(rate)
    for name, (decay, _) in found["no decay"].items():
        assert decay == (0.0 if "embedding" in name else 0.01), name
    for name, (decay, lr) in found["scaled"].items():
        assert lr == pytest.approx(rate * (0.1 if "embedding" in name else 1.0)), name
        assert decay == (0.0 if "norm" in name else 0.01), name
    for name, (_, lr) in found["scaled, constant"].items():
        assert lr == pytest.approx(1e-2 * (0.1 if "embedding" in name else 1.0)), name
    assert len(found["standard"]) > 10
    for name, (_, lr) in found["wider"].items():
        # The matrices of layers learn at half the rate in a model that is twice as wide, from the peak to the end.
        hidden = "layers." in name and "norm" not in name
        assert lr == pytest.approx(rate * (0.5 if hidden else 1.0)), name
    assert bool(found["wider"]) is HAS_MUP


def switches() -> dict[str, Any]:
    """`use_distributed_optimizer` in two configurations: who decides."""
    from megatron.core.distributed import DistributedDataParallelConfig

    from nemo2.config.provenance import note_explicit_fields

    def run(optimizer: bool | None, buffers: bool | None, **more: Any) -> Any:
        small_runs.quiet()
        model = small_runs.build_llama()
        config = model.optim.config
        config.use_distributed_optimizer = bool(optimizer)
        note_explicit_fields(config, {} if optimizer is None else {"use_distributed_optimizer": optimizer})
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=bool(buffers), **more)
        note_explicit_fields(ddp, more | ({} if buffers is None else {"use_distributed_optimizer": buffers}))
        trainer = small_runs.build_trainer(max_steps=1, ddp=ddp)
        try:
            trainer.fit(model, small_runs.TokenData())
        except ConfigError as error:
            return str(error)
        return (config.use_distributed_optimizer, ddp.use_distributed_optimizer)

    return {
        "buffers": run(None, True),
        "optimizer": run(True, None),
        "both": run(True, True),
        "contradiction": run(True, False),
        "gather without": run(False, None, overlap_param_gather=True, overlap_grad_reduce=True),
    }


@pytest.mark.quick
def test_the_distributed_optimizer_is_one_switch(run_on_ranks):
    found = run_on_ranks(switches, 1)[0]
    assert found["buffers"] == found["optimizer"] == found["both"] == (True, True)
    assert "optim.config.use_distributed_optimizer=True contradicts strategy.ddp_config" in found["contradiction"]
    assert (
        "overlap_param_gather=True contradicts optim.config.use_distributed_optimizer=False" in found["gather without"]
    )


def overlapped() -> list[dict[str, Any]]:
    """Gradients reduced and parameters gathered in the background, with a validation between: nothing may change."""
    from megatron.core.distributed import DistributedDataParallelConfig

    runs = []
    for overlap in (False, True):
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap, bucket_size=500
        )
        runs.append(
            small_runs.fit(
                small_runs.build_llama(distributed=True),
                max_steps=4,
                ddp=ddp,
                trainer={"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None},
            )
        )
    return runs


def test_overlapping_communication_changes_no_number(run_on_ranks):
    plain, overlap = run_on_ranks(overlapped, 2)[0]
    assert overlap["losses"] == plain["losses"]
    assert overlap["val_losses"] == plain["val_losses"]
    assert overlap["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-6)


def unclipped() -> list[list[float]]:
    model: dict[str, Any] = {"distributed": True, "optimizer": {"clip_grad": 0.0}}
    return [
        small_runs.fit(small_runs.build_llama(**model), max_steps=2, fsdp=fsdp)["grad_norms"]
        for fsdp in (None, "megatron")
    ]


def test_norms_of_gradients_that_are_not_clipped_are_logged_under_megatron_fsdp_too(run_on_ranks):
    plain, sharded = run_on_ranks(unclipped, 2)[0]
    assert all(norm > 0 for norm in sharded)
    assert sharded == pytest.approx(plain, rel=1e-5)


def test_of_a_loaded_chain_only_adam_counts_its_updates() -> None:
    """A checkpoint has the count in all groups. A second count, which stands still, would end the next save."""

    class FusedAdam(torch.optim.SGD):
        """Counts in its groups."""

    def loaded(state: dict[str, Any]) -> None:
        for part in chain:
            part.optimizer.load_state_dict(state)

    chain = [
        SimpleNamespace(optimizer=kind([torch.zeros(1)]), init_state_fn=None) for kind in (FusedAdam, torch.optim.SGD)
    ]
    groups = [group for part in chain for group in part.optimizer.param_groups]
    saved = chain[0].optimizer.state_dict()
    saved["param_groups"][0]["step"] = 2
    whole = SimpleNamespace(chained_optimizers=chain, param_groups=groups, load_state_dict=loaded)
    MegatronOptimizer(whole, OptimizerConfig(lr=1.0)).load_state_dict(saved)
    assert [part.optimizer.param_groups[0].get("step") for part in chain] == [2, None]


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("reused", [True, False])
def test_parameters_are_staged_after_the_gradients_whose_buffer_they_share_are_zeroed(
    reused: bool, overlapped: bool
) -> None:
    calls: list[str] = []

    class Chunks(list):
        gathers_in_forward = overlapped
        zero_grad_buffer = MegatronParallel.zero_grad_buffer
        force_param_sync = MegatronParallel.force_param_sync
        pause_param_gather = MegatronParallel.pause_param_gather
        _stage_gathered_params = MegatronParallel._stage_gathered_params

    ddp = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=reused, overlap_param_gather=overlapped)
    stage = partial(calls.append, "stage")
    part = SimpleNamespace(ddp_config=ddp, is_stub_optimizer=False, _copy_main_params_to_param_buffer=stage)
    chunk = SimpleNamespace(
        zero_grad_buffer=partial(calls.append, "zero"),
        start_param_sync=lambda **_: calls.append("gather"),
        disable_forward_pre_hook=lambda param_sync: calls.append("gather") if param_sync else None,
    )
    optimizer = object.__new__(MegatronOptimizer)
    optimizer.mcore_optimizer = part
    chunks: Any = Chunks([chunk])
    chunks.ddp_config, chunks.stage_params = ddp, optimizer.stage_params
    chunks.zero_grad_buffer()
    assert calls == (["zero", "stage"] if reused and overlapped else ["zero"])
    for gather in (chunks.force_param_sync, chunks.pause_param_gather):
        calls.clear()
        gather()
        assert calls == (["zero", "stage", "gather"] if reused and overlapped else ["gather"] if overlapped else [])
    calls.clear()
    chunks.pause_param_gather(whole=False)
    assert calls == []


def test_main_parameters_are_split_as_transformer_engine_rounds_them():
    """Bit by bit the arithmetic of Transformer Engine's kernel: the lower half is kept, and the upper one is rounded up where
    that is negative. Halves are drawn at random; ties and the numbers beside them are among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), generator=generator, dtype=torch.int64).to(torch.int32)
    bits[:6] = torch.tensor([0x3F808000, 0x3F807FFF, 0x3F80FFFF, 0x3F818000, -0x407F8000, 0])
    main = bits.view(torch.float32)
    main = main[main.isfinite() & (main.abs() < 3e38)]  # rounded up, the largest are infinite
    rounded, remainders = split_main_params(main)
    assert torch.equal(join_main_params(rounded, remainders), main)
    bits = main.view(torch.int32)
    lower = (bits & 0xFFFF).to(torch.int16)
    assert torch.equal(remainders, lower)
    assert torch.equal(rounded.view(torch.int16), (bits >> 16).to(torch.int16) + (lower < 0).to(torch.int16))
    ties = lower == -0x8000
    assert ties.any() and torch.equal(rounded[~ties], main[~ties].bfloat16())
