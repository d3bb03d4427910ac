# SPDX-License-Identifier: Apache-2.0
"""Precision as one value: who wins where two settings govern one thing, and what 16 bits do to training."""

import itertools
from typing import Any

import pytest
import small_runs
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from nemo2.config.explicit import note_explicit_fields
from nemo2.errors import ConfigError
from nemo2.precision import MegatronMixedPrecision


def ddp(*explicit: str, **fields: Any) -> DistributedDataParallelConfig:
    """A DDP configuration as a recipe builds it, which notes what its user set."""
    config = DistributedDataParallelConfig(**fields)
    note_explicit_fields(config, explicit or fields)
    return config


@pytest.mark.parametrize("spelling", ["bf16-mixed", "bf16"])
def test_precision_sets_model_optimizer_and_buffers_together(spelling):
    plugin = MegatronMixedPrecision(spelling)
    buffers, optimizer = DistributedDataParallelConfig(), OptimizerConfig()
    assert plugin.apply_to(buffers, path="strategy.ddp_config")["grad_reduce_in_fp32"] == (False, True)
    plugin.apply_to(optimizer, path="optim.config")
    assert (optimizer.bf16, optimizer.fp16, optimizer.params_dtype) == (True, False, torch.bfloat16)
    assert buffers.grad_reduce_in_fp32


def test_an_explicit_setting_wins_over_the_plugins_default():
    plugin, buffers = MegatronMixedPrecision("bf16-mixed"), ddp(grad_reduce_in_fp32=False)
    assert plugin.apply_to(buffers, path="strategy.ddp_config") == {}
    assert buffers.grad_reduce_in_fp32 is False
    assert plugin.dtype_config.grad_reduce_in_fp32 is False, "what is reported is what is used"


def test_the_plugins_explicit_setting_wins_over_a_default():
    buffers = ddp("overlap_grad_reduce", overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    MegatronMixedPrecision("bf16-mixed", grad_reduce_in_fp32=False).apply_to(buffers, path="strategy.ddp_config")
    assert buffers.grad_reduce_in_fp32 is False


def test_two_explicit_settings_that_differ_are_an_error_naming_both():
    plugin = MegatronMixedPrecision("bf16-mixed", grad_reduce_in_fp32=True)
    with pytest.raises(
        ConfigError,
        match=r"strategy\.ddp_config\.grad_reduce_in_fp32=False contradicts trainer\.plugins\.grad_reduce_in_fp32.*True",
    ):
        plugin.apply_to(ddp(grad_reduce_in_fp32=False), path="strategy.ddp_config")
    plugin.apply_to(ddp(grad_reduce_in_fp32=True), path="strategy.ddp_config")


def test_a_contradicting_optimizer_dtype_is_named_by_the_argument_that_causes_it():
    optimizer = OptimizerConfig(fp16=True)
    note_explicit_fields(optimizer, ["fp16"])
    with pytest.raises(ConfigError, match=r"optim\.config\.fp16=True contradicts trainer\.plugins\.precision"):
        MegatronMixedPrecision(precision="bf16-mixed").apply_to(optimizer, path="optim.config")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "bf17-mixed"}, "trainer.plugins.precision='bf17-mixed'.*did you mean.*bf16-mixed"),
        ({"fp8": "banana"}, "trainer.plugins.fp8='banana': must be 'hybrid', 'e4m3' or None"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwize"}, "fp8_recipe='blockwize'.*blockwise"),
        ({"fp8_params": True, "fp8_param_gather": False}, "old spelling"),
    ],
)
def test_unknown_values_are_answered_with_the_known_ones(arguments, words):
    with pytest.raises(ConfigError, match=f"(?i){words}"):
        MegatronMixedPrecision(**arguments)


@pytest.mark.parametrize("arguments", [{"fp8": "hybrid"}, {"fp4": "e2m1"}])
def test_formats_of_gpus_are_refused_where_there_is_none(arguments):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        MegatronMixedPrecision("bf16-mixed", **arguments).check_hardware()


def test_only_floating_point_inputs_are_converted():
    batch = {"x": torch.ones(2), "tokens": torch.ones(2, dtype=torch.int64)}
    converted = MegatronMixedPrecision("bf16-mixed").convert_input(batch)
    assert (converted["x"].dtype, converted["tokens"].dtype) == (torch.bfloat16, torch.int64)
    assert MegatronMixedPrecision("32").convert_input(batch) is batch


# ------------------------------------------------------------------------------------------------------ training in it

STEPS = 6


def trained() -> dict[str, Any]:
    def run(precision: Any, schedule: Any = None, **options: Any) -> dict[str, Any]:
        return small_runs.fit(
            small_runs.build_llama(schedule=schedule),
            max_steps=STEPS,
            precision=precision,
            inspect=lambda trainer: {
                "dtypes": sorted({str(p.dtype) for p in trainer.strategy.megatron_parallel.parameters()}),
                "buffers": sorted({str(p.main_grad.dtype) for p in trainer.strategy.megatron_parallel.parameters()}),
            },
            **options,
        )

    digests: list[float] = []

    class Digest(small_runs.Recorder):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            digests.append(
                sum(float(p.detach().double().abs().sum()) for p in trainer.strategy.megatron_parallel.parameters())
            )

    found = {
        "fp32": run("32"),
        "bf16": run("bf16-mixed"),
        "bf16 by name": run(None, trainer={"precision": "bf16-mixed"}),
        "bf16 buffers": run("bf16-mixed", ddp=ddp(grad_reduce_in_fp32=False)),
        # 2**24 times a loss of 4 overflows fp16 gradients; each overflow halves the scale (hysteresis 1).
        "fp16": run(
            MegatronMixedPrecision("16-mixed", fp16_initial_loss_scale=2.0**24, fp16_hysteresis=1),
            schedule=small_runs.cosine(STEPS),
            callbacks=[Digest()],
        ),
    }
    return found | {"digests": digests}


@pytest.fixture(scope="module")
def runs(run_on_ranks) -> dict[str, Any]:
    return run_on_ranks(trained, 1)[0]


def test_bf16_parameters_accumulate_in_fp32_and_stay_close_to_fp32(runs):
    full, half = runs["fp32"], runs["bf16"]
    assert half["inspected"] == {"dtypes": ["torch.bfloat16"], "buffers": ["torch.float32"]}
    assert full["inspected"] == {"dtypes": ["torch.float32"], "buffers": ["torch.float32"]}
    assert half["losses"] == pytest.approx(full["losses"], rel=0.01)
    assert half["losses"] != full["losses"]
    assert runs["bf16 by name"]["losses"] == half["losses"]
    assert runs["bf16 buffers"]["inspected"]["buffers"] == ["torch.bfloat16"]


def test_fp16_steps_that_overflow_move_neither_parameters_nor_the_schedule_and_halve_the_scale(runs):
    run, digests = runs["fp16"], runs["digests"]
    skipped = run["updated"].index(True)
    assert 0 < skipped < STEPS, "the scale must be too large at first and then found"
    assert run["scales"][:skipped] == [2.0 ** (23 - step) for step in range(skipped)]
    assert len(set(digests[:skipped])) == 1
    assert all(before != after for before, after in itertools.pairwise(digests[skipped - 1 : skipped + 1]))
    schedule = small_runs.cosine(STEPS)
    assert run["rates"] == [schedule.lr_at(max(0, step - skipped), 1e-2) for step in range(STEPS)]
    assert run["losses"][0] == pytest.approx(runs["fp32"]["losses"][0], rel=0.01)
