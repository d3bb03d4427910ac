# SPDX-License-Identifier: Apache-2.0
"""`nemo2 doctor`: what it finds here, what it says of what is missing or broken, and how it ends."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from nemo2.cli.app import main
from nemo2.preflight.doctor import examination, machine
from nemo2.preflight.doctor.finding import Finding, report


def test_this_environment_is_found_whole(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {(one["topic"], one["name"]): one for one in json.loads(capsys.readouterr().out)}
    assert found["Needed", "torch"]["value"] == metadata.version("torch")
    assert found["Needed", "megatron-core"]["value"] == metadata.version("megatron-core")
    assert found["This machine", "gloo"]["value"] == "works"
    for name in ("transformer-engine", "wandb"):
        one = found["Optional", name]
        assert one["state"] == "ok" or (one["costs"] and one["fix"].startswith("pip install"))


def test_it_takes_less_than_six_seconds_of_cpu_and_shows_no_secret():
    code = (
        "import sys, time; from nemo2.cli import main; status = main(['doctor']); "
        "print('CPU', time.process_time()); sys.exit(status)"
    )
    environment = {**os.environ, "HF_TOKEN": "hf_sehrgeheim"}
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=120, capture_output=True, text=True, env=environment, check=True
    )
    assert float(done.stdout.split("CPU ")[-1]) < 6
    assert "a token is set" in done.stdout and "sehrgeheim" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        ("leptonai", "0.47.1", "removed a module"),
        ("psutil", None, "hangs in the first save"),
        ("torch", "2.4.0", "before 2.7"),
        ("megatron-core", "0.12.0", "tested with 0.16.1"),
    ],
)
def test_a_version_known_to_break_is_broken_and_told_with_the_command(monkeypatch, package, version, words):
    real = examination.version_of
    monkeypatch.setattr(examination, "version_of", lambda name: version if name == package else real(name))
    broken = [one for one in examination.needed() if one.state == "broken"]
    assert [one.name for one in broken] == [package]
    assert words in broken[0].costs and broken[0].fix.startswith(f"pip install '{package}")
    assert broken[0].value == (version or "not installed")


def test_something_needed_that_is_broken_ends_with_exit_code_1(monkeypatch, capsys):
    broken = Finding(topic="Needed", name="torch", state="broken", value="not installed", fix="pip install torch")
    monkeypatch.setattr(examination, "PARTS", (lambda: iter([broken]),))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("broken: torch")


def test_a_part_that_can_not_be_examined_is_a_finding(monkeypatch):
    def collapses():
        raise OSError("no such device")

    monkeypatch.setattr(examination, "PARTS", (collapses,))
    (found,) = examination.examine()
    assert (found.state, found.name, found.value) == ("broken", "collapses", "OSError: no such device")


def test_an_interface_that_is_not_there_is_told_before_gloo_looks_for_it(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    (found,) = machine.network()
    assert found.state == "broken" and found.value.startswith("nosuch0, but this machine has ")


def test_a_small_shared_memory_and_a_full_disk_are_notes(monkeypatch):
    usage = type("Usage", (), {"free": 64 * 2**20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    notes = {one.name: one for one in machine.resources() if one.state == "note"}
    assert "--shm-size" in notes["shared memory"].fix and "14 bytes per parameter" in notes["disk"].costs


def test_the_report_is_aligned_wrapped_and_colourless_off_terminals():
    findings = [
        Finding(
            topic="Optional", name="x", state="absent", value="not installed", costs="words " * 40, fix="pip install x"
        ),
        Finding(topic="Optional", name="longer name", state="ok", value="1.0"),
    ]
    text = report(findings)
    assert "\033" not in text and max(map(len, text.splitlines())) <= 120 and "-> pip install x" in text
    assert "\033[32mok" in report(findings, colours=True)


def test_its_help_has_an_example(capsys):
    assert main(["doctor", "--help"]) == 0
    assert "Example: nemo2 doctor --json" in " ".join(capsys.readouterr().out.split())


def test_what_killed_launches_left_is_told(tmp_path, monkeypatch):
    from nemo2.cli.doctor import _left_behind
    from nemo2.launch.local import LAUNCHER_FILE, claim_staging

    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    monkeypatch.setattr("nemo_run.config.get_nemorun_home", lambda: str(tmp_path))
    assert _left_behind().value == "none"
    for name, launcher in (("lives", ""), ("killed", "999999999 1"), ("on another host", "999999999 1\nelsewhere")):
        (tmp_path / "nemo2" / name).mkdir(parents=True)
        (tmp_path / "nemo2" / name / LAUNCHER_FILE).write_text(launcher)
    claim_staging(tmp_path / "nemo2" / "lives")
    told = _left_behind()
    assert told.state == "note" and told.value.startswith("1 directories") and "next launch" in told.fix
