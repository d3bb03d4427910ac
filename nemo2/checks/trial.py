# SPDX-License-Identifier: Apache-2.0
"""The run's own code on copies of the settings: what the strategy writes where, and what Megatron-Core says of the result.

Nothing of this is arithmetic of ours. It is what would happen when the strategy connects to the model, so that a recipe
which passes is not refused on the ranks.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional

from nemo2.checks.building import as_asked, attempt
from nemo2.checks.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What was refused, by whom; empty where nothing was."""

    switch: tuple[str, ...] = ()
    """The distributed optimizer, which stands in two configurations."""
    precision: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    """Parallel sizes set on the model."""
    graphs: tuple[str, ...] = ()
    """What CUDA graphs can't hold."""
    megatron: tuple[str, ...] = ()
    """Megatron-Core's own checks."""


def try_settings(facts: Facts) -> Trial:
    """Connect copies of the settings as the strategy would."""
    strategy: Any = facts.built.get("trainer.strategy")
    if not facts.sizes or strategy is None or not hasattr(strategy, "parallelism"):
        return Trial()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo2.precision import MegatronMixedPrecision
    from nemo2.strategies.megatron_config import align_distributed_optimizer, prepare_graphs, write_parallelism

    optimizer, ddp = copy.copy(facts.built.get("optim.config")), copy.copy(strategy.ddp_config)
    switch = _refusal(facts, lambda: align_distributed_optimizer(optimizer, ddp, strategy.explicit_ddp_fields))

    def connect(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of configurations with the precision's fields."""
        copies = {path: copy.copy(config) for path, config in configs.items() if config is not None}
        precision = copy.copy(facts.built.get("trainer.plugins"))
        if isinstance(precision, MegatronMixedPrecision):
            precision.dtype_config = copy.copy(precision.dtype_config)
            precision.apply_to_all(copies)
        return copies

    model = {"model.config": facts.built.get("model.config")}
    parts = {
        "strategy": copy.copy(strategy.parallelism),
        "strategy.ddp_config": ddp,
        "optim.config": optimizer,
        **model,
    }
    contradictions = _refusal(facts, lambda: connect(parts))

    def capture() -> None:
        configs = connect(parts)
        model, optimizer = configs.get("model.config"), configs.get("optim.config")
        # This machine may have turned the graphs off.
        asked = None if model is None else as_asked(model)
        ddp, parallelism = configs["strategy.ddp_config"], configs["strategy"]
        prepare_graphs(asked, optimizer, ddp, strategy.explicit_ddp_fields, parallelism)

    graphs = None if contradictions else _refusal(facts, capture)
    written = stages = None
    if isinstance(model["model.config"], TransformerConfig) and _refusal(facts, lambda: connect(model)) is None:
        parallelism = replace(strategy.parallelism, **facts.layout.fields())
        if parallelism.pipeline_dtype is None and facts.precision is not None:
            parallelism.pipeline_dtype = facts.precision.pipeline_dtype

        def finished() -> Any:
            config = connect(model)["model.config"]
            write_parallelism(config, parallelism, facts.layout)
            return config

        config, written = attempt(finished, here=facts.here)
        if config is not None:
            stages = _refusal(facts, lambda: _count_layers(config))
    by_hand = written is not None and "contradicts strategy." in written
    return Trial(
        switch=_told(switch),
        precision=_told(*(contradictions or "").splitlines()),
        sizes=_told(written) if by_hand else (),
        graphs=_told(graphs),
        megatron=_told(None if by_hand else written, stages),
    )


def _count_layers(config: Any) -> None:
    """Megatron-Core's own count of the layers of every chunk, which asserts what the configuration does not."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if config.pipeline_model_parallel_layout is not None or hasattr(config, "mamba_stack_spec"):
        return
    chunks = config.virtual_pipeline_model_parallel_size
    for stage in range(config.pipeline_model_parallel_size):
        for chunk in range(chunks) if chunks else (None,):
            get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)


def _refusal(facts: Facts, step: Callable[[], Any]) -> Optional[str]:
    return attempt(step, here=facts.here)[1]


def _told(*messages: Optional[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(" ".join(message.split()) for message in messages if message))
