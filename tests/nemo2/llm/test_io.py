# SPDX-License-Identifier: Apache-2.0
"""NeMo's ``nl.io``."""

import fiddle as fdl
import pytest
from torch import nn

import nemo2 as nl
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.config.tree import as_config
from support import small_runs


class Mine(nn.Module, nl.io.IOMixin):
    def __init__(self, size: int, name: str = "a") -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.name = name


class Plain:
    def __init__(self, size: int) -> None:
        self.size = size


def test_a_class_of_a_users_own_remembers_its_arguments_and_is_made_again():
    mine = Mine(3, name="b")
    again = nl.io.reinit(mine)
    assert again is not mine and (again.layer.in_features, again.name) == (3, "b")
    config = as_config(mine)
    config.size = 5
    assert fdl.build(config).layer.in_features == 5
    with pytest.raises(ConfigError, match="cannot tell how a Plain was created. Derive its class from nl.io.IOMixin"):
        nl.io.reinit(Plain(2))


def test_track_io_does_it_for_a_class_that_is_there():
    class Other:
        def __init__(self, size: int) -> None:
            self.size = size

    tracked = nl.io.track_io(Other)
    assert nl.io.reinit(tracked(4)).size == 4
    with pytest.raises(ConfigError, match="artifacts"):
        nl.io.track_io(Plain, artifacts=["file"])


def write(folder: str) -> None:
    small_runs.fit(small_runs.build_llama(), max_steps=1, callbacks=[small_runs.keep(folder)])


def test_a_checkpoint_tells_of_its_run(run_on_ranks, tmp_path):
    run_on_ranks(write, 1, str(tmp_path))
    [checkpoint] = [path for path in tmp_path.iterdir() if path.is_dir()]
    for place in (tmp_path, checkpoint, checkpoint / "context"):
        assert nl.io.load_context(place, subpath="model.config").hidden_size == 32
    assert nl.io.load_context(checkpoint, subpath="model", build=False).config.num_layers == 2
    whole = nl.io.load_context(checkpoint)
    assert isinstance(whole, nl.io.TrainerContext) and type(whole.model).__name__ == "LlamaModel"
    with pytest.raises(ConfigError, match="does not contain its trainer"):
        _ = whole.trainer
    with pytest.raises(CheckpointError, match="does not describe the modle"):
        nl.io.load_context(checkpoint, subpath="modle")
