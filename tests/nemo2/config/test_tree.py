# SPDX-License-Identifier: Apache-2.0
import copy
import inspect
import pickle
import threading
from pathlib import Path

import fiddle as fdl
import nemo_run as run
import pytest
from fiddle import diffing

from nemo2.base.errors import ConfigError, UnknownNameError, UnsetFieldError
from nemo2.config import Config, Partial, select, who_set
from nemo2.config.located import recorded_at
from support.config_samples import (
    DDP,
    BigModel,
    Callback,
    LoudCallback,
    Model,
    Options,
    Strategy,
    Trainer,
    recipe,
    sent,
    train,
)


def test_an_alias_is_the_value_it_stands_for():
    r = recipe()
    assert r.strategy is r.trainer.strategy
    assert r.strategy.ddp_config is r.strategy.ddp
    r.strategy.ddp_config.overlap_grad_sync = True
    assert r.trainer.strategy.ddp.overlap_grad_reduce is True
    r.strategy = Config(Strategy, tensor_parallel=8)
    assert r.trainer.strategy.tensor_parallel == 8
    del r.strategy.tensor_parallel
    assert r.strategy.tensor_parallel == 1


def test_aliases_work_in_constructors_and_unset_ones_read_as_the_effective_default():
    assert Config(Strategy, ddp_config="megatron").ddp == "megatron"
    r = Partial(train, trainer=Config(Trainer), strategy=Config(Strategy, tensor_parallel=4))
    assert r.trainer.strategy.tensor_parallel == 4
    assert Config(DDP).overlap_grad_sync is Config(DDP).overlap_grad_reduce is False


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda c: c.clone(), sent, lambda c: pickle.loads(pickle.dumps(c))])
def test_aliases_and_values_survive_copies(carry):
    r = recipe()
    r.strategy.ddp_config.overlap_grad_sync = True
    carried = carry(r)
    assert carried == r
    assert carried.strategy.ddp_config.overlap_grad_sync is True
    carried.strategy.ddp_config.overlap_grad_sync = False
    assert carried != r and r.strategy.ddp.overlap_grad_reduce is True
    assert type(carried) is Partial and type(carried.strategy) is Config


def test_the_same_change_by_either_name_is_no_difference():
    one, other = recipe(), recipe()
    one.strategy.ddp_config.overlap_grad_sync = True
    other.trainer.strategy.ddp.overlap_grad_reduce = True
    assert one == other
    assert not diffing.build_diff(one, other).changes


def test_a_shared_config_stays_shared():
    shared = Config(Callback, every=5)
    r = recipe()
    r.trainer.callbacks = [shared, shared]
    for carried in (r.clone(), sent(r)):
        assert carried.trainer.callbacks[0] is carried.trainer.callbacks[1]
    built = fdl.build(r)()[1]
    assert built.callbacks[0] is built.callbacks[1]


class WithMethod:
    def fit(self): ...


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda r: setattr(r.strategy, "sequence_parallelism", True), UnknownNameError, "mean 'sequence_parallel'"),
        (lambda r: r.strtegy, UnknownNameError, "did you mean 'strategy'"),
        (
            lambda r: Config(Strategy, tensor_paralel=1),
            UnknownNameError,
            "Strategy has no parameter 'tensor_paralel'; did",
        ),
        (lambda r: Partial(train, modl=1), UnknownNameError, "did you mean 'model'"),
        (
            lambda r: setattr(r.model, "hiden", 3),
            UnknownNameError,
            "BigModel has no parameter 'hiden'; did you mean 'hid",
        ),
        (lambda r: delattr(r.model, "hidden"), AttributeError, "no value set for 'hidden'"),
        (
            lambda r: setattr(Partial(train), "strategy", Config(Strategy)),
            AttributeError,
            "'strategy' of train stands for 'trainer.strategy', but 'trainer' is not set",
        ),
        (lambda r: Config(Trainer).strategy, UnsetFieldError, "'strategy' of Trainer is required but not set yet"),
        (lambda r: Config(WithMethod).fit(), AttributeError, "Build the object first"),
        (lambda r: Config(Strategy, ddp="megatron", ddp_config="megatron"), ConfigError, "both 'ddp' and 'ddp_config'"),
    ],
)
def test_a_mistake_is_an_error_where_it_is_made(write, error, message):
    with pytest.raises(error, match=message):
        write(recipe())
    assert not hasattr(Config(Trainer), "strategy") and issubclass(UnknownNameError, ConfigError)


def test_open_signatures_and_builtins_take_any_keyword_and_are_no_such_value():
    def open_ended(a=1, **kwargs):
        return a, kwargs

    assert fdl.build(Config(open_ended, b=2)) == (1, {"b": 2})
    assert fdl.build(Config(dict, a=1)) == {"a": 1}
    assert not isinstance(Config(dict, a=1), dict) and not isinstance(Config(str), str)


def test_a_config_answers_isinstance_as_its_target_would():
    config = Config(LoudCallback)
    assert isinstance(config, LoudCallback) and isinstance(config, Callback) and not isinstance(config, Trainer)
    assert isinstance(config, fdl.Config) and isinstance(config, run.Config) and isinstance(config, Config)
    assert isinstance(recipe(), run.Partial) and isinstance(recipe(), fdl.Partial)
    assert not isinstance(Partial(Callback), Callback)
    assert type(config) is Config


def test_one_expression_filters_configs_and_live_objects():
    callbacks = [Config(Callback), Callback(), Config(Trainer)]
    assert [item for item in callbacks if not isinstance(item, Callback)] == [callbacks[2]]


def test_the_default_of_a_factory_can_be_read_and_edited():
    config = Config(Options)
    assert config.extra == {} and config.ddp.overlap_grad_reduce is False
    config.extra["a"] = 1
    config.ddp.dims.append(4)
    built = fdl.build(config)
    assert built.extra == {"a": 1} and built.ddp.dims == [4]


def test_reading_a_default_changes_nothing():
    read, untouched = recipe(), recipe()
    _ = read.options.ddp.dims, read.options.extra, read.options.ddp.bucket_size
    assert read == untouched
    assert "ddp" not in str(read.options) and fdl.ordered_arguments(read.options) == {}
    assert read.options.ddp is read.options.ddp


def test_a_default_object_in_a_signature_is_never_edited_itself():
    default = DDP()

    def target(ddp: DDP = default, items: list = [1]):  # noqa: B006
        return ddp, items

    config = Config(target)
    config.ddp.overlap_grad_reduce = True
    config.items.append(2)
    ddp, items = fdl.build(config)
    assert ddp.overlap_grad_reduce and items == [1, 2]
    assert default.overlap_grad_reduce is False and fdl.build(Config(target)) == (default, [1])


def test_history_names_the_line_of_the_user():
    r = recipe()
    r.strategy.ddp_config.overlap_grad_sync = True
    line = inspect.currentframe().f_lineno - 1
    assert who_set(r.strategy.ddp, "overlap_grad_sync") == [(__file__, line, True)]
    (file, _, value), *_ = who_set(r, "strategy")
    assert file.endswith("config_samples.py") and value is r.strategy
    assert who_set(r.model, "hidden") == []


def test_history_keeps_what_was_replaced():
    config = Config(Callback, every=1)
    config.every = 2
    assert [value for _, _, value in who_set(config, "every")] == [1, 2]
    config = Config(Options)
    config.extra["a"] = 1
    assert [(file, value) for file, _, value in who_set(config, "extra")] == [(__file__, {"a": 1})]


def test_nemo_runs_helpers_work():
    r = recipe()
    r.broadcast(tensor_parallel=4)
    assert r.strategy.tensor_parallel == 4 and who_set(r.strategy, "tensor_parallel")[-1][0] == __file__
    r.walk(tensor_parallel=lambda config: config.tensor_parallel * 2)
    assert r.strategy.tensor_parallel == 8
    assert "tensor_parallel" in r.diff(recipe()).source
    assert "BigModel" in r.visualize().source


def test_select_finds_configs_of_a_class_in_lists_too():
    r = recipe(LoudCallback(volume=2))
    nodes = select(r, Callback)
    assert [node.__fn_or_cls__ for node in nodes] == [Callback, LoudCallback]
    for node in nodes:
        node.every = 7
    assert [item.every for item in fdl.build(r)()[1].callbacks] == [7, 7]
    assert select(r, train) == [r] and select(r, Model) == [r.model]


def test_plain_nemo_run_and_fiddle_configs_keep_working():
    r = recipe(run.Config(Callback, every=4), fdl.Config(Callback, every=5))
    carried = sent(r)
    assert carried == r
    assert [item.every for item in fdl.build(carried)()[1].callbacks] == [3, 4, 5]


def test_fiddle_can_write_the_recipe_as_code():
    from fiddle.codegen.codegen import codegen_dot_syntax

    scope: dict = {}
    exec("\n".join(codegen_dot_syntax(recipe()).lines()), scope)
    assert scope["build_config"]() == recipe()


def test_casting_to_nemo_runs_own_classes_is_supported(caplog):
    cast = fdl.cast(run.Partial, recipe())
    assert type(cast) is run.Partial and "not been marked" not in caplog.text
    assert fdl.build(cast)()[0].layers == 32


def test_a_part_that_was_read_from_a_recipe_is_copied_without_the_recipe():
    r = recipe()
    part = r.trainer
    copied = copy.deepcopy(part)
    copied.callbacks = []
    assert copied != part and r.trainer is part


def test_a_failing_constructor_names_the_path():
    with pytest.raises(TypeError, match=r"trainer\.callbacks\[1\]"):
        fdl.build(recipe(Config(len)))


def test_what_a_config_sets_is_known_on_what_it_builds():
    from nemo2.config.requested import explicit_fields

    assert explicit_fields(fdl.build(Config(Options, share=0.5))) == {"share"}
    assert explicit_fields(fdl.build(Config(BigModel, layers=32))) == {"layers"}


def test_threads_that_record_at_other_places_dont_leave_them_behind():
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with recorded_at("elsewhere.py", 1):
            inside.set()
            over.wait(30)

    thread = threading.Thread(target=other)
    with recorded_at("here.py", 2):
        thread.start()
        inside.wait(30)
        config = Config(Strategy, tensor_parallel=2)
    over.set()
    thread.join()
    config.tensor_parallel = 4
    files = [Path(entry.location.filename).name for entry in config.__argument_history__["tensor_parallel"]]
    assert files == ["here.py", "test_tree.py"]


def test_names_are_compared_only_where_the_error_is_read(monkeypatch):
    """Rules ask a recipe for hundreds of names that it doesn't have: half a second of each check went into unread sentences."""
    compared = []
    monkeypatch.setattr("nemo2.config.capture.did_you_mean", lambda name, known: compared.append(name) or "; or else.")
    model = Config(BigModel)
    assert not hasattr(model, "hiden") and getattr(model, "hiden", 3) == 3 and compared == []
    with pytest.raises(UnknownNameError) as caught:
        model.hiden = 3
    assert str(pickle.loads(pickle.dumps(caught.value))) == "BigModel has no parameter 'hiden'; or else."
    assert compared == ["hiden"]
