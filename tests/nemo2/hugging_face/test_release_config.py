# SPDX-License-Identifier: Apache-2.0
"""config.json of every family: import, train a step, export, and compare the whole file with the release's."""

import json
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest

from nemo2.models.conversion.settings import SPECIAL_TOKENS
from support import hf_parity as parity
from support import small_runs
from support.hf_models import ROWS, Row

pytestmark = pytest.mark.filterwarnings("ignore:.*moe_ffn_hidden_size is not set.*:UserWarning")
OWN = {
    "bos_token_id": 1,
    "eos_token_id": [2, 8],
    "pad_token_id": 0,
    "residual_in_fp32": True,
    "time_step_min": 0.0123,
    "a_field_of_the_future": {"any": ["value"]},
    "transformers_version": "4.99.0",
}
"""Fields that nemo2's configuration doesn't have."""
LONGEST = 131072
AS_ANOTHER = ("ChatGLM 3 (by a GLM)",)


def families() -> dict[str, Row]:
    """A row of the table for each conversion."""
    return {row.name: row for row in ROWS if row.readable or row.released is not None}


def trained(names: list[str], root: str) -> dict[str, Any]:
    """For each row, the release's config.json and that of an export after a step of training."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = {}
    for number, name in enumerate(names):
        folder = Path(root) / str(number)
        folder.mkdir()
        try:
            found[name] = one(families()[name], folder)
        except Exception as error:  # one row's fault isn't the others'
            found[name] = f"{type(error).__name__}: {error}"
        small_runs.release()
    return found


def one(row: Row, folder: Path) -> list[dict[str, Any]]:
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.context import load_context
    from nemo2.hugging_face.exporting import export_weights
    from nemo2.optim.megatron import MegatronOptimizerModule
    from support.released_models import import_release

    release, saved = folder / "release", folder / "saved"
    parity.make(row, release)
    said = json.loads((release / "config.json").read_text()) | OWN
    if isinstance(said.get("max_position_embeddings"), int) and not stretched(said):
        said["max_position_embeddings"] = LONGEST
    (release / "config.json").write_text(json.dumps(said))
    imported = import_release(release, folder / "imported")
    described = load_context(imported, "model", build=False)
    if getattr(described.config, "position_embedding_type", "rope") != "learned_absolute":
        described.config.seq_length = small_runs.SEQ
    model: Any = fdl.build(described)
    MegatronOptimizerModule(OptimizerConfig(lr=1e-3)).connect(model)
    small_runs.fit(
        model,
        max_steps=1,
        restore_config=RestoreConfig(path=str(imported)),
        inspect=lambda trainer: trainer.save_checkpoint(saved, weights_only=True),
    )
    return [said, json.loads((export_weights(saved, folder / "exported") / "config.json").read_text())]


def stretched(said: dict[str, Any]) -> bool:
    """Whether rotary positions are stretched relative to the longest, which then decides what the model computes."""
    return (said.get("rope_parameters") or said.get("rope_scaling") or {}).get("rope_type", "default") != "default"


@pytest.fixture(scope="module")
def files(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_ranks(trained, 1, list(families()), str(tmp_path_factory.mktemp("releases")), timeout=900)[0]


@pytest.mark.parametrize("name", list(families()))
def test_config_json_comes_out_as_it_went_in(files: dict[str, Any], name: str) -> None:
    assert isinstance(files[name], list), files[name]
    release, exported = files[name]
    if name in AS_ANOTHER:  # a form that transformers reads without the release's code
        release = {field: release[field] for field in SPECIAL_TOKENS}
        exported = {field: exported[field] for field in SPECIAL_TOKENS}
    assert exported == release
