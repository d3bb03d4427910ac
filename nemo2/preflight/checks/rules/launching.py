# SPDX-License-Identifier: Apache-2.0
"""Rules of a launch: the executor against the trainer, this machine, its files and its packages."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo2.base.counts import is_count
from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.base.names import safe_name
from nemo2.checkpoint.paths import HUGGING_FACE, missing
from nemo2.mcore.settle.world import devices_problem, nodes_problem, world_of
from nemo2.preflight.checks.facts import Facts, number
from nemo2.preflight.checks.rule import Topic
from nemo2.preflight.checks.rules.parts import loggers_of
from nemo2.preflight.checks.tokenizers import Unknown, known_tokenizer, tokenizer_of
from nemo2.training.run_dir.directory import DEFAULT_BASE, link_in, problems_of_copies

LAUNCH = Topic("The launch", needs_sizes=False)
FILES = Topic("Files of this machine", needs_sizes=False)
_UNITS = {"devices": "processes per node", "num_nodes": "nodes"}


@LAUNCH.rule("executor-starts-what-the-trainer-expects")
def unequal_launch(facts: Facts) -> Iterator[str]:
    """The executor must start as many nodes, and as many processes per node, as the trainer expects.

    Otherwise: The strategy raises an error on every rank, or the ranks wait forever for processes that never start.
    """
    if devices_problem(facts.at("trainer.devices")) or nodes_problem(facts.at("trainer.num_nodes")):
        return
    world = world_of(facts.trainer, facts.machine)
    for name, requested, launched in zip(
        ("devices", "num_nodes"), (world.devices, world.nodes), facts.launched, strict=True
    ):
        if launched is not None and requested != launched:
            yield (
                f"trainer.{name}={getattr(facts.trainer, name)}, but the executor starts {launched} {_UNITS[name]}. "
                f"Both must be equal. Set trainer.{name}={launched}, or start {requested} {_UNITS[name]}."
            )


@LAUNCH.rule("accelerator-is-here", local=True)
def _accelerator(facts: Facts) -> Iterator[str]:
    """A run on this machine must request an accelerator that the machine has, no more GPUs than it has, and no more
    CPU processes than were launched.

    Otherwise: Lightning raises an error on every rank.
    """
    from nemo2.training.trainer import check_devices

    accelerator = getattr(facts.trainer, "accelerator", "auto")
    launched = facts.launched[0] is not None
    try:
        check_devices(
            accelerator=accelerator,
            devices="auto" if launched else getattr(facts.trainer, "devices", "auto"),
            num_nodes=number(facts.trainer, "num_nodes") or 1,
        )
    except ConfigError as error:
        yield str(error)


@LAUNCH.rule("run-name-is-a-folder")
def _name(facts: Facts) -> Iterator[str]:
    """The name and version of the run must be valid as a folder name on any file system and as a word on any
    command line.

    Otherwise: The launcher fails, or the run stops before its first step.
    """
    log = facts.at("log")
    if getattr(log, "explicit_log_dir", None):
        return  # in whose place neither is used
    for field in ("name", "version"):
        if (value := getattr(log, field, None)) is not None and (field, value) != ("version", ""):  # an empty text
            try:
                safe_name(value, field=f"log.{field}")
            except ConfigError as error:
                yield str(error)


@LAUNCH.rule("resume-directory-is-searched")
def _search(facts: Facts) -> Iterator[str]:
    """`resume_from_directory` requires `resume_if_exists=True`.

    Otherwise: Nothing reads it, and the run starts from the beginning.
    """
    directory = facts.at("resume.resume_from_directory")
    if directory and not facts.at("resume.resume_if_exists"):
        yield (
            f"resume.resume_from_directory={directory}: is searched only with resume.resume_if_exists=True. Set it, or "
            "remove the directory."
        )


@FILES.rule("log-directory-is-writable", local=True)
def _log_directory(facts: Facts) -> Iterator[str]:
    """The directories of runs, checkpoints, loggers and indices must be writable, the run's must contain no links, and
    files to copy into it must exist.

    Otherwise: The run stops before its first step.
    """
    log, data = facts.at("log"), facts.parts.get("data")
    explicit = getattr(log, "explicit_log_dir", None)
    directories = {
        "log.explicit_log_dir": explicit,
        "log.log_dir": None if explicit or log is None else getattr(log, "log_dir", None) or DEFAULT_BASE,
        "log.ckpt.dirpath": facts.at("log.ckpt.dirpath"),
    }
    packs = getattr(data, "packed_sequence_specs", None) if facts.packed else None
    settings = getattr(data, "settings", None)
    field = "data.index_mapping_dir" if settings is None else "data.dataset_kwargs.index_mapping_dir"
    directories[field] = getattr(data if settings is None else settings, "index_mapping_dir", None)
    if not (directories[field] or getattr(data, "streaming", False) or getattr(packs, "packed_train_data_path", None)):
        directories[field] = getattr(data, "cache_root", None)
    for name in ("packed_train_data_path", "packed_val_data_path"):
        directories[f"data.packed_sequence_specs.{name}"] = getattr(packs, name, None)
    moved = ("TensorBoardLogger", "WandbLogger") if getattr(log, "update_logger_directory", False) else ()
    for path, kind, arguments in loggers_of(facts):
        if kind not in moved:
            directories[f"{path}.save_dir"] = arguments.get("save_dir")
    problems = [
        f"{field}={directory}: this directory cannot be created or written. Set {field} to a writable directory."
        for field, directory in directories.items()
        if directory and not _writable(Path(str(directory)).expanduser().absolute())
    ]
    yield from problems
    from nemo2.preflight.checks.earlier import directory_to_continue

    resumes = bool(facts.at("resume.resume_if_exists"))
    directory = None if log is None or problems else directory_to_continue(log, newest=resumes)
    if directory is not None and directory.is_dir() and (link := link_in(directory)) is not None:
        yield f"{link} Remove the link, or choose another log directory."
    yield from problems_of_copies([Path(str(file)).expanduser() for file in getattr(log, "files_to_copy", None) or ()])


@FILES.rule("checkpoint-to-resume-exists", local=True)
def _checkpoint(facts: Facts) -> Iterator[str]:
    """The checkpoint to resume from or to restore must exist, and one to resume from must have an optimizer state.

    Otherwise: The run stops before its first step.
    """
    from nemo2.preflight.checks.earlier import lacks_a_checkpoint, weights_alone

    places = {path: facts.at(path) for path in ("resume.resume_from_path", "resume.restore_config.path")}
    places["strategy.restore_config.path"] = facts.at("trainer.strategy.restore_config.path")
    for name, path in places.items():
        if path and (why := missing(str(path))) is not None:
            yield f"{name}={path}: {why}"
    yield from weights_alone(facts.recipe)
    if not any(places.values()) and lacks_a_checkpoint(facts.recipe):
        yield (
            "resume.resume_ignore_no_checkpoint=False: the run has no finished checkpoint on this machine to resume from. "
            "To start from the beginning in this case, set resume.resume_ignore_no_checkpoint=True."
        )


@FILES.rule("released-weights-fit")
def _released(facts: Facts) -> Iterator[str]:
    """Weights to start from must belong to the recipe's model, and a release (`hf:///folder`) must be complete.

    Otherwise: The run stops on every rank after it has built the model.
    """
    named = str(facts.at("resume.resume_from_path") or "")
    if named.startswith(HUGGING_FACE):
        yield (
            f"resume.resume_from_path={named}: a Hugging Face release contains no optimizer state to resume from. To "
            f"start from its weights, set resume.restore_config.path={named}."
        )
    for name, owner in (("resume", "resume"), ("strategy", "trainer.strategy")):
        path = str(facts.at(f"{owner}.restore_config.path") or "")
        if not facts.here or not path:
            continue
        if not path.startswith(HUGGING_FACE):
            if missing(path) is None:
                from nemo2.preflight.checks.earlier import weights_of_another_shape

                yield from weights_of_another_shape(facts, f"{name}.restore_config.path", path)
            continue
        if not path.startswith(f"{HUGGING_FACE}/"):
            continue  # of a repository of the hub nothing is known before it is downloaded
        from nemo2.hugging_face.checkpoint import Checkpoint

        try:
            Checkpoint.open(path).tensors(facts.parts.get("model.config"))  # headers only
        except Nemo2Error as error:
            yield f"{name}.restore_config.path={path}: {str(error).removeprefix(f'{path}: ')}"


@FILES.rule("communicator-settings-exist", local=True)
def _communicators(facts: Facts) -> Iterator[str]:
    """`nccl_communicator_config_path` must be the path of an existing file.

    Otherwise: Megatron-Core raises an error when it creates the process groups.
    """
    path = facts.of_strategy("nccl_communicator_config_path")
    if path and not Path(str(path)).expanduser().is_file():
        yield (
            f"strategy.nccl_communicator_config_path={path}: this file does not exist. Set the path of an existing "
            "file, or set it to None."
        )


@FILES.rule("data-is-there", local=True)
def _data(facts: Facts) -> Iterator[str]:
    """Every dataset must have a .bin and an .idx file that belong together, enough tokens for a sample, and the
    run's tokenizer.

    Otherwise: The data module raises an error on every rank.
    """
    data = facts.parts.get("data")
    if not hasattr(data, "check_files"):
        return
    validates = facts.at("trainer.limit_val_batches") != 0
    try:
        splits = ("train", "validation") if validates else ("train",)
        data.check_files(splits, _tokenizer_of_data(facts), max_index_bytes=2**28)
    except Nemo2Error as error:
        yield str(error)


def _tokenizer_of_data(facts: Facts) -> Any:
    try:
        return tokenizer_of(facts, "data")
    except Nemo2Error:
        return None  # the next rule reports it


@FILES.rule("tokenizer-fits-the-vocabulary")
def _vocabulary(facts: Facts) -> Iterator[str]:
    """`vocab_size` must be at least the number of the tokenizer's tokens, and set if there is no tokenizer. `pad_token_id` must
    be one of its ids, and the tokenizer's special tokens must be in its vocabulary.

    Otherwise: The run stops on every rank, when it builds the model or at its first padded batch.
    """
    try:
        tokenizer, data = known_tokenizer(facts), facts.parts.get("data")
        if isinstance(tokenizer, Unknown):
            return
        if tokenizer is None and (hasattr(data, "check_files") or getattr(data, "reads_text", bool)()):
            return  # the next rule reports it, or that about weights
        for name in ("bos_id", "eos_id", "pad_id"):
            getattr(tokenizer, name, None)  # looks the token up
        in_range = is_count(facts.of_model("make_vocab_size_divisible_by"))  # else another rule is broken
        if in_range and hasattr(facts.config, "padded_vocab_size"):
            ids: int = facts.config.num_token_ids(tokenizer)  # pyright: ignore[reportOptionalMemberAccess]
            pad = getattr(data, "pad_token_id", None)
            if is_count(pad) and pad >= ids:
                yield f"data.pad_token_id={pad}: must be an id of the vocabulary, which has {ids} ids (0 to {ids - 1})."
    except Nemo2Error as error:
        yield str(error)


@FILES.rule("text-has-a-tokenizer")
def _text(facts: Facts) -> Iterator[str]:
    """Token files and fine-tuning on text require a tokenizer: the recipe's, the data's, or that of the weights to
    start from.

    Otherwise: The run stops on every rank when it opens the data.
    """
    data = facts.parts.get("data")
    restore = facts.at("resume.restore_config.path")
    text = hasattr(data, "reads_text") and data.reads_text()
    if not (text or hasattr(data, "check_files")) or facts.lacks_weights:
        return  # without weights to fine-tune from, the rule about them is broken
    try:
        tokenizer = known_tokenizer(facts, "data")
    except Nemo2Error:
        return  # the rule above reports it
    if tokenizer is None:
        yield (
            f"data.tokenizer=None: the data {'is text' if text else 'are token files'}, but the run has no tokenizer"
            f"{f', and {restore} describes none' if restore else ''}. Set data.tokenizer to the tokenizer of the model, such "
            "as BPETokenizer(path=tokenizer.json), or resume.restore_config.path to weights with a tokenizer."
        )


def _writable(path: Path) -> bool:
    try:
        os.lstat(path)  # raises for a name that no file system takes
    except FileNotFoundError:
        return path != path.parent and _writable(path.parent)
    except OSError:
        return False
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
