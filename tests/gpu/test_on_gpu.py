# SPDX-License-Identifier: Apache-2.0
"""The GPU path against the CPU path: Transformer Engine's layers, fp8, NCCL, CUDA graphs, checkpoints to and fro.

Left out of `make test`; `make test-gpu` runs them and fails where there is no GPU. The runs themselves can be tried without
one: NEMO2_GPU_TESTS_ON=cpu puts both sides on the CPU.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.backend.extras import has

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]
GPU = os.environ.get("NEMO2_GPU_TESTS_ON", "gpu")
NEEDS_TE = pytest.mark.skipif(
    GPU == "gpu" and not has("transformer_engine"), reason="Transformer Engine isn't installed"
)
Train = Callable[..., dict[str, Any]]


class Side:
    """A process of `gpu_run.py`, which trains run after run on a device. A run that fails ends it; the next starts another."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `end` closes it
        self.process = self.start()

    def start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, str(Path(__file__).with_name("gpu_run.py"))]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {})
        return subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors
        )

    def train(self, steps: int, **options: Any) -> dict[str, Any]:
        if self.process.poll() is not None:
            self.errors.seek(0)
            self.errors.truncate()
            self.process = self.start()
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"steps": steps, **options}, default=str), file=self.process.stdin, flush=True)
        try:
            for line in self.process.stdout:
                if line.startswith("RUN "):
                    return json.loads(line[4:])
        except BaseException:  # of a test's time: a later run's answer would be this one's
            self.process.kill()
            self.process.wait()
            raise
        self.process.wait()
        self.errors.seek(0)
        raise AssertionError(self.errors.read()[-4000:])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """The report of `gpu_run.py` on a run: ``train(device, steps, **options)``. Both sides start at once."""
    sides = {device: Side(device) for device in {"cpu", GPU}}
    yield lambda device, steps, **options: sides[device].train(steps, **options)
    for side in sides.values():
        side.end()


def checkpoint(folder: Path) -> Path:
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


@pytest.fixture(scope="module")
def start(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one CPU step: the same weights for both sides, which draw theirs from other generators."""
    folder = tmp_path_factory.mktemp("start")
    train("cpu", 1, save=folder)
    return checkpoint(folder)


@pytest.fixture(scope="module")
def on_cpu(train: Train, start: Path) -> dict[str, Any]:
    return train("cpu", 21, load=start)


@pytest.fixture(scope="module")
def on_gpu(train: Train, start: Path) -> dict[str, Any]:
    return train(GPU, 21, load=start)


@pytest.fixture(scope="module")
def learned(train: Train, start: Path) -> list[float]:
    """The losses of two hundred steps in bf16."""
    return train(GPU, 201, load=start)["losses"]


def test_the_gpus_layers_train_as_the_plain_ones_do(on_gpu, on_cpu):
    there = on_gpu
    if GPU == "gpu":
        assert there["device"] == "cuda"
        assert there["backend"] == "nccl"
        assert ("transformer_engine" in there["layers"]) is has("transformer_engine")
    assert there["losses"] == pytest.approx(on_cpu["losses"], rel=1e-2)  # bf16: 8 bits of a number
    assert there["norms"] == pytest.approx(on_cpu["norms"], rel=5e-2)


def test_a_run_goes_from_the_cpu_to_the_gpu_and_back(train, tmp_path, start, on_cpu):
    train(GPU, 11, load=start, save=tmp_path / "half")
    back = train("cpu", 21, load=checkpoint(tmp_path / "half"))
    assert len(back["losses"]) == 10
    assert back["losses"] == pytest.approx(on_cpu["losses"][-10:], rel=1e-2)


def test_an_asynchronous_save_is_what_a_synchronous_one_is(train, tmp_path, start):
    there = train(GPU, 6, load=start, save=tmp_path / "background", asynchronous=True)
    beside = train(GPU, 6, load=start, save=tmp_path / "waiting")
    assert there["losses"] == beside["losses"]
    resumed = [train(GPU, 11, load=checkpoint(tmp_path / name))["losses"] for name in ("background", "waiting")]
    assert resumed[0] == resumed[1]


@pytest.mark.parametrize("graphs", [pytest.param("transformer_engine", marks=NEEDS_TE), "local", "full_iteration"])
def test_captured_steps_train_as_the_others_do(train, start, on_gpu, graphs):
    there = train(GPU, 21, load=start, graphs=graphs)
    assert there["captured"] is (GPU == "gpu")  # a CPU turns them off
    assert there["losses"] == pytest.approx(on_gpu["losses"], rel=1e-2)
    assert there["norms"] == pytest.approx(on_gpu["norms"], rel=5e-2)


def test_soft_capped_attention_is_compiled_and_the_same(train, start):
    there, here = (train(device, 21, load=start, softcap=5.0) for device in (GPU, "cpu"))
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-2)
    if GPU == "gpu":
        assert there["compiled"] > 0


@NEEDS_TE
@pytest.mark.parametrize("recipe", ["bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed"])
def test_fp8_learns_as_bf16_does_over_two_hundred_steps(train, start, learned, recipe):
    eighth = train(GPU, 201, load=start, precision="bf16_mixed" if GPU == "cpu" else recipe)["losses"]
    assert statistics.mean(learned[-50:]) < 0.9 * learned[0]
    assert statistics.mean(eighth[-50:]) == pytest.approx(statistics.mean(learned[-50:]), rel=0.02)
