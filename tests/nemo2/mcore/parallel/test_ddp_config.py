# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's DDP and optimizer settings know what they were made with, and answer to both spellings."""

import copy
import dataclasses
import inspect
import pickle

import fiddle as fdl
import pytest

from nemo2.base.errors import ConfigError
from nemo2.config import Config
from nemo2.config.provenance import adjust
from nemo2.config.requested import explicit_fields, explicit_values, where_set
from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig, OptimizerConfig, remember_arguments


def test_a_default_that_was_given_counts_as_set() -> None:
    made = DistributedDataParallelConfig(overlap_grad_reduce=False)
    assert explicit_fields(made) == {"overlap_grad_reduce"}
    place = where_set(made, "overlap_grad_reduce")
    assert place is not None and place.startswith(f"{__file__}:")
    assert explicit_fields(OptimizerConfig(lr=1e-3)) == {"lr"}


def test_both_spellings_are_one_field_of_an_object() -> None:
    made = DistributedDataParallelConfig(overlap_grad_sync=True, overlap_param_sync=True)  # pyright: ignore[reportCallIssue]
    assert (made.overlap_grad_reduce, made.overlap_param_gather) == (True, True)
    made.overlap_grad_sync = False  # pyright: ignore[reportAttributeAccessIssue]
    assert made.overlap_grad_reduce is False and explicit_values(made)["overlap_grad_reduce"] is True
    assert "overlap_grad_sync" not in dataclasses.asdict(made)
    with pytest.raises(ConfigError, match="two names of the same parameter"):
        DistributedDataParallelConfig(overlap_grad_sync=True, overlap_grad_reduce=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match="did you mean 'overlap_grad_reduce'"):
        DistributedDataParallelConfig(overlap_grad_reduc=True)  # pyright: ignore[reportCallIssue]


def test_both_spellings_are_one_field_of_a_config() -> None:
    node = Config(DistributedDataParallelConfig, overlap_grad_sync=False)
    assert node.overlap_grad_reduce is False
    node.overlap_param_sync = True
    built = fdl.build(node)
    assert built.overlap_param_gather is True
    assert explicit_values(built) == {"overlap_grad_reduce": False, "overlap_param_gather": True}
    assert all((where_set(built, name) or "").startswith(f"{__file__}:") for name in explicit_fields(built))


def test_megatron_cores_class_stays_what_it_is() -> None:
    made = DistributedDataParallelConfig(bucket_size=5)
    assert made == DistributedDataParallelConfig(bucket_size=5) != DistributedDataParallelConfig()
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made)) == dataclasses.replace(made)
    assert explicit_fields(copy.deepcopy(made)) == {"bucket_size"}
    names = list(inspect.signature(DistributedDataParallelConfig).parameters)
    assert names == [field.name for field in dataclasses.fields(DistributedDataParallelConfig)]
    wrapped = DistributedDataParallelConfig.__init__
    remember_arguments()
    assert DistributedDataParallelConfig.__init__ is wrapped


def test_what_was_adjusted_later_is_not_what_the_user_set() -> None:
    made = DistributedDataParallelConfig(bucket_size=5)
    adjust(made, "bucket_size", 7, why="a test")
    adjust(made, "overlap_grad_reduce", True, why="a test")
    assert explicit_values(made) == {"bucket_size": 5}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(DistributedDataParallelConfig)])
def test_every_field_of_megatron_cores_can_be_set_in_a_recipe(field: str) -> None:
    """``strategy.ddp_config.<field>=...``, whichever Megatron-Core is installed."""
    from nemo2.recipes import llama_tiny

    recipe = llama_tiny.pretrain_recipe()
    value = getattr(recipe.strategy.ddp_config, field)
    setattr(recipe.strategy.ddp_config, field, value)
    assert field in recipe.trainer.strategy.ddp.__arguments__
