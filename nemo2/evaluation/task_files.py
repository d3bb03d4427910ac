# SPDX-License-Identifier: Apache-2.0
"""Reads a folder of lm-eval's tasks as data, so that no file decides what is called.

lm-eval imports the names after ``!function`` and under ``class`` in a task's YAML, loads unknown metrics as scripts
from the hub, and renders prompts in a Jinja environment without a sandbox. A folder from elsewhere is passed to it only
if its user allows it.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from nemo2.checkpoint.foreign_files import read_yaml
from nemo2.errors import CheckpointError, SecurityError

_RUN_CODE = {
    "class": "lm-eval builds what it names",
    "custom_dataset": "lm-eval calls it",
    "use_prompt": "lm-eval reads it with a YAML loader that makes objects",
}
_SWITCHES = {
    "trust_remote_code": "datasets then runs a script that comes with the data",
    "hf_evaluate": "evaluate then runs a script of the hub",
}


def refuse_code(folder: Path, *, metrics: Collection[str] = ()) -> None:
    """Check that no task in ``folder`` would run code, before lm-eval reads it.

    Args:
        metrics: The names of lm-eval's own metrics. For other names it looks for scripts. Empty: names aren't checked.

    Raises:
        SecurityError: the message has the file and the code in it.
    """
    for file in sorted(path for pattern in ("*.yaml", "*.yml") for path in folder.rglob(pattern)):
        try:
            found = read_yaml(file)
        except CheckpointError as error:
            raise _refusal(str(error).rstrip(".")) from error  # ``!function`` among them
        for key, value in _pairs(found):
            if why := _why_not(folder, file, key, value, metrics):
                raise _refusal(f"{file} has {key}: {value!r}, and {why}")


def sandbox_prompts() -> None:
    """Have lm-eval render its prompts in a sandbox in this process: texts of a task reach nothing of Python's."""
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils  # pyright: ignore[reportMissingImports]

    if isinstance(utils.env, ImmutableSandboxedEnvironment):
        return
    sandbox = ImmutableSandboxedEnvironment(
        loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=utils.env.keep_trailing_newline
    )
    sandbox.filters.update(utils.env.filters)
    utils.env = sandbox


def _why_not(folder: Path, file: Path, key: str, value: Any, metrics: Collection[str]) -> str:
    if key in _RUN_CODE:
        return _RUN_CODE[key]
    if key in _SWITCHES and value not in (None, False):
        return _SWITCHES[key]
    if key == "include":
        names = value if isinstance(value, list) else [value]
        known = [(file.parent / str(name)).resolve() for name in names]
        if any(one.suffix not in (".yaml", ".yml") or folder.resolve() not in one.parents for one in known):
            return "only .yaml files of the same folder are looked through"
    if key == "dataset_path" and (str(value).endswith(".py") or any(Path(str(value)).expanduser().glob("*.py"))):
        return "datasets runs that script"
    if key == "dataset_path" and value == "pandas":
        return "that reads pickles"
    if key == "metric" and metrics and value not in metrics:
        return "lm-eval has no metric of that name and would look for a script of it"
    return ""


def _refusal(what: str) -> SecurityError:
    return SecurityError(
        f"{what}. A folder of tasks is read as data: where you have read it and trust it, add --trust-tasks "
        "(trust_tasks=True)."
    )


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Each key with its value, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key), item
            yield from _pairs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _pairs(item)
