# SPDX-License-Identifier: Apache-2.0
"""``nemo2 serve`` with transformers' real server: its answers are those of ``nemo2 generate``. ``make test-serve`` runs it."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support import answering_runs

pytestmark = pytest.mark.serve
PROMPTS = ["It returns", "Name three colours of"]


def answered(directory: str, run: str, adapted: str) -> dict[str, list[str]]:
    from nemo2 import llm
    from nemo2.hugging_face.checkpoint import find_checkpoint
    from support import small_runs

    small_runs.quiet()
    merged = llm.peft.merge_lora(adapted, f"{directory}/merged")
    small_runs.release()
    found = {}
    for name, place in {"model": find_checkpoint(Path(run)), "LoRA": merged}.items():
        found[name] = llm.generate(str(place), prompts=PROMPTS, max_new_tokens=12, temperature=0.0, text_only=True)
        small_runs.release()
    return found


def saved(directory: str) -> dict[str, Any]:
    from nemo2.hugging_face.checkpoint import find_checkpoint
    from nemo2.llm import peft

    run = str(find_checkpoint(Path(answering_runs.save(f"{directory}/base"))))
    lora = peft.LoRA(dim=4, alpha=8, lora_B_init_method="normal")
    adapted = answering_runs.save(f"{directory}/LoRA", transform=lora, base=run)
    return {"runs": {"model": run, "LoRA": adapted}, "answers": answered(directory, run, adapted)}


@pytest.mark.parametrize("kind", ["model", "LoRA"])
def test_the_server_answers_as_generate_does(
    kind: str, run_on_ranks: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    [found] = run_on_ranks(saved, 1, str(tmp_path), timeout=240)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "nemo2",
        "serve",
        found["runs"][kind],
        "--engine",
        "transformers",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "NEMO2_EXPORTS_CACHE": str(tmp_path / "exports"), "HF_HUB_OFFLINE": "1"}
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait(server, port, tmp_path / "log")
        name = Path(found["runs"][kind]).name
        [model] = ask(port, "/v1/models")["data"]
        assert model["id"] == name, "requests name the model as the user does"
        for prompt, expected in zip(PROMPTS, found["answers"][kind], strict=True):
            body = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0.0}
            assert ask(port, "/v1/completions", body)["choices"][0]["text"] == expected
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert ask(port, "/v1/chat/completions", chat)["choices"][0]["message"]["role"] == "assistant"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)


def wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            if ask(port, "/health")["status"] == "ok":
                return
        except (ConnectionError, OSError):
            time.sleep(0.5)
    raise AssertionError(log.read_text())


def ask(port: int, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    return json.loads(connection.getresponse().read())
