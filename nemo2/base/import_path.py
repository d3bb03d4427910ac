# SPDX-License-Identifier: Apache-2.0
"""Sets the import path of ranks on this machine: installed modules first, the user's own modules last.

``python -m`` puts the working directory first, so a ``h2.py`` in it would replace an installed package of that name.
Ranks start without the working directory (``PYTHONSAFEPATH``). The folders of the user's own modules go to the end of
the path, after the entries of ``.pth`` files. These folders are the script's, the working directory, and those of
recipes given by path. Only Python's hook ``sitecustomize`` runs late enough for this, so each run brings a
``sitecustomize``, which then calls the machine's.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

OWN_FOLDERS = "NEMO2_OWN_FOLDERS"
"""The variable with the user's folders, separated as in ``$PATH``. Ranks search them last."""

_HOOK = '''\
"""Written by nemo2 for one run: {variable} goes to the end of the path; then the machine's own sitecustomize."""
import importlib.machinery, importlib.util, os, sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
sys.path.extend(
    folder for folder in os.environ.get({variable!r}, "").split(os.pathsep) if folder and folder not in sys.path
)
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
'''


def own_folders() -> list[str]:
    """The folders of this user's own modules, each once: those of recipes given by path, the script's, and the
    working directory."""
    main = sys.modules.get("__main__")
    # `python -m MODULE` has a spec, and puts the working directory on the path, not the module's folder.
    script = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
    beside = os.path.dirname(os.path.abspath(script)) if script else None
    # For a command such as ``nemo2``, this is the folder of commands.
    own = [] if beside in (None, os.path.dirname(sys.executable)) else [beside]
    return [*dict.fromkeys([*_added_by_us(), *own, os.getcwd()])]


def requested_path(variables: Mapping[str, str]) -> list[str]:
    """The entries of ``PYTHONPATH`` in ``variables``, or else in this process's environment, which the user has set."""
    path = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return [entry for entry in path.split(os.pathsep) if entry and entry not in _added_by_us()]


def write_hook(staging: Path) -> None:
    """Write the ``sitecustomize`` of a launch into its folder."""
    folder = staging / "path"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_HOOK.format(variable=OWN_FOLDERS), encoding="utf-8")


def path_variables(staging: str | Path, *, requested: Sequence[str], own: Sequence[str]) -> dict[str, str]:
    """The variables that give a process this import path.

    Args:
        staging: The launch's folder, with the hook of `write_hook`.
        requested: Entries that the user has set. They come first.
        own: The folders of the user's own modules, which come last.
    """
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [f"{staging}/path", *requested])),
        "PYTHONSAFEPATH": "1",
        OWN_FOLDERS: os.pathsep.join(own),
    }


def add_own_folder(folder: Path) -> None:
    """Let this process and its child processes import modules from ``folder``, after all other folders."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(folder) not in paths:
        # For ranks that nemo-run starts directly. `path_variables` removes the entry again.
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(folder)])
        os.environ[OWN_FOLDERS] = os.pathsep.join([*_added_by_us(), str(folder)])


def _added_by_us() -> list[str]:
    return [folder for folder in os.environ.get(OWN_FOLDERS, "").split(os.pathsep) if folder]
