# SPDX-License-Identifier: Apache-2.0
"""Identification of a folder with a checkpoint: its format, step and size, and whether it is complete.

No tensor is loaded and no code runs. Only names and sizes of files, JSON, and the names and shapes in Megatron-Core's
``.metadata`` are read (`untrusted.read_metadata`).
"""

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

from nemo2.checkpoint.directory import (
    CONTEXT_PATH,
    MANIFEST,
    WEIGHTS_PATH,
    Manifest,
    changed,
    missing_context,
    problems,
    read_manifest,
    step_in_name,
    unusable,
)
from nemo2.checkpoint.foreign_files import nemo_adapters, read_json, read_yaml, refuse_links
from nemo2.checkpoint.paths import checkpoint_folders, checkpoints_of_runs
from nemo2.errors import CheckpointError
from nemo2.files import open_regular, read_bounded
from nemo2.parallel.layout import SIZE_FIELDS

Kind = Literal[
    "nemo2", "NeMo 2.0", "Megatron-Bridge", "Megatron-LM", "Megatron-LM (legacy)", "Hugging Face", "torch_dist"
]
_TRACKER = "latest_checkpointed_iteration.txt"
_BRIDGE = ("run_config.yaml", "train_state.pt", "latest_train_state.pt")
_MOST_TRACKER = 1000
_MOST_INDEX = 64 << 20
_MOST_HEADER = 100_000_000
"""The limit of safetensors itself."""
_NO_COMMAND = "nemo2 cannot read this format"


@dataclass
class Identified:
    """One checkpoint. ``problems`` is empty if it is complete. None: unknown."""

    kind: Kind
    path: Path
    step: Optional[int] = None
    consumed_samples: Optional[int] = None
    layout: Optional[str] = None
    weights_only: Optional[bool] = None
    parameters: Optional[int] = None
    dtypes: list[str] = field(default_factory=list)
    size_bytes: int = 0
    files: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    """The next valid commands."""


def identify(path: Path | str, *, verify: bool = False) -> Identified:
    """Describe the checkpoint at ``path``. A run directory or a folder of checkpoints stands for its newest checkpoint.

    Args:
        path: A folder.
        verify: Also read every file of a nemo2 checkpoint and compare its SHA-256.

    Raises:
        CheckpointError: there is no such folder, or no checkpoint in it.
        SecurityError: an entry leads out of its folder.
    """
    kind, folder, others = _find(Path(path).expanduser())
    describe = _DESCRIBED[kind]
    found = describe(folder, verify) if describe is _ours else describe(folder)
    _measure(found)
    if others is not None:
        found.notes.append(
            f"the newest of {len(others) + 1} checkpoints in {path}" if others else f"the checkpoint in {path}"
        )
        for other, reason in unusable(folder.parent).items():
            found.notes.append(f"not usable: {other} ({reason})")
    return found


def kind_at(path: Path | str) -> tuple[Kind, Path]:
    """The format and the folder of the checkpoint at ``path``. A run directory or a folder of checkpoints stands for its
    newest checkpoint.

    Raises:
        CheckpointError: there is no such folder, or no checkpoint in it.
        SecurityError: an entry leads out of its folder.
    """
    return _find(Path(path).expanduser())[:2]


def _find(path: Path) -> tuple[Kind, Path, Optional[list[Path]]]:
    """The format, the folder, and the other checkpoints beside it. None: ``path`` is the checkpoint itself."""
    if not path.is_dir():
        why = "is not a folder, but a checkpoint is a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {why}. Give the path of a checkpoint, or a run's directory.")
    for looks_like, kind in _FORMATS:
        if looks_like(path):
            if kind != "Hugging Face":  # the cache of huggingface_hub consists of links
                refuse_links(path)
            return kind, path, None
    inside = _inside(path)
    if inside:
        kind, folder, _ = _find(inside[0])
        return kind, folder, inside[1:]
    raise CheckpointError(_not_one(path))


# ------------------------------------------------------------------------------------------------------ formats


def _is_ours(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _ours(path: Path, verify: bool) -> Identified:
    manifest = read_manifest(path)
    assert manifest is not None
    layout = {name: value for name, value in manifest.layout.items() if name != "world_size"}
    cuts = " ".join(
        f"{name}{value}" for name, value in layout.items() if isinstance(value, int) and value not in (0, 1, False)
    )
    found = Identified(
        "nemo2",
        path,
        step=manifest.step,
        consumed_samples=manifest.consumed_samples,
        layout=f"{cuts or 'not sharded'} over {manifest.layout.get('world_size', '?')} ranks",
        weights_only=manifest.weights_only,
        versions=manifest.versions,
        problems=problems(path),
    )
    if verify and not found.problems:
        found.problems = changed(path)
        found.notes.append(_what_was_compared(path, manifest))
    found.notes += [f"context: {problem}" for problem in missing_context(path)]
    if not found.problems:
        _read_weights(found, path / WEIGHTS_PATH)
    if not found.problems:
        found.commands = [
            f"nemo2 generate {path} --prompt TEXT",
            f"nemo2 evaluate {path} --recipe RECIPE",
            f"nemo2 export {path} --output FOLDER  # for Hugging Face's libraries",
            f"nemo2 pretrain RECIPE resume.resume_from_path={path}  # resume this run"
            if not manifest.weights_only
            else f"nemo2 pretrain RECIPE resume.restore_config.path={path}  # start from its weights",
        ]
    return found


def _what_was_compared(path: Path, manifest: Manifest) -> str:
    if not manifest.hashes:
        return "the version that wrote it computed no hashes"
    of = "of weights/ and context/" if (path / CONTEXT_PATH).is_dir() else "of weights/"
    itself = (
        "the manifest matches its own digest"
        if manifest.digest
        else "the manifest is of a version without a digest of itself"
    )
    return f"all SHA-256 hashes match: {len(manifest.hashes)} files {of}; {itself}"


def _is_torch_dist(path: Path) -> bool:
    return (path / "metadata.json").is_file() or (path / ".metadata").is_file()


def _is_nemo(path: Path) -> bool:
    return _is_torch_dist(path / WEIGHTS_PATH)


def _nemo(path: Path) -> Identified:
    found = Identified("NeMo 2.0", path, step=step_in_name(path))
    _read_weights(found, path / WEIGHTS_PATH)
    context = path / CONTEXT_PATH
    if not (context / "model.yaml").is_file():
        found.notes.append("context/model.yaml is missing, so you must name a recipe for the model")
    else:
        from nemo2.checkpoint.nemo_context import describe, model_config

        found.layout = _sizes(model_config(path)) or found.layout
        found.notes.append(describe(path))
    if (adapters := nemo_adapters(path)) is not None:
        found.notes.append(adapters)
        found.commands = [f"nemo2 translate {path} --output recipe.py  # writes its run as a recipe"]
    elif not found.problems:
        described = any((context / name).is_file() for name in ("io.json", "model.yaml"))
        found.commands = [
            *(
                [
                    (
                        f"nemo2 translate {path} --output recipe.py  # writes its run as a recipe that starts from its "
                        "weights"
                    )
                ]
                * described
            ),
            f"nemo2 pretrain RECIPE resume.restore_config.path={path}  # start from its weights; RECIPE: a recipe of "
            "its model",
            f"nemo2 import {path} --output CHECKPOINT",
            f"nemo2 export {path} --output FOLDER  # for Hugging Face's libraries",
        ]
    return found


def _legacy(path: Path) -> Identified:
    ranks = sorted(folder.name for folder in path.glob("mp_rank_*"))
    return Identified(
        "Megatron-LM (legacy)",
        path,
        step=_iteration(path),
        layout=f"{len(ranks)} model-parallel ranks, a pickle each",
        notes=[
            "one file per rank, readable in its original layout only; Megatron-LM's tools/checkpoint converts it to "
            "torch_dist"
        ],
        commands=[f"# {_NO_COMMAND}"],
    )


def _is_iteration(path: Path) -> bool:
    return _is_torch_dist(path) and (_iteration(path) is not None or (path.parent / _TRACKER).is_file())


def _is_bridge(path: Path) -> bool:
    return _is_iteration(path) and any((folder / name).is_file() for folder in (path, path.parent) for name in _BRIDGE)


def _megatron(path: Path) -> Identified:
    bridge = _is_bridge(path)
    found = Identified("Megatron-Bridge" if bridge else "Megatron-LM", path, step=_iteration(path))
    if bridge:
        _read_run_config(found)
    _read_weights(found, path)
    found.notes.append("its names lack the 'module.' prefix that nemo2's names have, so its weights must be imported")
    if not found.problems:
        found.commands = [
            f"nemo2 import {path} --recipe RECIPE --output CHECKPOINT  # RECIPE: a recipe of its model",
            f"nemo2 export {path} --recipe RECIPE --output FOLDER  # for Hugging Face's libraries",
        ]
    return found


def _read_run_config(found: Identified) -> None:
    """The layout in Megatron-Bridge's ``run_config.yaml``, and the class of its model."""
    file = next(
        (folder / _BRIDGE[0] for folder in (found.path, found.path.parent) if (folder / _BRIDGE[0]).is_file()), None
    )
    if file is None:
        return
    try:
        model = read_yaml(file).get("model") or {}
        found.layout = _sizes(model)
        found.notes.append(f"model: {str(model.get('_target_', 'unknown')).rpartition('.')[2]}")
    except (CheckpointError, AttributeError) as error:
        found.notes.append(f"{file.name} cannot be read ({' '.join(str(error).split())[:80]})")


def _sizes(config: dict[str, Any]) -> Optional[str]:
    """The layout of a configuration with Megatron's names, as ``tp2 pp4``. None: the configuration has no parallel
    sizes."""
    if not any(name in config for name in SIZE_FIELDS.values()):
        return None
    cuts = [f"{short}{config[name]}" for short, name in SIZE_FIELDS.items() if config.get(name) not in (None, 1)]
    return " ".join(cuts) or "not cut"


def _bare(path: Path) -> Identified:
    found = Identified("torch_dist", path, step=step_in_name(path.parent) if path.name == WEIGHTS_PATH else None)
    _read_weights(found, path)
    if path.name == WEIGHTS_PATH:
        found.notes.append(f"the inside of {path.parent}")
    if not found.problems:
        found.commands = [f"nemo2 import {path} --recipe RECIPE --output CHECKPOINT  # RECIPE: a recipe of its model"]
    return found


def conversion_of_pickles(folder: Path) -> str:
    """The command that converts pickled weights to safetensors with transformers."""
    new = folder.with_name(f"{folder.name}-safetensors")
    program = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"M.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained({str(new)!r}); "
        f"T.from_pretrained({str(folder)!r}).save_pretrained({str(new)!r})"
    )
    return f"python -c {shlex.quote(program)}"


def _hugging_face(path: Path) -> Identified:
    found = Identified("Hugging Face", path, weights_only=True)
    config: Any = {}
    try:
        config = read_json(path / "config.json")
        found.notes.append(f"architecture {', '.join(config.get('architectures') or ['unknown'])}")
    except (CheckpointError, AttributeError, TypeError) as error:
        found.problems.append(f"config.json cannot be read ({error})")
    for index in path.glob("*.index.json"):
        try:
            named = sorted(set(read_json(index, at_most=_MOST_INDEX)["weight_map"].values()))
        except (CheckpointError, KeyError, TypeError, AttributeError):
            found.problems.append(f"{index.name} cannot be read")
            continue
        there = {file.name for file in path.iterdir() if file.is_file()}
        found.problems += [f"{name} is missing" for name in named if name not in there]
    found.parameters = 0
    for file in path.glob("*.safetensors"):
        _read_safetensors(found, file)
    if not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
        found.parameters = None
        found.problems.append("it contains no weights")
    elif not list(path.glob("*.safetensors")):
        found.parameters = None
        found.notes.append("the weights are pickle files (.bin); if you trust them, convert them to safetensors")
        found.commands = [conversion_of_pickles(path)]
    found.notes.append("the weights of a model, without optimizer state")
    if found.parameters is not None and not found.problems:
        if (reason := _not_importable(config)) is not None:
            found.notes.append(f"nemo2 cannot import it: {reason}")
        else:
            found.commands = [
                f"nemo2 finetune --from {path} --data SAMPLES",
                f"nemo2 import {path} --output CHECKPOINT",
            ]
    return found


def _not_importable(config: Any) -> Optional[str]:
    """The reason why nemo2 has no model for a config.json. None: it has one."""
    from nemo2.models.conversion.families import conversion_for

    try:
        conversion_for(config).config(config)
    except Exception as error:  # a file that others wrote, for which an import has the exact error
        return " ".join(str(error).split())[:300]
    return None


_FORMATS: list[tuple[Callable[[Path], bool], Kind]] = [
    (_is_ours, "nemo2"),
    (_is_nemo, "NeMo 2.0"),
    (lambda path: any(path.glob("mp_rank_*/model_*rng.pt")), "Megatron-LM (legacy)"),
    (_is_bridge, "Megatron-Bridge"),
    (_is_iteration, "Megatron-LM"),
    (_is_torch_dist, "torch_dist"),
    (lambda path: (path / "config.json").is_file(), "Hugging Face"),
]
_DESCRIBED: dict[Kind, Callable[..., Identified]] = {
    "nemo2": _ours,
    "NeMo 2.0": _nemo,
    "Megatron-LM (legacy)": _legacy,
    "Megatron-Bridge": _megatron,
    "Megatron-LM": _megatron,
    "torch_dist": _bare,
    "Hugging Face": _hugging_face,
}


# ------------------------------------------------------------------------------------------------------ reading


def _read_weights(found: Identified, weights: Path) -> None:
    """Parameters, dtypes and completeness of a ``torch_dist`` folder. It is complete if every file that it names exists
    and is long enough."""
    from nemo2.checkpoint.untrusted import read_metadata

    for name in (".metadata", "metadata.json"):
        if not (weights / name).is_file():
            found.problems.append(f"{weights.name}/{name} is missing")
    if not (weights / ".metadata").is_file():
        return
    try:
        metadata = read_metadata(weights)
    except CheckpointError as error:
        found.problems.append(str(error))
        return
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
    model = {name: entry for name, entry in tensors.items() if not name.startswith("optimizer.")}
    # A tensor that layers of another kind store under a second name counts once.
    first = {index.fqn: (info.relative_path, info.offset) for index, info in (metadata.storage_data or {}).items()}
    once = {first.get(name, name): entry for name, entry in model.items()}
    found.parameters = sum(math.prod(entry.size) for entry in once.values())
    found.dtypes = sorted({str(entry.properties.dtype).removeprefix("torch.") for entry in model.values()})
    if found.weights_only is None:
        found.weights_only = len(model) == len(tensors)
    needed: dict[str, int] = {}
    # `read_metadata` has checked that each name is a path inside the folder.
    for info in (metadata.storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, length in sorted(needed.items()):
        file = weights / name
        if not file.is_file():
            found.problems.append(f"{weights.name}/{name} is missing")
        elif file.stat().st_size < length:
            found.problems.append(f"{weights.name}/{name} has {file.stat().st_size} bytes, but {length} are needed")
    if found.layout is None:
        writers = {match[1] for name in needed if (match := re.match(r"(?:\w*?)__(\d+)_", name))}
        found.layout = f"written by {len(writers)} ranks" if writers else None


def _read_safetensors(found: Identified, file: Path) -> None:
    """The header of a safetensors file: 8 bytes of length, then JSON with each tensor's dtype, shape and place."""
    try:
        with open_regular(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(file.stat().st_size, _MOST_HEADER):
                raise ValueError("its header is longer than the file or than any valid header")
            header: dict[str, Any] = json.loads(stream.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found.problems.append(f"{file.name} is not a safetensors file ({error})")
        return
    if file.stat().st_size < needed:
        found.problems.append(f"{file.name} has {file.stat().st_size} bytes, but {needed} are needed")
    found.parameters = (found.parameters or 0) + sum(math.prod(entry["shape"]) for entry in tensors)
    found.dtypes = sorted({*found.dtypes, *(entry["dtype"].lower() for entry in tensors)})


def _measure(found: Identified) -> None:
    files = [file for file in found.path.rglob("*") if file.is_file()]
    found.files, found.size_bytes = len(files), sum(file.stat().st_size for file in files)


def _inside(path: Path) -> list[Path]:
    """The checkpoints inside a path that a user may name, newest first. Empty: there are none."""
    if ours := checkpoints_of_runs(path):
        return ours
    if (path / _TRACKER).is_file():
        word = read_bounded(path / _TRACKER, at_most=_MOST_TRACKER).decode(errors="replace").strip()
        name = "release" if word == "release" else f"iter_{int(word):07d}" if word.isdigit() else ""
        if name and (path / name).is_dir():
            return [path / name, *(other for other in path.glob("iter_*") if other.name != name)]
    theirs = (
        folder
        for where in checkpoint_folders(path)
        if where.is_dir()
        for folder in where.iterdir()
        if folder.is_dir() and _is_nemo(folder)
    )
    return sorted(theirs, key=lambda folder: (step_in_name(folder) or -1, folder.stat().st_mtime), reverse=True)


def _not_one(path: Path) -> str:
    lost = {**unusable(path), **unusable(path / "checkpoints")}
    if lost:
        listed = "; ".join(f"{folder} ({reason})" for folder, reason in lost.items())
        return f"{path} contains no usable checkpoint: {listed}."
    return (
        f"{path} contains no checkpoint that nemo2 recognizes. nemo2 looks for {MANIFEST} (its own), "
        f"weights/metadata.json (NeMo 2.0), metadata.json or mp_rank_* or {_TRACKER} (Megatron), and config.json (Hugging "
        "Face). Give the path that the run printed when it saved, or the run's directory."
    )


def _iteration(path: Path) -> Optional[int]:
    match = re.fullmatch(r"iter_(\d+)", path.name)
    return int(match[1]) if match else None
