# SPDX-License-Identifier: Apache-2.0
"""A recipe drawn: every config is a box, every value is there, and nothing overlaps."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.config import Config
from nemo2.config.show import Branch, flatten, tree
from nemo2.config.walk import iterate_nodes
from nemo2.report.pictures.recipe_tree import draw, is_box, rows_of, text_of, write_picture


def recipe() -> Any:
    return recipes.get("deepseek_v3").pretrain_recipe(performance_mode=True)


def all_boxes(box: Branch) -> list[Branch]:
    return [box, *(below for _, one in rows_of(box) if is_box(one) for below in all_boxes(one))]


def by_class(box: Branch) -> dict[str, dict[str, Branch]]:
    """The rows of each box by the name of its class."""
    return {one.value.__fn_or_cls__.__name__: dict(rows_of(one)) for one in all_boxes(box)}


def rectangles(svg: str) -> list[tuple[float, float, float, float]]:
    found = re.findall(r'<rect class="card edge" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
    return [tuple(float(number) for number in one) for one in found]  # pyright: ignore[reportReturnType]


def test_there_is_a_box_for_each_config_and_a_row_for_each_value():
    made = recipe()
    found = all_boxes(tree(made))
    assert len(found) == len(list(iterate_nodes(made)))
    names = {path.rpartition(".")[2] for path in flatten(made) if not path.endswith("_target_")}
    labels = {label for box in found for label, _ in rows_of(box)}
    assert {re.sub(r"\[\d+\]$", "", name) for name in names} <= {re.sub(r"\[\d+\]$", "", label) for label in labels}
    rows = by_class(tree(made))["MegatronStrategy"]
    assert text_of(rows["tensor_model_parallel_size"]) == "2" and is_box(rows["ddp"])


def test_defaults_are_drawn_when_asked_for_and_told_apart():
    plain, whole = by_class(tree(recipe())), by_class(tree(recipe(), defaults=True))
    told = {
        label for name, rows in plain.items() if name != "DeepSeekV3Config" for label in rows if rows[label].default
    }
    assert told == set()
    assert whole["Trainer"]["max_steps"].default is False and whole["Trainer"]["benchmark"].default is True


def test_a_models_sizes_are_drawn_also_where_its_class_sets_them():
    made = recipe()
    made.model.config.num_layers = 7
    rows = by_class(tree(made))["DeepSeekV3Config"]
    told = {label: (text_of(one), one.default) for label, one in rows.items()}
    assert told["hidden_size"] == ("7168", True) and told["num_moe_experts"] == ("256", True)
    assert told["num_layers"] == ("7", False)
    names = by_class(tree(recipes.get("llama3_8b").pretrain_recipe()))["Llama3Config8B"].keys()
    assert {"num_layers", "ffn_hidden_size"} <= names and not [name for name in names if name.startswith("moe_")]
    assert rows.keys() & {"rotary_base", "layernorm_epsilon"} == set()


def test_a_fraction_is_drawn_without_what_rounding_left():
    texts = {label: text_of(one) for rows in by_class(tree(recipe())).values() for label, one in rows.items()}
    assert all(len(texts[name]) < 10 for name in ("lr", "min_lr", "adam_eps"))


def test_a_config_in_two_places_is_drawn_once():
    made = recipe()
    made.resume = made.log
    [resume] = [one for label, one in rows_of(tree(made)) if label == "resume"]
    assert text_of(resume) == "same as log" and not is_box(resume)


@pytest.mark.parametrize("defaults", [False, True])
def test_boxes_do_not_overlap_and_lie_on_the_canvas(defaults):
    for name in ("llama_tiny", "deepseek_v3", "nemotronh_8b"):
        canvas = draw(tree(recipes.get(name).pretrain_recipe(), defaults=defaults), name)
        found = rectangles(canvas.render())
        assert len(found) > 10
        for index, (x, y, width, height) in enumerate(found):
            assert x >= 0 and y >= 0 and x + width <= canvas.width and y + height <= canvas.height
            for x2, y2, width2, height2 in found[index + 1 :]:
                apart = x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y
                assert apart, (name, (x, y, width, height), (x2, y2, width2, height2))


def test_the_picture_is_well_formed_whatever_the_values_say(tmp_path):
    made = recipe()
    made.log.name = '<&">' + "x" * 200
    text = write_picture(made, tmp_path / "a.svg", title="a < b").read_text()
    root = ElementTree.fromstring(text)
    said = "".join(root.itertext())
    assert "DeepSeekV3Config" in said and repr('<&">' + "x" * 200) in said and "…" in said
    assert "DeepSeekV3Config" in write_picture(made, tmp_path / "a.html", title="a < b").read_text()


def test_a_picture_in_another_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the suffix of a picture must be one of .svg, .html"):
        write_picture(recipe(), tmp_path / "a.png", title="t")
    assert list(tmp_path.iterdir()) == []


def test_show_draws_the_recipe_with_its_changes(tmp_path, command):
    file = tmp_path / "pictures" / "tree.svg"
    assert command("show llama_tiny trainer.max_steps=77 --output", file).out == f"{file}\n"
    assert ">77<" in file.read_text()


def test_a_config_of_nothing_is_one_box():
    from nemo2.callbacks import TimingCallback

    assert len(rectangles(draw(tree(Config(TimingCallback)), "t").render())) == 1
