# SPDX-License-Identifier: Apache-2.0
"""Our recipes under nemo-run's own command."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run
import pytest

from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.cli.nemo_run import COMMANDS, HonestRunContext

ROOT = Path(__file__).resolve().parents[3]


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


def run(
    words: list[str], folder: Path, commands: dict[str, str], path: str = str(ROOT)
) -> subprocess.CompletedProcess[str]:
    variables = {"NEMORUN_HOME": str(folder), "INCLUDE_WORKSPACE_FILE": "false", "COLUMNS": "200", "PYTHONPATH": path}
    return subprocess.run(
        [*words, "--dryrun", "--yes"], capture_output=True, text=True, timeout=240, cwd=folder,
        env=os.environ | commands | variables,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pretrain trainer.max_steps=7 strategy.sequence_parallel=False", ["max_steps: 7", "sequence_parallel: False"]),
        ("finetune peft.dim=4", ["peft: LoRA", "dim: 4"]),
        ("pretrain trainer.max_step=7", ["max_steps"]),
    ],
)
def test_nemo_runs_own_command_finds_a_recipe_and_applies_overrides_or_fails(tmp_path, warm_commands, line, words):
    task, *overrides = line.split()
    path = os.pathsep.join((str(entry_points_of_this_checkout(tmp_path)), str(ROOT)))
    done = run(["nemo", "llm", task, "--factory", "llama_tiny", *overrides], tmp_path, warm_commands, path)
    assert (done.returncode == 0) is ("max_step=" not in line), done.stderr
    assert all(word in done.stdout + done.stderr for word in words)


SCRIPT = """
import nemo_run as run
from nemo2 import llm
if __name__ == "__main__":
    run.cli.main(llm.pretrain)
"""


def test_a_script_of_ones_own_finds_recipes_and_parts_and_its_exit_code_tells_the_truth(tmp_path, warm_commands):
    (tmp_path / "script.py").write_text(SCRIPT)

    words = ["python", "script.py", "--factory", "llama_tiny(num_gpus_per_node=4)"]
    optim = "optim=distributed_fused_adam_with_cosine_annealing(max_lr=0.02)"
    done = run([*words, optim, "trainer.plugins=fp16_mixed"], tmp_path, warm_commands)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("devices: 4", "lr: 0.02", "precision: '16-mixed'")), done.stdout
    broken = run([*words, "trainer.max_stepss=3"], tmp_path, warm_commands)
    assert broken.returncode == 1 and "did you mean 'max_steps'" in broken.stderr


def parsed(factory: Any, *overrides: str, of: Any = llm.pretrain) -> Any:
    return HonestRunContext(name="asked", factory=factory).parse_fn(of, list(overrides))


def test_a_recipe_takes_the_arguments_of_its_factory_and_parts_by_name():
    assert parsed("llama3_70b(num_nodes=128)").trainer.num_nodes == 128
    assert fdl.get_callable(parsed("llama3_8b", of=llm.validate)) is llm.validate
    tuned = parsed("llama3_8b", "peft=dora", "peft.dim=16", of=llm.finetune)
    assert fdl.get_callable(tuned.peft) is llm.peft.DoRA and tuned.peft.dim == 16
    whole = parsed(None, "model=llama3_8b", "data=mock", "trainer=llama3_70b", "log=default_log(name=by_hand)")
    assert isinstance(fdl.build(whole.model), llm.LlamaModel) and whole.log.name == "by_hand"
    with pytest.raises(ConfigError, match="num_node'.*num_nodes"):
        parsed("llama3_70b(num_node=128)")
    with pytest.raises(ConfigError, match="--factory llama3_8bb: no such recipe; did you mean 'llama3_8b'"):
        parsed("llama3_8bb")


def test_functions_of_a_script_are_found_by_their_names(monkeypatch):
    def of_my_own() -> Any:
        recipe = llm.llama3_8b.pretrain_recipe()
        recipe.trainer.max_steps = 11
        return recipe

    def my_executor() -> Any:
        return nemo_run.LocalExecutor(ntasks_per_node=3, env_vars={"A": "1"})

    def as_config() -> Any:
        made.append(1)
        return nemo_run.Config(nemo_run.LocalExecutor, ntasks_per_node=3)

    made: list[int] = []
    for written in (of_my_own, my_executor, as_config):
        monkeypatch.setattr(sys.modules["__main__"], written.__name__, written, raising=False)
    assert parsed("of_my_own", "trainer.max_steps*=2").trainer.max_steps == 22
    context = HonestRunContext(name="asked")
    executor = fdl.build(context.parse_executor("my_executor", "nodes=2"))
    assert (executor.ntasks_per_node, executor.nodes, executor.env_vars) == (3, 2, {"A": "1"})
    assert fdl.build(context.parse_executor("as_config", "nodes=2")).nodes == 2 and made == [1]
    with pytest.raises(ConfigError, match="run.executor=somewhere: this executor does not exist. Use torchrun"):
        context.parse_executor("somewhere")


def test_torchrun_starts_as_many_ranks_as_the_recipe_has_devices(monkeypatch, capsys):
    launched = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(
        "nemo2.cli.nemo_run.run", lambda task, executor, **how: launched.append(executor.ntasks_per_node)
    )
    for given in ([], ["run.executor.ntasks_per_node=5"]):
        context = HonestRunContext(name="asked", factory="llama_tiny(num_gpus_per_node=4)", dryrun=True)
        context.cli_execute(llm.pretrain, ["run.executor=torchrun", *given])
    assert launched == [4, 5]
    assert "devices: 4" in capsys.readouterr().out


def test_the_commands_have_nemos_names():
    listed = {command.__name__: name for name, command in COMMANDS.items()}
    assert listed["import_ckpt"] == "import" and listed["export_ckpt"] == "export"
    assert {"pretrain", "finetune", "train", "validate", "generate", "distill", "prune", "ptq", "deploy"} < set(
        COMMANDS
    )
    prune = parsed(None, "nemo_checkpoint=in", "save_path=out", "pruning_config.target_num_layers=2", of=llm.prune)
    assert prune.pruning_config.target_num_layers == 2
    taken = parsed(None, "model=llama3_8b", "source=hf://some/where", of=llm.import_ckpt)
    assert isinstance(fdl.build(taken.model), llm.LlamaModel)
