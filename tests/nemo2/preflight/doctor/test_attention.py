# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of an attention that runs, and of the two ways in which it failed on a real H100."""

import json
import subprocess

import pytest

from nemo2.preflight.doctor import attention as probe

OLD = "cuDNN Error: set_attribute(CUDNN_ATTR_OPERATION_RESHAPE_MODE) failed"
MIXED = "cuDNN Error: finalize() cudnn_status: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"


def test_an_attention_that_runs_is_one_line() -> None:
    found = probe.finding({"error": "", "cudnn": ["/a/libcudnn.so.9"]})
    assert (found.state, found.costs, found.fix) == ("ok", "", "")


@pytest.mark.parametrize(
    ("error", "files", "words"),
    [
        (OLD, ["/a/libcudnn.so.9"], "cudnn-cu13>="),
        (MIXED, ["/a/libcudnn.so.9", "/b/libcudnn.so.9.14.0"], "CUDNN_HOME="),
        ("CUDA error: out of memory", ["/a/libcudnn.so.9"], "attention_backend=unfused"),
    ],
)
def test_a_failure_names_what_is_loaded_and_what_helps(error: str, files: list[str], words: str) -> None:
    found = probe.finding({"error": error, "cudnn": files})
    assert found.state == "broken" and error in found.value and words in found.fix
    assert all(file in found.costs for file in files) is (len(files) > 1)


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ('a warning\n{"error": "", "cudnn": []}\n', "ok"),
        ("", "broken"),
    ],
)
def test_a_process_that_answers_and_one_that_dies(monkeypatch: pytest.MonkeyPatch, printed: str, state: str) -> None:
    monkeypatch.setattr(probe, "have_te", lambda: True)
    done = subprocess.CompletedProcess([], 0 if printed else -11, stdout=printed, stderr="Segmentation fault")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    (found,) = probe.attention()
    assert found.state == state
    assert printed or "Segmentation fault" in found.value


def test_a_process_that_never_answers_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("python", probe.SECONDS)

    monkeypatch.setattr(probe, "have_te", lambda: True)
    monkeypatch.setattr(subprocess, "run", never)
    (found,) = probe.attention()
    assert found.state == "broken"


def test_without_transformer_engine_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "have_te", lambda: False)
    assert not list(probe.attention())


def test_the_process_answers_in_json_whatever_goes_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise RuntimeError(f"a line\n{OLD}")

    monkeypatch.setattr(probe, "try_attention", fails)
    probe.main()
    assert json.loads(capsys.readouterr().out)["error"] == OLD
