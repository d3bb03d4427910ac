# SPDX-License-Identifier: Apache-2.0
"""Text models within the files of models for pictures, under each of the names that such files have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo2.base.errors import ConfigError
from support import hf_parity as parity
from support.hf_models import ROWS
from support.resharding import whole_tensors

WITHIN = {
    "Gemma 3": "Gemma3ForConditionalGeneration",
    "Llama 4 Scout": "Llama4ForConditionalGeneration",
    "Mistral NeMo, Large": "Mistral3ForConditionalGeneration",
    "Ministral 3": "Mistral3ForConditionalGeneration",
}
SPELLINGS = {
    "as released": lambda name: f"language_model.{name}",
    "as transformers calls it": lambda name: name.replace("model.", "model.language_model.", 1),
}


def wrapped(source: Path, target: Path, architecture: str, spelling: str) -> Path:
    """The same weights, with a tower for pictures beside them, and the settings in ``text_config``."""
    target.mkdir()
    told = json.loads((source / "config.json").read_text())
    told.pop("architectures")
    outer = {"architectures": [architecture], "vision_config": {"hidden_size": 8}, "text_config": told}
    (target / "config.json").write_text(json.dumps(outer))
    tensors = {SPELLINGS[spelling](name): value for name, value in load_file(source / "model.safetensors").items()}
    before = "model." if spelling == "as transformers calls it" else ""
    towers = ("multi_modal_projector.linear.weight", "vision_tower.a.weight", "vision_model.b.weight")
    own = towers[:2] if architecture != "Llama4ForConditionalGeneration" else (towers[0], towers[2])
    tensors |= {f"{before}{name}": torch.zeros(2) for name in own}
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("name", WITHIN)
def test_a_text_model_is_the_same_alone_and_within_a_model_for_pictures(tmp_path: Path, name: str) -> None:
    from support.released_models import import_release

    (row,) = (row for row in ROWS if row.name == name)
    parity.make(row, tmp_path / "alone")
    expected = whole_tensors(import_release(tmp_path / "alone", tmp_path / "imported alone"))
    for spelling in SPELLINGS:
        source = wrapped(tmp_path / "alone", tmp_path / spelling, WITHIN[name], spelling)
        found = whole_tensors(import_release(source, tmp_path / f"imported {spelling}"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_settings_that_are_no_object_are_refused() -> None:
    from nemo2.models.conversion.families import conversion_for

    told: dict[str, Any] = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": None}
    with pytest.raises(ConfigError, match="text_config=None: it must be an object"):
        conversion_for(told).config(told)
