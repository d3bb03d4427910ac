# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of a recipe's model as its run builds them, with the vocabulary of its data or tokenizer."""

import dataclasses
from typing import Any, NamedTuple, Optional

from nemo2.base.counts import short_count
from nemo2.base.errors import ConfigError
from nemo2.base.gpus import DEFAULT, gpu
from nemo2.mcore.settle.machine import Machine
from nemo2.models.conversion.families import modules_with_weights
from nemo2.models.peft.lora import LoRA
from nemo2.models.shape import ModelShape
from nemo2.models.walker import shape_of
from nemo2.preflight.checks.facts import Facts, read_facts
from nemo2.preflight.planner.recipe import job_of, vocabulary_of
from nemo2.preflight.planner.step_time import trained_weights


class Size(NamedTuple):
    """The parameters of a model."""

    parameters: int
    """Those of the whole model, without adapters."""
    vocabulary: int
    """The rows of the embedding, with padding. Recipes with other data have other rows, and another number of
    parameters."""
    adapters: Optional[int] = None
    """The parameters of adapters beside frozen ones. None: all parameters are trained, or the method's are not counted."""
    saved: int = 0
    """Those of ``peft.modules_to_save``, which are trained too."""

    def __str__(self) -> str:
        count = f"{short_count(self.parameters)} with a vocabulary of {self.vocabulary:,}"
        if self.adapters is None:
            return count
        whole = f" and {short_count(self.saved)} in modules_to_save" if self.saved else ""
        share = (self.adapters + self.saved) / self.parameters
        return f"{count}; {short_count(self.adapters)} in adapters{whole} train ({share:.2%})"


def size_of(recipe: Any, machine: Machine) -> Optional[Size]:
    """The size of a recipe's model. None: its vocabulary is unknown, or nemo2 can't count a model of this kind."""
    try:
        facts = read_facts(recipe, machine=machine)
        rows = vocabulary_of(facts)
        shape = shape_of(facts.config, rows)
        if facts.parts.get("peft") is None:
            return Size(shape.parameters, rows)
        job = job_of(facts, gpu(DEFAULT))
        saved = _saved(facts, shape)
        if job.adapters is None or saved is None:
            return Size(shape.parameters, rows)
        held = trained_weights(shape, dataclasses.replace(job, tp=1, pp=1, ep=1, etp=1), embeddings=0)
        return Size(shape.parameters, rows, round(held.dense + held.routed), saved)
    except (ConfigError, AttributeError, TypeError, ValueError):
        return None


def _saved(facts: Facts, shape: ModelShape) -> Optional[int]:
    """The parameters of the modules that a LoRA trains in full. None: some of them are outside matrices, and not counted."""
    method = facts.parts.get("peft")
    if not isinstance(method, LoRA) or not method.modules_to_save:
        return 0
    weights = {name: linear.parameters for name, linear in shape.linears()}
    weights |= {"embedding.word_embeddings": shape.embedding_parameters, "output_layer": shape.embedding_parameters}
    saved = [name for name in modules_with_weights(facts.config) or () if method.trains_whole(name)]
    return sum(weights[name] for name in saved) if saved and weights.keys() >= {*saved} else None
