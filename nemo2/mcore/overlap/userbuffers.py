# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's userbuffers: the memory through which overlapped GEMMs of a tensor-parallel group exchange data.

Transformer Engine keeps one set per process, in one of its modules. From 2.17 on its layers assert during construction
that the set exists. Earlier versions look it up in the first forward. Starting the set after the process groups and
before the first layer satisfies both. `nemo2.training.strategy.MegatronStrategy.model_sharded_context` does so in every entry
point.
"""

import inspect
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Optional

from torch import nn

from nemo2.base.errors import ConfigError, DataError
from nemo2.base.variables import all_set
from nemo2.mcore.parallel.megatron_parallel import MegatronStep

logger = logging.getLogger(__name__)

_running: Optional[dict[str, Any]] = None
"""The arguments of the last `start_userbuffers`. None: no userbuffers run."""


def start_userbuffers(config: Any, data_sampler: Any) -> None:
    """Allocate the buffers for a model's configuration. Every rank calls this after the process groups exist and before
    a layer is built.

    Does nothing if tensors or sequences aren't sharded, or if the same buffers already run. Other buffers are freed first.

    Args:
        config: The model's ``TransformerConfig`` with ``tp_comm_overlap``, as it will be built. Its ``tp_comm_overlap_cfg``
            holds settings. None: Transformer Engine's own for every GEMM.
        data_sampler: The source of the sequence length and the micro-batch size.

    Raises:
        ConfigError: the size of a micro-batch is unknown, or Transformer Engine would reject the settings, or its
            buffers can't exchange the tensors.
    """
    global _running
    if config.tensor_model_parallel_size < 2 or not config.sequence_parallel:
        return
    tokens = _tokens(config, data_sampler)
    import transformer_engine  # pyright: ignore[reportMissingImports]

    from nemo2.mcore.overlap.userbuffer_limits import uncarried

    if problems := list(uncarried(config, version=transformer_engine.__version__, tokens=tokens)):
        raise ConfigError("\n".join(sentence for _, sentence in problems), rules=[rule for rule, _ in problems])
    arguments = {
        "shape": [tokens, config.hidden_size],
        "tp_size": config.tensor_model_parallel_size,
        "dtype": config.params_dtype,
        "bootstrap_backend": config.tp_comm_bootstrap_backend,
        **_buffer_sets(config),
    }
    if arguments == _running:
        return
    stop_userbuffers()
    from transformer_engine.pytorch.module import base  # pyright: ignore[reportMissingImports]

    _exchange_without_multicast(base)
    try:
        base.initialize_ub(**arguments)
    except BaseException:
        base.destroy_ub()  # the remains of a failed start would make the next one fail
        raise
    _running = arguments


def _exchange_without_multicast(base: Any) -> None:
    """Let the buffers be shared by CUDA's handles of memory where the GPU, its driver or the toolkit has no multicast.
    Transformer Engine would end the run and ask for the variable. A variable that is set stays."""
    supported = getattr(getattr(base, "tex", None), "device_supports_multicast", None)
    if supported is None or "UB_SKIPMC" in os.environ or supported():
        return
    os.environ["UB_SKIPMC"] = "1"
    logger.warning(
        "model.config.tp_comm_overlap=True: this GPU or its driver has no multicast, so UB_SKIPMC=1 is set, and ranks exchange "
        "through memory handles. That is slower than multicast over NVLink."
    )


def stop_userbuffers() -> None:
    """Free the buffers of `start_userbuffers`. Layers that overlap can't run until the next start."""
    global _running
    if _running is None:
        return
    from transformer_engine.pytorch.module import base  # pyright: ignore[reportMissingImports]

    base.destroy_ub()
    _running = None


class OneSize:
    """Reject a step over micro-batches of another size than the buffers'. Transformer Engine would copy beyond the
    buffer or too little.

    The class listens to the steps of `nemo2.mcore.parallel.megatron_parallel.MegatronParallel`. It compares the size of each
    micro-batch with ``tokens``.
    """

    def on_megatron_microbatches_start(self, step: MegatronStep) -> None:
        config = step.pipeline.config
        if _running is None or not getattr(config, "tp_comm_overlap", False):
            return
        has = _running["shape"][0] * config.context_parallel_size
        for batch in step.microbatches():
            tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
            if tokens is None or tokens.numel() == has:
                continue
            raise DataError(
                f"A micro-batch of {step.stage} has {' x '.join(map(str, tokens.shape))} = {tokens.numel()} tokens, "
                "but the userbuffers of model.config.tp_comm_overlap=True have room for data.micro_batch_size x "
                f"data.seq_length = {has}. Pad samples to one length and use the same micro-batch size in every data "
                "loader, or set tp_comm_overlap=False."
            )


def without_userbuffers(model: nn.Module) -> AbstractContextManager[None]:
    """Within this context the layers of ``model`` exchange before and after their GEMMs, for batches whose size
    differs from a micro-batch's."""
    fields = [(layer, name, value) for layer in model.modules() for name, value in vars(layer).items()]
    return all_set([(layer, name, False) for layer, name, value in fields if name.startswith("ub_") and value is True])


def _tokens(config: Any, data_sampler: Any) -> int:
    """The tokens of a micro-batch on this rank, before sequence parallelism shards them."""
    if data_sampler is None:
        raise ConfigError(
            "model.config.tp_comm_overlap=True needs the size of a micro-batch for its buffers, but the data module "
            "has no data_sampler. Give the data module a MegatronDataSampler, or set tp_comm_overlap=False."
        )
    return data_sampler.seq_len * data_sampler.micro_batch_size // config.context_parallel_size


def _buffer_sets(config: Any) -> dict[str, Any]:
    """The arguments that select the sets of buffers in the installed version: for layers in 8 bits (or 4), for
    layers in 16, or for both."""
    from transformer_engine.pytorch.module import base  # pyright: ignore[reportMissingImports]

    from nemo2.mcore.overlap.tp_overlap_cfg import settings_per_mode, userbuffer_settings
    from nemo2.mcore.overlap.tp_switches import SWITCHES, contradictions
    from nemo2.mcore.overlap.userbuffer_limits import some_layers_in_16_bits

    quantized = config.fp8 is not None or getattr(config, "fp4", None) is not None
    requested = config.tp_comm_overlap_cfg
    if isinstance(requested, str):  # set on the model, without a callback that resolves it
        from nemo2.mcore.overlap.presets import preset

        requested = None if requested == "default" else preset(requested)
    problems = contradictions(requested, {name: getattr(config, name) for name in SWITCHES})
    if problems:
        raise ConfigError("\n".join(problems))
    settings = userbuffer_settings(requested, quantized=quantized)
    both = quantized and some_layers_in_16_bits(config)
    # Transformer Engine 2.8 replaced the flag by a list with one mode per set, and warns about the flag.
    if "quantization_modes" not in inspect.signature(base.initialize_ub).parameters:
        return {"use_fp8": quantized, "ub_cfgs": settings}
    modes = base.UserBufferQuantizationMode
    chosen = [modes.FP8 if quantized else modes.NONE, *([modes.NONE] if both else [])]
    return {"quantization_modes": chosen, "ub_cfgs": settings_per_mode(settings, 1 + both)}
