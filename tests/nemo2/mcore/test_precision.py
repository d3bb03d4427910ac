# SPDX-License-Identifier: Apache-2.0
"""Precision as one value: who wins where two settings govern one thing, and what 16 bits do to training."""

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from nemo2.base.errors import ConfigError
from nemo2.config.provenance import adjustments, note_explicit_fields
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.mcore.settle.machine import Machine
from nemo2.models.llama import LlamaConfig
from support import small_runs


def ddp(*explicit: str, **fields: Any) -> DistributedDataParallelConfig:
    """A DDP configuration as a recipe builds it, which notes what its user set."""
    config = DistributedDataParallelConfig(**fields)
    note_explicit_fields(config, {name: getattr(config, name) for name in explicit} or fields)
    return config


@pytest.mark.parametrize("spelling", ["bf16-mixed", "bf16"])
def test_precision_sets_model_optimizer_and_buffers_together(spelling):
    plugin = MegatronMixedPrecision(spelling)
    buffers, optimizer = DistributedDataParallelConfig(), OptimizerConfig()
    plugin.apply_to(buffers, path="strategy.ddp_config")
    plugin.apply_to(optimizer, path="optim.config")
    assert (optimizer.bf16, optimizer.fp16, optimizer.params_dtype) == (True, False, torch.bfloat16)
    assert buffers.grad_reduce_in_fp32


@pytest.mark.parametrize("spelling", ["32", "bf16-mixed", "16-mixed"])
def test_it_is_lightnings_mixed_precision_without_its_autocast_and_scaler(spelling: str) -> None:
    plugin = MegatronMixedPrecision(spelling)
    assert isinstance(plugin, MixedPrecision)
    inherited = {name for name, value in vars(MixedPrecision).items() if callable(value)} - vars(
        MegatronMixedPrecision
    ).keys()
    assert inherited <= {"__init__"}
    with plugin.forward_context():
        assert not torch.is_autocast_enabled("cpu")
    with plugin.autocast_context_manager():
        assert not torch.is_autocast_enabled("cpu")
    assert plugin.scaler is None and MegatronMixedPrecision.pre_backward is Precision.pre_backward
    assert plugin.state_dict() == {}
    plugin.load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(
    ("plugin", "buffers"),
    [
        ({}, ddp(grad_reduce_in_fp32=False)),
        (
            {"grad_reduce_in_fp32": False},
            ddp("overlap_grad_reduce", overlap_grad_reduce=True, grad_reduce_in_fp32=True),
        ),
        ({"grad_reduce_in_fp32": False}, ddp(grad_reduce_in_fp32=False)),
    ],
    ids=["of the buffers", "of the plugin", "of both"],
)
def test_an_explicit_setting_wins_over_a_default(plugin, buffers):
    precision = MegatronMixedPrecision("bf16-mixed", **plugin)
    precision.apply_to(buffers, path="strategy.ddp_config")
    assert buffers.grad_reduce_in_fp32 is False
    assert precision.dtype_config.grad_reduce_in_fp32 is False, "what is reported is what is used"


def set_in(config: Any, **fields: Any) -> Any:
    """A configuration as a recipe builds it, with the lines of what its user set."""
    note_explicit_fields(config, fields, {name: f"mine.py:{line}" for line, name in enumerate(fields, 1)})
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_what_is_set_in_one_configuration_holds_for_the_others() -> None:
    plugin = MegatronMixedPrecision("bf16-mixed", fp8="hybrid")
    model, buffers = Model(), set_in(DistributedDataParallelConfig(), fp8_param_gather=True)
    optimizer = set_in(OptimizerConfig(), fp8_recipe="tensorwise")
    plugin.apply_to_all({"strategy.ddp_config": buffers, "optim.config": optimizer, "model.config": model})
    assert (model.fp8_param, model.fp8_recipe, model.fp8) == (True, "tensorwise", "hybrid")
    assert (buffers.fp8_param_gather, optimizer.fp8_recipe) == (True, "tensorwise")
    assert plugin.dtype_config.fp8_recipe == "tensorwise", "what is reported is what is used"
    [step] = adjustments(model)["fp8_param"]
    assert step.why == "strategy.ddp_config.fp8_param_gather was set"


@dataclasses.dataclass
class Model:
    """The fields of Megatron-Core's TransformerConfig that precision decides, and nothing of its checks."""

    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    pipeline_dtype: Any = None
    enable_autocast: bool = False
    fp8: Any = None
    fp8_recipe: str = "delayed"
    fp8_param: bool = False


BUFFERS, OPTIMIZER, MODEL = "strategy.ddp_config", "optim.config", "model.config"
PRECISION = r"contradicts trainer\.plugins\.precision"


@pytest.mark.parametrize(
    ("plugin", "fields", "sentence"),
    [
        (
            {"fp8": "hybrid"},
            {BUFFERS: {"fp8_param_gather": True}, MODEL: {"fp8_param": False}},
            r"strategy\.ddp_config\.fp8_param_gather=True \(mine\.py:1\) contradicts model\.config\.fp8_param=False "
            r"\(mine\.py:1\)",
        ),
        (
            {"fp8": "hybrid"},
            {OPTIMIZER: {"fp8_recipe": "tensorwise"}, MODEL: {"fp8_recipe": "mxfp8"}},
            r"optim\.config\.fp8_recipe='tensorwise' \(.*\) contradicts model\.config\.fp8_recipe='mxfp8' \(",
        ),
        (
            {"fp8": "hybrid"},
            {OPTIMIZER: {"params_dtype": torch.bfloat16}, MODEL: {"params_dtype": torch.float32}},
            r"optim\.config\.params_dtype=torch\.bfloat16 \(.*\) contradicts model\.config\.params_dtype=torch\.float32 \(",
        ),
        (
            {"precision": "bf16-mixed", "grad_reduce_in_fp32": True},
            {BUFFERS: {"grad_reduce_in_fp32": False}},
            r"ddp_config\.grad_reduce_in_fp32=False .*contradicts trainer\.plugins\.grad_reduce_in_fp32.*True",
        ),
        ({"precision": "bf16-mixed"}, {OPTIMIZER: {"fp16": True}}, rf"optim\.config\.fp16=True .*{PRECISION}"),
        # Its parameters would be cast all the same, or its optimizer would take them for others.
        *[
            (plugin, {MODEL: fields}, rf"model\.config\.{next(iter(fields))}=.* {PRECISION}")
            for plugin in ({}, {"precision": "bf16-mixed"})
            for fields in ({"bf16": False}, {"params_dtype": torch.float32})
        ],
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_both_lines(
    plugin: dict[str, Any], fields: dict[str, dict[str, Any]], sentence: str
) -> None:
    configs = {BUFFERS: DistributedDataParallelConfig(), OPTIMIZER: OptimizerConfig(), MODEL: Model()}
    with pytest.raises(ConfigError, match=sentence):
        MegatronMixedPrecision(**plugin).apply_to_all(
            {path: set_in(config, **fields.get(path, {})) for path, config in configs.items()}
        )


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        ({"fp8_recipe": "mxfp8"}, ["fp8_recipe='mxfp8' .*: trainer.plugins.fp8 is off"]),
        ({"fp8_recipe": "delayed"}, []),
        ({"fp16_hysteresis": 1, "fp16_min_loss_scale": 1.0}, ["fp16_hysteresis=1 .*: fp16 .* is off"]),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, []),
        ({"fp8_amax_history_len": 1024, "fp8_margin": 0}, ["fp8_amax_history_len=1024 .*: trainer.plugins.fp8 is off"]),
        (
            {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1},
            ["first_last_layers_bf16=True .*: trainer.plugins.fp8 is off"],
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise", "num_layers_at_end_in_bf16": 2},
            ["num_layers_at_end_in_bf16=2 .*: trainer.plugins.first_last_layers_bf16 is off"],
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
            ["first_last_layers_bf16=True does not take effect: num_layers_at_start_in_bf16 and .* are 0"],
        ),
    ],
)
def test_what_takes_no_effect_is_said(arguments: dict[str, Any], sentences: list[str]) -> None:
    found = MegatronMixedPrecision("bf16-mixed", **arguments).ineffective()
    assert len(found) == len(sentences)
    for said, expected in zip(found, sentences, strict=True):
        assert re.search(expected, said) and "does not take effect" in said


def test_an_adopted_setting_without_effect_is_said_with_its_own_name() -> None:
    plugin, optimizer = MegatronMixedPrecision("bf16-mixed"), OptimizerConfig(hysteresis=5)
    note_explicit_fields(optimizer, {"hysteresis": 5})
    plugin.apply_to(optimizer, path="optim.config")
    [said] = plugin.ineffective()
    assert said.startswith("optim.config.hysteresis=5 does not take effect: fp16 ")


def test_it_is_said_as_the_run_starts(caplog: pytest.LogCaptureFixture) -> None:
    MegatronMixedPrecision("bf16-mixed", fp8_recipe="mxfp8").check_hardware(Machine.here())
    [record] = caplog.records
    assert record.levelname == "WARNING" and "fp8_recipe='mxfp8'" in record.getMessage()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "bf17-mixed"}, "trainer.plugins.precision='bf17-mixed'.*did you mean.*bf16-mixed"),
        ({"fp8": "banana"}, "trainer.plugins.fp8='banana': must be 'hybrid', 'e4m3' or None"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwize"}, "fp8_recipe='blockwize'.*blockwise"),
        ({"fp8": "hybrid", "fp8_recipe": None}, "fp8_recipe=None: must be one of"),
        ({"fp8_params": True, "fp8_param_gather": False}, "old name of fp8_param_gather"),
        (
            {"precision": "bf16-mixed", "params_dtype": torch.float32},
            r"params_dtype=torch\.float32 contradicts .*precision='bf16-mixed'",
        ),
    ],
)
def test_unknown_values_are_answered_with_the_known_ones(arguments, words):
    with pytest.raises(ConfigError, match=f"(?i){words}"):
        MegatronMixedPrecision(**arguments)


def test_a_dtype_alone_and_no_recipe_of_fp8_are_filled_in():
    assert MegatronMixedPrecision("16", params_dtype=torch.float16).dtype_config.pipeline_dtype is torch.float16
    assert MegatronMixedPrecision("bf16-mixed", fp8=None, fp8_recipe=None).dtype_config.fp8_recipe == "delayed"


@pytest.mark.parametrize("arguments", [{"fp8": "hybrid"}, {"fp4": "e2m1"}])
def test_formats_of_gpus_are_refused_where_there_is_none(arguments):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="requires a GPU with Transformer Engine"):
        MegatronMixedPrecision("bf16-mixed", **arguments).check_hardware(Machine.here())


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


@pytest.mark.quick
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


ARGUMENTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "pipeline_dtype": (torch.float32, ("pipeline_dtype",)),
    "autocast_dtype": (torch.float16, ("autocast_dtype",)),
    "autocast_enabled": (True, ("enable_autocast",)),
    "grad_reduce_in_fp32": (False, ("grad_reduce_in_fp32",)),
    "fp8": ("e4m3", ("fp8",)),
    "fp8_margin": (3, ("fp8_margin",)),
    "fp8_amax_history_len": (7, ("fp8_amax_history_len",)),
    "fp8_amax_compute_algo": ("max", ("fp8_amax_compute_algo",)),
    "fp8_wgrad": (False, ("fp8_wgrad",)),
    "fp8_dot_product_attention": (True, ("fp8_dot_product_attention",)),
    "fp8_multi_head_attention": (True, ("fp8_multi_head_attention",)),
    "fp8_params": (True, ("fp8_param", "fp8_param_gather")),
    "fp4": ("e2m1", ("fp4",)),
    "fp4_recipe": ("nvfp4", ("fp4_recipe",)),
    "fp16_loss_scale": (8.0, ("loss_scale",)),
    "fp16_initial_loss_scale": (16.0, ("initial_loss_scale",)),
    "fp16_min_loss_scale": (2.0, ("min_loss_scale",)),
    "fp16_loss_scale_window": (5, ("loss_scale_window",)),
    "fp16_hysteresis": (4, ("hysteresis",)),
}
"""A value of each argument, and the fields that then have it."""
FORMATS = {"fp8": {"fp8": "hybrid"}, "fp4": {"fp4": "e2m1"}}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_reaches_the_configurations_that_have_its_field(name: str) -> None:
    value, fields = ARGUMENTS[name]
    sixteen = "16-mixed" if name.startswith("fp16_") else "bf16-mixed"
    configs: dict[str, Any] = {
        "model.config": LlamaConfig(num_layers=2, hidden_size=8, num_attention_heads=2),
        "optim.config": OptimizerConfig(),
        "strategy.ddp_config": DistributedDataParallelConfig(),
    }
    MegatronMixedPrecision(sixteen, **FORMATS.get(name[:3], {}) | {name: value}).apply_to_all(configs)
    for field in fields:
        values = [getattr(config, field) for config in configs.values() if hasattr(config, field)]
        assert values and all(one == value for one in values), field
