# SPDX-License-Identifier: Apache-2.0
"""Identification of a folder with a checkpoint: its format, step and size, and whether it is complete.

No tensor is loaded and no code runs. Only names and sizes of files, JSON, and the names and shapes in Megatron-Core's
``.metadata`` are read (`untrusted.read_metadata`).
"""

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

from nemo2.base.counts import counted
from nemo2.base.errors import CheckpointError
from nemo2.base.files import read_bounded
from nemo2.checkpoint.directory import (
    CONTEXT_PATH,
    MANIFEST,
    WEIGHTS_PATH,
    changed,
    problems,
    read_manifest,
    step_in_name,
    unusable,
)
from nemo2.checkpoint.foreign_files import is_nemo, nemo_adapters, read_json, read_yaml, refuse_links
from nemo2.checkpoint.metadata import lost_shards, read_metadata
from nemo2.checkpoint.nemo_context import describe, model_config
from nemo2.checkpoint.paths import checkpoint_folders, checkpoints_of_runs
from nemo2.hugging_face.safetensors_files import conversion_of_pickles, open_folder
from nemo2.mcore.parallel.layout import SIZE_FIELDS
from nemo2.models.conversion.families import conversion_for

Kind = Literal[
    "nemo2", "NeMo 2.0", "Megatron-Bridge", "Megatron-LM", "Megatron-LM (legacy)", "Hugging Face", "torch_dist"
]
_TRACKER = "latest_checkpointed_iteration.txt"
_BRIDGE = ("run_config.yaml", "train_state.pt", "latest_train_state.pt")
_MOST_TRACKER = 1000


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
    """The next valid commands. Empty: it is incomplete."""


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
    identified = next(describe for name, _, describe in _FORMATS if name == kind)(folder)
    if verify and kind == "nemo2" and not identified.problems:
        identified.problems = changed(folder)
        identified.notes.append(_what_was_compared(folder))
    if identified.problems:
        identified.commands = []
    if (quoted := shlex.quote(str(folder))) != str(folder):  # a program of Python has its own quotes
        commands = identified.commands
        identified.commands = [c if c.startswith("python") else c.replace(str(folder), quoted) for c in commands]
    files = [file for file in folder.rglob("*") if file.is_file()]
    identified.files, identified.size_bytes = len(files), sum(file.stat().st_size for file in files)
    if others is not None:
        identified.notes.append(
            f"the newest of {len(others) + 1} checkpoints in {path}" if others else f"the checkpoint in {path}"
        )
        for other, reason in unusable(folder.parent).items():
            identified.notes.append(f"not usable: {other} ({reason})")
    return identified


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
    for kind, matches, _ in _FORMATS:
        if matches(path):
            if kind != "Hugging Face":  # the cache of huggingface_hub consists of links
                refuse_links(path)
            return kind, path, None
    if inside := _inside(path):
        kind, folder, _ = _find(inside[0])
        return kind, folder, inside[1:]
    if lost := {**unusable(path), **unusable(path / "checkpoints")}:
        listed = "; ".join(f"{folder} ({reason})" for folder, reason in lost.items())
        raise CheckpointError(f"{path} contains no usable checkpoint: {listed}.")
    from nemo2.hugging_face.adapter_rows import ADAPTER_CONFIG

    if (path / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{path} contains an adapter of peft ({ADAPTER_CONFIG}), not a model. Import it: nemo2 import {path} --output "
            "CHECKPOINT"
        )
    raise CheckpointError(
        f"{path} contains no checkpoint that nemo2 recognizes. nemo2 looks for {MANIFEST} (its own), "
        f"weights/metadata.json (NeMo 2.0), metadata.json or mp_rank_* or {_TRACKER} (Megatron), and config.json (Hugging "
        "Face). Give the path that the run printed when it saved, or the run's directory."
    )


# ------------------------------------------------------------------------------------------------------ formats


def _nemo2(path: Path) -> Identified:
    manifest = read_manifest(path)
    assert manifest is not None
    layout = {name: value for name, value in manifest.layout.items() if name != "world_size"}
    ranks = manifest.layout.get("world_size", "?")
    cuts = " ".join(
        f"{name}{value}" for name, value in layout.items() if isinstance(value, int) and value not in (0, 1, False)
    )
    identified = Identified(
        "nemo2",
        path,
        step=manifest.step,
        consumed_samples=manifest.consumed_samples,
        layout=f"{cuts or 'not sharded'} over {ranks} rank{'s' * (ranks != 1)}",
        weights_only=manifest.weights_only,
        versions=manifest.versions,
        problems=problems(path),
    )
    identified.notes += [f"context: {problem}" for problem in problems(path, of_context=True)]
    if not identified.problems:
        _read_weights(identified, path / WEIGHTS_PATH)
    identified.commands = [
        f"nemo2 generate {path} --prompt TEXT",
        f"nemo2 evaluate {path} --recipe RECIPE",
        f"nemo2 export {path} --output FOLDER  # for Hugging Face's libraries",
        f"nemo2 pretrain RECIPE resume.resume_from_path={path}  # resume this run"
        if not manifest.weights_only
        else f"nemo2 pretrain RECIPE resume.restore_config.path={path}  # start from its weights",
    ]
    return identified


def _what_was_compared(path: Path) -> str:
    manifest = read_manifest(path)
    if manifest is None or not manifest.hashes:
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


def _nemo(path: Path) -> Identified:
    identified = Identified("NeMo 2.0", path, step=step_in_name(path))
    _read_weights(identified, path / WEIGHTS_PATH)
    context = path / CONTEXT_PATH
    if not (context / "model.yaml").is_file():
        identified.notes.append("context/model.yaml is missing, so you must name a recipe for the model")
    else:
        identified.layout = _sizes(model_config(path)) or identified.layout
        identified.notes.append(describe(path))
    if (adapters := nemo_adapters(path)) is not None:
        identified.notes.append(adapters)
        identified.commands = [f"nemo2 translate {path} --output recipe.py  # writes its run as a recipe"]
    else:
        translate = (
            f"nemo2 translate {path} --output recipe.py  # writes its run as a recipe that starts from its weights"
        )
        identified.commands = [
            *([translate] if is_nemo(path) else []),
            f"nemo2 pretrain RECIPE resume.restore_config.path={path}  # start from its weights; RECIPE: a recipe of "
            "its model",
            f"nemo2 import {path} --output CHECKPOINT",
            f"nemo2 export {path} --output FOLDER  # for Hugging Face's libraries",
        ]
    return identified


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
        commands=["# nemo2 cannot read this format"],
    )


def _is_iteration(path: Path) -> bool:
    return _is_torch_dist(path) and (_iteration(path) is not None or (path.parent / _TRACKER).is_file())


def _is_bridge(path: Path) -> bool:
    return _is_iteration(path) and any((folder / name).is_file() for folder in (path, path.parent) for name in _BRIDGE)


def _megatron(path: Path) -> Identified:
    bridge = _is_bridge(path)
    identified = Identified("Megatron-Bridge" if bridge else "Megatron-LM", path, step=_iteration(path))
    if bridge:
        _read_run_config(identified)
    _read_weights(identified, path)
    identified.notes.append(
        "its names lack the 'module.' prefix that nemo2's names have, so its weights must be imported"
    )
    identified.commands = [
        f"nemo2 import {path} --recipe RECIPE --output CHECKPOINT  # RECIPE: a recipe of its model",
        f"nemo2 export {path} --recipe RECIPE --output FOLDER  # for Hugging Face's libraries",
    ]
    return identified


def _read_run_config(identified: Identified) -> None:
    """The layout in Megatron-Bridge's ``run_config.yaml``, and the class of its model."""
    file = next(
        (
            folder / _BRIDGE[0]
            for folder in (identified.path, identified.path.parent)
            if (folder / _BRIDGE[0]).is_file()
        ),
        None,
    )
    if file is None:
        return
    try:
        model = read_yaml(file).get("model") or {}
        identified.layout = _sizes(model)
        identified.notes.append(f"model: {str(model.get('_target_', 'unknown')).rpartition('.')[2]}")
    except (CheckpointError, AttributeError) as error:
        identified.notes.append(f"{file.name} cannot be read ({' '.join(str(error).split())[:80]})")


def _sizes(config: dict[str, Any]) -> Optional[str]:
    """The layout of a configuration with Megatron's names, as ``tp2 pp4``. None: the configuration has no parallel
    sizes."""
    if not any(name in config for name in SIZE_FIELDS.values()):
        return None
    cuts = [f"{short}{config[name]}" for short, name in SIZE_FIELDS.items() if config.get(name) not in (None, 1)]
    return " ".join(cuts) or "not cut"


def _bare(path: Path) -> Identified:
    identified = Identified("torch_dist", path, step=step_in_name(path.parent) if path.name == WEIGHTS_PATH else None)
    _read_weights(identified, path)
    if path.name == WEIGHTS_PATH:
        identified.notes.append(f"the inside of {path.parent}")
    identified.commands = [f"nemo2 import {path} --recipe RECIPE --output CHECKPOINT  # RECIPE: a recipe of its model"]
    return identified


def _hugging_face(path: Path) -> Identified:
    identified = Identified("Hugging Face", path, weights_only=True)
    config: Any = {}
    try:
        config = read_json(path / "config.json")
        identified.notes.append(f"architecture {', '.join(config.get('architectures') or ['unknown'])}")
    except (CheckpointError, AttributeError, TypeError) as error:
        identified.problems.append(f"config.json cannot be read ({error})")
    if not any(path.glob("*.safetensors")) and any(path.glob("pytorch_model*.bin")):
        identified.notes.append("the weights are pickle files (.bin); if you trust them, convert them to safetensors")
        identified.commands = [conversion_of_pickles(path)]
    else:
        try:
            tensors = open_folder(path).values()
            identified.parameters = sum(math.prod(tensor.shape) for tensor in tensors)
            identified.dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        except CheckpointError as error:
            identified.problems.append(str(error))
    identified.notes.append("the weights of a model, without optimizer state")
    if identified.parameters is not None and not identified.problems:
        try:
            conversion_for(config).config(config)
        except Exception as error:  # a file that others wrote, for which an import has the exact error
            identified.notes.append(f"nemo2 cannot import it: {' '.join(str(error).split())[:300]}")
        else:
            identified.commands = [
                f"nemo2 finetune --from {path} --data SAMPLES",
                f"nemo2 import {path} --output CHECKPOINT",
            ]
    return identified


_FORMATS: list[tuple[Kind, Callable[[Path], bool], Callable[[Path], Identified]]] = [
    ("nemo2", lambda path: (path / MANIFEST).is_file(), _nemo2),
    ("NeMo 2.0", lambda path: _is_torch_dist(path / WEIGHTS_PATH), _nemo),
    ("Megatron-LM (legacy)", lambda path: any(path.glob("mp_rank_*/model_*rng.pt")), _legacy),
    ("Megatron-Bridge", _is_bridge, _megatron),
    ("Megatron-LM", _is_iteration, _megatron),
    ("torch_dist", _is_torch_dist, _bare),
    ("Hugging Face", lambda path: (path / "config.json").is_file(), _hugging_face),
]


# ------------------------------------------------------------------------------------------------------ reading


def _read_weights(identified: Identified, weights: Path) -> None:
    """Parameters, dtypes and completeness of a ``torch_dist`` folder. It is complete if every file that it names exists
    and is long enough."""
    for name in (".metadata", "metadata.json"):
        if not (weights / name).is_file():
            identified.problems.append(f"{weights.name}/{name} is missing")
    if not (weights / ".metadata").is_file():
        return
    try:
        metadata = read_metadata(weights)
    except CheckpointError as error:
        identified.problems.append(str(error))
        return
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
    model = {name: entry for name, entry in tensors.items() if not name.startswith("optimizer.")}
    # A tensor that layers of another kind store under a second name counts once.
    first = {index.fqn: (info.relative_path, info.offset) for index, info in (metadata.storage_data or {}).items()}
    once = {first.get(name, name): entry for name, entry in model.items()}
    identified.parameters = sum(math.prod(entry.size) for entry in once.values())
    identified.dtypes = sorted({str(entry.properties.dtype).removeprefix("torch.") for entry in model.values()})
    if identified.weights_only is None:
        identified.weights_only = len(model) == len(tensors)
    lost = lost_shards(weights, metadata)
    identified.problems += [f"{weights.name}/{name} {why}" for name, why in lost.items()]
    if identified.layout is None:
        files = {file for file, _ in first.values()}
        writers = {match[1] for name in files if (match := re.match(r"(?:\w*?)__(\d+)_", name))}
        identified.layout = f"written by {counted(len(writers), 'rank')}" if writers else None


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
        if folder.is_dir() and _is_torch_dist(folder / WEIGHTS_PATH)
    )
    return sorted(theirs, key=lambda folder: (step_in_name(folder) or -1, folder.stat().st_mtime), reverse=True)


def _iteration(path: Path) -> Optional[int]:
    match = re.fullmatch(r"iter_(\d+)", path.name)
    return int(match[1]) if match else None
