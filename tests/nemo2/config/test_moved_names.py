# SPDX-License-Identifier: Apache-2.0
"""``saved_names.txt`` has what recipes of some version could hold. `make fmt` adds rows and never removes one."""

import importlib.util
import json
from pathlib import Path

import pytest

from nemo2.config import Partial, from_json, from_yaml, to_json, to_yaml
from nemo2.config.moved_names import MOVED, MOVED_ROOMS, module_today
from nemo2.training.strategies.distillation import DistillationCallback, DistillationConfig

SAVED = Path(__file__).with_name("saved_names.txt").read_text().split()


def test_what_was_saved_is_found() -> None:
    names = [saved.partition(":")[::2] for saved in SAVED]
    lost = [one for one in names if not hasattr(importlib.import_module(module_today(*one)), one[1])]
    assert lost == []


def test_every_move_is_on_the_list_and_leads_somewhere_else() -> None:
    for former, today in MOVED.items():
        assert any(saved == former or saved.startswith(f"{former}:") for saved in SAVED)
        assert former.partition(":")[0] != today
    for former, today in MOVED_ROOMS.items():
        # A checkout that was updated may keep a folder of byte code, which counts as a package without a file.
        assert getattr(importlib.util.find_spec(former), "origin", None) is None and importlib.util.find_spec(today)


@pytest.mark.parametrize("former", ["nemo2.strategies.teaching", "nemo2.strategies.distillation"])
@pytest.mark.parametrize(("write", "read"), [(to_json, from_json), (to_yaml, from_yaml)])
def test_a_saved_recipe_loads_after_a_move(write, read, former) -> None:
    recipe = Partial(DistillationCallback, "/teacher", Partial(DistillationConfig, logit_kl_topk=3))
    text = write(recipe).replace("nemo2.training.strategies.distillation", former)
    assert former in text and read(text) == recipe


def test_a_move_lets_nothing_in_that_is_refused() -> None:
    text = to_json(Partial(DistillationCallback, "/teacher"))
    tree = json.loads(
        text.replace("nemo2.training.strategies.distillation", "os").replace("DistillationCallback", "system")
    )
    with pytest.raises(Exception, match="os.system"):
        from_json(json.dumps(tree))
