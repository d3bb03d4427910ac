# SPDX-License-Identifier: Apache-2.0
import pathlib
from datetime import timedelta

import nemo_run as run
import pytest
import torch
from fiddle._src.experimental.serialization import UnserializableValueError
from nemo_run.core.serialization.yaml import YamlSerializer

from support.config_samples import BigModel, Mode, Model, recipe, sent

DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
VALUES = [
    pathlib.Path("/data/x"),
    pathlib.PurePosixPath("a/b"),
    timedelta(days=2, minutes=15, microseconds=7),
    torch.device("cuda", 1),
    Mode.EXACT,
    None,
    b"\x00\xff",
    (1, "two", [3.0, None]),
    {"a": pathlib.Path("b"), "c": [timedelta(1)]},
    slice(1, 2),
    torch.nn.functional.gelu,
    torch.nn.functional.silu,
    torch.nn.functional.softplus,
    torch.tanh,
    torch.sigmoid,
    torch.special.erf,
    Model,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value).partition(" at 0x")[0])
def test_values_arrive_as_they_were(value):
    r = recipe()
    r.options = {"value": value, "list": [value], "tuple": (value,)}
    arrived = sent(r)
    assert arrived == r
    assert type(arrived.options["value"]) is type(value)
    assert arrived.options["list"][0] == value


def test_every_dtype_arrives():
    r = recipe()
    r.options = [getattr(torch, name.removeprefix("torch.")) for name in DTYPES]
    arrived = sent(r).options
    assert len(arrived) >= 12 and all(one is other for one, other in zip(arrived, r.options, strict=True))


@pytest.mark.parametrize("act", [torch.nn.functional.gelu, pathlib.Path("x")])
def test_dtypes_and_paths_inside_plain_nemo_run_configs_arrive(act):
    r = recipe()
    r.model = run.Config(BigModel, dtype=torch.bfloat16, act=act)
    arrived = sent(r)
    assert arrived == r and arrived.model.dtype is torch.bfloat16 and arrived.model.act == act


def test_a_list_used_twice_is_still_one_list():
    shared = [1, 2]
    r = recipe()
    r.options, r.trainer.devices = shared, shared
    arrived = sent(r)
    assert arrived.options is arrived.trainer.devices


def test_a_foreign_recipe_is_not_promised_what_its_reader_could_not_read():
    with pytest.raises(UnserializableValueError, match="only a nemo2.config.Partial"):
        sent(run.Partial(recipe_writer, path=pathlib.Path("x")))


def recipe_writer(path): ...


def test_nemo_runs_readable_copy_is_plain_yaml():
    r = recipe()
    r.options = {"root": pathlib.Path("/x"), "dtype": torch.bfloat16, "act": torch.nn.functional.gelu}
    text = YamlSerializer().serialize(r)
    assert (
        "_target_: support.config_samples.Strategy" in text and "dtype: torch.bfloat16" in text and "root: /x" in text
    )
