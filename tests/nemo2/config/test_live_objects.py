# SPDX-License-Identifier: Apache-2.0
import copy
import functools
from pathlib import Path

import fiddle as fdl
import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.config import Config, select, who_set
from nemo2.config.tree import as_config
from support.config_samples import (
    DDP,
    BigModel,
    Callback,
    LoudCallback,
    Options,
    Plain,
    Strategy,
    Trainer,
    recipe,
    sent,
)


def test_an_appended_object_travels_as_its_arguments():
    arrived = fdl.build(sent(recipe(LoudCallback(volume=3, every=2))))()[1].callbacks[-1]
    assert type(arrived) is LoudCallback and (arrived.volume, arrived.every) == (3, 2)


@pytest.mark.parametrize("place", [lambda c: [c], lambda c: (c,), lambda c: {"one": [c]}])
def test_objects_are_found_in_containers(place):
    r = recipe()
    r.options = place(Callback(every=9))
    assert select(r, Callback)[-1].every == 9
    assert sent(r) == r


def test_in_this_process_the_very_object_is_used_and_a_copy_has_its_own():
    mine = Callback(every=2)
    r = recipe(mine)
    mine.calls = 0
    for _ in range(2):
        assert fdl.build(r)()[1].callbacks[-1] is mine
    built = fdl.build(r.clone())()[1].callbacks[-1]
    assert built is not mine and type(built) is Callback


def test_an_edited_config_of_an_object_builds_another_object():
    mine = Callback(every=2)
    r = recipe(mine)
    repr(r)
    r.trainer.callbacks[1].every = 5
    built = fdl.build(r)()[1].callbacks[1]
    assert built is not mine and built.every == 5 and mine.every == 2


def test_editing_inside_an_objects_config_counts():
    mine = Strategy(ddp=DDP(dims=[1]))
    r = recipe()
    r.strategy = mine
    assert fdl.build(r)()[1].strategy is mine
    r.strategy.ddp_config.overlap_grad_sync = True
    built = fdl.build(r)()[1].strategy
    assert built is not mine and built.ddp.overlap_grad_reduce and built.ddp.dims == [1]
    assert mine.ddp.overlap_grad_reduce is False


def test_the_object_keeps_its_own_lists():
    trainer = Trainer(Strategy(), callbacks=[Callback()])
    r = recipe()
    r.trainer = trainer
    r.trainer.callbacks.append(Config(Callback))
    sent(r)
    assert [type(item) for item in trainer.callbacks] == [Callback]


def test_one_object_in_two_places_of_a_list_stays_one():
    mine = Callback()
    built = fdl.build(sent(recipe(mine, mine)))()[1].callbacks
    assert built[1] is built[2] is not built[0]


@pytest.mark.parametrize("leave", [sent, copy.deepcopy])
@pytest.mark.parametrize("adopted", [False, True])
def test_an_object_changed_behind_its_arguments_is_refused(leave, adopted):
    mine = Callback(every=2)
    r = recipe(mine)
    if adopted:
        sent(r)
    mine.every = 7
    why = r"live Callback whose every=7 changed after it was created.*Callback\(\.\.\.\)"
    with pytest.raises(ConfigError, match=why):
        leave(r)
    assert fdl.build(r)()[1].callbacks[-1] is mine, "in this process nothing is lost"


def test_an_edited_dataclass_is_described_by_its_fields_and_what_was_derived_stays():
    model = BigModel(hidden=16)
    model.layers, model.hidden, model.act = 3, 8, torch.nn.functional.silu
    r = recipe()
    r.model = model
    assert r.model.layers == 3
    arrived = fdl.build(sent(r))()[0]
    assert arrived == model and arrived.ffn == 64 and arrived.act is torch.nn.functional.silu


def test_a_third_partys_dataclass_becomes_a_config_of_what_differs():
    r = recipe()
    r.options = Options(share=0.25, ddp=DDP(overlap_grad_sync=True))
    assert isinstance(r.options, Config)
    assert fdl.ordered_arguments(r.options).keys() == {"share", "ddp"}
    assert fdl.build(sent(r))()[2] == Options(share=0.25, ddp=DDP(True))


def test_a_dataclass_given_to_the_constructor_keeps_our_configs_inside():
    config = Config(Trainer, strategy=Strategy(), callbacks=[Options(ddp=DDP(True))])
    assert type(config.strategy) is Config
    assert [type(node) for node in select(config, DDP)] == [Config]


def test_megatrons_own_dataclass_can_be_assigned_live():
    from megatron.core.distributed import DistributedDataParallelConfig

    r = recipe()
    r.strategy.ddp = DistributedDataParallelConfig(overlap_grad_reduce=True)
    r.strategy.ddp_config.overlap_param_sync = True
    arrived = fdl.build(sent(r))()[1].strategy.ddp
    assert arrived == DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True)


def test_a_bound_activation_travels_as_a_partial():
    r = recipe()
    r.model.act = functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.5)
    arrived = fdl.build(sent(r))()[0].act
    assert arrived(torch.tensor(-2.0)).item() == -1.0


def test_the_line_that_made_the_object_set_its_fields():
    mine = Callback(every=2)
    (node,) = [node for node in select(recipe(mine), Callback) if node.every == 2]
    file, line, value = who_set(node, "every")[0]
    assert (file, value) == (__file__, 2)
    assert "mine = Callback(every=2)" in Path(__file__).read_text().splitlines()[line - 1]


def test_as_config_describes_an_object_as_it_is():
    strategy = Strategy(2, ddp=DDP())
    strategy.ddp.overlap_grad_reduce = True
    config = as_config(strategy)
    built = fdl.build(config)
    assert built is not strategy and built.ddp is not strategy.ddp
    assert (built.tensor_parallel, built.ddp) == (2, DDP(True))
    assert as_config(config) == config and as_config(config) is not config
    assert sent(as_config(strategy)) == config


def test_as_config_says_when_it_is_not_known_how_an_object_was_made():
    with pytest.raises(ConfigError, match="cannot tell how a live Plain was created"):
        as_config(Plain())
