# SPDX-License-Identifier: Apache-2.0
import pytest

from nemo2.base.errors import ConfigError, Nemo2Error, UnknownNameError
from nemo2.base.names import ABBREVIATIONS, MAX_NAME_BYTES, did_you_mean, nearest, safe_name
from nemo2.mcore.parallel.layout import LAYOUT_FIELDS

KNOWN = ["tensor_model_parallel_size", "sequence_parallel", "max_steps", "lr", "pipeline_dtype", "dim"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("sequence_parallelism", "sequence_parallel"),
        ("max_step", "max_steps"),
        ("tensor_parallel_size", "tensor_model_parallel_size"),
        ("max-steps", "max_steps"),
        ("max_lr", "lr"),
        ("learning_rate", "lr"),
        ("tmps", "tensor_model_parallel_size"),
        ("tp", "tensor_model_parallel_size"),
        ("TP", "tensor_model_parallel_size"),
        ("sp", "sequence_parallel"),
        ("rank", "dim"),
        ("--form", "--from"),  # two letters may be swapped
        ("zzz", None),
    ],
)
def test_the_nearest_name_comes_first(typed, meant):
    assert (
        next(iter(nearest(typed, ["--force", "--from", "--peft"] if typed.startswith("-") else KNOWN)), None) == meant
    )


def test_what_everybody_calls_a_parallel_size_is_the_short_name_of_the_layout():
    assert LAYOUT_FIELDS.items() <= ABBREVIATIONS.items()


def test_a_hint_ends_the_sentence():
    assert did_you_mean("max_step", KNOWN) == "; did you mean 'max_steps'?"
    assert did_you_mean("bet", ["beta", "betas"]) == "; did you mean 'beta' or 'betas'?"
    assert did_you_mean("zzz", ["a", "b"]) == "; known names: a, b."
    assert did_you_mean("zzz", ["a", "b"], listed=True) == "."
    assert did_you_mean("zzz", []) == "."


@pytest.mark.parametrize(
    "name", ["run", "llama3_8b", "a--val_loss=1.5-step=3", "_x", "7b", "größe", "my_run", "x" * MAX_NAME_BYTES]
)
def test_ordinary_names_are_left_as_they_are(name):
    assert safe_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/x",
        "a/b",
        "a\\b",
        "a\0b",
        "a\nb",
        "x\n",
        "",
        ".",
        "..",
        "-rf",
        "a b",
        "x" * 300,
        "é" * 100,
        None,
    ],
)
def test_names_that_could_leave_their_directory_are_refused(name):
    with pytest.raises(ConfigError, match="is not a valid directory name" if name is not None else "must be a string"):
        safe_name(name)


def test_a_refusal_offers_a_name_that_would_do():
    with pytest.raises(ConfigError, match=r"log.name='../my run'.*for example 'my_run'"):
        safe_name("../my run", field="log.name")


def test_an_unknown_name_is_what_python_would_raise():
    error = UnknownNameError("x")
    assert isinstance(error, AttributeError | TypeError) and isinstance(error, ValueError)
    assert isinstance(error, ConfigError) and isinstance(error, Nemo2Error)
