# SPDX-License-Identifier: Apache-2.0
"""Deferred packages are imported by the first who asks for them, and work then."""

import json
import subprocess
import sys
from typing import Any

import pytest


def python(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


HEAVY = "[name for name in ('leptonai', 'fastapi', 'transformers') if name in sys.modules]"


def test_nemo_run_and_lightning_come_without_what_few_runs_use_and_its_executor_works() -> None:
    found = python(f"""
import json, sys
import nemo2
import nemo_run, lightning.pytorch
before = {HEAVY}
from nemo_run.core.execution import lepton
executor = nemo_run.LeptonExecutor(
    container_image="image", nemo_run_dir="/n", mounts=[dict(path="/a", mount_path="/b")], node_group="group"
)
made = {HEAVY}
state = lepton.LeptonJobState.Running            # an attribute imports it,
from leptonai.api.v1.types.job import LeptonJobState
same = lepton.LeptonJobState is LeptonJobState   # and the real class is in its place
class Client:
    pass
from leptonai.api.v2 import client
client.APIClient = Client
called = type(lepton.APIClient()) is Client      # so does a call
print(json.dumps([before, made, "leptonai" in sys.modules, state.value, same, called, lepton.APIClient is Client]))
""")
    assert found == [[], [], True, "Running", True, True, True]


def test_a_metric_that_needs_transformers_gets_it() -> None:
    found = python(f"""
import json, sys
import nemo2
import torchmetrics
from torchmetrics.functional.text import bert
before = {HEAVY}
tokenizer = bert.AutoTokenizer.from_pretrained
import transformers
print(json.dumps([before, bert.AutoTokenizer is transformers.AutoTokenizer, tokenizer.__name__]))
""")
    assert found == [[], True, "from_pretrained"]


def test_a_stand_in_is_as_good_as_what_it_stands_for() -> None:
    from nemo2.base.deferred import StandIn

    holder: dict[str, Any] = {}
    path: Any = StandIn("pathlib", "PurePath", holder)
    holder["Path"] = path
    assert "not imported yet" in repr(path)

    class Own(path):
        pass

    import pathlib

    assert holder["Path"] is pathlib.PurePath and issubclass(Own, pathlib.PurePath)
    assert isinstance(pathlib.PurePath("a"), path) and issubclass(Own, path) and path("a") == pathlib.PurePath("a")


def test_a_package_that_is_missing_is_missed_where_it_is_used() -> None:
    from nemo2.base.deferred import StandIn

    gone: Any = StandIn("no_such_package.at_all", "Thing", {})
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        gone()


def test_every_deferred_module_is_still_there() -> None:
    """A module that its library has moved would silently cost its time again."""
    found = python("""
import importlib.util, json
from nemo2.base.deferred import DEFERRED
import nemo_run, torchmetrics
print(json.dumps([name for name in DEFERRED if importlib.util.find_spec(name) is None]))
""")
    assert found == []
