# SPDX-License-Identifier: Apache-2.0
"""Checks a folder of lm-eval tasks, so that no file in it runs code.

lm-eval imports the names after ``!function`` and under ``class`` in a task's YAML, loads unknown metrics as scripts
from the hub, and renders prompts in a Jinja environment without a sandbox. nemo2 passes a task folder that would run
code to lm-eval only if the user trusts the folder.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from nemo2.base.advice import advice
from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.checkpoint.foreign_files import read_yaml

_RUN_CODE = {
    "class": "lm-eval imports and calls the named class",
    "custom_dataset": "lm-eval calls the named function",
    "use_prompt": "lm-eval reads the prompt with a YAML loader that creates Python objects",
}
_SWITCHES = {
    "trust_remote_code": "the datasets library then runs the data set's script",
    "hf_evaluate": "the evaluate library then runs a script from the hub",
}


def refuse_code(folder: Path, *, metrics: Collection[str] = ()) -> None:
    """Check that no task in ``folder`` would run code, before lm-eval reads the folder.

    Args:
        metrics: The names of lm-eval's own metrics. lm-eval loads any other metric as a script. Empty: metrics aren't
            checked.

    Raises:
        SecurityError: a task would run code. The message names the file and the setting.
    """
    for file in sorted(path for pattern in ("*.yaml", "*.yml") for path in folder.rglob(pattern)):
        try:
            content = read_yaml(file)
        except CheckpointError as error:
            raise _refusal(str(error).rstrip(".")) from error  # ``!function`` among them
        for key, value in _pairs(content):
            if why := _why_not(folder, file, key, value, metrics):
                raise _refusal(f"{file} sets {key}: {value!r}, and {why}")


def sandbox_prompts() -> None:
    """Make lm-eval render prompts in a sandbox, so that a task's templates can't access Python objects in this process."""
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
        files = [(file.parent / str(name)).resolve() for name in names]
        if any(one.suffix not in (".yaml", ".yml") or folder.resolve() not in one.parents for one in files):
            return "nemo2 checks only .yaml and .yml files inside the task folder"
    if key == "dataset_path" and (str(value).endswith(".py") or any(Path(str(value)).expanduser().glob("*.py"))):
        return "the datasets library runs that script"
    if key == "dataset_path" and value == "pandas":
        return "the pandas loader reads pickles, which can run code"
    if key == "metric" and metrics and value not in metrics:
        return "lm-eval has no metric of that name and would load a script of that name"
    return ""


def _refusal(what: str) -> SecurityError:
    return SecurityError(
        f"{what}. nemo2 doesn't run code from a task folder unless you trust the folder. If you do, add "
        f"{advice('--trust-tasks', 'trust_tasks=True')}."
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
