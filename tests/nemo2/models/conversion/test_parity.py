# SPDX-License-Identifier: Apache-2.0
"""Every family beside transformers' own model, in both directions and at every layout: docs/hugging_face.md, row by row."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support import hf_parity as parity
from support.hf_models import ROWS
from support.nightly import each_case, requested
from tools import hugging_face

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2, SP": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
}
NAMES = [row.name for row in ROWS]
OF_LAYOUTS = each_case(NAMES, [row.name for row in ROWS if not row.like_another])


def folder_of(root: str, row: Any) -> Path:
    return Path(root) / str(NAMES.index(row.name))


def told_in_one_line(function: Any, *arguments: Any) -> Any:
    """What a function returns, or what it raises: one row's fault isn't the others'."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def both_ways(root: str) -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parity.start()
    return {row.name: told_in_one_line(one_row, root, row) for row in ROWS}


def one_row(root: str, row: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    from nemo2.hugging_face.exporting import export_weights
    from nemo2.models.conversion.families import conversion_of
    from support.released_models import import_release

    folder = folder_of(root, row)
    folder.mkdir(parents=True)
    model = parity.make(row, folder)
    config_json = parity.add_unknown_fields(folder)
    expected = parity.logits_of(model)
    torch.save(expected, folder / "logits.pt")
    released = parity.Released(folder)
    chunk = released.chunk(released.config(mtp_num_layers=None))
    found: dict[str, Any] = {"import": parity.apart(parity.our_logits(chunk), expected)}
    if row.trained:
        found["step"] = one_step(model, chunk, released, row, folder)
    config = released.config()
    checkpoint = import_release(folder, folder / "imported")
    whole = released.chunk(config, checkpoint)
    found["import"] = max(found["import"], parity.apart(parity.our_logits(whole), expected))
    back = export_weights(checkpoint, folder / "back")
    found["config"] = parity.comparable(row.name, config_json, json.loads((back / "config.json").read_text()))
    if conversion_of(config) is released.conversion:
        tensors = load_file(back / "model.safetensors")
    else:  # ChatGLM, which goes out as a GLM
        tensors = parity.taken_apart(released.entries(config), parity.stored_by(whole))
    found["back"] = differing(tensors, released.file)
    found |= exported(row, released, chunk, folder / "exported")
    return found


def differing(tensors: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that aren't bit by bit what the file has."""
    return sorted(
        name
        for name in {*theirs, *tensors}
        if name not in theirs or name not in tensors or not torch.equal(theirs[name], tensors[name])
    )


def exported(row: Any, released: Any, chunk: Any, folder: Path) -> dict[str, Any]:
    """Of other weights in our model: what transformers computes with them, and what we read again."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(9)
    for parameter in chunk.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    stored, entries = parity.stored_by(chunk), released.entries(chunk.config)
    again = parity.whole(entries, parity.taken_apart(entries, stored))
    answer: dict[str, Any] = {"again": sorted(key for key in stored if not torch.equal(stored[key], again[key]))}
    told = released.conversion.hf_config(chunk.config)
    assert json.loads(json.dumps(told)) == told
    if not row.readable:
        return answer
    parity.export(released, chunk, folder)
    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    answer["loading"] = {name: sorted(map(str, what)) for name, what in loading.items() if what}
    answer["export"] = parity.apart(parity.our_logits(chunk), parity.logits_of(parity.plain(model)))
    return answer


def one_step(model: Any, chunk: Any, released: Any, row: Any, folder: Path) -> dict[str, float]:
    """Losses of the first step and gradients, as files: each parameter replaced by its gradient."""
    ids = parity.tokens()
    labels = ids.roll(-1, dims=1)
    positions = torch.arange(ids.size(1)).expand_as(ids)
    loss = chunk(ids, positions, None, labels=labels).mean()
    theirs = torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    theirs.backward()
    weights = [(parameter, parameter.data) for parameter in (*chunk.parameters(), *model.parameters())]
    for parameter, _ in weights:
        assert parameter.grad is not None
        parameter.data = parameter.grad
    parity.write(model, folder / "gradients", row)
    ours = parity.taken_apart(released.entries(chunk.config), parity.stored_by(chunk))
    file = parity.Released(folder / "gradients").file
    for parameter, data in weights:
        parameter.data, parameter.grad = data, None
    worst = max(float((ours[name] - file[name]).norm() / file[name].norm()) for name in file)
    return {
        "loss": float(((loss - theirs).abs() / theirs).detach()),
        "gradients": worst,
        "compared": len(file) - len(ours),
    }


def at_layouts(root: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each named row at each of its layouts how far the logits are from transformers'; None on ranks without any."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for layout, own in LAYOUTS.items():
        started: dict[str, Any] = {}
        rows = [row for row in ROWS if row.name in names and layout in row.layouts]
        for row in sorted(rows, key=lambda row: len(row.with_tp)):
            sizes = {**own, **(row.with_tp if layout.startswith("TP") else {})}
            if sizes != started:
                parity.start(**sizes)
                started = sizes
            found[row.name][layout] = told_in_one_line(at_layout, folder_of(root, row), sizes)
    return found


def at_layout(folder: Path, sizes: dict[str, Any]) -> float | None:
    from megatron.core import parallel_state

    released = parity.Released(folder)
    chunk = released.chunk(released.config(**sizes, parallel_output=False), folder / "imported")
    logits = parity.our_logits(chunk)
    if not parallel_state.is_pipeline_last_stage():
        return None
    return parity.apart(logits, torch.load(folder / "logits.pt"))


def test_the_page_has_these_rows() -> None:
    assert hugging_face.PAGE.read_text() == hugging_face.page(), "run `make fmt`"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def alone(run_on_ranks: Any, root: str) -> dict[str, Any]:
    return run_on_ranks(both_ways, 1, root, timeout=600)[0]


@pytest.fixture(scope="module")
def laid_out(request: pytest.FixtureRequest, run_on_ranks: Any, root: str, alone: Any) -> list[dict[str, Any]]:
    ranks = run_on_ranks(at_layouts, 2, root, requested(request, "name"), timeout=600)
    if (file := os.environ.get(hugging_face.MEASURED_VARIABLE)) is not None:
        found = {name: hugging_face.figures(alone[name], [rank[name] for rank in ranks]) for name in NAMES}
        Path(file).write_text(json.dumps(found, indent=1) + "\n")
    return ranks


@pytest.mark.parametrize("name", NAMES)
def test_imported_weights_compute_what_transformers_computes(alone: Any, name: str) -> None:
    assert isinstance(alone[name], dict), alone[name]
    assert alone[name]["import"] < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_is_read_by_transformers_and_computes_the_same(alone: Any, name: str) -> None:
    found = alone[name]
    assert found.get("loading", {}) == {}
    assert found.get("export", 0.0) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_weights_come_back_bit_by_bit(alone: Any, name: str) -> None:
    assert alone[name]["back"] == []
    assert alone[name]["again"] == []


@pytest.mark.parametrize("name", NAMES)
def test_config_json_comes_out_as_it_went_in(alone: Any, name: str) -> None:
    release, export = alone[name]["config"]
    assert export == release


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.trained])
def test_a_training_step_is_transformers(alone: Any, name: str) -> None:
    step = alone[name]["step"]
    assert step["loss"] < 1e-6
    assert step["gradients"] < 1e-4
    assert step["compared"] == 0


@pytest.mark.parametrize("name", OF_LAYOUTS)
def test_imported_weights_compute_the_same_at_every_layout(laid_out: Any, name: str) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    for layout in row.layouts:
        found = [rank[name][layout] for rank in laid_out]
        assert not any(isinstance(one, str) for one in found), (layout, found)
        assert max(one for one in found if one is not None) < 1e-5, layout
