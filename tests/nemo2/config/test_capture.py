# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest
import torch

from nemo2.base.errors import ConfigError, UnknownNameError
from nemo2.config.capture import (
    aliases_of,
    captured_arguments,
    changed_since_made,
    configurable,
    is_configurable,
    made_at,
    register_aliases,
)
from support.config_samples import DDP, BigModel, Callback, LoudCallback, Strategy, Trainer, train


def test_capturing_imports_neither_torch_nor_fiddle():
    heavy = "{'torch', 'fiddle', 'nemo_run', 'lightning'}"
    code = f"import sys, nemo2.config.capture, nemo2.config; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (Strategy(4, sequence_parallel=True), {"tensor_parallel": 4, "sequence_parallel": True}),
        (DDP(), {}),
        (object(), None),
        (LoudCallback(volume=3, every=2), {"volume": 3, "every": 2}),  # of a subclass without a decorator
        (BigModel(hidden=4), {"hidden": 4}),
        (Strategy(ddp_config="megatron"), {"ddp": "megatron"}),  # by its second spelling
        (DDP(overlap_grad_sync=True), {"overlap_grad_reduce": True}),
    ],
)
def test_an_object_knows_the_arguments_it_was_given_and_only_those(made, arguments):
    assert captured_arguments(made) == arguments


def test_the_line_that_made_an_object_is_known():
    made = Callback()
    line = inspect.currentframe().f_lineno - 1
    assert made_at(made) == (__file__, line)


def test_the_signature_stays_what_it_is():
    assert list(inspect.signature(Strategy).parameters)[0] == "tensor_parallel"
    assert list(inspect.signature(DDP).parameters) == [field.name for field in dataclasses.fields(DDP)]
    assert Strategy.__init__.__annotations__["tensor_parallel"] is int


def target(a, b): ...


@dataclasses.dataclass(slots=True)
class Slotted:
    a: int = 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Strategy(ddp="megatron", ddp_config="megatron"), ConfigError, "both 'ddp' and 'ddp_config'"),
        (
            lambda: Strategy(sequence_parallelism=True),
            TypeError,
            "Strategy has no parameter .*; did you mean 'sequence_p",
        ),
        (lambda: train(model=1, trainr=2), UnknownNameError, "did you mean 'trainer'"),
        (lambda: Trainer(), TypeError, "missing 1 required"),
        (lambda: Strategy(2, tensor_parallel=3), TypeError, "multiple values"),
        (lambda: configurable(x="c")(target), TypeError, "no parameter 'c'"),
        (lambda: configurable(b="a")(target), TypeError, "a parameter 'b'"),
        (lambda: configurable(Slotted), TypeError, "__slots__"),
    ],
)
def test_calls_and_decorations_that_cannot_be_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("stars", ["*args", "**kwargs"])
def test_a_signature_that_swallows_is_refused(stars):
    scope: dict = {}
    exec(f"def target(a, {stars}): ...\nclass Target:\n    def __init__(self, {stars}): ...", scope)
    for target in (scope["target"], scope["Target"]):
        with pytest.raises(TypeError, match="accept a misspelled name"):
            configurable(target)


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


def test_a_change_after_construction_is_noticed_and_what_a_framework_attaches_is_none():
    made, model = Callback(every=2), BigModel()
    made.trainer, made._cache = object(), 1
    assert changed_since_made(made) == changed_since_made(model) == []
    made.every, model.act = 3, torch.nn.functional.silu
    assert changed_since_made(made) == ["every"] and changed_since_made(model) == ["act"]
    strategy = Strategy(ddp=DDP())
    strategy.ddp = DDP()
    assert changed_since_made(strategy) == []
    strategy.ddp = DDP(True)
    assert changed_since_made(strategy) == ["ddp"]


def test_a_list_that_grew_together_with_its_argument_is_no_change():
    dims = [1]
    made = DDP(dims=dims)
    dims.append(2)
    assert changed_since_made(made) == []
    made.dims = [3]
    assert changed_since_made(made) == ["dims"]


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
