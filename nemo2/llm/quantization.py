# SPDX-License-Identifier: Apache-2.0
"""``llm.ptq``: exports a checkpoint to Hugging Face's format and quantizes it with NVIDIA's ModelOpt, if that is
installed."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from nemo2.base.backend.extras import install
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError, DataError
from nemo2.base.files import output_folder, refuse_existing, text_of
from nemo2.checkpoint.directory import take_place
from nemo2.config.aliases import register_gone
from nemo2.config.capture import configurable
from nemo2.config.notices import only_defaults
from nemo2.config.value_types import refuse_misfits
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.hugging_face.output_folders import new_folder
from nemo2.llm.exported import DTYPES, Form, dtype_of, own_dtype

_CONFIGS = {
    "fp8": "FP8_DEFAULT_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}
"""ModelOpt's settings by NeMo 2.0's names of algorithms (modelopt.torch.quantization)."""


register_gone(
    "nemo2.llm.quantization:QuantizationConfig",
    **dict.fromkeys(
        ("awq_block_size", "sq_alpha", "enable_kv_cache", "kv_cache_qformat"),
        "ModelOpt's default for the algorithm applies. Leave it out.",
    ),
)
register_gone(
    "nemo2.llm.quantization:ExportConfig",
    **dict.fromkeys(
        ("decoder_type", "inference_tp", "inference_pp"),
        "the server that loads the folder decides it: Hugging Face's format has no layout. Leave it out.",
    ),
    generate_sample="run `nemo2 generate` on the model before, or the server on the folder. Leave it out.",
)


@configurable
@dataclass(frozen=True)
class QuantizationConfig:
    """Select how weights and activations are quantized."""

    algorithm: str = "fp8"
    """One of "fp8", "int8_sq", "int4_awq", "w4a8_awq" and "nvfp4"."""
    calibration_dataset: Optional[str] = None
    """A UTF-8 text with which the ranges of activations are measured."""
    calibration_dataset_size: int = 512
    """The number of sequences from the text."""
    calibration_batch_size: int = 64
    """Sequences per forward."""
    calibration_seq_len: int = 128
    """Tokens per sequence."""

    def __post_init__(self) -> None:
        refuse_misfits(type(self), vars(self), of="QuantizationConfig")
        if self.algorithm not in _CONFIGS:
            raise ConfigError(f"QuantizationConfig.algorithm={self.algorithm!r}: must be one of {', '.join(_CONFIGS)}.")
        names = "calibration_dataset_size", "calibration_batch_size", "calibration_seq_len"
        require_counts("QuantizationConfig", **{name: getattr(self, name) for name in names})


@configurable
@dataclass(frozen=True)
class ExportConfig:
    """Select where and how the quantized model is written."""

    path: str
    """The folder to write. It must not exist."""
    export_format: str = "hf"
    """Must be "hf", Hugging Face's format, which vLLM and TensorRT-LLM read."""
    dtype: Optional[str] = None
    """"bf16", "fp16" or "fp32": the dtype of parameters that aren't quantized. None: the dtype of most stored
    weights."""

    def __post_init__(self) -> None:
        refuse_misfits(type(self), vars(self), of="ExportConfig")
        if self.export_format != "hf":
            raise ConfigError(
                f"ExportConfig.export_format={self.export_format!r}: must be 'hf', which TensorRT-LLM reads too."
            )
        own_dtype(self.dtype, of="ExportConfig.dtype")


@configurable
def ptq(
    model_path: str,
    export_config: ExportConfig,
    calibration_tp: int = 1,
    calibration_pp: int = 1,
    num_layers_in_first_pipeline_stage: Optional[int] = None,
    num_layers_in_last_pipeline_stage: Optional[int] = None,
    devices: Optional[int] = None,
    num_nodes: Optional[int] = None,
    quantization_config: Optional[QuantizationConfig] = None,
    forward_loop: Optional[Callable[[Any], None]] = None,
    tokenizer_path: Optional[str] = None,
    legacy_ckpt: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Quantize a checkpoint's model after training.

    The parameters are NeMo 2.0's, in NeMo's order.

    Args:
        model_path: A checkpoint directory, or a run's.
        export_config: The format and the folder of the result.
        calibration_tp, calibration_pp, devices, num_nodes: Must have their defaults, because ModelOpt quantizes
            transformers' model in one process.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: Must have their defaults, for the same
            reason.
        tokenizer_path, legacy_ckpt, trust_remote_code: Must have their defaults, because the tokenizer is the
            checkpoint's.
        quantization_config: The settings. None: their defaults.
        forward_loop: A function that runs transformers' model on samples, to measure ranges. None: the calibration text
            is used.

    Returns:
        The folder, in Hugging Face's format.

    Raises:
        CheckpointError: the checkpoint is missing or doesn't describe its model, or the folder can't be written.
        ConfigError: ModelOpt isn't installed, there is nothing to calibrate with, or the folder exists.
        DataError: the calibration text is unreadable, or too short for one sequence.
    """
    only_defaults(
        "ModelOpt runs on transformers' model in one process, with the checkpoint's tokenizer.",
        calibration_tp=(calibration_tp, 1),
        calibration_pp=(calibration_pp, 1),
        num_layers_in_first_pipeline_stage=(num_layers_in_first_pipeline_stage, None),
        num_layers_in_last_pipeline_stage=(num_layers_in_last_pipeline_stage, None),
        devices=(devices, None),
        num_nodes=(num_nodes, None),
        tokenizer_path=(tokenizer_path, None),
        legacy_ckpt=(legacy_ckpt, False),
        trust_remote_code=(trust_remote_code, False),
    )
    settings, target = quantization_config or QuantizationConfig(), output_folder(export_config.path)
    refuse_existing(target)
    if importlib.util.find_spec("modelopt") is None:
        raise ConfigError(
            f"Quantization requires NVIDIA's ModelOpt, which is not installed: {install('quantize')}. "
            f"You can also run ModelOpt yourself on the output of `nemo2 export {model_path} "
            "--output FOLDER`."
        )
    if forward_loop is None and settings.calibration_dataset is None:
        raise ConfigError(
            "ptq measures activations on samples. Set quantization_config.calibration_dataset to a text file."
        )
    import modelopt.torch.quantization as quantization  # pyright: ignore[reportMissingImports]
    import transformers
    from modelopt.torch.export import export_hf_checkpoint  # pyright: ignore[reportMissingImports]
    from safetensors import SafetensorError

    checkpoint = Checkpoint.open(model_path)
    folder, dtype = checkpoint.path, own_dtype(export_config.dtype)
    if not checkpoint.is_release:
        form = Form(checkpoint=checkpoint.require_nemo2().path, kind="model", dtype=dtype or dtype_of(checkpoint))
        folder = form.make()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype] if dtype else "auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def read(whole: Any) -> None:
        for batch in _batches(tokenizer, settings):
            whole(batch)

    quantization.quantize(model, getattr(quantization, _CONFIGS[settings.algorithm]), forward_loop or read)
    with new_folder(target, 0, overwrite=False, reads=[]) as unfinished:
        try:
            export_hf_checkpoint(model, export_dir=str(unfinished))
        except SafetensorError as error:  # a full disk
            raise OSError(str(error)) from error
        tokenizer.save_pretrained(str(unfinished))
        take_place(unfinished, target)
    return target


def _batches(tokenizer: Any, settings: QuantizationConfig) -> Iterator[Any]:
    """The text's tokens, ``[batch, sequence]``."""
    import torch

    file = Path(settings.calibration_dataset or "")
    ids = tokenizer(text_of(file))["input_ids"]
    rows = min(len(ids) // settings.calibration_seq_len, settings.calibration_dataset_size)
    if rows == 0:
        raise DataError(
            f"{file} has {len(ids)} tokens, but one calibration sequence needs {settings.calibration_seq_len}."
        )
    tokens = torch.tensor(ids[: rows * settings.calibration_seq_len]).view(rows, -1)
    yield from tokens.split(settings.calibration_batch_size)
