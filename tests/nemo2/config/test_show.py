# SPDX-License-Identifier: Apache-2.0
import pathlib
from datetime import timedelta

import nemo_run as run
import pytest
import torch

from nemo2.config import Config, diff, flatten, render
from nemo2.config.show import NOT_SET, format_value
from support.config_samples import DDP, Callback, LoudCallback, Mode, Model, Trainer, recipe


def test_flatten_gives_every_value_by_its_path():
    assert flatten(recipe()) == {
        "_target_": "support.config_samples.train",
        "model._target_": "support.config_samples.BigModel",
        "trainer._target_": "support.config_samples.Trainer",
        "trainer.strategy._target_": "support.config_samples.Strategy",
        "trainer.strategy.tensor_parallel": 2,
        "trainer.strategy.ddp._target_": "support.config_samples.DDP",
        "trainer.callbacks[0]._target_": "support.config_samples.Callback",
        "trainer.callbacks[0].every": 3,
        "options._target_": "support.config_samples.Options",
    }


def test_flatten_can_show_what_nobody_set():
    flat = flatten(recipe(), defaults=True)
    assert flat["model.layers"] == 32 and flat["trainer.max_steps"] == 10
    assert flat["options.ddp.overlap_grad_reduce"] is False and flat["options.extra"] == {}
    assert flatten(Config(Trainer), defaults=True)["strategy"] is NOT_SET
    assert flatten(run.Config(DDP), defaults=True)["bucket_size"] is None


def test_empty_containers_are_values():
    r = recipe()
    r.trainer.callbacks, r.options = [], {}
    assert flatten(r)["trainer.callbacks"] == [] and flatten(r)["options"] == {}


def test_render_is_an_indented_tree():
    r = recipe()
    r.model.dtype = torch.bfloat16
    r.options = {"dims": [1, 2]}
    assert render(r) == "\n".join(
        [
            "train (partial)",
            "  model: BigModel",
            "    dtype: torch.bfloat16",
            "  trainer: Trainer",
            "    strategy: Strategy",
            "      tensor_parallel: 2",
            "      ddp: DDP",
            "    callbacks:",
            "      - Callback",
            "        every: 3",
            "  options: {'dims': [1, 2]}",
        ]
    )


def test_render_can_show_defaults_and_who_set_what():
    shown = render(recipe(), defaults=True, who=True)
    assert "max_steps: 10  [default]" in shown
    line = next(line for line in shown.splitlines() if "tensor_parallel: 2" in line)
    assert "config_samples.py:" in line and "[default]" not in line


def test_render_writes_a_shared_config_once():
    r = recipe()
    shared = Config(LoudCallback, volume=1)
    r.trainer.callbacks = [shared, shared]
    assert render(r).count("volume: 1") == 1
    assert "- same as trainer.callbacks[0]" in render(r)


def test_diff_names_the_paths_that_differ():
    one, other = recipe(), recipe()
    other.strategy.tensor_parallel = 8
    other.strategy.ddp_config.overlap_grad_sync = True
    other.trainer.max_steps = 10
    other.trainer.callbacks.append(Config(Callback))
    assert [str(change) for change in diff(one, other)] == [
        "trainer.strategy.tensor_parallel: 2 -> 8",
        "trainer.strategy.ddp.overlap_grad_reduce: False -> True",
        "trainer.callbacks[1]._target_: (not set) -> 'support.config_samples.Callback'",
    ]
    assert diff(one, recipe()) == []


def test_diff_tells_one_type_from_another():
    one, other = recipe(), recipe()
    one.trainer.devices, other.trainer.devices = 1, True
    assert len(diff(one, other)) == 1


def test_diff_of_another_class_shows_the_class():
    one, other = recipe(), recipe()
    other.model = Config(Model, layers=32)
    assert [change.path for change in diff(one, other)] == ["model._target_"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.float8_e4m3fn, "torch.float8_e4m3fn"),
        (torch.nn.functional.gelu, "torch.nn.functional.gelu"),
        (torch.nn.functional.silu, "torch.nn.functional.silu"),
        (torch.tanh, "torch.tanh"),
        (Mode.FAST, "Mode.FAST"),
        (pathlib.Path("/a"), "/a"),
        (timedelta(minutes=1), "0:01:00"),
        (Callback, "support.config_samples.Callback"),
        ([1, (torch.bfloat16, "x")], "[1, (torch.bfloat16, 'x')]"),
        (1e-05, "1e-05"),
        (None, "None"),
    ],
)
def test_values_are_shown_as_a_user_writes_them(value, text):
    assert format_value(value) == text


def test_a_name_with_control_characters_does_not_reach_the_terminal():
    tree = recipe()
    tree.options = Config(dict, **{"a\x1b[2J": {"b\x07": 1}})
    assert "a\\x1b[2J" in render(tree) and not {"\x1b", "\x07"} & set(render(tree))
