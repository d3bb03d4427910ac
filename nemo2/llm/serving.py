# SPDX-License-Identifier: Apache-2.0
"""Passes a checkpoint to an inference server, vLLM's or transformers', with the right arguments.

nemo2 answers no requests itself. This module decides the format in which the engine reads the weights, and the engine's
command line.
"""

import hashlib
import os
import shlex
import socket
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from nemo2.base.advice import advice, typed_as
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.checkpoint.directory import temporary_name
from nemo2.config.capture import configurable
from nemo2.config.notices import only_defaults, warn_without_effect
from nemo2.hugging_face.checkpoint import Checkpoint, name_of_weights
from nemo2.llm import engines
from nemo2.llm.engines import Adapters, Engine, ServingOptions
from nemo2.llm.exported import Form, dtype_of, exports_cache, own_dtype, tokenizer_trouble
from nemo2.models.conversion.families import conversion_of


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The way in which a checkpoint is served."""

    forms: tuple[Form, ...]
    """The forms in which the engine reads the checkpoint. Missing forms are created before the engine starts."""
    command: tuple[str, ...]
    """The command line of the engine's process."""
    model_name: str
    """The name by which requests address the model."""
    notes: tuple[str, ...] = ()
    """The decisions, one sentence each."""
    link: Optional[Path] = None
    """A link to the model's folder, which the engine is given by its name below `directory`. None: there is none."""
    folder: Optional[Path] = None
    """The model's folder, for the link."""

    @property
    def directory(self) -> Optional[Path]:
        """The directory in which the engine starts. None: any."""
        return None if self.link is None else self.link.parents[self.model_name.count("/")]

    def text(self) -> str:
        """The commands that would run, as shell text."""
        commands = [line for form in self.forms if not form.is_there for line in form.commands]
        if self.link is None:
            return "\n".join([*commands, shlex.join(self.command)])
        place, link, directory = (shlex.quote(str(one)) for one in (self.link.parent, self.link, self.directory))
        commands += [f"mkdir -p {place}", f"ln -sfn {shlex.quote(str(self.folder))} {link}"]
        return "\n".join([*commands, f"cd {directory} && {shlex.join(self.command)}"])

    def prepare(self) -> None:
        """Create the missing forms.

        Raises:
            CheckpointError: as in `nemo2.llm.exported.Form.make`.
            ConfigError: as in `nemo2.llm.exported.Form.make`.
        """
        for form in self.forms:
            form.make()
        if self.link is not None and self.folder is not None:
            self.link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new = temporary_name(self.link)
            new.symlink_to(self.folder)
            os.replace(new, self.link)


def plan_serving(
    path: str, options: ServingOptions, *, engine: Optional[str] = None, merge: bool = False, print_only: bool = False
) -> Serving:
    """Decide the form and the command line with which an engine serves a checkpoint. Nothing is written or started.

    Args:
        path: A checkpoint directory, a run's for its newest checkpoint, or released weights (``hf://organisation/name``, or
            their folder).
        engine: One of `nemo2.llm.engines.ENGINES`. None: the first that is installed.
        merge: Merge the adapters of a fine-tuning run into the weights, even where vLLM could load them beside the base
            model. The checkpoint must have adapters.
        print_only: Plan without requiring an installed engine.

    Raises:
        CheckpointError: the checkpoint is missing or doesn't describe its model.
        ConfigError: no engine is installed, the engine doesn't support the request, or the address can't be used.
    """
    if not print_only:
        _refuse_used_address(options)
    options = replace(options, model_name=options.model_name or name_of_weights(path))
    checkpoint = Checkpoint.open(path)
    model, chosen = checkpoint.model(), engines.chosen(engine, print_only=print_only)
    if not print_only:
        engines.refuse_unknown_options(chosen, options)
    if merge and checkpoint.base is None:
        raise ConfigError(
            f"{advice('--merge', 'merge=True')}: {checkpoint.path} has no adapters to merge. Leave it out, or name a "
            "checkpoint of a PEFT run."
        )
    dtype = options.dtype or dtype_of(checkpoint)
    if checkpoint.is_release:  # served as it is
        return _serving(model, options, chosen, dtype, folder=checkpoint.path)
    if (trouble := tokenizer_trouble(model)) is not None:
        raise ConfigError(
            f"{checkpoint.path}: {trouble}, but a server receives text and needs a tokenizer. `nemo2 generate` completes "
            "prompts without one."
        )
    if (why := _why_merged(checkpoint, model, chosen, merge=merge)) is None:
        return _plan_adapters(checkpoint, model, options, dtype)
    form = Form(checkpoint=checkpoint.require_nemo2().path, kind="merged" if why else "model", dtype=dtype)
    notes = (f"The adapters are merged into the weights, because {why}.",) if why else ()
    return _serving(model, options, chosen, dtype, folder=form.folder, forms=(form,), notes=notes)


def _refuse_used_address(options: ServingOptions) -> None:
    fix = advice("choose another --host or --port", "set another host or port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, after one that has just ended
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"{options.host}:{options.port} can't be served on: {error.strerror}; {fix}.") from error


@configurable
def deploy(
    nemo_checkpoint: Optional[str] = None,
    backend: str = "in-framework",
    model_type: Optional[str] = None,
    triton_model_name: str = "triton_model",
    triton_model_version: Optional[int] = 1,
    triton_http_port: int = 8000,
    triton_grpc_port: int = 8001,
    triton_http_address: str = "0.0.0.0",
    triton_model_repository: Optional[str] = None,
    start_fastapi_server: bool = True,
    fastapi_http_address: str = "0.0.0.0",
    fastapi_port: int = 8080,
    num_gpus: int = 1,
    num_nodes: int = 1,
    tensor_parallelism_size: int = 1,
    pipeline_parallelism_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 1,
    dtype: Optional[str] = None,
    max_input_len: int = 4096,
    max_output_len: int = 256,
    max_batch_size: int = 8,
    output_context_logits: bool = True,
    output_generation_logits: bool = True,
    enable_flash_decode: bool = True,
    legacy_ckpt: bool = False,
) -> None:
    """Serve a checkpoint until interrupted, as ``nemo2 serve`` does.

    The parameters are NeMo 2.0's, in NeMo's order.

    Args:
        nemo_checkpoint: A checkpoint directory, or a run's.
        backend: "vllm" or "transformers". "in-framework": the engine that is installed.
        model_type: Accepted for NeMo's signature, without effect. The checkpoint defines it.
        triton_model_name: The name by which requests address the model. "triton_model": the name of ``nemo_checkpoint``.
        fastapi_http_address, fastapi_port: The address and the port of the server.
        num_gpus: The GPUs of vLLM. 1: as many as the parallel sizes need.
        tensor_parallelism_size, pipeline_parallelism_size: The parallel sizes of vLLM. Their product must equal
            ``num_gpus`` if that is more than 1.
        dtype: "bf16", "fp16" or "fp32", or torch's names for them. None: the dtype of the stored weights.
        max_input_len, max_output_len: Their sum is vLLM's longest sequence, if it is shorter than the run's.
        max_batch_size, output_context_logits: Accepted for NeMo's signature, without effect. Engines batch requests as
            they arrive.
        output_generation_logits, enable_flash_decode: Accepted for NeMo's signature, without effect. Engines return
            log-probabilities to requests that ask for them.
        triton_model_version, triton_http_port, triton_grpc_port, triton_http_address: Must have their defaults, because
            Triton isn't started.
        triton_model_repository, start_fastapi_server, num_nodes, context_parallel_size, expert_model_parallel_size,
            expert_tensor_parallel_size, legacy_ckpt: Must have their defaults.

    Raises:
        CheckpointError: as in `plan_serving`.
        ConfigError: as in `plan_serving`, or an argument without a meaning here is set.
    """
    only_defaults(
        "deploy starts the server of vLLM or transformers on this machine, which has no such option.",
        triton_model_version=(triton_model_version, 1),
        triton_http_port=(triton_http_port, 8000),
        triton_grpc_port=(triton_grpc_port, 8001),
        triton_http_address=(triton_http_address, "0.0.0.0"),
        triton_model_repository=(triton_model_repository, None),
        start_fastapi_server=(start_fastapi_server, True),
        num_nodes=(num_nodes, 1),
        context_parallel_size=(context_parallel_size, 1),
        expert_model_parallel_size=(expert_model_parallel_size, 1),
        expert_tensor_parallel_size=(expert_tensor_parallel_size, 1),
        legacy_ckpt=(legacy_ckpt, False),
    )
    warn_without_effect(
        "The engine batches requests as they arrive, returns log-probabilities to requests that ask for them, and reads the "
        "kind of model from the checkpoint.",
        model_type=(model_type, None),
        max_batch_size=(max_batch_size, 8),
        output_context_logits=(output_context_logits, True),
        output_generation_logits=(output_generation_logits, True),
        enable_flash_decode=(enable_flash_decode, True),
    )
    if nemo_checkpoint is None:
        raise ConfigError("deploy needs nemo_checkpoint: a checkpoint directory, or a run's.")
    require_counts("", num_gpus=num_gpus, max_input_len=max_input_len, max_output_len=max_output_len)
    sizes = tensor_parallelism_size, pipeline_parallelism_size
    if num_gpus > 1 and num_gpus != sizes[0] * sizes[1]:
        raise ConfigError(
            f"num_gpus={num_gpus} must be tensor_parallelism_size * pipeline_parallelism_size = {sizes[0]} * {sizes[1]}."
        )
    run_length = Checkpoint.open(nemo_checkpoint).model().config.seq_length
    engine = None if backend == "in-framework" else backend
    vllm = engines.chosen(engine) == "vllm"
    options = ServingOptions(
        host=fastapi_http_address,
        port=fastapi_port,
        tensor_parallel_size=tensor_parallelism_size,
        pipeline_parallel_size=pipeline_parallelism_size,
        dtype=own_dtype(dtype),
        max_length=min(max_input_len + max_output_len, run_length) if vllm else None,
        model_name=triton_model_name if triton_model_name != "triton_model" else None,
    )
    serving = plan_serving(nemo_checkpoint, options, engine=engine)
    serving.prepare()
    subprocess.run(serving.command, check=True, cwd=serving.directory)


def _serving(
    model: Any,
    options: ServingOptions,
    engine: Engine,
    dtype: str,
    *,
    folder: Path,
    forms: tuple[Form, ...] = (),
    notes: tuple[str, ...] = (),
    adapters: Optional[Adapters] = None,
) -> Serving:
    if engine == "transformers":
        return _by_transformers(options, dtype, forms=forms, folder=folder, notes=notes)
    engines.refuse_uneven_heads(model, options.tensor_parallel_size)
    # vLLM would refuse the length only after it has loaded the model.
    positions = conversion_of(model.config).hf_config(model.config).get("max_position_embeddings")
    if options.max_length is not None and positions is not None and options.max_length > positions:
        raise ConfigError(
            f"{typed_as('max_length', options.max_length)}: the model reads only {positions} tokens, prompt and answer "
            f"together. Set {positions} or less."
        )
    length, name = options.max_length or model.config.seq_length, options.model_name or ""
    if options.max_length is None:
        notes = (
            *notes,
            f"At most {length} tokens, the sequence length of the model. To change this, set "
            f"{advice('--max-length', 'max_length')}.",
        )
    command = engines.vllm_command(str(folder), options, dtype=dtype, length=length, name=name, adapters=adapters)
    return Serving(forms=forms, command=tuple(command), model_name=name, notes=notes)


def _by_transformers(
    options: ServingOptions, dtype: str, *, forms: tuple[Form, ...], folder: Path, notes: tuple[str, ...]
) -> Serving:
    """The model answers by the path that ``transformers serve`` is given, so that is a link of its name.

    Raises:
        ConfigError: a setting has no argument, or the name is no path below a directory.
    """
    name = options.model_name or folder.name
    if Path(name).is_absolute() or ".." in Path(name).parts or str(Path(name)) != name:
        raise ConfigError(
            f"{typed_as('model_name', repr(name), option='--name')}: `transformers serve` needs a name such as "
            "'mine' or 'organisation/mine'."
        )
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    command = engines.transformers_command(name, options, dtype=dtype)
    link = exports_cache() / "served" / digest / name
    return Serving(forms=forms, command=tuple(command), model_name=name, notes=notes, link=link, folder=folder)


def _why_merged(checkpoint: Checkpoint, model: Any, engine: Engine, *, merge: bool) -> Optional[str]:
    """Why adapters are merged. "": there are none. None: the engine loads them beside the base model."""
    if checkpoint.base is None:
        return ""
    if merge:
        return f"{advice('--merge', 'merge=True')} requests it"
    if engine == "transformers":
        return "`transformers serve` has no argument for adapters"
    return engines.why_vllm_takes_no_adapters(model)


def _plan_adapters(checkpoint: Checkpoint, model: Any, options: ServingOptions, dtype: str) -> Serving:
    adapters = Form(checkpoint=checkpoint.path, kind="adapters", dtype=dtype)
    name = options.model_name
    notes = (f"{name} is the base with its adapters, and {name}-base is the base alone.",)
    base = Checkpoint.open(checkpoint.base or "")
    forms: tuple[Form, ...] = (adapters,)
    if not base.is_release:
        forms = (Form(checkpoint=base.require_nemo2().path, kind="model", dtype=dtype), adapters)
    folder = base.path if base.is_release else forms[0].folder
    loaded = Adapters(folder=adapters.folder, rank=model.model_transform.dim)
    return _serving(model, options, "vllm", dtype, folder=folder, forms=forms, notes=notes, adapters=loaded)
