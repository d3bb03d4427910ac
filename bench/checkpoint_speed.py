# SPDX-License-Identifier: Apache-2.0
"""Speed of saving and loading checkpoints, against `torch.save` and against the disk, in one run.

One process trains a step of a Llama with about 0.5 GB of parameters and optimizer state, then, in turns: writes as many bytes
to one file (the disk's own limit, fsync included), saves them with `torch.save` and fsync, saves a checkpoint in the
foreground, and one in the background. Files are dropped from the page cache before they are read. `torch.load` only builds
tensors, a load also gives them to the model and the optimizer, so that `torch.load` followed by ``load_state_dict`` is measured
as well. Medians of the wall time are reported, and of the processor time of this process, which other work on the machine
disturbs less; the writer of a background save is a process of its own.

    python -m bench.checkpoint_speed --folder /path/on/the/disk/in/question --repeats 3
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo2.checkpoint.loading import Loading
from support import ranks, small_runs

MODEL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "ffn_hidden_size": 1536,
    "num_attention_heads": 8,
    "vocab_size": 16384,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure (default: the temporary folder)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    from bench.checkpoint_speed import measure  # ranks know it by this name

    ranks.prepare("support.quiet")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times = ranks.run(measure, 1, folder, options.repeats, timeout=1200.0, quiet=True)[0]
    print(json.dumps(times))
    print(table(times))


def measure(folder: str, repeats: int) -> dict[str, Any]:
    """Seconds of each turn by what was done, and the bytes of a checkpoint."""
    import torch

    place = Path(folder)
    found: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    trainer = _trained()
    strategy, io = trainer.strategy, trainer.strategy.checkpoint_io
    tensors = _tensors(trainer)
    count = sum(value.numel() * value.element_size() for value in tensors.values())
    content = b"".join(bytes(value.contiguous().view(torch.uint8).flatten().numpy()) for value in tensors.values())

    def timed(name: str, action: Callable[[], Any]) -> None:
        os.sync()
        started, worked = time.perf_counter(), time.process_time()
        action()
        found.setdefault(name, []).append(time.perf_counter() - started)
        busy.setdefault(name, []).append(time.process_time() - worked)

    for turn in range(repeats):
        raw, plain = place / "raw", place / "plain.pt"
        timed("write the bytes", lambda raw=raw: _write(raw, content))
        timed("torch.save", lambda plain=plain: _torch_save(tensors, plain))
        io.async_save = False
        target = place / f"foreground{turn}"
        timed("save in the foreground", lambda target=target: trainer.save_checkpoint(target))
        io.async_save = True
        background = place / f"background{turn}"
        timed("save in the background: stall", lambda background=background: trainer.save_checkpoint(background))
        timed("save in the background: rest", lambda: io.maybe_finalize_save_checkpoint(blocking=True))
        _forget(place)
        timed("read the bytes", lambda raw=raw: _read(raw))
        timed("torch.load", lambda plain=plain: torch.load(plain, weights_only=True))
        _forget(place)
        timed("torch.load, load_state_dict", lambda plain=plain: _torch_load(trainer, plain))
        for verify in (True, False):
            _forget(place)
            io.loading = Loading(verify=verify, parallel=io.parallel_load)
            name = "load, hashes compared" if verify else "load"
            timed(
                name, lambda target=target: strategy.load_model_state_dict(strategy.form.read(target, optimizer=True))
            )
        for path in (raw, plain):
            path.unlink()
        shutil.rmtree(target)
        shutil.rmtree(background)
    return {"bytes": count, "repeats": repeats, "seconds": found, "processor_seconds": busy, "load": os.getloadavg()}


def _trained() -> Any:
    from lightning.pytorch.trainer.states import TrainerFn

    small_runs.quiet()
    model = small_runs.build_llama(**MODEL)
    trainer = small_runs.build_trainer(max_steps=1)
    trainer.fit(model, small_runs.TokenData())
    trainer.state.fn = TrainerFn.FITTING
    return trainer


def _tensors(trainer: Any) -> dict[str, Any]:
    """The tensors of a checkpoint: parameters and both moments."""
    found = {name: value.detach() for name, value in trainer.strategy.megatron_parallel.named_parameters()}
    state = trainer.strategy.optimizers[0].state_dict()
    for index, entry in state["state"].items():
        found |= {
            f"{index}.{name}": value for name, value in entry.items() if hasattr(value, "numel") and value.numel() > 1
        }
    return found


def _torch_load(trainer: Any, path: Path) -> None:
    """The save of a training script without Megatron-Core's checkpoints."""
    import torch

    content = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, value in trainer.strategy.megatron_parallel.named_parameters():
            value.copy_(content[name])
    state = trainer.strategy.optimizers[0].state_dict()
    for index, entry in state["state"].items():
        entry.update({name: content[f"{index}.{name}"] for name in ("exp_avg", "exp_avg_sq")})
    trainer.strategy.optimizers[0].load_state_dict(state)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _torch_save(tensors: dict[str, Any], path: Path) -> None:
    import torch

    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(8 << 20):
            pass


def _forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def table(times: dict[str, Any]) -> str:
    seconds = {name: statistics.median(values) for name, values in times["seconds"].items()}
    busy = {name: statistics.median(values) for name, values in times["processor_seconds"].items()}
    lines = [
        f"{times['bytes'] / 1e9:.2f} GB, medians of {times['repeats']} turns; load of the machine afterwards "
        f"{times['load'][0]:.1f} on {os.cpu_count()} cores",
        "",
        "| | s | GB/s | against the disk | against torch | processor s | against torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, value in seconds.items():
        reading = any(word in name for word in ("load", "read"))
        disk = seconds["read the bytes" if reading else "write the bytes"]
        torchs = "torch.load" if reading else "torch.save"
        lines.append(
            f"| {name} | {value:.2f} | {times['bytes'] / value / 1e9:.2f} | {disk / value:.0%} | "
            f"{seconds[torchs] / value:.0%} | {busy[name]:.2f} | {busy[torchs] / max(busy[name], 1e-9):.0%} |"
        )
    stall = seconds["save in the background: stall"] / seconds["save in the foreground"]
    return "\n".join([*lines, "", f"A background save stalls training for {stall:.0%} of a foreground one."])


if __name__ == "__main__":
    main()
