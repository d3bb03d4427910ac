# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest

from nemo2.config.capture import (
    aliases_of,
    captured_arguments,
    changed_since_made,
    configurable,
    is_configurable,
    made_at,
    register_aliases,
)
from nemo2.errors import ConfigError, UnknownNameError
from support.config_samples import DDP, BigModel, Callback, LoudCallback, Strategy, Trainer, train


def test_capturing_imports_neither_torch_nor_fiddle():
    heavy = "{'torch', 'fiddle', 'nemo_run', 'lightning'}"
    code = f"import sys, nemo2.config.capture, nemo2.config; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_an_object_knows_the_arguments_it_was_given_and_only_those():
    assert captured_arguments(Strategy(4, sequence_parallel=True)) == {"tensor_parallel": 4, "sequence_parallel": True}
    assert captured_arguments(DDP()) == {}
    assert captured_arguments(object()) is None


def test_the_line_that_made_an_object_is_known():
    made = Callback()
    line = inspect.currentframe().f_lineno - 1
    assert made_at(made) == (__file__, line)


def test_an_undecorated_subclass_keeps_its_own_arguments():
    assert captured_arguments(LoudCallback(volume=3, every=2)) == {"volume": 3, "every": 2}
    assert captured_arguments(BigModel(hidden=4)) == {"hidden": 4}


def test_the_signature_stays_what_it_is():
    assert list(inspect.signature(Strategy).parameters)[0] == "tensor_parallel"
    assert str(inspect.signature(DDP)) == str(inspect.signature(dataclasses.make_dataclass("DDP", _fields(DDP))))
    assert Strategy.__init__.__annotations__["tensor_parallel"] is int


def _fields(cls):
    return [(f.name, f.type, _copy(f)) for f in dataclasses.fields(cls)]


def _copy(field):
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return dataclasses.field(default=field.default)


def test_second_spellings_set_the_real_parameter():
    assert DDP(overlap_grad_sync=True).overlap_grad_reduce is True
    assert captured_arguments(Strategy(ddp_config="megatron")) == {"ddp": "megatron"}


def test_two_spellings_of_one_parameter_are_refused():
    with pytest.raises(ConfigError, match="both 'ddp' and 'ddp_config'"):
        Strategy(ddp="megatron", ddp_config="megatron")


def test_a_misspelled_keyword_is_answered_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"Strategy has no parameter 'sequence_parallelism'; did you mean 'sequence_p"):
        Strategy(sequence_parallelism=True)
    with pytest.raises(UnknownNameError, match="did you mean 'trainer'"):
        train(model=1, trainr=2)


def test_pythons_own_errors_for_calls_stay():
    with pytest.raises(TypeError, match="missing 1 required"):
        Trainer()
    with pytest.raises(TypeError, match="multiple values"):
        Strategy(2, tensor_parallel=3)


@pytest.mark.parametrize("stars", ["*args", "**kwargs"])
def test_a_signature_that_swallows_is_refused(stars):
    scope: dict = {}
    exec(f"def target(a, {stars}): ...\nclass Target:\n    def __init__(self, {stars}): ...", scope)
    for target in (scope["target"], scope["Target"]):
        with pytest.raises(TypeError, match="accept a misspelled name"):
            configurable(target)


def test_an_alias_must_stand_for_something_and_hide_nothing():
    def target(a, b): ...

    with pytest.raises(TypeError, match="no parameter 'c'"):
        configurable(x="c")(target)
    with pytest.raises(TypeError, match="a parameter 'b'"):
        configurable(b="a")(target)


def test_slots_leave_no_room_for_arguments():
    @dataclasses.dataclass(slots=True)
    class Slotted:
        a: int = 1

    with pytest.raises(TypeError, match="__slots__"):
        configurable(Slotted)


def test_aliases_are_inherited_unless_the_signature_changed():
    class Same(Strategy):
        pass

    class Other(Strategy):
        def __init__(self, ddp_config: int = 1) -> None:
            super().__init__()

    assert aliases_of(Same) == {"ddp_config": "ddp"}
    assert aliases_of(Other) == {}
    assert aliases_of(train) == {"strategy": "trainer.strategy"}


def test_aliases_can_be_given_to_a_class_that_was_not_imported_yet():
    scope = {"__name__": "not_there_yet"}
    register_aliases("not_there_yet:Late", second="first")
    exec("class Late:\n    def __init__(self, first=1): ...", scope)
    assert aliases_of(scope["Late"]) == {"second": "first"}


def test_megatrons_ddp_config_has_the_documented_spellings():
    from megatron.core.distributed import DistributedDataParallelConfig

    assert aliases_of(DistributedDataParallelConfig)["overlap_grad_sync"] == "overlap_grad_reduce"
    assert aliases_of(DistributedDataParallelConfig)["overlap_param_sync"] == "overlap_param_gather"


def test_frozen_dataclasses_and_modules_are_captured():
    import torch

    @configurable
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        a: int = 1

    @configurable
    class Module(torch.nn.Module):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(width, width)

    assert captured_arguments(Frozen(a=2)) == {"a": 2} and Frozen(2) == Frozen(a=2)
    assert captured_arguments(Module(width=3)) == {"width": 3}
    assert "width" not in Module().state_dict()


def test_a_change_after_construction_is_noticed():
    made = Callback(every=2)
    assert changed_since_made(made) == []
    made.every = 3
    assert changed_since_made(made) == ["every"]


def test_a_list_that_grew_together_with_its_argument_is_no_change():
    dims = [1]
    made = DDP(dims=dims)
    dims.append(2)
    assert changed_since_made(made) == []
    made.dims = [3]
    assert changed_since_made(made) == ["dims"]


def test_a_changed_function_is_noticed():
    import torch

    made = BigModel()
    made.act = torch.nn.functional.silu
    assert changed_since_made(made) == ["act"]


def test_what_a_framework_attaches_is_no_change():
    made = Callback()
    made.trainer = object()
    made._cache = 1
    assert changed_since_made(made) == []


def test_copies_keep_the_arguments_and_pickles_leave_them_behind():
    made = Callback(every=5)
    assert captured_arguments(copy.deepcopy(made)) == {"every": 5}
    thawed = pickle.loads(pickle.dumps(made))
    assert thawed.every == 5 and captured_arguments(thawed) is None


def test_a_constructor_that_fails_leaves_nothing_behind():
    @configurable
    class Picky:
        def __init__(self, value: int) -> None:
            if value < 0:
                raise ValueError("negative")
            self.value = value

    with pytest.raises(ValueError, match="negative"):
        Picky(-1)
    assert captured_arguments(Picky(1)) == {"value": 1}


def test_inheritance_makes_configurable():
    assert is_configurable(LoudCallback) and is_configurable(train)
    assert not is_configurable(dict) and not is_configurable(len)
