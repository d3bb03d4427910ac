# SPDX-License-Identifier: Apache-2.0
"""config.json of every family: import, train a step, export, and compare the whole file with the release's.

A step is trained every day for one row of each kind, and for the others in the night.
"""

import json
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest

from nemo2.models.conversion.settings import SPECIAL_TOKENS
from support import hf_parity as parity
from support import small_runs
from support.hf_models import DAILY, ROWS, Row
from support.nightly import daily_and_nightly

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
AS_ANOTHER = ("ChatGLM 3 (by a GLM)", "Qwen 3.5 MoE, stacked")


def families() -> dict[str, Row]:
    """A row of the table for each conversion."""
    return {row.name: row for row in ROWS if row.readable or row.released is not None}


def exported(names: list[str], trained: list[str], root: str) -> dict[str, Any]:
    """For each row, the release's config.json and that of an export, after a step of training where it is ``trained``."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = {}
    for number, name in enumerate(names):
        folder = Path(root) / str(number)
        folder.mkdir()
        try:
            found[name] = one(families()[name], folder, train=name in trained)
        except Exception as error:  # one row's fault isn't the others'
            found[name] = f"{type(error).__name__}: {error}"
        small_runs.release()
    return found


def one(row: Row, folder: Path, *, train: bool) -> list[dict[str, Any]]:
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.context import load_context
    from nemo2.hugging_face.exporting import export_weights
    from nemo2.mcore.optim.megatron import MegatronOptimizerModule
    from support.released_models import import_release

    release, saved = folder / "release", folder / "saved"
    parity.make(row, release)
    said = json.loads((release / "config.json").read_text()) | OWN
    if isinstance(said.get("max_position_embeddings"), int) and not stretched(said):
        said["max_position_embeddings"] = LONGEST
    (release / "config.json").write_text(json.dumps(said))
    imported = import_release(release, folder / "imported")
    if not train:
        return [said, json.loads((export_weights(imported, folder / "exported") / "config.json").read_text())]
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


@pytest.mark.parametrize("trained", daily_and_nightly(families(), DAILY))
def test_config_json_comes_out_as_it_went_in(run_on_ranks: Any, tmp_path: Path, trained: list[str]) -> None:
    names = list(families()) if trained == list(DAILY) else trained
    files = run_on_ranks(exported, 1, names, trained, str(tmp_path), timeout=900)[0]
    assert [name for name in names if name not in files] == []
    for name, configs in files.items():
        assert isinstance(configs, list), f"{name}: {configs}"
        release, export = configs
        if name in AS_ANOTHER:  # a form that transformers reads without the release's code
            release = {field: release[field] for field in SPECIAL_TOKENS}
            export = {field: export[field] for field in SPECIAL_TOKENS}
        assert export == release, name
