# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's verdict on a recipe: the judge of the rules.

The model's chunks of the first and the last stage are built for real, on meta tensors, in a world of fake ranks; the micro-batch
calculator and the optimizer's and the gradient buffers' configurations are made too. None of the rules takes part.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Optional

from nemo2.base.errors import message_of
from nemo2.mcore.parallel.layout import SIZE_FIELDS
from support.ranks import simulated_rank

WRITERS = "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"
"""Variables that Megatron-Core sets itself when it builds a model."""


def verdicts(cases: list[Any]) -> list[Optional[str]]:
    """Megatron-Core's refusal of each case. None: it builds the case. Runs in a separate process."""
    import logging
    import warnings

    from nemo2.base.backend import get_backend
    from support.rule_cases import recipe_of

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    get_backend().install()
    answers = []
    for case in cases:
        with _variables(case.environment):
            answers.append(verdict(recipe_of(case)))
    return answers


def verdict(recipe: Any) -> Optional[str]:
    """Megatron-Core's reason for refusing this recipe. None: it builds the recipe."""
    from nemo2.mcore.settle import Machine

    refusal = None
    # As this machine adjusts it, which takes fp8 away; then as it was asked for.
    for machine in (Machine.here(), Machine()):
        try:
            _build(recipe, machine)
            return None
        except Exception as error:
            refusal = refusal or f"{type(error).__name__}: {message_of(error).strip()}"
    return refusal


def _build(recipe: Any, machine: Any) -> None:
    import fiddle as fdl

    from nemo2.config.provenance import adjust_to
    from nemo2.mcore.settle.parts import precision_of
    from nemo2.mcore.settle.run_settings import RunSettings
    from nemo2.mcore.settle.settling import write_parallelism
    from nemo2.training.strategy import MegatronStrategy

    trainer = recipe.trainer
    config: Any = fdl.build(recipe.model.config)
    strategy: Any = fdl.build(trainer.strategy)
    if not recipe.optim.config.use_precision_aware_optimizer:
        # With it, the configuration itself asks for Transformer Engine.
        fdl.build(recipe.optim.config)
    precision = fdl.build(precision_of(trainer)[1])
    adjust_to(config, machine.overrides)
    precision.apply_to(config, path="model.config")
    # Torch shards a model that Megatron-Core builds whole.
    parallelism = copy.copy(getattr(strategy, "parallelism", None) or MegatronStrategy().parallelism)
    parallelism.pipeline_dtype = parallelism.pipeline_dtype or precision.dtype_config.pipeline_dtype
    world = trainer.num_nodes * trainer.devices
    for rank in sorted({0, world - 1}):
        with _world(rank, world, strategy):
            cut = copy.copy(config)
            write_parallelism(RunSettings(parallelism=parallelism, model_config=cut, machine=machine))
            if rank == 0 or strategy.layout.pp > 1:  # without stages the last rank builds the chunks of the first
                _chunks(cut, recipe)
            _micro_batches(recipe.data, rank)


def _chunks(config: Any, recipe: Any) -> None:
    from nemo2.data.tokenizer import NullTokenizer
    from nemo2.preflight.checks.facts import read_facts
    from nemo2.preflight.checks.tokenizers import tokenizer_of

    config.init_model_with_meta_device, config.perform_initialization = True, False
    tokenizer = tokenizer_of(read_facts(recipe)) or NullTokenizer(config.vocab_size or 50_000)
    chunks = config.virtual_pipeline_model_parallel_size
    for chunk in range(chunks) if chunks else (None,):
        config.configure_model(tokenizer, vp_stage=chunk)


def _micro_batches(data: Any, rank: int) -> None:
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        rank, None, data.global_batch_size, data.micro_batch_size, parallel_state.get_data_parallel_world_size()
    )


@contextmanager
def _world(rank: int, size: int, strategy: Any) -> Iterator[None]:
    from megatron.core import parallel_state, tensor_parallel

    layout = replace(strategy.layout, vp=None if strategy.layout.vp == 1 else strategy.layout.vp)
    with simulated_rank(rank, size):
        parallel_state.initialize_model_parallel(
            **{name: getattr(layout, short) for short, name in SIZE_FIELDS.items()},
            **strategy._groups | {"create_gloo_process_groups": False, "pipeline_model_parallel_comm_backend": None},
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in WRITERS:
        os.environ.pop(name, None)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
