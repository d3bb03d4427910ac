# SPDX-License-Identifier: Apache-2.0
"""Every Python process that is to see pretend GPUs starts with this: once torch is imported, its operators get values, and so do
Transformer Engine's functions."""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs ``install`` of a file of this project's once the module is imported."""

    files = {
        "torch": "operators",
        "transformer_engine.pytorch": "transformer_engine",
        "triton.runtime.interpreter": "triton_interpreter",
    }

    def __init__(self):
        self.searching = set()

    def find_spec(self, fullname, path, target=None):
        """Also asked by who only wants to know whether the module is there, as transformers does, before it is imported."""
        name = self.files.get(fullname)
        if name is None or fullname in self.searching:
            return None
        self.searching.add(fullname)
        spec = importlib.util.find_spec(fullname)
        self.searching.remove(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            file = Path(__file__).parents[1] / f"{name}.py"
            values = importlib.util.spec_from_file_location(f"pretend_gpu_{name}", file)
            assert values is not None and values.loader is not None
            sys.modules[values.name] = loaded = importlib.util.module_from_spec(values)
            values.loader.exec_module(loaded)
            loaded.install()

        spec.loader.exec_module = execute_and_install
        return spec


if os.environ.get("PRETEND_GPU") == "1":
    sys.meta_path.insert(0, _AfterImport())

# The file of this name that this one hides runs too.
for _folder in sys.path:
    _file = Path(_folder) / "sitecustomize.py"
    if _file.is_file() and not _file.samefile(__file__):
        exec(compile(_file.read_text(), str(_file), "exec"), {"__name__": "sitecustomize", "__file__": str(_file)})
        break
