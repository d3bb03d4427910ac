# SPDX-License-Identifier: Apache-2.0
"""Rules about optional packages that a run needs and this machine lacks."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nemo2.base.backend.extras import has
from nemo2.config.walk import class_of
from nemo2.models.layers import rules as layers
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

PARTS = Topic("Optional packages", needs_sizes=False)


@PARTS.rule("plain-layers-can-do-it", megatron_refuses=True)
def _plain_layers(facts: Facts) -> Iterator[str]:
    """A model without Transformer Engine must not use features that only its kernels have: QK clipping, the flex
    dispatcher, latent experts, cached latents and experimental attention.

    Otherwise: The model raises an error when it is built.
    """
    config, has_te = facts.sized_config, facts.machine.transformer_engine is not None
    if has_te or config is None or facts.is_hybrid:
        return
    config = copy.copy(config)
    config.cp_comm_type = None  # and these have separate rules
    reported = [
        *layers.mla_over_tensor_ranks(config),
        *layers.experts_cut_only_where_shared(config),
        *layers.experts_need_sequence_parallel(config),
        *layers.experts_have_no_post_norm(config),
    ]
    for problem in layers.layer_problems(config):
        if problem not in reported:
            yield f"model.config: {problem}"


@PARTS.rule("dispatcher-is-installed", local=True)
def _dispatcher(facts: Facts) -> Iterator[str]:
    """The flex dispatcher's package, deep_ep, must be installed.

    Otherwise: Megatron-Core raises an ImportError when it builds the model.
    """
    backend = getattr(facts.model, "moe_flex_dispatcher_backend", "deepep")
    if getattr(facts.model, "moe_token_dispatcher_type", None) != "flex":
        return
    if backend in ("deepep", "hybridep") and not has("deep_ep"):
        yield (
            f"model.config.moe_token_dispatcher_type='flex' with moe_flex_dispatcher_backend={backend!r} requires the package "
            "deep_ep, which is not installed. Install it (github.com/deepseek-ai/DeepEP), or set "
            "moe_token_dispatcher_type='alltoall'."
        )


@PARTS.rule("ring-exchange-is-installed", local=True)
def _ring_exchange(facts: Facts) -> Iterator[str]:
    """`use_ring_exchange_p2p` requires a PyTorch that was built with `torch.distributed.ring_exchange`.

    Otherwise: Every rank raises an AttributeError at its first message to another stage.
    """
    if facts.of_model("use_ring_exchange_p2p") and not hasattr(torch.distributed, "ring_exchange"):
        yield (
            "model.config.use_ring_exchange_p2p=True requires torch.distributed.ring_exchange, which the installed PyTorch does "
            "not have. Set use_ring_exchange_p2p=False."
        )


@PARTS.rule("logger-is-installed", local=True)
def _loggers(facts: Facts) -> Iterator[str]:
    """The packages of the loggers must be installed.

    Otherwise: Every rank raises ModuleNotFoundError.
    """
    from nemo2.training.run_dir.trackers import missing_package  # ranks skip these two rules

    for path, kind, _ in loggers_of(facts):
        if package := missing_package(kind):
            yield (
                f"{path}: {kind} requires {package}, which is not installed. Run `pip install {package}`, or remove "
                "the logger."
            )


@PARTS.rule("tracker-can-log-in", local=True)
def _logins(facts: Facts) -> Iterator[str]:
    """W&B and Comet must have an API key on this machine, or must be offline.

    Otherwise: The client of the service asks for a key, and every rank ends.
    """
    from nemo2.training.run_dir.trackers import missing_login

    for path, kind, arguments in loggers_of(facts):
        if why := missing_login(kind, arguments):
            yield f"{path}: {why}."


def loggers_of(facts: Facts) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The path, class and arguments of each logger of a recipe."""
    log, trainer = facts.at("log"), facts.at("trainer")
    for owner, place, field in (
        (log, "log", "tensorboard"),
        (log, "log", "wandb"),
        (log, "log", "extra_loggers"),
        (trainer, "trainer", "logger"),
    ):
        loggers = getattr(owner, field, None)
        several = isinstance(loggers, list | tuple)
        for number, node in enumerate(loggers if several else [loggers]):
            kind = getattr(class_of(node), "__name__", "")
            arguments = getattr(node, "__arguments__", {})
            yield f"{place}.{field}[{number}]" if several else f"{place}.{field}", kind, arguments
