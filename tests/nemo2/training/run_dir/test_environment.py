# SPDX-License-Identifier: Apache-2.0
"""``environment.json`` tells where a run was done and none of its secrets."""

import json
import platform
import subprocess
import sys
from importlib import metadata

import pytest

from nemo2.training.run_dir.environment import (
    git_state,
    is_secret_name,
    redact_arguments,
    redact_text,
    write_environment,
)


def test_versions_and_world_size_are_those_of_this_run(tmp_path):
    content = json.loads(write_environment(tmp_path, world_size=2).read_text())
    assert content["versions"]["python"] == platform.python_version()
    assert content["versions"]["megatron-core"] == metadata.version("megatron-core")
    assert "transformer-engine" in content["versions"]
    assert content["world_size"] == 2 and content["devices"]


def test_no_secret_reaches_the_file(tmp_path, monkeypatch):
    canary = "canary-5f1d2c"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "NEMO_PASSWORD", "SLURM_JWT_SECRET", "TORCH_AUTH"):
        monkeypatch.setenv(name, canary)
    monkeypatch.setenv("HF_ENDPOINT", f"https://user:{canary}@hub.example/x")
    monkeypatch.setenv("MY_OWN_VARIABLE", canary)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(
        sys, "argv", ["nemo2", "--api-key", canary, f"--hf-token={canary}", f"https://{canary}@host/", "trainer.x=1"]
    )
    text = write_environment(tmp_path).read_text()
    assert canary not in text
    variables = json.loads(text)["environment"]
    assert variables["NCCL_DEBUG"] == "INFO" and variables["TOKENIZERS_PARALLELISM"] == "false"
    assert variables["HF_TOKEN"] == "<redacted>" and "MY_OWN_VARIABLE" not in variables
    assert json.loads(text)["command_line"][-1] == "trainer.x=1"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--token", "x", "y"], ["--token", "<redacted>", "y"]),
        (["--token", "--other"], ["--token", "--other"]),
        (["a.password=x"], ["a.password=<redacted>"]),
        (["data.tokenizer=gpt2"], ["data.tokenizer=gpt2"]),
    ],
)
def test_command_lines_lose_values_not_names(arguments, shown):
    assert redact_arguments(arguments) == shown


@pytest.mark.parametrize("name", ["HF_TOKEN", "api_key", "DB_PASSWORD", "client_secret", "SLURM_JWT"])
@pytest.mark.parametrize("other", ["TOKENIZERS_PARALLELISM", "data.tokenizer", "num_tokens", "tokens_per_second"])
def test_secrets_are_known_by_name_and_tokens_of_text_are_none(name, other):
    assert is_secret_name(name) and not is_secret_name(other)


def test_the_git_state_of_a_repository_and_of_none(tmp_path):
    assert git_state(tmp_path) is None
    repository = tmp_path / "r"
    repository.mkdir()

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=repository, check=True, capture_output=True, text=True
        )

    git("init", "-q", "-b", "work")
    (repository / "f").write_text("1")
    git("add", "f")
    git("commit", "-qm", "m")
    assert git_state(repository) == {
        "commit": git("rev-parse", "HEAD").stdout.strip(),
        "branch": "work",
        "dirty": False,
    }
    (repository / "f").write_text("2")
    assert git_state(repository)["dirty"] is True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Override log.wandb.api_key=canary-1: no", "Override log.wandb.api_key=<redacted> no"),
        ('takes a Logger, not {"api_key": "canary-2"}: set', 'takes a Logger, not {"api_key": "<redacted>"}: set'),
        ("not {'password': 'canary-3', 'size': 2}", "not {'password': '<redacted>', 'size': 2}"),
        ("https://me:canary@host/x", "https://<redacted>@host/x"),
        ("login hf_" + "a1" * 17 + " failed", "login <redacted> failed"),
        ("variable: a-secret-of-the-environment.", "variable: <redacted>."),
        ("data.tokenizer=llama pad_token=<pad> json_keys=text num_tokens=5", None),
        ("a token: 17, and the key 'x': see KEY=VALUE", None),
    ],
)
def test_messages_lose_their_secrets(text, shown, monkeypatch):
    monkeypatch.setenv("MY_ACCESS_TOKEN", "a-secret-of-the-environment")
    monkeypatch.setenv("OTHER_TOKEN", "key")  # too short to be looked for
    assert redact_text(text) == (shown or text)
