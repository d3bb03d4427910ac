# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's hub, which answers, doesn't answer, or isn't to be asked."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nemo2.base.errors import CheckpointError, DataError
from nemo2.data.hub import asking_hub

constants = pytest.importorskip("huggingface_hub.constants")


def serve(monkeypatch: pytest.MonkeyPatch) -> HTTPServer:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return server


@pytest.fixture
def dead_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    serve(monkeypatch).server_close()
    return constants.ENDPOINT


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that knows no page: it answers each request with an error."""
    with serve(monkeypatch) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def test_a_hub_that_does_not_answer_is_not_asked_again(dead_hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    with asking_hub("org/model"):  # a cached copy is used
        assert constants.HF_HUB_OFFLINE
    with pytest.raises(ConnectionError, match=dead_hub), asking_hub("org/model"):
        raise OSError("nothing in the cache")
    assert not constants.HF_HUB_OFFLINE
    assert f"{dead_hub} for org/model" in capsys.readouterr().err


def test_a_hub_that_answers_is_asked_and_its_errors_stay(hub: None) -> None:
    with pytest.raises(KeyError, match="no such model"), asking_hub("org/model"):
        assert not constants.HF_HUB_OFFLINE
        raise KeyError("no such model")


def test_a_process_that_is_offline_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with asking_hub("org/model"):
        pass
    assert constants.HF_HUB_OFFLINE
    assert not capsys.readouterr().err


def test_each_name_of_the_hub_is_refused_with_its_reason(dead_hub: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    from nemo2.checkpoint.paths import folder_of
    from nemo2.data.finetuning.open import load
    from nemo2.data.tokenizer import AutoTokenizer

    with pytest.raises(DataError, match=dead_hub):
        AutoTokenizer("org/model").vocab_size  # noqa: B018
    with pytest.raises(DataError, match=dead_hub):
        load("org/data", cache_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match=dead_hub):
        folder_of("hf://org/model")
