# SPDX-License-Identifier: Apache-2.0
"""The inference servers that can serve a checkpoint, and their command lines."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

from nemo2.base.advice import advice, typed_as
from nemo2.base.backend.extras import install, version_of
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.base.names import check_choice, did_you_mean
from nemo2.config.dtypes import ShortDtype
from nemo2.config.value_types import refuse_misfits
from nemo2.llm.exported import torch_name
from nemo2.models.peft import LoRA

Engine = Literal["vllm", "transformers"]
ENGINES: tuple[Engine, ...] = ("vllm", "transformers")
"""The first installed engine serves."""
_INSTALL = {"vllm": "pip install vllm", "transformers": install("serve")}
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``--max-lora-rank`` (vllm/config/lora.py)."""
_LAST_PORT = 65535
_OLDEST_TRANSFORMERS = 5
"""Before this version ``transformers serve`` didn't take the model to serve."""


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The requested settings of a server."""

    host: str = "127.0.0.1"
    port: int = 8000
    """The port. By default the server accepts requests from this machine only, although vLLM's own default is every
    address."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    """vLLM's parallel sizes: it distributes the model over their product of GPUs."""
    dtype: Optional[str] = None
    """"bf16", "fp16" or "fp32". None: the dtype of most stored weights. Engines always receive a dtype, because vLLM's own
    choice for float32 weights is float16."""
    max_length: Optional[int] = None
    """The largest number of tokens of a prompt and its continuation. None: the sequence length of the run."""
    model_name: Optional[str] = None
    """The name by which requests address the model. None: the name of the weights."""
    further: Sequence[str] = ()
    """Further arguments for the engine, after all others."""

    def __post_init__(self) -> None:
        refuse_misfits(type(self), vars(self))
        parallel = {name: getattr(self, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        require_counts("", port=self.port, **parallel)
        require_counts("", others=(None,), max_length=self.max_length)
        if self.port > _LAST_PORT or not self.host:
            raise ConfigError(
                f"host={self.host!r}, port={self.port}: must be an address and a port up to {_LAST_PORT}."
            )
        if self.dtype is not None:
            check_choice("dtype", self.dtype, ShortDtype)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters that vLLM loads beside their base model."""

    folder: Path
    rank: int


def chosen(engine: Optional[str], *, print_only: bool = False) -> Engine:
    """The engine of this name, or the first that is installed.

    Args:
        print_only: The engine need not be installed. If none is, the first of all.

    Raises:
        ConfigError: an unknown engine, or one that isn't installed.
    """
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"engine={engine!r}: must be one of {', '.join(ENGINES)}.")
    for one in ENGINES:
        if engine == one and print_only or engine in (None, one) and _missing(one) is None:
            return one
    if print_only:
        return ENGINES[0]
    others = [one for one in ENGINES if one != engine and _missing(one) is None]
    if engine is not None and others:
        leave, named = advice("Leave --engine out", "Set engine=None"), advice(f"--engine {engine}", f"{engine=}")
        raise ConfigError(f"{named}: {_missing(engine)}. {leave} to serve with {others[0]}, or install it.")
    reasons = "; ".join(f"{_missing(one)}" for one in ENGINES if engine in (None, one))
    show = advice("--print", "plan_serving(..., print_only=True)")
    raise ConfigError(f"This machine has no engine to serve with: {reasons}. To only see the command, use {show}.")


def vllm_command(
    model: str, options: ServingOptions, *, dtype: str, length: int, name: str, adapters: Optional[Adapters]
) -> list[str]:
    """``vllm serve`` for a model's folder. With ``adapters`` these answer as ``name``, and the base model as
    ``name-base``."""
    command = [
        *(_program("vllm"), "serve", model, "--host", options.host, "--port", str(options.port)),
        *("--served-model-name", name if adapters is None else f"{name}-base"),
        *("--dtype", torch_name(dtype), "--max-model-len", str(length)),
    ]
    if options.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    if options.pipeline_parallel_size > 1:
        command += ["--pipeline-parallel-size", str(options.pipeline_parallel_size)]
    if adapters is not None:
        rank = next(one for one in _LORA_RANKS if one >= adapters.rank)
        module = {"name": name, "path": str(adapters.folder), "base_model_name": f"{name}-base"}
        command += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", json.dumps(module)]
    return [*command, *options.further]


def transformers_command(model: str, options: ServingOptions, *, dtype: str) -> list[str]:
    """``transformers serve`` for a model's folder. Requests address the model by this path.

    Raises:
        ConfigError: a requested setting has no argument.
    """
    default = ServingOptions()
    for name, option in (("tensor_parallel_size", "-tp"), ("pipeline_parallel_size", ""), ("max_length", "")):
        if (value := getattr(options, name)) != getattr(default, name):
            raise ConfigError(
                f"{typed_as(name, value, option=option)}: `transformers serve` has no such argument. Remove it, or "
                f"serve with vLLM ({_INSTALL['vllm']})."
            )
    where = "--host", options.host, "--port", str(options.port)
    return [_program("transformers"), "serve", model, "--dtype", torch_name(dtype), *where, *options.further]


def refuse_unknown_options(engine: Engine, options: ServingOptions) -> None:
    """Check that the server of transformers lists each of ``options.further`` in its help, before anything is exported.
    vLLM takes further spellings of its options, and refuses the others itself before it loads a model.

    Raises:
        ConfigError: the server has no such option.
    """
    requested = [word.partition("=")[0] for word in options.further if word.startswith("--")]
    if engine == "vllm" or not requested:
        return
    text = subprocess.run([_program(engine), "serve", "--help"], capture_output=True, text=True, check=False).stdout
    known = sorted({*re.findall(r"--[a-z][\w-]*", text)})
    for word in requested if "--host" in known else ():
        if word not in known:
            raise ConfigError(
                f"{word}: `{engine} serve` has no such option{did_you_mean(word, known)} `{engine} serve --help` lists "
                "its options."
            )


def why_vllm_takes_no_adapters(model: Any) -> Optional[str]:
    """Why vLLM can't load a run's adapters beside their base model. None: it can. vLLM supports one rank and one
    scale for all modules, no row lengths, and no ``modules_to_save`` (vllm/lora/peft_helper.py)."""
    method = model.model_transform
    if type(method) is not LoRA:
        return f"vLLM doesn't load {type(method).__name__}"
    if method.modules_to_save:
        return f"vLLM doesn't load modules that were trained in full ({', '.join(method.modules_to_save)})"
    if method.dim > _LORA_RANKS[-1]:
        return f"vLLM supports ranks up to {_LORA_RANKS[-1]}, but these adapters have rank {method.dim}"
    if model.config.num_moe_experts:
        return "vLLM supports adapters of experts for few models only"
    return None


def refuse_uneven_heads(model: Any, tensor_parallel_size: int) -> None:
    """Check the number of heads.

    Raises:
        ConfigError: vLLM can't split the model's attention over that many GPUs.
    """
    heads = getattr(model.config, "num_attention_heads", None)
    if heads and heads % tensor_parallel_size:
        fits = [size for size in (1, 2, 4, 8, 16) if heads % size == 0]
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide the {heads} attention heads of the model, "
            f"which vLLM splits. Set it to one of {', '.join(map(str, fits))}."
        )


def _missing(engine: Engine) -> Optional[str]:
    """Why an engine can't start here, and the command that installs it. None: it can start."""
    program = Path(_program(engine))
    if shutil.which(program) is None:
        return f"the program `{engine}` does not exist ({_INSTALL[engine]})"
    if engine == "vllm" or program.parent != Path(sys.executable).parent:
        return None
    version = version_of("transformers") or "0"
    if int(version.partition(".")[0]) < _OLDEST_TRANSFORMERS:
        return f"transformers {version} is too old, {_OLDEST_TRANSFORMERS}.0 serves models ({_INSTALL[engine]})"
    from transformers.utils.import_utils import is_serve_available

    return None if is_serve_available() else f"`transformers serve` lacks packages ({_INSTALL[engine]})"


def _program(engine: Engine) -> str:
    """The path of an engine's program, in this environment or on the search path. Its name if there is none."""
    beside = Path(sys.executable).parent / engine
    return str(beside) if beside.exists() else shutil.which(engine) or engine
