# SPDX-License-Identifier: Apache-2.0
"""config.json after training: import, train a step, export, and compare the whole file with the release's.

What comes out of an import alone is compared for every row in tests/nemo2/models/conversion/test_parity.py.
"""

import json
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest

from support import hf_parity as parity
from support import small_runs
from support.hf_models import ROWS, Row
from support.nightly import daily_and_nightly

pytestmark = pytest.mark.filterwarnings("ignore:.*moe_ffn_hidden_size is not set.*:UserWarning")
FAMILIES = {row.name: row for row in ROWS}
DAILY = ("Llama 4 Scout", "Gemma 3", "DeepSeek V3", "Nemotron-H, Nemotron Nano v2", "StarCoder", "Qwen3-Next")


def exported(names: list[str], root: str) -> dict[str, Any]:
    """For each row, the release's config.json and that of an export after a step of training."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = {}
    for number, name in enumerate(names):
        folder = Path(root) / str(number)
        folder.mkdir()
        try:
            found[name] = one(FAMILIES[name], folder)
        except Exception as error:  # one row's fault isn't the others'
            found[name] = f"{type(error).__name__}: {error}"
        small_runs.release()
    return found


def one(row: Row, folder: Path) -> list[dict[str, Any]]:
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.context import load_context
    from nemo2.hugging_face.exporting import export_weights
    from nemo2.mcore.optim.megatron import MegatronOptimizerModule
    from support.released_models import import_release

    release, saved = folder / "release", folder / "saved"
    parity.make(row, release)
    said = parity.add_unknown_fields(release, longest=131072)
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


@pytest.mark.parametrize("trained", daily_and_nightly(FAMILIES, DAILY))
def test_config_json_comes_out_as_it_went_in(run_on_ranks: Any, tmp_path: Path, trained: list[str]) -> None:
    files = run_on_ranks(exported, 1, trained, str(tmp_path), timeout=900)[0]
    assert list(files) == trained
    for name, configs in files.items():
        assert isinstance(configs, list), f"{name}: {configs}"
        release, export = parity.comparable(name, *configs)
        assert export == release, name
