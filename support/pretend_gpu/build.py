# SPDX-License-Identifier: Apache-2.0
"""Builds the libraries of the pretend GPU for the torch of this environment: `python -m support.pretend_gpu.build`.

One library holds the behaviour (`cuda/`). For each NVIDIA library that torch is linked to there is one of the same name, with the
functions that torch needs of it: those with a behaviour jump there, the others return 0. So the libraries fit whatever CUDA build
of torch is installed. Needs g++ and binutils; CUDA's headers come from the registry, a few MB.
"""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path

from support.pretend_gpu import CORE, HOME, LIBRARIES

# The newest headers of CUDA 13 would do as well: the functions' signatures and the structures hold for a major version. They are
# pinned so that a build is the same tomorrow.
HEADERS = {"nvidia-cuda-runtime": "13.2.86", "nvidia-cuda-crt": "13.2.86"}
PREFIXES = {
    "libcublasLt": ("cublasLt",),
    "libcublas": ("cublas",),
    "libcudart": ("cuda", "__cuda"),
    "libcudnn": ("cudnn",),
    "libcupti": ("cupti",),
    "libcufft": ("cufft",),
    "libcurand": ("curand",),
    "libcusolver": ("cusolver",),
    "libcusparseLt": ("cusparseLt",),
    "libcusparse": ("cusparse",),
    "libnccl": ("nccl",),
    "libnvidia-ml": ("nvml",),
    "libcuda": ("cu",),
}
"""Libraries by the names of their functions: the first that fits."""
OPENED = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}
"""Libraries that come with the driver, which programs open by name."""
OPENED_BY = {
    "libc10_cuda.so": {"libnvidia-ml": rb"nvml[A-Z]\w+"},
    "libtransformer_engine.so": {"libcudnn": rb"(?<=\0)cudnn[A-Z]\w+(?=\0)", "libcuda": rb"(?<=\0)cu[A-Z]\w+(?=\0)"},
}
"""Functions that a program looks up by name in a library that it opened: their names are among its bytes."""
DRIVER = {"cuCtxGetLimit", "cuCtxSetLimit", "cuFuncSetCacheConfig", "cuModuleLoadData", "cuOccupancyMaxActiveClusters"}
"""Functions of the driver that Triton's launcher, which is compiled at run time, is linked to."""


def main() -> None:
    build([*torch_libraries(), *transformer_engine_libraries()])
    print(f"built for torch {metadata.version('torch')}: {LIBRARIES}")


def torch_libraries() -> list[Path]:
    """The libraries of torch, which must be a CUDA build."""
    folder = Path(str(metadata.distribution("torch").locate_file("torch"))) / "lib"
    if not (folder / "libtorch_cuda.so").is_file():
        raise SystemExit(f"torch {metadata.version('torch')} is no CUDA build: TORCH=torch make setup brings one")
    return sorted(folder.glob("lib*.so"))


def transformer_engine_libraries() -> list[Path]:
    """The libraries of Transformer Engine; none where it isn't installed."""
    try:
        distribution = metadata.distribution("transformer_engine_torch")
    except metadata.PackageNotFoundError:
        return []
    return sorted(Path(str(distribution.locate_file("transformer_engine"))).glob("**/*transformer_engine*.so"))


def build(programs: list[Path]) -> None:
    """Build libraries for ``programs`` into a new folder, then put it into its place: running processes keep the old files."""
    new = HOME / "lib.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    core = new / CORE
    command = ["g++", "-O2", "-fPIC", "-shared", "-std=c++17", "-Wall", "-Wno-unused-parameter", f"-I{_headers()}"]
    command += [str(path) for path in sorted((Path(__file__).parent / "cuda").glob("*.cpp"))]
    command += ["-o", str(core), f"-Wl,-soname,{CORE}", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"]
    _run(*command, "-ldl", "-lpthread")
    behaviours = {
        name.removeprefix("pretend_") for name in _symbols(core, "--defined-only") if name.startswith("pretend_")
    }
    sonames, versions, functions = _needs(programs)
    for name in behaviours:
        if library := _library_of(name):
            functions[library].add(name)
    functions["libcuda"] |= DRIVER
    for library, soname in sonames.items():
        _write_library(new, soname, versions.get(library), sorted(functions[library]), behaviours)
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    new.rename(LIBRARIES)


def _headers() -> Path:
    folder = HOME / "headers"
    pins = [f"{name}=={version}" for name, version in HEADERS.items()]
    done = folder / "pins"
    if not done.is_file() or done.read_text() != " ".join(pins):
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *pins)
        done.write_text(" ".join(pins))
    return folder / "nvidia" / "cu13" / "include"


def _needs(programs: list[Path]) -> tuple[dict[str, str], dict[str, str], dict[str, set[str]]]:
    """Names of files, versions of symbols, and functions, by library."""
    sonames, versions, functions = dict(OPENED), {}, defaultdict(set)
    for program in programs:
        for soname in re.findall(r"\(NEEDED\).*\[(\S+)\]", _run("readelf", "-dW", str(program))):
            library = soname.split(".")[0]
            if library in PREFIXES or library.startswith("libcudnn_"):
                sonames[library] = soname
        for symbol in _symbols(program, "--undefined-only"):
            name, _, version = symbol.partition("@")
            if library := _library_of(name):
                functions[library].add(name)
                if version:
                    versions[library] = version.lstrip("@")
        for library, names in OPENED_BY.get(program.name, {}).items():
            functions[library] |= {name.decode() for name in re.findall(names, program.read_bytes())}
    return sonames, versions, functions


def _library_of(function: str) -> str | None:
    for library, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if re.match(rf"{prefix}[A-Z_]", function):
                return library
    return None


def _write_library(folder: Path, soname: str, version: str | None, functions: list[str], behaviours: set[str]) -> None:
    """x86-64 assembler: a jump to the behaviour, or a call that names the function where stubs are traced, and 0."""
    lines = [".text"]
    for index, name in enumerate(functions):
        lines += [f".globl {name}", f".type {name},@function", f"{name}:"]
        behaviour = re.sub(r"_pt[sd][zs]$", "", name)
        if behaviour in behaviours:
            lines.append(f"  jmp *pretend_{behaviour}@GOTPCREL(%rip)")
        else:
            lines += ["  subq $8,%rsp", f"  leaq .Lname{index}(%rip),%rdi", "  call *pretend_stub@GOTPCREL(%rip)"]
            lines += ["  addq $8,%rsp", "  xorl %eax,%eax", "  ret"]
            lines += [".section .rodata", f'.Lname{index}: .string "{name}"', ".text"]
    lines.append('.section .note.GNU-stack,"",@progbits')
    source, exports = folder / f"{soname}.s", folder / f"{soname}.map"
    source.write_text("\n".join(lines) + "\n")
    command = ["gcc", "-shared", "-nostdlib", str(source), "-o", str(folder / soname), f"-Wl,-soname,{soname}"]
    if version:
        exports.write_text(f"{version} {{ global: {'; '.join(functions)}; }};\n")
        command.append(f"-Wl,--version-script={exports}")
    _run(*command, f"-L{folder}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN")
    source.unlink()
    exports.unlink(missing_ok=True)


def _symbols(library: Path, which: str) -> list[str]:
    return [line.split()[-1] for line in _run("nm", "-D", which, str(library)).splitlines()]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
