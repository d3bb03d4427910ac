# SPDX-License-Identifier: Apache-2.0
"""Completion: what is offered where, from which index, and what bash makes of it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
from typer.main import get_command

from nemo2.cli import completion
from nemo2.cli.app import app


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has llama_tiny's index."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMO_HOME", str(home))
        completion.write_index("llama_tiny")
    return home


@pytest.fixture
def indexed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_HOME", str(home))


def offered(line: str) -> list[str]:
    return completion.candidates(get_command(app), line.split(" "))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pr", ["pretrain", "prune"]),
        ("runs t", ["tail", "trace"]),
        ("pretrain llama_t", ["llama_tiny"]),
        ("pretrain llama_tiny --nod", ["--nodes"]),
        ("finetune llama_tiny --peft l", ["lora"]),
        ("pretrain llama_tiny --tracker wan", ["wandb", "wandb:offline"]),
        ("check llama_tiny --gpus H100", ["H100", "H100x8"]),
        ("serve x --engine v", ["vllm"]),
        ("pretrain llama_tiny tr", ["trainer=", "trainer."]),
        ("pretrain llama_tiny trainer.max_st", ["trainer.max_steps="]),
        ("pretrain --devices 2 llama_tiny strategy.sequence_p", ["strategy.sequence_parallel="]),
        ("pretrain llama_tiny strategy.sequence_parallel=T", ["strategy.sequence_parallel=True"]),
        ("pretrain llama_tiny data=Pre", ["data=PreTrainingDataModule"]),
        ("show llama_tiny optim.config.weight_d", ["optim.config.weight_decay="]),
        ("pretrain llama_tiny --trainer.max_st", ["--trainer.max_steps="]),
        ("show llama3_8b --diff llama_t", ["llama_tiny"]),
        ("--show-completion z", ["zsh"]),
    ],
)
def test_what_may_follow_is_offered(line, found, indexed):
    assert sorted(offered(line)) == sorted(found)


def test_every_path_that_is_offered_can_be_set(home):
    from nemo2.config.overrides import _find
    from nemo2.recipes import llama_tiny

    [file] = home.rglob("llama_tiny.json")
    paths = json.loads(file.read_text())
    assert len(paths) > 300
    recipe = llama_tiny.pretrain_recipe()
    for path in paths:
        _find(recipe, path)


class Writer:
    """In place of the process that writes indexes: it fails at once, or ends by writing one after ``seconds`` of a clock that
    only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path, *, seconds: float | None = None) -> None:
        self.started: list[list[str]] = []
        self.clock, self.seconds = 0.0, seconds
        monkeypatch.setattr(completion.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(completion.time, "sleep", self.sleep)
        monkeypatch.setenv("NEMO_HOME", str(home))
        monkeypatch.setattr(completion.subprocess, "Popen", lambda command, **_: self.started.append(command) or self)

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def poll(self) -> int | None:
        if self.seconds is None:
            return 1
        if self.clock < self.seconds:
            return None
        index("llama3_8b", "trainer.max_steps")
        return 0


def index(recipe: str, *paths: str) -> None:
    file = completion._file(recipe)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({path: [] for path in paths}))


@pytest.mark.parametrize("seconds", [0, 2, 90])
def test_the_first_tab_waits_for_its_index_however_slow_the_machine_is(seconds, tmp_path, monkeypatch):
    writer = Writer(monkeypatch, tmp_path, seconds=seconds)
    assert offered("show llama3_8b trainer.m") == ["trainer.max_steps="]
    assert writer.started[0][1:] == ["-c", "from nemo2.cli.completion import write_indexes; write_indexes('llama3_8b')"]
    assert offered("show llama3_8b trainer.m") == ["trainer.max_steps="] and len(writer.started) == 1


def test_where_no_index_can_be_written_the_parts_are_offered(tmp_path, monkeypatch):
    writer = Writer(monkeypatch, tmp_path)
    assert offered("show llama3_8b m") == ["model."]
    assert offered("show no_such_recipe m") == ["model."] and len(writer.started) == 1


def test_after_an_update_the_index_of_before_answers_meanwhile(tmp_path, monkeypatch):
    writer = Writer(monkeypatch, tmp_path)
    index("llama3_8b", "trainer.max_steps")
    monkeypatch.setattr("nemo2.__version__", "99.0")
    assert offered("show llama3_8b trainer.m") == ["trainer.max_steps="] and len(writer.started) == 1


def test_a_process_writes_the_asked_index_first_and_one_of_them_all_the_others(tmp_path, monkeypatch):
    written: list[str] = []
    monkeypatch.setenv("NEMO_HOME", str(tmp_path))
    monkeypatch.setattr("nemo2.recipes._shipped.names", lambda: ["a", "b", "c", "d"])
    index("c", "trainer.max_steps")

    def write(recipe: str) -> None:
        written.append(recipe)
        if recipe == "a":
            completion.write_indexes("d")  # another process, for another TAB
        index(recipe, "trainer.max_steps")

    monkeypatch.setattr(completion, "write_index", write)
    completion.write_indexes("b")
    assert written == ["b", "a", "d"]


def test_runs_are_offered_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first" / "2026-01-01").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "2026-01-01" / "recipe.json").touch()
    assert offered("generate fi") == offered("runs report fi") == ["first"]


def test_a_completion_imports_no_torch(home):
    code = (
        "import sys; from nemo2.cli import main; code = main(['__complete', 'pretrain', 'llama_tiny', 'trainer.max_s']);"
        "sys.exit(code or any(m in sys.modules for m in ('torch', 'nemo_run', 'lightning', 'fiddle')))"
    )
    variables = {**os.environ, "NEMO_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=variables)
    assert (done.returncode, done.stdout) == (0, "trainer.max_steps=\n"), done.stderr


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("nemo2 pretrain llama_tiny trainer.max_s", "trainer.max_steps="),
        ("nemo2 pretrain llama_tiny trainer.max_steps=1", "100"),
        ("nemo2 pretrain ", "llama_tiny"),
    ],
)
def test_bash_completes_the_word_before_the_cursor(line, reply, tmp_path, monkeypatch, command):
    writer = Writer(monkeypatch, tmp_path)
    script = command("--show-completion bash").out
    assert len(writer.started) == 1, "indexes are made when the script is installed"
    monkeypatch.undo()
    stub = """
    nemo2() {
        case "${@: -1}" in
            trainer.max_s) echo trainer.max_steps= ;;
            trainer.max_steps=1) echo trainer.max_steps=100 ;;
            "") echo llama_tiny ;;
        esac
    }
    compopt() { :; }
    """
    ask = f"COMP_LINE='{line}' COMP_POINT={len(line)}; _nemo2; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{stub}\n{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{reply}\n"


@pytest.mark.skipif(which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("trainer.max_s", "trainer.max_s"),
        (r"trainer.callbacks\[0\].", "trainer.callbacks[0]."),
        ("'trainer.callbacks[0].", "trainer.callbacks[0]."),
        ("", ""),
    ],
)
def test_zsh_asks_for_the_word_without_its_quotes_and_has_zsh_quote_the_answer(typed, asked):
    stubs = """
    nemo2() { print -r -- "$3|${@[-1]}|." }
    compadd() { print -r -- "$@" }
    compdef() { :; }
    """
    ask = f"words=(nemo2 show llama_tiny {shlex.quote(typed)}) CURRENT=4; _nemo2"
    script = completion.SCRIPTS["zsh"].replace("2>/dev/null", "")
    done = subprocess.run(["zsh", "-fc", f"{stubs}\n{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stdout == f"-S  -- llama_tiny|{asked}|.\n"


@pytest.mark.skipif(which("fish") is None, reason="fish is not installed")
def test_fish_asks_for_the_word_without_its_quotes(tmp_path):
    stub = "function nemo2; printf '%s\\n' $argv[-1]max_steps=; end"
    line = "nemo2 show llama_tiny trainer.callbacks\\[0\\]."
    ask = f"{stub}\n{completion.SCRIPTS['fish']}\ncomplete -C {shlex.quote(line)}"
    home = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", ask], capture_output=True, text=True, check=True, env=home)
    assert done.stdout.splitlines() == ["trainer.callbacks[0].max_steps="]


@pytest.mark.skipif(which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("known", "offered"), [("recipe", ["recipe"]), ("", ["report.py"])])
def test_fish_offers_files_only_where_nemo2_offers_nothing(known, offered, tmp_path):
    (tmp_path / "report.py").touch()
    stub = f"function nemo2; test -n '{known}'; and echo '{known}'; end"
    ask = f"{stub}\n{completion.SCRIPTS['fish']}\ncomplete -C 'nemo2 show re'"
    home = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True, env=home)
    assert done.stdout.splitlines() == offered
