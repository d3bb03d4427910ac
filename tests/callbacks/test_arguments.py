# SPDX-License-Identifier: Apache-2.0
"""Arguments that no callback can work with are refused when it is made."""

import contextlib
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.callbacks import (
    DdpParityChecker,
    EvaluationCallback,
    FLOPsMeasurementCallback,
    GarbageCollectionCallback,
    JitConfig,
    JitTransform,
    LayerFreezer,
    LossGuard,
    MegatronTokenDropCallback,
    MemoryMonitor,
    MemoryProfileCallback,
    ModelTrainingStateCallback,
    NsysCallback,
    ParameterDebugger,
    PytorchProfilerCallback,
    RuntimeEstimator,
    SpeedMonitor,
    StragglerDetectionCallback,
    TimingCallback,
)
from nemo2.config import Config
from nemo2.preflight.checks.find import find_problems
from nemo2.recipes import llama_tiny
from support import small_runs

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (DdpParityChecker, {"interval": -1}, "interval=-1"),
    (EvaluationCallback, {}, "nothing to measure"),
    (EvaluationCallback, {"texts": ["a"], "every_n_steps": 0}, "every_n_steps=0: must be a whole number"),
    (EvaluationCallback, {"texts": ["a"], "at_end": False}, "would never run"),
    (EvaluationCallback, {"texts": ["a"], "max_batch_size": 0}, "max_batch_size=0"),
    (EvaluationCallback, {"tasks": ["a"], "limit": 0}, "limit=0"),
    (EvaluationCallback, {"tasks": ["a"], "num_fewshot": -1}, "num_fewshot=-1"),
    (FLOPsMeasurementCallback, {"peak_tflops": 0}, "peak_tflops=0: must be a positive number"),
    (FLOPsMeasurementCallback, {"peak_tflops": "989"}, "peak_tflops='989': must be a positive number"),
    (FLOPsMeasurementCallback, {"model_config": "llama"}, "model_config='llama' is not the configuration"),
    (FLOPsMeasurementCallback, {"data_config": {"seq_length": 8}}, "data_config has no global_batch_size and no seq_length"),
    (GarbageCollectionCallback, {"gc_interval_train": 0, "gc_interval_val": 5}, "gc_interval_train=0: must be a whole"),
    (GarbageCollectionCallback, {"gc_interval_train": 5, "gc_interval_val": 0}, "gc_interval_val=0: must be a whole"),
    (JitConfig, {"use_thunder": True}, "nemo2 compiles with torch"),
    (JitConfig, {"torch_kwargs": {"fulgraph": True}}, "no argument 'fulgraph'; did you mean 'fullgraph'"),
    (JitTransform, {"config": None}, r"JitTransform\.config=None"),
    (LayerFreezer, {"schedule": "decoder.layers.0"}, r"LayerFreezer\.schedule='decoder\.layers\.0'"),
    (LayerFreezer, {"schedule": {"a": 0}}, r"schedule\['a'\]=0: must be -1"),
    (LayerFreezer, {"schedule": {"a": [3, 1]}}, r"schedule\['a'\]=\[3, 1\]"),
    (LossGuard, {"on_nonfinite": "skipp"}, r"LossGuard\.on_nonfinite="),
    (LossGuard, {"on_spike": "warn"}, r"LossGuard\.on_spike="),
    (LossGuard, {"spike_factor": 1.0}, r"LossGuard\.spike_factor="),
    (LossGuard, {"spike_factor": "2"}, r"LossGuard\.spike_factor='2'"),
    (LossGuard, {"spike_factor": float("nan")}, r"LossGuard\.spike_factor="),
    (LossGuard, {"window": 0}, r"LossGuard\.window="),
    (LossGuard, {"max_skips": 0}, r"LossGuard\.max_skips="),
    (MegatronTokenDropCallback, {"moe_expert_capacity_factor": -1.0}, "requires a capacity"),
    (MegatronTokenDropCallback, {"moe_expert_capacity_factor": "1"}, "moe_expert_capacity_factor='1'"),
    (MegatronTokenDropCallback, {"moe_expert_capacity_factor": float("nan")}, "moe_expert_capacity_factor=nan"),
    (MemoryMonitor, {"dist_aggregate_batch_interval": 10}, "log_every_n_steps"),
    (MemoryProfileCallback, {"ranks": [-1], "max_entries": 0}, r"ranks contains -1(.|\n)*max_entries=0"),
    (ModelTrainingStateCallback, {"val_check_interval": 0}, "val_check_interval=0"),
    (
        NsysCallback,
        {"start_step": -1, "end_step": True, "ranks": [-2]},
        r"NsysCallback\.start_step=-1.*\n.*NsysCallback\.end_step=True.*\n.*NsysCallback\.ranks",
    ),
    (NsysCallback, {"start_step": 3, "end_step": 3}, "end_step=3 must be above start_step=3"),
    (ParameterDebugger, {"param_fn": 5}, r"ParameterDebugger\.param_fn=5"),
    (ParameterDebugger, {"log_on_hooks": "on_train_strat"}, "not a hook with .*; did you mean 'on_train_start'"),
    (PytorchProfilerCallback, {"start_step": 3, "end_step": 3}, "end_step=3 must be above start_step=3, because"),
    (PytorchProfilerCallback, {"start_step": 1, "end_step": 3, "warmup_steps": 2}, "Set end_step to 4 or more"),
    (PytorchProfilerCallback, {"start_step": -1, "end_step": 2}, r"PytorchProfilerCallback\.start_step=-1: must be a"),
    (PytorchProfilerCallback, {"start_step": 1.5, "end_step": 2}, "start_step=1.5"),
    (PytorchProfilerCallback, {"start_step": 0, "end_step": 2, "warmup_steps": True}, "warmup_steps=True: must be a"),
    (
        PytorchProfilerCallback,
        {"start_step": -1, "end_step": 0, "active_steps": 0},
        "start_step=-1.*\n.*end_step=0.*\n.*active_steps=0",
    ),
    *(
        (PytorchProfilerCallback, {"start_step": 0, "end_step": 2, "profiler_kwargs": kwargs}, f"profiler_kwargs.*{name}")
        for name, kwargs in {"with_stak": {"with_stak": True}, "record_shapes": {"record_shapes": "no"}}.items()
    ),
    (RuntimeEstimator, {"time_unit": None}, r"RuntimeEstimator\.time_unit=None"),
    (RuntimeEstimator, {"time_unit": "weeks"}, r"RuntimeEstimator\.time_unit='weeks'"),
    (SpeedMonitor, {"window_size": 0}, "window_size=0: must be a whole number of at least 1"),
    (SpeedMonitor, {"time_unit": "hour"}, "time_unit='hour': must be one of .*did you mean 'hours'"),
    (
        StragglerDetectionCallback,
        {"report_time_interval": 0, "calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False,
         "gpu_relative_perf_threshold": 70},
        r"\A.*\n.*\n.*\Z",
    ),
    (StragglerDetectionCallback, {"profiling_interval": 1.5}, "profiling_interval=1.5"),
    (StragglerDetectionCallback, {"report_time_interval": "300"}, "report_time_interval='300'"),
    (StragglerDetectionCallback, {"gpu_relative_perf_threshold": "1"}, "gpu_relative_perf_threshold='1'"),
    (StragglerDetectionCallback, {"num_gpu_perf_scores_to_print": -1}, "num_gpu_perf_scores_to_print=-1"),
    (TimingCallback, {"timer_kwargs": {"buffersize": 2}}, "did you mean 'buffer_size'"),
    (TimingCallback, {"timer_kwargs": {"buffer_size": 0}}, "buffer_size=0: must be a whole number of at least 1"),
    (TimingCallback, {"timer_kwargs": {"reduction": "max"}}, "must be 'mean'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("callback", "arguments", "words"),
    REFUSED,
    ids=[f"{callback.__name__} {'-'.join(arguments)}" for callback, arguments, _ in REFUSED],
)
def test_arguments_that_cannot_be_are_refused(callback, arguments, words):
    with pytest.raises(ConfigError, match=words):
        callback(**arguments)


@pytest.mark.parametrize(
    ("selector", "known"),
    [
        ("decoder.layers.*.mlp", True),
        ("decoder.layers.1.self_attention.core_attention", True),
        ("decoder.layers.0.mlp.linear_fc1.adapter", True),
        ("rotary_pos_emb", True),
        ("decoder.layers.2.mlp", False),
        ("decoder.layers.0.mlp.linear_fc1.act", False),
        ("model.layers.0.mlp", False),
    ],
)
def test_modules_to_compile_are_those_of_the_model(selector, known):
    callback = JitTransform(JitConfig(module_selector=selector, use_torch=True))
    with contextlib.nullcontext() if known else pytest.raises(ConfigError, match="the model has no such module"):
        callback.check_model(small_runs.build_llama().config)


@pytest.mark.parametrize(("layer", "vp", "known"), [(1, None, True), (2, None, False), (0, 2, True), (1, 2, False)])
def test_layers_to_compile_are_counted_in_each_pipeline_chunk(layer, vp, known):
    recipe = llama_tiny.pretrain_recipe(num_gpus_per_node=2)
    recipe.strategy.pipeline_model_parallel_size = 2
    recipe.strategy.virtual_pipeline_model_parallel_size = vp
    jit = Config(JitConfig, module_selector=f"decoder.layers.{layer}.mlp", use_torch=True)
    recipe.trainer.callbacks.append(Config(JitTransform, jit))
    found = [one for one in find_problems(recipe) if "JitConfig" in one]
    assert len(found) == (not known) and all("counts its layers from 0" in one for one in found)
