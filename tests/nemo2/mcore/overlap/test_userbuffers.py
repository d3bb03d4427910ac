# SPDX-License-Identifier: Apache-2.0
"""Userbuffers against what each version of Transformer Engine checks: the tables of tests/transformer_engine."""

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nemo2.base.errors import ConfigError
from nemo2.mcore.overlap import userbuffers
from nemo2.mcore.overlap.presets import PRESETS, preset
from nemo2.mcore.overlap.tp_overlap_cfg import userbuffer_settings
from nemo2.mcore.overlap.tp_switches import switches_of
from nemo2.mcore.overlap.userbuffers import start_userbuffers, stop_userbuffers, without_userbuffers
from nemo2.models.llama import LlamaConfig
from support.nightly import each_case, requested

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "tests" / "transformer_engine"


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"transformer_engine_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = _module("stand_in")
SAMPLER = SimpleNamespace(seq_len=8192, micro_batch_size=1)


# Made before the stand-in is there: what a configuration asks about this machine is remembered.
MODEL = LlamaConfig(num_layers=2, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=64)


def a_config(**changes: Any) -> Any:
    config = copy.copy(MODEL)
    settled = {
        "tp_comm_overlap": True,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "params_dtype": torch.bfloat16,
        "bf16": True,
    }
    for name, value in (settled | changes).items():
        setattr(config, name, value)
    return config


@pytest.fixture(params=each_case(stand_in.VERSIONS, (stand_in.VERSIONS[0], stand_in.VERSIONS[-1])))
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Transformer Engine of this version, as far as userbuffers go, inside a world of processes."""
    before = set(sys.modules)
    stand_in.install()
    import megatron.core.utils as megatron_utils

    monkeypatch.setattr(megatron_utils, "_te_version", None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(userbuffers, "_running", None)
    yield stand_in.use(request.param)
    for name in set(sys.modules) - before:
        if name.startswith("transformer_engine"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("multicast", "given", "expected"), [(True, None, None), (False, None, "1"), (False, "0", "0")], ids=str
)
def test_gpus_without_multicast_exchange_through_handles(
    version: Any, monkeypatch: pytest.MonkeyPatch, multicast: bool, given: str | None, expected: str | None
) -> None:
    from transformer_engine.pytorch.module import base  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("UB_SKIPMC", given or "")  # so that what the start sets is taken back
    if given is None:
        monkeypatch.delenv("UB_SKIPMC")
    monkeypatch.setattr(base, "tex", SimpleNamespace(device_supports_multicast=lambda: multicast), raising=False)
    start_userbuffers(a_config(), SAMPLER)
    assert os.environ.get("UB_SKIPMC") == expected
    stop_userbuffers()


# --------------------------------------------------------------------------------- whole runs, with Megatron-Core's wrappers


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A performance-mode recipe on two ranks, entry by entry and version by version."""
    work = tmp_path_factory.mktemp("runs")
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    environment |= {
        "MASTER_PORT": "29511",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", str(FOLDER / "run.py"), str(work / "out.json"), str(work)]
    command += requested(request, "number") or [stand_in.RUN[-1]]
    with (
        (work / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=work, start_new_session=True) as process,
    ):
        try:
            process.wait(timeout=800)
        finally:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
    assert (work / "out.json").exists(), (work / "log").read_text()[-3000:]
    return json.loads((work / "out.json").read_text())


@pytest.mark.timeout(900)  # about 40 s on two idle cores
@pytest.mark.parametrize("number", each_case(stand_in.RUN, stand_in.RUN[-1:]))
def test_a_run_builds_its_layers_over_started_buffers_trains_as_without_and_frees_them(
    runs: dict[str, Any], number: str
) -> None:
    """The layers refuse to be built before the start, where their version does; every GEMM's buffer has the size that comes."""
    for entry, run in runs[number].items():
        assert "error" not in run, f"{number} {entry}: {run.get('error')}"
        steps = [line[0] for line in run["log"]]
        if entry == "generate":
            assert not steps  # without sequence parallelism, which single tokens can't have, no layer has a buffer
            continue
        assert steps[0] == "start" and steps[-1] == "destroy" and steps.count("start") == steps.count("destroy") == 1
        assert not run["left"] and steps.index("build") < steps.index("ask")
        asked = {line[1] for line in run["log"] if line[0] == "ask"}
        assert asked == {
            *("qkv_fprop", "qkv_dgrad", "qkv_wgrad", "proj_fprop", "proj_dgrad"),
            *("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop", "fc2_dgrad"),
        }
    assert runs[number]["fit"]["result"] == runs["plain"]


@pytest.mark.timeout(900)
def test_the_newest_version_resumes_and_generates(runs: dict[str, Any]) -> None:
    newest = runs[stand_in.RUN[-1]]
    assert newest["resume"]["result"] != newest["fit"]["result"] and len(newest["resume"]["result"]) == 1
    assert newest["generate"]["result"]


@pytest.mark.timeout(900)
def test_the_oldest_version_resumes_what_the_newest_saved(runs: dict[str, Any]) -> None:
    """Its layers can't read the states without bytes that newer versions save."""
    assert runs["older"] and runs["older"] != runs[stand_in.RUN[-1]]["resume"]["result"]


# --------------------------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_starts_in_every_version(version: Any, name: str) -> None:
    row = PRESETS[name]
    fp8 = "hybrid" if row.job.dtype == "fp8" else None
    settings, switched = preset(name), switches_of(preset(name))
    start_userbuffers(a_config(tp_comm_overlap_cfg=settings, fp8=fp8, **switched), SAMPLER)
    asked = layers_ask(version, switched)
    # One of the two dgrads of the LoRA presets scatters, and what keeps the other in bulk turns its fprop off.
    assert asked == set(userbuffer_settings(settings) or ()) - ({"qkv_fprop"} if row.fc1_dgrad else set())
    with pytest.raises(AssertionError) if row.fc1_dgrad else nullcontext():
        layers_ask(version, switches_of(None))


def layers_ask(version: Any, switched: dict[str, bool]) -> set[str]:
    """Which buffers the four linear layers look for in a step, with these switches of Megatron-Core's; each is of their kind."""
    version.log.clear()
    mode = next(mode for _, mode in version.buffers)
    for layer in ("qkv", "proj", "fc1", "fc2"):
        flags = {"ub_overlap_ag": switched["tp_comm_overlap_ag"], "ub_overlap_rs": switched["tp_comm_overlap_rs"]}
        cut, cls = ("row", "Linear") if layer in ("proj", "fc2") else ("column", "LayerNormLinear")
        if cut == "column":
            scattered = switched["tp_comm_overlap_rs_dgrad"]
            flags = {"ub_overlap_ag": flags["ub_overlap_ag"], "ub_overlap_rs_dgrad": scattered}
            if switched[f"tp_comm_overlap_disable_{layer}"]:
                flags = dict.fromkeys(flags, False)
            flags |= {f"ub_bulk_{part}": switched[f"tp_comm_bulk_{part}"] for part in ("dgrad", "wgrad")}
        on = version.switches(cls, cut, {"sequence_parallel": True, "ub_name": layer, **flags})
        for switch in [name for name, value in on.items() if value]:
            for suffix in version.buffers_of("linear" if cls == "Linear" else "layernorm_linear", switch):
                version.buffers.setdefault(
                    (f"{layer}{suffix}", stand_in.Mode.NONE), version.buffers[f"{layer}{suffix}", mode]
                )
                version.ask(f"{layer}{suffix}", scatter=switch == "ub_overlap_rs_dgrad", tokens=8192)
    return {line[1] for line in version.log if line[0] == "ask"}


def test_the_shape_is_that_of_a_micro_batch_on_this_rank(version: Any) -> None:
    changes = {"context_parallel_size": 2, "params_dtype": torch.float16, "tp_comm_bootstrap_backend": "gloo"}
    start_userbuffers(a_config(**changes), SAMPLER)
    [(_, given, settings)] = version.log
    assert given["shape"] == [4096, 8192] and given["tp_size"] == 4 and given["dtype"] is torch.float16
    assert settings is None and given["bootstrap_backend"] == "gloo"


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        ({}, ["none"]),
        ({"fp8": "hybrid"}, ["fp8"]),
        ({"fp8": "hybrid", "first_last_layers_bf16": True}, ["fp8", "none"]),
        ({"first_last_layers_bf16": True}, ["none"]),
    ],
)
def test_there_is_a_set_of_buffers_for_each_dtype_of_layers(version: Any, changes: Any, modes: list[str]) -> None:
    config = a_config(**changes, num_layers_at_start_in_bf16=1)
    if "quantization_modes" not in str(version.table["signatures"]) and len(modes) > 1:
        with pytest.raises(ConfigError, match=r"first_last_layers_bf16=True .* Install 2\.8 or newer"):
            start_userbuffers(config, SAMPLER)
        return
    start_userbuffers(config, SAMPLER)
    assert sorted({mode.value for _, mode in version.buffers}) == sorted(modes)


@pytest.mark.parametrize("name", [one for one, row in PRESETS.items() if row.fc1_dgrad is not None])
def test_a_scattered_dgrad_goes_with_layers_in_16_bits(version: Any, name: str) -> None:
    """Transformer Engine fails in `list.remove` where the second set of buffers says the method again."""
    both = {"fp8": "hybrid", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1}
    config = a_config(tp_comm_overlap_cfg=preset(name), **both, **switches_of(preset(name)))
    if version.table["userbuffers"]["two_modes"] is None:  # one set of buffers is all it has
        with pytest.raises(ConfigError, match=r"2\.8 or newer"):
            start_userbuffers(config, SAMPLER)
        return
    start_userbuffers(config, SAMPLER)
    assert all(version.buffers["fc1_dgrad", mode].scattered for mode in stand_in.Mode)


def test_atomic_gemms_and_layers_in_16_bits_exclude_each_other(version: Any) -> None:
    both = {"fp8": "hybrid", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1}
    atomic = {"qkv_fprop": {"atomic_gemm": True}}
    with pytest.raises(ConfigError, match=r"atomic_gemm|2\.8 or newer"):
        start_userbuffers(a_config(tp_comm_overlap_cfg=atomic, **both), SAMPLER)


# -------------------------------------------------------------------------------------------------------------- when


def test_the_same_buffers_stay_and_others_take_their_place(version: Any) -> None:
    for micro_batch, steps in ((1, 1), (1, 1), (2, 3)):
        start_userbuffers(a_config(), SimpleNamespace(seq_len=8192, micro_batch_size=micro_batch))
        assert len(version.log) == steps
    assert [line[0] for line in version.log] == ["start", "destroy", "start"]
    stop_userbuffers()
    stop_userbuffers()
    assert len(version.log) == 4 and version.buffers is None


def test_a_start_that_failed_leaves_nothing_behind(version: Any) -> None:
    version.buffers = {}  # somebody else's
    with pytest.raises((AssertionError, RuntimeError), match="already initialized"):
        start_userbuffers(a_config(), SAMPLER)
    start_userbuffers(a_config(), SAMPLER)


@pytest.mark.parametrize("changes", [{"tensor_model_parallel_size": 1}, {"sequence_parallel": False}])
def test_nothing_starts_where_nothing_overlaps(version: Any, changes: dict[str, Any]) -> None:
    start_userbuffers(a_config(**changes), SAMPLER)
    assert version.log == []


def test_data_of_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_comm_overlap=True .* no data_sampler"):
        start_userbuffers(a_config(), None)


def test_layers_can_do_without_for_a_while() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    layer: Any = model["layer"]
    layer.ub_overlap_ag_fprop, layer.ub_bulk_wgrad, layer.ub_name = True, False, "qkv"
    with without_userbuffers(model):
        assert (layer.ub_overlap_ag_fprop, layer.ub_bulk_wgrad, layer.ub_name) == (False, False, "qkv")
    assert layer.ub_overlap_ag_fprop is True and layer.ub_bulk_wgrad is False
