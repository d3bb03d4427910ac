# SPDX-License-Identifier: Apache-2.0
"""Spellings of ``paths`` and ``split``."""

from pathlib import Path

import pytest
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.utils import get_blend_from_list

from nemo2.base.errors import ConfigError
from nemo2.data.blend import Blend, parse_paths, parse_split


@pytest.mark.parametrize(
    ("paths", "blend"),
    [
        ("a", Blend(("a",))),
        (Path("d/a.bin"), Blend(("d/a",))),
        (["a.idx", "b"], Blend(("a", "b"))),
        ([30, "a", "70", "b"], Blend(("a", "b"), (30.0, 70.0))),
        ((0.5, "a", 0.5, "b"), Blend(("a", "b"), (0.5, 0.5))),
        ([1, "a"], Blend(("a",))),
        (["s3://bucket/a.bin"], Blend(("s3://bucket/a",))),
    ],
)
def test_each_form_is_understood(paths, blend):
    assert parse_paths(paths) == blend


@pytest.mark.parametrize("listed", [["30", "a", "70", "b"], ["a", "b"], ["a", "b", "c"]])
def test_lists_mean_what_they_mean_to_megatron(listed):
    assert parse_paths(listed).for_megatron() == tuple(get_blend_from_list(listed))


def test_home_directories_are_found():
    assert parse_paths("~/x").prefixes == (str(Path.home() / "x"),)


def test_a_dictionary_names_each_split():
    blends = parse_paths({"train": [1, "a", 2, "b"], "validation": "c", "test": []})
    assert blends == {"train": Blend(("a", "b"), (1.0, 2.0)), "validation": Blend(("c",)), "test": None}


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], r"paths=\[\]: must be the path of a dataset"),
        (5, "paths=5: must be the path"),
        (["a", 30], "weights and paths must alternate"),
        ([30, "a", "b"], "weights and paths must alternate"),
        ([30, "a", "b", 70], "weights and paths must alternate"),
        ([30, 70, "a", "b"], "weights and paths must alternate"),
        ([30, "a", 0, "b"], "the weight of b is 0, but a weight must be above 0"),
        ([30, "a", -1, "b"], "the weight of b is -1"),
        ([30, "a", "nan", "b"], "the weight of b is nan"),
        ([float("inf"), "a", 1, "b"], "the weight of a is inf"),
        ([None, "a"], "has None where the path"),
        ([True, "a"], "has True where the path"),
        ([" "], "where the path of a dataset is expected"),
        ({"training": "a"}, "has the key 'training'; did you mean 'train'"),
        ({"train": []}, "dictionary without datasets"),
        ({"train": "a", "validation": [0, "b"]}, r"paths\['validation'\]: the weight of b is 0"),
    ],
)
def test_anything_else_is_refused_in_words(paths, words):
    with pytest.raises(ConfigError, match=words):
        parse_paths(paths)


@pytest.mark.parametrize("split", ["900,50,50", "1", "0.98, 0.02", "1e3,5e-5,0", "0,1,0"])
def test_megatron_reads_the_shares_that_were_written(split):
    written = [float(number) for number in split.split(",")]
    written += [0.0] * (3 - len(written))
    assert parse_and_normalize_split(parse_split(split)) == pytest.approx([n / sum(written) for n in written])


@pytest.mark.parametrize("split", ["0,0,0", "abc", "", "1,2,3,4", "-1,2", "nan", "inf,1", "900;50;50", None])
def test_a_split_that_megatron_would_misread_is_refused(split):
    with pytest.raises(ConfigError, match="split=.* train, validation and test, such as '900,50,50'"):
        parse_split(split)
