# SPDX-License-Identifier: Apache-2.0
"""``nemo2 import``, ``nemo2 export`` and ``nemo2 merge``: convert between released weights, adapters and
checkpoints."""

from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from nemo2.cli.run_names import Checkpoint, checkpoint_called

IMPORT_EXAMPLE = "Example: nemo2 import hf:///models/Llama-3.1-8B --output checkpoints/llama"
EXPORT_EXAMPLE = "Example: nemo2 export nemo_experiments/llama_tiny --output exported/llama"
MERGE_EXAMPLE = "Example: nemo2 merge nemo_experiments/llama3_8b_lora --output checkpoints/tuned"
_Output = Annotated[Path, typer.Option("--output", "-o", help="Directory to write.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing directory.")]
_Dtype = Annotated[
    Optional[Literal["bf16", "fp16", "fp32"]],
    typer.Option(help="Data type of the written weights. Default: unchanged."),
]
_Recipe = Annotated[
    Optional[str], typer.Option(help="A recipe of the same model, if the weights don't describe their model.")
]


def register(app: typer.Typer) -> None:
    app.command("import", epilog=IMPORT_EXAMPLE)(import_weights)
    app.command("export", epilog=EXPORT_EXAMPLE)(export_weights)
    app.command("merge", epilog=MERGE_EXAMPLE)(merge)


def import_weights(
    source: Annotated[
        str,
        typer.Argument(
            help="hf://organisation/name, or a directory from Hugging Face (a model or a peft adapter), NeMo 2.0 or "
            "Megatron-LM."
        ),
    ],
    output: _Output,
    recipe: _Recipe = None,
    base: Annotated[
        Optional[str],
        typer.Option(help="For an adapter: its base model. Default: the base model in adapter_config.json."),
    ] = None,
    dtype: _Dtype = None,
    overwrite: _Overwrite = False,
) -> None:
    """Import weights from Hugging Face, NeMo 2.0 or Megatron-LM as a checkpoint.

    Runs of any layout and strategy can start from the checkpoint.
    """
    _refuse_missing(source)
    from nemo2.checkpoint.directory import read_manifest
    from nemo2.hugging_face.api import import_ckpt

    target = import_ckpt(_model(recipe), source, output, overwrite=overwrite, dtype=_dtype(dtype), base_model=base)
    manifest = read_manifest(target)
    if manifest is not None and manifest.part_of is not None:
        print(f"{target}\nnext:\n  nemo2 generate {target} --prompt ...\n  nemo2 merge {target} --output FOLDER")
        return
    print(f"{target}\nnext:\n  nemo2 pretrain RECIPE resume.restore_config.path={target}  # start from its weights")


def export_weights(
    checkpoint: Checkpoint,
    output: _Output,
    recipe: _Recipe = None,
    dtype: _Dtype = None,
    overwrite: _Overwrite = False,
) -> None:
    """Export a checkpoint to Hugging Face format: safetensors, config.json and the tokenizer."""
    folder = checkpoint_called(checkpoint)
    from nemo2.hugging_face.api import export_ckpt

    print(export_ckpt(folder, "hf", output, overwrite=overwrite, model=_model(recipe), dtype=_dtype(dtype)))


def merge(
    checkpoint: Checkpoint,
    output: _Output,
    overwrite: _Overwrite = False,
) -> None:
    """Merge the adapters of LoRA, DoRA or canonical LoRA into the base weights, in this process."""
    folder = checkpoint_called(checkpoint)
    from nemo2.llm.peft import merge_lora

    target = merge_lora(str(folder), output, overwrite=overwrite)
    print(f"{target}\nnext:\n  nemo2 generate {target} --prompt ...\n  nemo2 export {target} --output FOLDER")


def _refuse_missing(path: str) -> None:
    """Refuse a missing folder before torch is imported."""
    folder = path.removeprefix("hf://") if path.startswith("hf:///") else path
    if "://" not in folder and not Path(folder).expanduser().is_dir():
        from nemo2.errors import CheckpointError

        raise CheckpointError(f"{path}: there is no directory {folder}.")


def _model(recipe: Optional[str]) -> Any:
    if recipe is None:
        return None
    import fiddle

    from nemo2.cli.sources import configured

    return fiddle.build(configured(recipe, []).model)


def _dtype(name: Optional[str]) -> Any:
    import torch

    return None if name is None else {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
