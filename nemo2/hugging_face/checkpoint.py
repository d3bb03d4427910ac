# SPDX-License-Identifier: Apache-2.0
"""`Checkpoint.open`: the weights that a user names, of nemo2, NeMo 2.0, Megatron-LM, Megatron-Bridge or Hugging Face.

Whoever is given a path asks this module which weights it names, what their model is, and what their tensors are. The
format decides the answers, so no caller looks at files.
"""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Self, Union

import fiddle as fdl
import torch

from nemo2.base.advice import advice
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.base.names import listed
from nemo2.checkpoint.context import describes, load_context
from nemo2.checkpoint.directory import CONTEXT_PATH, MANIFEST, Manifest, read_manifest, sha256, weights_dir
from nemo2.checkpoint.foreign_files import nemo_adapters, read_object
from nemo2.checkpoint.nemo_context import load_nemo_model
from nemo2.checkpoint.paths import HUGGING_FACE, checkpoint_at, digest_of, folder_of
from nemo2.checkpoint.tokenizers import read_tokenizer
from nemo2.config import Config
from nemo2.config.requested import explicit_fields
from nemo2.config.tree import as_config
from nemo2.hugging_face.identify import Kind, identify, kind_at
from nemo2.hugging_face.released import open_released
from nemo2.hugging_face.safetensors_files import CONFIG
from nemo2.hugging_face.stored import StoredTensors, StoredWeights
from nemo2.hugging_face.tensor_source import TensorSource

_TIME_OF_START = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}_[0-9]{2}-[0-9]{2}-[0-9]{2}")
"""The name of the folder of one start, in the folder of its run."""
_DESCRIPTIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""The suffixes of a release's files that describe its model and its tokenizer."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of any format. Only its manifest is read before a method asks for more.

    Made by `Checkpoint.open`.
    """

    kind: Kind
    path: Path
    """The checkpoint's folder."""
    source: str
    """The checkpoint as ``resume.restore_config.path`` names it."""

    @classmethod
    def open(cls, source: Union[str, Path]) -> Self:
        """The checkpoint that ``source`` names.

        Args:
            source: A checkpoint; a run's directory, for its newest checkpoint; ``nemo://name``, an imported model; or a
                release: its folder, ``hf:///folder`` or ``hf://organisation/name``, which is downloaded if it is missing.

        Raises:
            CheckpointError: there is no checkpoint, or it can't be downloaded.
            ConfigError: see `folder_of`.
            SecurityError: an entry leads out of its folder.
        """
        if str(source).startswith(HUGGING_FACE):
            return cls("Hugging Face", folder_of(str(source)), str(source))
        kind, path = kind_at(checkpoint_at(str(source)))
        path = path.absolute()
        return cls(kind, path, f"{HUGGING_FACE}{path}" if kind == "Hugging Face" else str(path))

    @property
    def is_nemo2(self) -> bool:
        return self.kind == "nemo2"

    @property
    def is_release(self) -> bool:
        return self.kind == "Hugging Face"

    @cached_property
    def manifest(self) -> Optional[Manifest]:
        """None: it is not nemo2's."""
        return read_manifest(self.path) if self.is_nemo2 else None

    @property
    def base(self) -> Optional[str]:
        """The weights that hold the rest of the model, as `open` takes them. None: the whole model is here."""
        return None if self.manifest is None else self.manifest.part_of

    @cached_property
    def digest(self) -> str:
        """A digest of the weights (`digest_of`). "": unknown."""
        return digest_of(self.source)

    @cached_property
    def identity(self) -> str:
        """A digest of the weights, of the model's description and of the tokenizer. "": unknown."""
        if self.manifest is not None:
            return self.manifest.digest or sha256(self.path / MANIFEST)
        if not self.digest:
            return ""
        files = [file for file in sorted(self.path.iterdir()) if file.suffix in _DESCRIPTIONS]
        described = [f"{file.name}:{sha256(file)};" for file in files]
        return hashlib.sha256("".join([self.digest, *described]).encode()).hexdigest()

    def require_nemo2(self) -> Self:
        """This checkpoint, for a use that needs nemo2's format.

        Raises:
            CheckpointError: it has another format.
        """
        if not self.is_nemo2:
            raise CheckpointError(
                f"{self.path} is a checkpoint of {self.kind}, not of nemo2. Convert it with `nemo2 import {self.path} "
                "--output FOLDER`."
            )
        return self

    def require_complete(self) -> Self:
        """This checkpoint, whose files are there in full.

        Raises:
            CheckpointError: it is damaged, or holds NeMo 2.0's adapters only.
        """
        if problems := identify(self.path).problems:
            raise CheckpointError(f"{self.path} is damaged: {listed(problems, 5, separator='; ')}.")
        if (adapters := nemo_adapters(self.path)) is not None:
            raise CheckpointError(f"{self.path}: {adapters}")
        return self

    def refuse_adapters(self) -> None:
        """Check that the checkpoint holds a whole model.

        Raises:
            ConfigError: it holds only a part, such as the adapters of a PEFT run.
        """
        if self.base is not None:
            raise ConfigError(
                f"{self.path} contains only a part of a model, and the rest is in {self.base}. Merge the adapters of a PEFT run "
                f"into the whole model: nemo2 export {self.path} --merge (with --to checkpoint for a checkpoint), or "
                "llm.peft.merge_lora. llm.peft.export_lora writes the adapters alone. Train other runs with "
                "strategy.ckpt_save_part=None."
            )

    def model_config(self, *, follow_data: bool = False) -> Any:
        """The model as an editable config, without its tokenizer.

        Args:
            follow_data: Leave out the sequence length, which then follows the data's. A model with learned positions
                keeps its own.

        Raises:
            CheckpointError: the checkpoint doesn't describe its model.
            ConfigError: nemo2 has no such model, or the format describes none.
            SecurityError: the description names something outside the allow-list, or leads out of its folder.
        """
        if self.is_nemo2:
            model = load_context(self.path, "model", build=False)
        elif self.is_release:
            released = open_released(self.path)
            model = Config(released.conversion.model, config=as_config(released.config))
        elif self.kind == "NeMo 2.0" and (self.path / CONTEXT_PATH).is_dir():
            described = load_nemo_model(self.path)
            model = Config(type(described), config=as_config(described.config))
        else:
            raise ConfigError(
                f"{self.path} is a checkpoint of {self.kind} that does not describe its model in a way that nemo2 can "
                f"read. Name its model: {advice('--recipe llama3_8b', 'model=LlamaModel(config=...)')}."
            )
        config = getattr(model, "config", None)
        by_table = getattr(config, "position_embedding_type", None) == "learned_absolute"
        if follow_data and not by_table and "seq_length" in config.__arguments__:  # pyright: ignore[reportOptionalMemberAccess]
            del config.seq_length  # pyright: ignore[reportOptionalMemberAccess]
        return model

    def config(self) -> Any:
        """nemo2's configuration of the model.

        Raises:
            ConfigError, SecurityError: see `model_config`.
        """
        try:
            return fdl.build(self.model_config()).config
        except (CheckpointError, AttributeError) as error:
            raise ConfigError(
                f"{self.path} does not describe its model ({error}). Give the configuration: config=LlamaConfig(...), or "
                "a recipe of the model."
            ) from error

    def tokenizer(self, *, trust_remote_code: bool = False) -> Any:
        """The tokenizer. None: the checkpoint has none that works without code of its own.

        Args:
            trust_remote_code: Allow a tokenizer of nemo2's to run the Python code beside its files.

        Raises:
            CheckpointError: the files differ from those of the training.
            SecurityError: see `model_config`.
        """
        return read_tokenizer(self.path, trust_remote_code=True) if trust_remote_code else self._tokenizer

    def tokenizer_config(self) -> Any:
        """The tokenizer as an editable config.

        Raises:
            CheckpointError: the checkpoint doesn't describe its tokenizer.
            SecurityError: see `model_config`.
        """
        return load_context(self.path, "tokenizer", build=False)

    def model(self, *, trust_remote_code: bool = False, seq_length: Optional[int] = None) -> Any:
        """The model with its tokenizer and sequence length. No weight is allocated.

        Args:
            trust_remote_code: As in `tokenizer`.
            seq_length: The new sequence length, if it differs from the training's. A model with learned positions keeps
                the training's. None: the training's.

        Raises:
            CheckpointError, ConfigError, SecurityError: see `model_config` and `tokenizer`; or there is no tokenizer.
        """
        described = self.model_config()
        config = getattr(described, "config", None)
        if (
            seq_length is not None
            and getattr(config, "position_embedding_type", "learned_absolute") != "learned_absolute"
        ):
            config.seq_length = seq_length  # pyright: ignore[reportOptionalMemberAccess]
        model = fdl.build(described)
        model.tokenizer = self.tokenizer(trust_remote_code=trust_remote_code)
        if model.tokenizer is None:
            if self.is_nemo2:
                load_context(self.path, "tokenizer")  # raises, with the reason
            raise ConfigError(
                f"{self.source} has no tokenizer that works without code of its own. Put the tokenizer's files beside "
                f"{'config.json' if self.is_release else 'its weights, into context/tokenizer'}."
            )
        if "seq_length" not in explicit_fields(model.config) and describes(self.path, "data"):
            data = load_context(self.path, "data", build=False)
            if getattr(data, "seq_length", None):
                model.config.seq_length = data.seq_length
        # Userbuffers have the size of a training micro-batch, whereas prompts have any size.
        model.config.tp_comm_overlap = False
        return model

    @cached_property
    def dtype(self) -> Optional[torch.dtype]:
        """The dtype in which most of the numbers are stored, or that a release names. Adapters are computed in that of their
        base. None: unknown."""
        if self.base is not None:
            return Checkpoint.open(self.base).dtype
        if self.is_release:
            config = read_object(self.path, CONFIG)
            dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
            return dtype if isinstance(dtype, torch.dtype) else None
        counted: Counter[torch.dtype] = Counter()
        for tensor in StoredTensors(weights_dir(self.path)).tensors.values():
            counted[tensor.properties.dtype] += torch.Size(tensor.size).numel()
        return counted.most_common(1)[0][0] if counted else None

    def tensors(self, config: Optional[Any] = None) -> TensorSource:
        """The tensors, none of which is read yet.

        Args:
            config: nemo2's configuration of the model. None: as the checkpoint describes.

        Raises:
            CheckpointError: a file is missing or damaged, or the weights belong to another model.
            ConfigError: the model is unknown, or nemo2 has no conversion for it.
            SecurityError: a name leads out of the folder.
        """
        if self.is_release:
            return open_released(self.path, config)
        self.require_complete()
        described = config if config is not None else self.config()
        rows_are_known = self.is_nemo2 or self.tokenizer() is not None
        return StoredWeights(self.path, described, rows_are_known=rows_are_known)

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self.path)


def find_checkpoint(path: Union[str, Path]) -> Path:
    """The folder of the checkpoint of nemo2 at ``path``: itself, or the newest one in a run's directory.

    Raises:
        CheckpointError: there is none.
    """
    return Checkpoint.open(path).require_nemo2().path


def name_of_weights(source: str, *, revision: bool = False) -> str:
    """The name of the weights at ``source``: the repository's (with its ``revision``, whose weights are others), the run's, or
    that of the folder."""
    if source.startswith(HUGGING_FACE) and not source.startswith(f"{HUGGING_FACE}/"):
        name = source.removeprefix(HUGGING_FACE)
        return name if revision else name.partition("@")[0]
    folder = Path(source.removeprefix(HUGGING_FACE)).expanduser().absolute()
    return folder.parent.name if _TIME_OF_START.match(folder.name) else folder.name
