# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that hold a part of a model: written and read in every form, over weights from elsewhere."""

from pathlib import Path
from typing import Any

import pytest

from support import transformed_runs as runs
from support.nightly import each_case, requested

WRITERS = ("tp2 sp", "pp2 vp2", "fsdp2", "mfsdp", "fsdp1", "pp2")
DAILY = WRITERS[:4]


def of_attention(name: str) -> bool:
    return "self_attention" in name and "layers.3" in name


def written(directory: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Each writer trains over the base, saves what is trained, and goes on; then it goes on from another's."""
    found: dict[str, Any] = {}
    part = {"ckpt_save_part": "trained"}
    for name in names:
        options = runs.LAYOUTS[name] | part
        found[name] = runs.train(directory, name, wrapped=runs.DENSE, save=True, strategy=options)
    for name, other in zip(names, (*names[1:], names[0]), strict=True):
        path = f"{directory}/{other}/step={runs.STEPS}"
        options = runs.LAYOUTS[name] | part
        found[f"{name} after another"] = runs.train(directory, name, wrapped=runs.DENSE, resume=path, strategy=options)
    return found


def alone(directory: str) -> dict[str, Any]:
    from nemo2.checkpoint.directory import read_manifest

    runs.base(directory)
    found: dict[str, Any] = {"whole": runs.train(directory, "whole", wrapped=runs.DENSE, save=True)}
    path = f"{directory}/whole/step={runs.STEPS}"
    found["resumed"] = runs.train(directory, wrapped=runs.DENSE, resume=path)
    named = {"ckpt_save_part": of_attention}
    runs.train(directory, "named", wrapped=runs.DENSE, save=True, strategy=named)
    found["keys"] = keys(f"{directory}/named/step={runs.STEPS}")
    manifest = read_manifest(Path(f"{directory}/named/step={runs.STEPS}"))
    found["rest"] = None if manifest is None else manifest.part_of
    return found


def keys(path: str) -> list[str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    stored = FileSystemReader(f"{path}/weights").read_metadata().state_dict_metadata
    return sorted(key for key in stored if key.startswith("module."))


def refused(directory: str) -> dict[str, str]:
    import shutil

    def told(**options: Any) -> str:
        try:
            runs.train(directory, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    part = {"ckpt_save_part": "trained"}
    path = f"{directory}/{DAILY[1]}/step={runs.STEPS}"
    found = {
        "other": told(wrapped=("layers.0.self_attention.linear_qkv",), resume=path, strategy=part),
        "more": told(wrapped=(*runs.DENSE, "layers.0.self_attention.linear_qkv"), resume=path, strategy=part),
        "no rest": told(wrapped=runs.DENSE, strategy=part, base=False),
    }
    shutil.move(f"{directory}/base-step=1", f"{directory}/moved")
    found["moved"] = told(wrapped=runs.DENSE, resume=path, strategy=part)
    return found


@pytest.fixture(scope="module")
def found(request, run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    directory = str(tmp_path_factory.mktemp("parts"))
    one = run_on_ranks(alone, 1, directory)[0]
    writers = list(dict.fromkeys([*requested(request, "name"), DAILY[1]]))
    two = run_on_ranks(written, 2, directory, writers)[0]
    stored = {name: keys(f"{directory}/{name}/step={runs.STEPS}") for name in writers}
    sizes = {
        name: sum(
            file.stat().st_size for file in Path(f"{directory}/{name}/step={runs.STEPS}/weights").rglob("*.distcp")
        )
        for name in (*writers, "whole")
    }
    return one | two | {"stored": stored, "sizes": sizes, "refused": run_on_ranks(refused, 1, directory)[0]}


@pytest.mark.parametrize("name", each_case(WRITERS, DAILY))
def test_a_part_holds_what_is_trained_by_its_full_name(found, name):
    added = [f"module.decoder.layers.{layer}.self_attention.linear_qkv.{which}" for layer in (2, 3) for which in "ab"]
    assert found["stored"][name] == added
    assert found["sizes"][name] < found["sizes"]["whole"] / 2


@pytest.mark.parametrize("name", each_case(WRITERS, DAILY))
def test_every_form_goes_on_from_a_part_of_another_over_the_base(found, name):
    assert found[f"{name} after another"]["losses"] == pytest.approx(found["resumed"]["losses"], rel=5e-5)


def test_a_part_by_name_holds_parameters_of_single_layers_and_says_where_the_rest_is(found):
    layer = "module.decoder.layers.3.self_attention"
    assert found["keys"] == [
        f"{layer}.linear_proj.weight",
        f"{layer}.linear_qkv.a",
        f"{layer}.linear_qkv.b",
        f"{layer}.linear_qkv.weight",
    ]
    assert found["rest"].endswith("/base-step=1")


def test_what_is_missing_is_said(found):
    told = found["refused"]
    assert "CheckpointError" in told["other"] and "has 4 parameters that this model does not have" in told["other"]
    assert "lacks 2 parameters that model_transform adds: module.decoder.layers.0" in told["more"]
    assert "resume.restore_config.path" in told["moved"] and "the checkpoint with the rest is not at" in told["moved"]
    assert "strategy.ckpt_save_part='trained'" in told["no rest"]


def some_layers(directory: str, names: tuple[str, ...]) -> dict[str, Any]:
    from support.transforms import FreezeBut

    found = {}
    for name in names:
        given: dict[str, Any] = {"transform": FreezeBut("layers.2", "layers.3.mlp"), "base": False}
        found[name] = runs.train(directory, name, save=True, **given)
        path = f"{directory}/{name}/step={runs.STEPS}"
        found[f"{name} on"] = runs.train(directory, name, resume=path, **given)
        found[f"{name} in one go"] = runs.train(directory, name, steps=runs.LAST_STEP, **given)
    return found


def test_a_whole_checkpoint_holds_the_optimizer_of_some_layers_only(run_on_ranks, tmp_path) -> None:
    """Megatron-Core stacks the layers of a state, and refuses a stack that isn't complete."""
    found = run_on_ranks(some_layers, 2, str(tmp_path), ("do", "pp2"))[0]
    changed = found["do"]["changed"]
    assert changed and all("layers.2" in key or "layers.3.mlp" in key for key in changed)
    for name in ("do", "pp2"):
        assert found[f"{name} on"]["losses"] == found[f"{name} in one go"]["losses"][runs.STEPS :]
