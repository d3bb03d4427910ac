# SPDX-License-Identifier: Apache-2.0
"""A cluster of Kubernetes with Kubeflow Trainer as far as a run meets it: its API over HTTP, and pods that are processes.

What a TrainJob may say is decided by the models that Kubeflow generates from its own OpenAPI schema (``kubeflow-trainer-api``).
Pods get the variables that Trainer's torch plugin sets, their command runs as it stands, and pods that fail are started again.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

OLD, NEW = "podTemplateOverrides", "runtimePatches"


class Pod:
    """A pod of a TrainJob: its number is the node's."""

    def __init__(self, job: str, number: int, body: dict[str, Any], folder: Path, port: int) -> None:
        self.name, self.number, self.restarts = f"{job}-node-0-{number}", number, 0
        self.job, self.log = job, folder / f"{job}-{number}.log"
        self.words = folder / f"{job}-{number}.words"
        self.last: dict[str, Any] | None = None
        trainer = body["spec"]["trainer"]
        self.command = trainer["command"]
        given = {one["name"]: one["value"] for one in trainer["env"]}
        hidden = ("NEMO2_", "PET_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
        self.variables = {key: value for key, value in os.environ.items() if not key.startswith(hidden)} | given
        self.variables |= {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "NEMO2_TERMINATION_LOG": str(self.words),
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.variables, stdout=log, stderr=log, cwd="/", start_new_session=True
            )

    def again(self) -> None:
        self.last = self.state()
        self.words.unlink(missing_ok=True)
        self.restarts += 1
        self.start()

    def state(self) -> dict[str, Any]:
        code = self.process.poll()
        if code is None:
            return {"running": {}}
        words = self.words.read_text() if self.words.exists() else ""
        return {"terminated": {"exitCode": code % 256, "message": words}}

    def as_json(self) -> dict[str, Any]:
        code = self.process.poll()
        status = {"name": "node", "image": "", "imageID": "", "ready": code is None, "restartCount": self.restarts}
        return {
            "metadata": {
                "name": self.name,
                "labels": {
                    "jobset.sigs.k8s.io/jobset-name": self.job,
                    "batch.kubernetes.io/job-completion-index": str(self.number),
                },
            },
            "status": {
                "phase": "Running" if code is None else "Succeeded" if code == 0 else "Failed",
                "containerStatuses": [{**status, "state": self.state(), "lastState": self.last or {}}],
            },
        }


class Cluster:
    """The cluster; ``form`` is where its Trainer has pods' settings. ``restarts``: how often failed pods are started again."""

    def __init__(self, folder: Path, *, form: str = NEW, restarts: int = 0) -> None:
        self.folder, self.form, self.restarts = folder, form, restarts
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: list[Pod] = []
        self.refused: list[str] = []
        (folder / "bin").mkdir()
        python = folder / "bin" / "python3"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def kubeconfig(self) -> Path:
        address = f"http://127.0.0.1:{self._server.server_port}"
        named = {"cluster": {"server": address}, "user": {"token": "t"}, "context": {"cluster": "c", "user": "c"}}
        text = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
        lists = {f"{kind}s": [{"name": "c", kind: value}] for kind, value in named.items()}
        file = self.folder / "kubeconfig"
        file.write_text(json.dumps(text | lists))
        return file

    def unknown_field(self, body: dict[str, Any]) -> str | None:
        """The first field of a TrainJob that this version of Trainer doesn't know."""
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

        if self.form == OLD:
            if NEW in body["spec"]:
                return f"spec.{NEW}"
            body = {**body, "spec": {key: value for key, value in body["spec"].items() if key != OLD}}
        known = TrainerV1alpha1TrainJob.from_dict(body)
        assert known is not None
        return lost(body, known.to_dict())

    def create(self, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        self.jobs[name] = body
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pods += [
            Pod(name, number, body, self.folder, port) for number in range(body["spec"]["trainer"]["numNodes"])
        ]

    def status(self, name: str) -> dict[str, Any]:
        pods = [pod for pod in self.pods if pod.job == name]
        codes = [pod.process.poll() for pod in pods]
        if any(codes) and None not in codes and pods[0].restarts < self.restarts:
            for pod in pods:
                pod.again()
            codes = [None for _ in pods]
        counts = {
            "active": codes.count(None),
            "failed": int(any(codes) and None not in codes),
            "succeeded": int(all(code == 0 for code in codes)),
        }
        return {"jobsStatus": [{"name": "node", "ready": 0, "suspended": 0, **counts}]}

    def evict(self) -> None:
        """Ask all pods to end, as a node that is drained does: their first process alone gets the signal."""
        for pod in self.pods:
            pod.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        self._server.shutdown()
        for pod in self.pods:
            if pod.process.poll() is None:
                os.killpg(pod.process.pid, signal.SIGKILL)
                pod.process.wait()


def lost(given: Any, kept: Any, path: str = "") -> str | None:
    """The path of the first field of ``given`` that ``kept`` lacks."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                return f"{path}.{key}".strip(".")
            if (found := lost(value, kept[key], f"{path}.{key}")) is not None:
                return found
    if isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            if (found := lost(one, other, f"{path}[{number}]")) is not None:
                return found
    return None


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, code: int, value: Any) -> None:
            text = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            strict = parse_qs(urlparse(self.path).query).get("fieldValidation") == ["Strict"]
            if strict and (field := cluster.unknown_field(body)):
                cluster.refused.append(field)
                words = (
                    f'TrainJob in version "v1alpha1" cannot be handled: strict decoding error: unknown field "{field}"'
                )
                return self.answer(400, {"kind": "Status", "message": words, "code": 400})
            cluster.create(body)
            return self.answer(201, body)

        def do_GET(self) -> None:
            path = urlparse(self.path).path
            if match := re.fullmatch(r"/apis/trainer.kubeflow.org/v1alpha1/namespaces/[^/]+/trainjobs/([^/]+)", path):
                name = match[1]
                if name not in cluster.jobs:
                    return self.answer(404, {"kind": "Status", "code": 404, "message": "not found"})
                return self.answer(200, {**cluster.jobs[name], "status": cluster.status(name)})
            if re.fullmatch(r"/api/v1/namespaces/[^/]+/pods", path):
                [selector] = parse_qs(urlparse(self.path).query)["labelSelector"]
                items = [pod.as_json() for pod in cluster.pods if selector.endswith(f"={pod.job}")]
                return self.answer(200, {"kind": "PodList", "apiVersion": "v1", "items": items})
            name = path.split("/")[-2]
            return self.follow(next(pod for pod in cluster.pods if pod.name == name))

        def follow(self, pod: Pod) -> None:
            self.send_response(200)
            self.end_headers()
            process = pod.process
            with open(pod.log, "rb") as log:
                while True:
                    ended = process.poll() is not None
                    if text := log.read():
                        self.wfile.write(text)
                        self.wfile.flush()
                    if ended:
                        return
                    time.sleep(0.1)

    return Handler
