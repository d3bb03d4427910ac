# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own Python sources, imported on a machine without a GPU.

Its wheel from the package index holds all of its Python code; only the extension module is compiled elsewhere. Here that module
and what else is missing (Triton, ONNX) are empty shells, so that the package's own classes can be built and its own checks run.
What would compute answers with mocks.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

EXTENSION = "transformer_engine_torch"
_ABSENT = ("triton", "onnx", "onnxscript", "onnxruntime", "pydantic")


def unpack(wheel: Path, directory: Path) -> Path:
    """The Python sources of a ``transformer_engine-*.whl``, under ``directory`` by their version."""
    target = directory / version_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def import_sources(directory: Path) -> Any:
    """``transformer_engine`` as `unpack` laid it down, with ``transformer_engine.pytorch`` imported; once per process."""
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}  # no shared library, nothing compiled
    import torch._inductor.output_code  # noqa: F401  # asks for Triton, and must not find the shell of it

    sys.path.insert(0, str(directory))
    sys.meta_path.append(_Shells())
    (directory / f"{EXTENSION}.shell.so").touch()  # 2.2 looks for a file of the name before it imports the module
    _pretend_gpu()
    package: Any = ModuleType("transformer_engine")
    package.__path__ = [str(directory / "transformer_engine")]
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    package.__version__ = directory.name
    sys.modules["transformer_engine"] = package
    package.common = importlib.import_module("transformer_engine.common")
    package.common.load_framework_extension = lambda framework: importlib.import_module(EXTENSION)
    package.pytorch = importlib.import_module("transformer_engine.pytorch")
    _without_kernels(sys.modules[EXTENSION])
    return package


_GEMMS = ("GEMM1", "GEMM2", "GEMM3")
_ORDER = {
    "FP8FwdTensors": tuple(f"{gemm}_{part}" for gemm in _GEMMS for part in ("INPUT", "WEIGHT", "OUTPUT")),
    "FP8BwdTensors": tuple(f"GRAD_{part}{number}" for number in (1, 2, 3) for part in ("OUTPUT", "INPUT")),
}
"""Enumerations by whose numbers lists are indexed; of the others only the names matter."""


class _Number(int):
    name: str


def _enumeration(name: str) -> type:
    counter = itertools.count()
    order = _ORDER.get(name, ())

    class Meta(type):
        def __getattr__(cls, member: str) -> _Number:
            if member.startswith("__"):
                raise AttributeError(member)
            number = _Number(order.index(member) if member in order else next(counter))
            number.name = member
            setattr(cls, member, number)
            cls.__members__[member] = number
            return number

    return Meta(name, (), {"__members__": {}, "__init__": lambda self, *args, **kwargs: None})


class _Shell(ModuleType):
    """A module with every name: capitalised names are classes, other names are mocks."""

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=name) if name[0].islower() else _enumeration(name)
        setattr(self, name, made)
        return made


class _Shells(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in (EXTENSION, *_ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        # 2.2 makes the module from a file and puts it in place itself: there must be one of them all the same.
        return sys.modules.get(spec.name) or _Shell(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def _pretend_gpu() -> None:
    real = importlib.util.spec_from_file_location

    def from_file(name: str, *args: Any, **kwargs: Any) -> Any:
        return importlib.util.find_spec(name) if name == EXTENSION else real(name, *args, **kwargs)

    importlib.util.spec_from_file_location = from_file
    empty = torch.empty
    torch.empty = lambda *sizes, **options: empty(
        *sizes, **options | ({"device": "cpu"} if "device" in options else {})
    )
    # Compiled functions of theirs would look for Triton.
    torch.compile = lambda function=None, **kwargs: function if function is not None else (lambda inner: inner)


def _without_kernels(extension: Any) -> None:
    """Answers for the machine: it is a Hopper, buffers can be exchanged, and each is an object that knows what it was
    made of."""

    class Buffer:
        def __init__(self, *args: Any, **kwargs: Any):
            self.dtype, self.args, self.kwargs = args[1], args, kwargs

        def is_fp8_ubuf(self) -> bool:
            return self.dtype is torch.uint8

        def with_cublasmp(self) -> bool:
            return False

    extension.CommOverlap, extension.CommOverlapP2P = (
        type("CommOverlap", (Buffer,), {}),
        type("CommOverlapP2P", (Buffer,), {}),
    )
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.get_device_properties = lambda *args: SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    cpp: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    extension.get_cudnn_version = cpp.get_cudnn_version = lambda: 91300
    extension.device_supports_multicast = lambda *args: True
    extension.ubuf_built_with_mpi = lambda: False
    extension.get_stream_priority_range = lambda: (0, -1)
