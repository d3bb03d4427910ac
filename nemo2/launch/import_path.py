# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of this machine find modules: the installed ones first, the user's own behind them.

``python -m`` puts the working directory in front of everything, and a ``h2.py`` that lies there is imported in the place of an
installed package. Ranks start without that (``PYTHONSAFEPATH``). The folders from which the user's own modules come, that of the
script, the working directory and those of recipes given by path, go to the end of the path, behind what ``.pth`` files add:
nothing but Python's own hook ``sitecustomize`` comes late enough for that, so a run brings one, which calls the machine's.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

OWN_FOLDERS = "NEMO2_OWN_FOLDERS"
"""The user's folders, separated as in ``$PATH``; ranks look there last."""

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
    """Where this process' user has modules of their own, each once: recipes given by path, the script, the working directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    beside = os.path.dirname(os.path.abspath(script)) if script else None
    # For a command such as ``nemo2`` that is the folder of commands.
    own = [] if beside in (None, os.path.dirname(sys.executable)) else [beside]
    return [*dict.fromkeys([*_added_by_us(), *own, os.getcwd()])]


def path_variables(*, staging: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process looks for modules as this module says.

    A ``PYTHONPATH`` of ``given``, or else of this process' own environment, stays in front: the user has asked for that.
    """
    folder = staging / "path"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_HOOK.format(variable=OWN_FOLDERS), encoding="utf-8")
    path = given.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    asked = [entry for entry in path.split(os.pathsep) if entry and entry not in _added_by_us()]
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), *asked]),
        "PYTHONSAFEPATH": "1",
        OWN_FOLDERS: os.pathsep.join(own_folders()),
    }


def add_own_folder(folder: Path) -> None:
    """Let modules in ``folder`` be imported: here, and in the processes that this one starts, behind everything else."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(folder) not in paths:
        # For ranks that nemo-run starts without us; `path_variables` takes it out again.
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(folder)])
        os.environ[OWN_FOLDERS] = os.pathsep.join([*_added_by_us(), str(folder)])


def _added_by_us() -> list[str]:
    return [folder for folder in os.environ.get(OWN_FOLDERS, "").split(os.pathsep) if folder]
