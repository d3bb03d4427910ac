# SPDX-License-Identifier: Apache-2.0
import inspect

import pytest

from nemo2.config import check_serialisable
from nemo2.errors import ConfigError
from support.config_samples import Callback, Plain, recipe


def test_a_recipe_that_can_travel_passes():
    check_serialisable(recipe())


def test_all_that_stands_in_the_way_is_named_at_once_with_who_set_it():
    r = recipe()
    r.model.act = lambda x: x
    line = inspect.currentframe().f_lineno - 1
    r.trainer.lr = float("nan")
    r.trainer.callbacks.append(Plain())
    changed = Callback()
    changed.every = 3
    r.options = [changed]
    with pytest.raises(ConfigError) as caught:
        check_serialisable(r)
    message = str(caught.value)
    assert message.startswith("4 values of this recipe cannot be sent")
    assert "model.act = <function" in message and f"{__file__}:{line}" in message and "`def`" in message
    assert "trainer.lr = nan" in message
    assert (
        "trainer.callbacks[1] = <support.config_samples.Plain" in message
        and "nemo2.config.Config(Plain, ...)" in message
    )
    assert "options[0]: " in message and "live Callback whose every=3 changed" in message


@pytest.mark.parametrize("value", [Plain().__init__, (i for i in ()), open, range(3), {1: Plain()}])
def test_other_live_things_are_refused(value):
    r = recipe()
    r.options = value
    with pytest.raises(ConfigError, match="options"):
        check_serialisable(r)


def test_a_closure_as_the_target_is_refused():
    from nemo2.config import Config

    def local():
        return 1

    with pytest.raises(ConfigError, match="cannot be imported by name"):
        check_serialisable(Config(local))
