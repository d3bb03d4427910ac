# SPDX-License-Identifier: Apache-2.0
"""Our recipes under nemo-run's own command."""

import os
import subprocess
import sys
from pathlib import Path

NEMO = Path(sys.executable).parent / "nemo"


def nemo(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(NEMO), "llm", "pretrain", "--factory", "llama_tiny", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=home,
        env=os.environ | {"NEMORUN_HOME": str(home), "INCLUDE_WORKSPACE_FILE": "false", "COLUMNS": "200"},
    )


def test_nemo_runs_own_command_finds_a_recipe_and_applies_overrides(tmp_path):
    done = nemo("trainer.max_steps=7", "strategy.sequence_parallel=False", "--dryrun", "--yes", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "max_steps: 7" in done.stdout and "sequence_parallel: False" in done.stdout


def test_nemo_runs_own_command_fails_on_a_typing_error(tmp_path):
    done = nemo("trainer.max_step=7", "--dryrun", "--yes", home=tmp_path)
    assert done.returncode != 0
    assert "max_steps" in done.stdout + done.stderr
