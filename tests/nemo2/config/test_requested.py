# SPDX-License-Identifier: Apache-2.0
"""Settings that changed behind their user's back."""

import dataclasses
import functools
from typing import Any, Optional

import fiddle as fdl
import pytest

from nemo2.base.backend.compilation import uncompiled
from nemo2.base.errors import ConfigError
from nemo2.config import Config
from nemo2.config.capture import configurable
from nemo2.config.provenance import adjust
from nemo2.config.requested import refuse_silent_changes, silent_changes


@dataclasses.dataclass
class Buffers:
    size: Optional[int] = None
    overlap: bool = False


@configurable
@dataclasses.dataclass
class Rounded(Buffers):
    def __post_init__(self) -> None:
        self.size = None if self.size is None else self.size // 10 * 10


def test_a_silent_change_stops_the_run_with_the_line_that_was_overruled() -> None:
    built = fdl.build(Config(Buffers, size=5, overlap=False))
    refuse_silent_changes({"strategy.ddp_config": built, "optim.config": None})
    built.overlap = True
    with pytest.raises(ConfigError) as refused:
        refuse_silent_changes({"strategy.ddp_config": built})
    assert f"strategy.ddp_config.overlap is True instead of False (set at {__file__}:" in str(refused.value)


def test_an_announced_change_is_fine_as_long_as_it_holds() -> None:
    built = fdl.build(Config(Buffers, size=5))
    adjust(built, "size", 7, why="a test")
    assert silent_changes("x", built) == []
    built.size = 8
    assert silent_changes("x", built) == ["x.size is 8 instead of 7 (announced: a test)"]


def test_none_and_what_nobody_set_ask_for_nothing() -> None:
    built = fdl.build(Config(Buffers, size=None))
    built.size, built.overlap = 40, True
    assert silent_changes("x", built) == []


@pytest.mark.parametrize("make", [lambda: fdl.build(Config(Rounded, size=57)), lambda: Rounded(size=57)])
def test_what_a_class_makes_of_its_own_arguments_is_announced(make) -> None:
    built = make()
    assert built.size == 50 and silent_changes("x", built) == []
    built.size = 57
    assert "x.size is 57 instead of 50" in silent_changes("x", built)[0]


def test_an_activation_is_the_same_compiled_or_not() -> None:
    """The CPU's backend takes the compilation out of Megatron-Core's modules after a recipe may have read them."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    compiled = functools.wraps(quick_gelu)(lambda x: x)
    vars(compiled)["_torchdynamo_orig_callable"] = uncompiled(quick_gelu)
    built: Any = fdl.build(Config(Buffers, size=compiled))
    built.size = quick_gelu
    assert silent_changes("x", built) == []
    built.size = abs
    assert len(silent_changes("x", built)) == 1
