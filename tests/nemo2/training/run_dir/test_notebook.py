# SPDX-License-Identifier: Apache-2.0
"""A cell that trains is interrupted, as by the notebook's stop button: it ends at once, and the kernel goes on."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
from support import small_runs
from nemo2.training.run_dir.preemption import PreemptionCallback
import lightning.pytorch as pl, pathlib, signal, time

class Slow(pl.Callback):
    def on_train_batch_start(self, trainer, *rest):
        pathlib.Path({mark!r}).touch()
        time.sleep(0.2)

before = [signal.getsignal(number) for number in signal.Signals]
small_runs.fit(small_runs.build_llama(), max_steps=1000, callbacks=[PreemptionCallback(), Slow()])
"""
AFTER = """
assert [signal.getsignal(number) for number in signal.Signals] == before
small_runs.release()
print(len(small_runs.fit(small_runs.build_llama(), max_steps=2)["losses"]))
"""


def answers(message: dict[str, Any], asked: str) -> bool:
    return message["parent_header"].get("msg_id") == asked


@pytest.mark.slow
def test_an_interrupted_cell_ends_at_once_and_the_next_one_trains(tmp_path, monkeypatch, warm_interpreter):
    jupyter = pytest.importorskip("jupyter_client")
    spec = tmp_path / "kernels" / "warm" / "kernel.json"
    spec.parent.mkdir(parents=True)
    line = [warm_interpreter, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": line, "display_name": "warm", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    # Over TCP, another process may take a port between its choice by the manager and its use by the kernel. A socket's path
    # has 107 characters at most.
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", tempfile.mkdtemp())
    kernel = jupyter.KernelManager(kernel_name="warm", transport="ipc")
    kernel.start_kernel(cwd=str(Path(__file__).parents[4]))
    client = kernel.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        mark = tmp_path / "trains"
        # After an error, a kernel refuses the requests of the next moment unless the failed one said otherwise.
        asked = client.execute(TRAIN.format(mark=str(mark)), stop_on_error=False)
        deadline = time.monotonic() + 150
        while not mark.exists():
            assert time.monotonic() < deadline, "the cell doesn't train"
            time.sleep(0.1)
        kernel.interrupt_kernel()
        reply = next(one for one in iter(lambda: client.get_shell_msg(timeout=60), None) if answers(one, asked))[
            "content"
        ]
        assert (reply["status"], reply.get("ename")) == ("error", "SystemExit"), (
            "Lightning's answer to KeyboardInterrupt"
        )
        said = []
        reply = client.execute_interactive(
            AFTER, timeout=120, output_hook=lambda message: said.append(message["content"])
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        assert any(one.get("text") == "2\n" for one in said), said
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
