# SPDX-License-Identifier: Apache-2.0
"""Every family beside transformers' own model, in both directions and at every layout: docs/hugging_face.md, row by row."""

from typing import Any

import pytest

from support import hf_parity as parity
from support.hf_models import ROWS
from support.nightly import each_case, requested
from tools import hugging_face

NAMES = [row.name for row in ROWS]
TRAINED = [row.name for row in ROWS if row.trained]
DAILY = [row.name for row in ROWS if not row.repeats]


def test_the_page_has_these_rows() -> None:
    assert hugging_face.PAGE.read_text() == hugging_face.page(), "run `make fmt`"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, run_on_ranks: Any, root: str) -> dict[str, Any]:
    return run_on_ranks(parity.both_ways, 1, root, requested(request, "name"), timeout=600)[0]


@pytest.fixture(scope="module")
def laid_out(request: pytest.FixtureRequest, run_on_ranks: Any, root: str, alone: Any) -> list[dict[str, Any]]:
    return run_on_ranks(parity.at_layouts, 2, root, requested(request, "name"), timeout=600)


@pytest.mark.parametrize("name", each_case(NAMES, DAILY))
def test_weights_compute_what_transformers_computes_and_come_back_bit_by_bit(alone: Any, name: str) -> None:
    """Imported they give its logits and greedy tokens, exported they are read by it, and config.json comes out as it went in."""
    found = alone[name]
    assert isinstance(found, dict), found
    assert found["import"] < 1e-5
    ours, theirs = found["greedy"]
    assert ours == theirs
    assert found.get("loading", {}) == {}
    assert found.get("export", 0.0) < 1e-5
    assert (found["back"], found["again"]) == ([], [])
    release, export = found["config"]
    assert export == release


@pytest.mark.parametrize("name", each_case(TRAINED, [name for name in TRAINED if name in DAILY]))
def test_a_training_step_is_transformers(alone: Any, name: str) -> None:
    step = alone[name]["step"]
    assert step["loss"] < 1e-6
    assert step["gradients"] < 1e-4
    assert step["compared"] == 0


@pytest.mark.parametrize(
    "name", each_case(NAMES, [row.name for row in ROWS if row.name in DAILY and not row.like_another])
)
def test_imported_weights_compute_the_same_at_every_layout(laid_out: Any, name: str) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    for layout in row.layouts:
        found = [rank[name][layout] for rank in laid_out]
        assert not any(isinstance(one, str) for one in found), (layout, found)
        assert max(one for one in found if one is not None) < 1e-5, layout
