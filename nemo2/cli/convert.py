# SPDX-License-Identifier: Apache-2.0
"""``nemo2 import`` and ``nemo2 export``: convert between released weights, adapters and checkpoints."""

import contextlib
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.base.files import refuse_existing
from nemo2.cli.adapter import Result
from nemo2.cli.commands import refuse_all_but
from nemo2.cli.flags import Folder, Overwrite
from nemo2.cli.run_names import Checkpoint, checkpoint_called
from nemo2.cli.sources import configured
from nemo2.config.dtypes import ShortDtype, named_dtype

_Dtype = Annotated[
    Optional[ShortDtype],
    typer.Option(
        help="Data type of the written weights. Default: that of the weights; of adapters, that of their base model."
    ),
]
_Recipe = Annotated[
    Optional[str], typer.Option(help="A recipe of the same model, if the weights don't describe their model.")
]


def import_weights(
    source: str,
    *,
    output: Folder,
    recipe: _Recipe = None,
    base: Optional[str] = None,
    dtype: _Dtype = None,
    overwrite: Overwrite = False,
) -> Result:
    """Import weights from Hugging Face, NeMo 2.0 or Megatron-LM.

    Writes a checkpoint, from which runs of any layout and strategy can start.

    Args:
        source: hf://organisation/name, or a directory from Hugging Face (a model or a peft adapter), NeMo 2.0 or
            Megatron-LM.
        base: For an adapter: its base model. Default: the base model in adapter_config.json.

    Example: nemo2 import hf:///models/Llama-3.1-8B --output checkpoints/llama
    """
    # Before torch is imported.
    folder = source.removeprefix("hf://") if source.startswith("hf:///") else source
    if "://" not in folder and not Path(folder).expanduser().is_dir():
        raise CheckpointError(f"{source}: there is no such directory. A release on the hub is hf://organisation/name.")
    refuse_existing(output, overwrite=overwrite)
    from nemo2.hugging_face.api import import_ckpt
    from nemo2.hugging_face.checkpoint import Checkpoint as Opened

    target = import_ckpt(_model(recipe), source, output, overwrite=overwrite, dtype=_dtype(dtype), base_model=base)
    there = shlex.quote(str(target))
    if Opened.open(target).base is not None:
        then = f"nemo2 generate {there} --prompt ...\n  nemo2 export {there} --merge --output FOLDER"
    else:
        then = f"nemo2 pretrain RECIPE resume.restore_config.path={there}  # start from its weights"
    return Result({"path": str(target)}, f"{target}\nnext:\n  {then}")


def export_weights(
    checkpoint: Checkpoint,
    *,
    output: Folder,
    merge: bool = False,
    to: Literal["hf", "checkpoint"] = "hf",
    recipe: _Recipe = None,
    dtype: _Dtype = None,
    overwrite: Overwrite = False,
) -> Result:
    """Export a checkpoint to Hugging Face format.

    Writes safetensors, config.json and the tokenizer.

    Args:
        merge: First merge the adapters of LoRA, DoRA or canonical LoRA into the base weights, in this process.
        to: 'hf', or with --merge 'checkpoint': a checkpoint of nemo2.

    Example: nemo2 export nemo_experiments/llama_tiny --output exported/llama
    """
    if to == "checkpoint" and not merge:
        raise ConfigError("--to checkpoint: an export that merges nothing is to Hugging Face format. Add --merge.")
    folder = checkpoint_called(checkpoint)
    refuse_existing(output, overwrite=overwrite)
    from nemo2.hugging_face.api import export_ckpt
    from nemo2.hugging_face.checkpoint import Checkpoint as Opened
    from nemo2.hugging_face.output_folders import check_target
    from nemo2.llm.peft import merge_lora, merged_for_export

    if to == "checkpoint":
        refuse_all_but("checkpoint", "output", "merge", "to", "overwrite", "as_json", why="with --to checkpoint")
        target = merge_lora(str(folder), output, overwrite=overwrite)
        there = shlex.quote(str(target))
        text = f"{target}\nnext:\n  nemo2 generate {there} --prompt ...\n  nemo2 export {there} --output FOLDER"
        return Result({"path": str(target)}, text)
    target_dtype = _dtype(dtype)
    with contextlib.ExitStack() as stack:
        if merge:
            opened = Opened.open(folder)
            final = check_target(output, overwrite=overwrite, reads=[opened.path, opened.base])
            # The merged weights have the dtype of the run, which is fp32 on CPUs.
            target_dtype = target_dtype or opened.dtype
            folder = stack.enter_context(merged_for_export(folder, final))
        target = export_ckpt(folder, "hf", output, overwrite=overwrite, model=_model(recipe), dtype=target_dtype)
    return Result({"path": str(target)}, str(target))


def _model(recipe: Optional[str]) -> Any:
    if recipe is None:
        return None
    import fiddle

    return fiddle.build(configured(recipe, []).model)


def _dtype(name: Optional[str]) -> Any:
    return None if name is None else named_dtype(name)
