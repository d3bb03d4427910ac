# SPDX-License-Identifier: Apache-2.0
"""Writes ``environment.json``: the machine and the software of a run, without secrets."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo2.base.backend.extras import version_of
from nemo2.training.run_dir.records import ENVIRONMENT_FILE, write_text

REDACTED = "<redacted>"

_PACKAGES = (
    "torch",
    "lightning",
    "megatron-core",
    "nemo-run",
    "fiddle",
    "transformer-engine",
    "transformers",
    "tokenizers",
    "numpy",
)
# "token" as a separate word, because tokenizers and token counts are no secrets.
_SECRET = re.compile(r"TOKEN(?![A-Z])|KEYS?(?![A-Z])|SECRET|PASSWORD|PASSWD|CREDENTIAL|JWT|AUTH(?!OR)", re.IGNORECASE)
# For a recipe's fields, where pad_token and json_keys are no secrets.
_SECRET_FIELD = re.compile(
    r"^token$|(^|_)(api|access|auth|hf|hub|wandb|secret|private)_?(key|token)$|password|passwd|secret|credential",
    re.IGNORECASE,
)
_RELEVANT = re.compile(
    r"^(CUDA|NCCL|GLOO|TORCH|PYTORCH|NVTE|NVIDIA|UB_|OMP|MKL|OPENBLAS|SLURM|NEMO|NEMORUN|HF_|TRANSFORMERS|TOKENIZERS|WANDB"
    r"|MASTER_|RANK$|LOCAL_RANK$|WORLD_SIZE$|LOCAL_WORLD_SIZE$|GROUP_RANK$|PET_|PYTHONPATH$|LD_LIBRARY_PATH$|VIRTUAL_ENV$)"
)
# The prefixes of Hugging Face, GitHub, GitLab, NVIDIA, OpenAI, AWS, Slack.
_SHAPE = re.compile(
    r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|nvapi-|sk-|AKIA|xox[abp]-)[A-Za-z0-9_-]{16,}|\beyJ[\w-]{16,}\.[\w-]+\.[\w-]+"
)
_ASSIGNED = re.compile(r"(?P<name>\w+)(?P<sign>[\"'\]]*\s*=\s*[\"']?|[\"']\s*:\s*[\"']?)(?P<value>[^\s\"',;)}\]]+)")
_LEAST_SECRET = 8
"""The shortest value of a secret variable that is searched for in texts. A shorter value would match ordinary words."""
_URL_USER = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/\s:@]+(:[^/\s@]*)?@")


def write_environment(directory: str | os.PathLike[str], *, world_size: int | None = None) -> Path:
    """Write ``environment.json`` into a run directory. Returns its path.

    Args:
        directory: The run directory.
        world_size: The number of ranks. None: not recorded.
    """
    contents = {
        "versions": {"python": platform.python_version(), "nemo2": version_of("nemo2")}
        | {package: version_of(package) for package in _PACKAGES},
        "git": git_state(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "devices": _device_names(),
        "world_size": world_size,
        "working_directory": str(Path.cwd()),
        "command_line": redact_arguments(sys.argv),
        "environment": redact_variables(os.environ),
    }
    return write_text(Path(directory) / ENVIRONMENT_FILE, json.dumps(contents, indent=2) + "\n")


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable, option or field of this name must not be written down."""
    return _SECRET.search(name) is not None


def is_secret_field(name: str) -> bool:
    """Whether a recipe's field of this name holds a secret."""
    return _SECRET_FIELD.search(name) is not None


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change a run, sorted. Secrets appear without their values."""
    return {
        name: REDACTED if is_secret_name(name) else redact_urls(variables[name])
        for name in sorted(variables)
        if _RELEVANT.match(name)
    }


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without secret values: ``--api-key x``, ``--api-key=x``, ``HF_TOKEN=x``, URLs with a user."""
    redacted: list[str] = []
    hide_next = False
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            redacted.append(REDACTED)
        elif separator and is_secret_name(name):
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(redact_urls(argument))
        hide_next = argument.startswith("-") and not separator and is_secret_name(argument)
    return redacted


def holds_secret(text: str) -> bool:
    """Whether a text looks like a key or token, or is a URL with a password."""
    urls = (match["scheme"] for match in _URL_USER.finditer(text) if match[2])
    return _SHAPE.search(text) is not None or next(urls, None) is not None


def redact_text(text: str) -> str:
    """A message without secrets: values of this process's secret variables, texts that look like keys,
    ``api_key=...``, URLs with a user."""
    for name, value in os.environ.items():
        if len(value) >= _LEAST_SECRET and is_secret_name(name):
            text = text.replace(value, REDACTED)
    text = _SHAPE.sub(REDACTED, redact_urls(text))
    return _ASSIGNED.sub(
        lambda match: f"{match['name']}{match['sign']}{REDACTED}" if is_secret_field(match["name"]) else match[0], text
    )


def redact_urls(text: str) -> str:
    """``https://user:password@host`` as ``https://<redacted>@host``."""
    return _URL_USER.sub(rf"\g<scheme>{REDACTED}@", text)


def git_state(directory: Path) -> dict[str, Any] | None:
    """The commit, the branch, and whether there were uncommitted changes. None: no repository or no git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _device_names() -> list[str]:
    """The names of this process's accelerators, if torch is imported already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [platform.processor() or platform.machine()]
