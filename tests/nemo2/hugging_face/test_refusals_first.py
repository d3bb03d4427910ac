# SPDX-License-Identifier: Apache-2.0
"""A target that exists is refused before anything is downloaded, opened or read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo2 import llm
from nemo2.base.errors import CheckpointError
from nemo2.hugging_face.adapter_import import import_adapter
from nemo2.hugging_face.adapters import export_adapter
from nemo2.hugging_face.api import Connector

CALLS: dict[str, Callable[[Path], Any]] = {
    "import of a repository": lambda target: llm.import_ckpt(source="hf://organisation/name", output_path=target),
    "export": lambda target: Connector(Path("/nowhere"), "hf")(target),
    "export of an adapter": lambda target: export_adapter("/nowhere", target),
    "import of an adapter": lambda target: import_adapter("/nowhere", target),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_target_that_exists_is_refused_first(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def downloaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a download began")

    monkeypatch.setattr("huggingface_hub.snapshot_download", downloaded)
    with pytest.raises(CheckpointError, match="exists"):
        CALLS[call](tmp_path)
