# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the forms that inference engines read, created once and cached.

The name of a form's folder contains the digest of its checkpoint's manifest, which has the hash of every file. A
rewritten checkpoint therefore gets a new folder, and a checkpoint that was moved finds its old folder again.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, get_args

import torch

from nemo2.base.errors import ConfigError
from nemo2.config.dtypes import ShortDtype, named_dtype
from nemo2.data.home import nemo_home
from nemo2.hugging_face.checkpoint import Checkpoint

Kind = Literal["model", "merged", "adapters"]
DTYPES: dict[str, torch.dtype] = {name: named_dtype(name) for name in get_args(ShortDtype)}


@dataclass(frozen=True, kw_only=True)
class Form:
    """A checkpoint in one of Hugging Face's forms."""

    checkpoint: Path
    kind: Kind
    """The whole model; the whole model with its adapters merged; or the adapters alone, in ``peft``'s format."""
    dtype: str
    """The dtype of the weights, a key of `DTYPES`."""

    @property
    def folder(self) -> Path:
        """The form's folder in `exports_cache`."""
        name = f"{self.checkpoint.name}-{self.kind}-{self.dtype}-{Checkpoint.open(self.checkpoint).require_nemo2().identity[:16]}"
        return exports_cache() / name.replace("=", "-").replace(",", "-")

    @property
    def is_there(self) -> bool:
        """Whether the folder exists. It gets its name only when it is complete."""
        return self.folder.is_dir()

    @property
    def commands(self) -> list[str]:
        """The commands that create the same form, one per line."""
        here, there = str(self.checkpoint), str(self.folder)
        if self.kind == "adapters":
            return [shlex.join(["python", "-c", f"from nemo2 import llm; llm.peft.export_lora({here!r}, {there!r})"])]
        merged = f"{there}-checkpoint"
        merge = ["nemo2", "export", here, "--merge", "--to", "checkpoint", "--output", merged]
        source = here if self.kind == "model" else merged
        export = ["nemo2", "export", source, "--dtype", self.dtype, "--output", there]
        return [shlex.join(one) for one in ([export] if self.kind == "model" else [merge, export])]

    def make(self) -> Path:
        """Create the folder if it doesn't exist, and return it.

        Raises:
            CheckpointError: as in `export_ckpt`, `export_lora` and `merge_lora`.
            ConfigError: as in `export_ckpt`, `export_lora` and `merge_lora`.
        """
        if not self.is_there:
            exports_cache().mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make()
        return self.folder

    def _make(self) -> None:
        from nemo2.hugging_face.adapters import export_adapter
        from nemo2.hugging_face.api import export_ckpt
        from nemo2.llm.peft import merged_for_export

        dtype = DTYPES[self.dtype]
        if self.kind == "adapters":
            export_adapter(self.checkpoint, self.folder, dtype=dtype)
        elif self.kind == "model":
            export_ckpt(self.checkpoint, "hf", self.folder, dtype=dtype)
        else:
            with merged_for_export(self.checkpoint, self.folder) as merged:
                export_ckpt(merged, "hf", self.folder, dtype=dtype)


def exports_cache() -> Path:
    """The folder of forms: ``$NEMO2_EXPORTS_CACHE``, or ``exports`` in ``$NEMO_HOME``, which defaults to
    ``~/.cache/nemo2``."""
    return Path(os.environ.get("NEMO2_EXPORTS_CACHE") or nemo_home() / "exports").expanduser().absolute()


def dtype_of(checkpoint: Checkpoint) -> str:
    """The key of `DTYPES` for `Checkpoint.dtype`. "fp32" for other dtypes."""
    return next((name for name, dtype in DTYPES.items() if dtype is checkpoint.dtype), "fp32")


def torch_name(dtype: str) -> str:
    """``bfloat16`` of ``bf16``."""
    return str(DTYPES[dtype]).removeprefix("torch.")


def own_dtype(dtype: Optional[str], *, of: str = "dtype") -> Optional[str]:
    """The key of `DTYPES` for torch's name or ours. None stays None.

    Raises:
        ConfigError: another dtype, which the setting ``of`` can't have.
    """
    own = next((own for own in DTYPES if dtype in (own, torch_name(own))), None)
    if own is None and dtype is not None:
        raise ConfigError(f"{of}={dtype!r}: must be {', '.join(DTYPES)} or None.")
    return own


def tokenizer_trouble(model: Any) -> Optional[str]:
    """Why an engine finds no tokenizer in the form of a model's checkpoint. None: it finds one."""
    from nemo2.data.tokenizer import AutoTokenizer
    from nemo2.data.tokenizer_files import files_of

    if files_of(model.tokenizer) or isinstance(model.tokenizer, AutoTokenizer):
        return None
    return f"the model was trained with {model.tokenizer!r}, which has no Hugging Face form"
