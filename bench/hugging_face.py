# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of importing and exporting released weights, against `cp` of the same bytes on the same disk.

A model of the shape of Llama 3 8B (16 GB of bfloat16) or of 1.5 B parameters (3 GB) is written with random bytes, then, in turns:
copied with `cp` and `sync`, imported, and exported again, each in a process of its own, whose peak of resident memory is what it
reports at its end. Files are dropped from the page cache before they are read. ``3gb`` is also loaded and saved by
transformers' own `from_pretrained` and `save_pretrained`. With ``--memory`` the files are holes, and what would be written is
dropped and not hashed, so that 70 B parameters need no disk: only the peak of memory is meant then.

    python -m bench.hugging_face 8b --folder /path/on/the/disk/in/question
    python -m bench.hugging_face 70b --memory
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "hidden": 256, "ffn": 512, "heads": 4, "groups": 2, "vocab": 1024},
    "3gb": {"layers": 16, "hidden": 2560, "ffn": 8704, "heads": 20, "groups": 4, "vocab": 32768},
    "8b": {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "vocab": 128256},
    "70b": {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "groups": 8, "vocab": 128256},
}
_BLOCK = os.urandom(8 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure (default: the temporary folder)"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="only the peak of memory, without using the disk")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(_one(*options.one, dry=options.memory)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(table(measure(options.shape, Path(folder), options.repeats, dry=options.memory)))


def measure(shape: str, folder: Path, repeats: int, *, dry: bool) -> dict[str, Any]:
    """Seconds and peak of memory of each turn by what was done, and the bytes of the weights."""
    released, ours, out = folder / "released", folder / "ours", folder / "out"
    write_released(shape, released, holes=dry)
    size = sum(file.stat().st_size for file in released.glob("*.safetensors"))
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        if dry:
            found.setdefault("import", []).append(_apart(shape, "import", released, ours, "--memory"))
            found.setdefault("export", []).append(_apart(shape, "export", ours, out, "--memory"))
            continue
        found.setdefault("cp", []).append(_copied(released, out))
        found.setdefault("import", []).append(_apart(shape, "import", released, ours))
        found.setdefault("cp of the checkpoint", []).append(_copied(ours, out))
        found.setdefault("export", []).append(_apart(shape, "export", ours, out))
        shutil.rmtree(out)
        if shape in ("tiny", "3gb"):
            found.setdefault("transformers", []).append(_apart(shape, "transformers", released, out))
            shutil.rmtree(out)
        shutil.rmtree(ours)
    return {"shape": shape, "bytes": size, "turns": found, "load": os.getloadavg()[1]}


def table(times: dict[str, Any]) -> str:
    """The figures of `measure`, the best of its turns, as Markdown."""
    size, turns = times["bytes"], times["turns"]
    lines = [
        f"{times['shape']}: {size / 1e9:.2f} GB; load of the machine meanwhile {times['load']:.1f} on {os.cpu_count()} cores",
        "",
    ]
    lines += ["| | s | GB/s | against cp | processor s | peak MiB |", "|---|---|---|---|---|---|"]
    for name, runs in turns.items():
        best = min(runs, key=lambda run: run["seconds"])
        base = turns.get("cp of the checkpoint" if name == "export" else "cp")
        against = "" if base is None else f"{min(run['seconds'] for run in base) / best['seconds']:.0%}"
        peak = f"{best['peak'] / 2**20:.0f}" if best.get("peak") else ""
        lines.append(
            f"| {name} | {best['seconds']:.1f} | {size / best['seconds'] / 1e9:.2f} | {against} | {best['busy']:.1f} | {peak} |"
        )
    return "\n".join(lines)


def write_released(shape: str, folder: Path, *, holes: bool) -> None:
    """A Llama of this shape in bfloat16, of random bytes or of holes in files that read as zeros."""
    import torch

    from nemo2.hugging_face.safetensors_files import CONFIG, INDEX, plan_shards
    from nemo2.models.conversion.table import released_shapes
    from nemo2.models.conversion.tables.llama import LLAMA

    sizes = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["groups"],
        "vocab_size": sizes["vocab"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    shapes = released_shapes(LLAMA.entries(LLAMA.config(config), vocab_rows=sizes["vocab"]))
    shards, index = plan_shards([(name, torch.bfloat16, shape) for name, shape in shapes.items()])
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    for shard in shards:
        with open(folder / shard.name, "wb") as file:
            file.write(shard.header)
            while not holes and file.tell() < shard.size:
                file.write(_BLOCK[: shard.size - file.tell()])
            file.truncate(shard.size)
            os.fsync(file.fileno())


def _copied(source: Path, target: Path) -> dict[str, float]:
    """The seconds that `cp` takes, without the disk's help in sharing blocks."""
    _forget(source)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = _timed(lambda: subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True), target)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(target)
    return {"seconds": seconds, "busy": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def _apart(shape: str, what: str, source: Path, target: Path, *more: str) -> dict[str, float]:
    _forget(source)
    command = [sys.executable, "-m", "bench.hugging_face", shape, *more, "--one", what, str(source), str(target)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(told.splitlines()[-1])


def _one(what: str, source: str, target: str, *, dry: bool) -> dict[str, float]:
    """Measure one action in a separate process, without the time of imports."""
    if what == "transformers":
        from transformers import AutoModelForCausalLM

        def work() -> None:
            AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(target)
    else:
        from nemo2.hugging_face import output_folders, streams
        from nemo2.hugging_face.exporting import export_weights
        from support.released_models import import_release

        options: dict[str, Any] = {}
        if dry:
            streams._write_all = lambda descriptor, block, place: None
            streams.hashlib = types.SimpleNamespace(sha256=_NoHash)
            output_folders.refuse_full_disk = lambda target, needed: None
            options = {"verify": False} if what == "export" else {}
        function: Callable[..., Any] = import_release if what == "import" else export_weights

        def work() -> None:
            function(source, target, **options)

    busy = time.process_time()
    seconds = _timed(work, Path(target))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "busy": time.process_time() - busy, "peak": peak}


class _NoHash:
    def update(self, block: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 64


def _timed(work: Callable[[], Any], target: Path) -> float:
    """Seconds until all of it is on the disk."""
    started = time.perf_counter()
    work()
    for file in target.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - started


def _forget(folder: Path) -> None:
    """Drop files from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    main()
