# SPDX-License-Identifier: Apache-2.0
"""Every Python process that is to see pretend GPUs starts with this: once torch is imported, its operators get values."""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            file = Path(__file__).parents[1] / "operators.py"
            operators = importlib.util.spec_from_file_location("pretend_gpu_operators", file)
            assert operators is not None and operators.loader is not None
            loaded = importlib.util.module_from_spec(operators)
            operators.loader.exec_module(loaded)
            loaded.install()

        spec.loader.exec_module = execute_and_install
        return spec


if os.environ.get("PRETEND_GPU") == "1":
    sys.meta_path.insert(0, _AfterTorch())

# The file of this name that this one hides runs too.
for _folder in sys.path:
    _file = Path(_folder) / "sitecustomize.py"
    if _file.is_file() and not _file.samefile(__file__):
        exec(compile(_file.read_text(), str(_file), "exec"), {"__name__": "sitecustomize", "__file__": str(_file)})
        break
