# SPDX-License-Identifier: Apache-2.0
"""Additions beside Transformer Engine's layers, a stand-in's: tests/transformer_engine/adapted.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.nightly import each_case, requested
from tests.transformer_engine.adapted import ADAPTERS

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("adapted")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = ROOT / "tests" / "transformer_engine" / "adapted.py"
    command = [sys.executable, "-W", "ignore", str(script), str(work / "out.json"), str(work)]
    command += requested(request, "adapter")
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, cwd=work, capture_output=True, text=True, timeout=300
    )
    assert (work / "out.json").exists(), done.stderr[-3000:]
    return json.loads((work / "out.json").read_text())


@pytest.mark.timeout(330)
@pytest.mark.parametrize("adapter", each_case(ADAPTERS, ADAPTERS[-1:]))
def test_experts_that_would_be_grouped_are_built_one_by_one_and_train_as_plain_ones(found: Any, adapter: str) -> None:
    theirs, plain = found[adapter]["engine"], found[adapter]["plain"]
    assert isinstance(theirs, dict) and isinstance(plain, dict), found
    assert (theirs["experts"], theirs["inside"]) == (["SequentialMLP"], ["TEColumnParallelLinear"])
    assert theirs["keys"] == plain["keys"] and any(".experts." in key for key in theirs["keys"])
    assert len(set(plain["losses"])) == len(plain["losses"])
    assert theirs["losses"] == pytest.approx(plain["losses"], rel=1e-6)
