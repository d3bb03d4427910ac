# SPDX-License-Identifier: Apache-2.0
"""Our recipes under nemo-run's own command."""

import os
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def entry_points_of_this_checkout(folder: Path) -> Path:
    """``folder``, in which nemo-run finds the entry points that pyproject.toml names now, whatever was installed earlier."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"nemo2-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nemo2\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for name, items in groups for line in (f"[{name}]", *(f"{key} = {of}" for key, of in items.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def nemo(
    *arguments: str, home: Path, commands: dict[str, str], task: str = "pretrain"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["nemo", "llm", task, "--factory", "llama_tiny", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=home,
        env=os.environ
        | commands
        | {"NEMORUN_HOME": str(home), "INCLUDE_WORKSPACE_FILE": "false", "COLUMNS": "200"}
        | {"PYTHONPATH": os.pathsep.join((str(entry_points_of_this_checkout(home)), str(ROOT)))},
    )


def test_nemo_runs_own_command_finds_a_recipe_and_applies_overrides(tmp_path, warm_commands):
    done = nemo(
        "trainer.max_steps=7",
        "strategy.sequence_parallel=False",
        "--dryrun",
        "--yes",
        home=tmp_path,
        commands=warm_commands,
    )
    assert done.returncode == 0, done.stderr
    assert "max_steps: 7" in done.stdout and "sequence_parallel: False" in done.stdout


def test_nemo_runs_own_command_fails_on_a_typing_error(tmp_path, warm_commands):
    done = nemo("trainer.max_step=7", "--dryrun", "--yes", home=tmp_path, commands=warm_commands)
    assert done.returncode != 0
    assert "max_steps" in done.stdout + done.stderr


def test_nemo_runs_own_command_finds_a_recipe_of_fine_tuning_under_the_same_name(tmp_path, warm_commands):
    done = nemo("peft.dim=4", "--dryrun", "--yes", home=tmp_path, commands=warm_commands, task="finetune")
    assert done.returncode == 0, done.stderr
    assert "peft: LoRA" in done.stdout and "dim: 4" in done.stdout


SCRIPT = """
import nemo_run as run
from nemo2 import llm
if __name__ == "__main__":
    run.cli.main(llm.pretrain)
"""


def test_a_script_of_ones_own_finds_recipes_and_parts_and_its_exit_code_tells_the_truth(tmp_path, warm_commands):
    (tmp_path / "script.py").write_text(SCRIPT)

    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                "python",
                "script.py",
                "--factory",
                "llama_tiny(num_gpus_per_node=4)",
                "--dryrun",
                "--yes",
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
            env=os.environ
            | warm_commands
            | {"NEMORUN_HOME": str(tmp_path), "INCLUDE_WORKSPACE_FILE": "false", "PYTHONPATH": str(ROOT)},
        )

    done = script("optim=distributed_fused_adam_with_cosine_annealing(max_lr=0.02)", "trainer.plugins=fp16_mixed")
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("devices: 4", "lr: 0.02", "precision: '16-mixed'")), done.stdout
    broken = script("trainer.max_stepss=3")
    assert broken.returncode == 1 and "did you mean 'max_steps'" in broken.stderr
