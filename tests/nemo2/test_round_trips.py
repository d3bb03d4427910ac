# SPDX-License-Identifier: Apache-2.0
"""Whatever a writer of nemo2 accepts, its reader reads: random values, NaN, control characters and lone surrogates."""

import json
import math
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nemo2 import Config
from nemo2.base.errors import ConfigError
from nemo2.base.files import parse_json
from nemo2.checkpoint.changes import Changes
from nemo2.checkpoint.context import load_context, write_parts
from nemo2.checkpoint.directory import Manifest, finished, publish, read_manifest, temporary_name
from nemo2.checkpoint.lineage import Run, begin, run_of
from nemo2.config.reading import from_json
from nemo2.config.serialize import to_json
from nemo2.data.finetuning.base import Samples, write_samples
from nemo2.data.finetuning.encode import Report
from nemo2.data.finetuning.sample import Sample
from nemo2.data.index_cache import read_array, write_array
from nemo2.data.input_changes import compare
from nemo2.data.inputs import Input
from nemo2.hugging_face.adapter_files import read_adapters, read_settings
from nemo2.hugging_face.adapters import _adapter_config, _Released, _tensors, _write_files
from nemo2.llm.evaluation.answers import Answers
from nemo2.models.peft.dora import DoRA
from nemo2.models.peft.lora import LoRA
from nemo2.training.run_dir.effective import plain
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE, read_faults, record_fault
from nemo2.training.run_dir.metrics import JSONLLogger
from nemo2.training.run_dir.records import EVALUATIONS_FILE, add_evaluation, read_metrics, truncate_metrics, write_text
from nemo2.training.run_dir.run_folder import RunFolder
from support.nightly import each_case

SEEDS = each_case(range(25), range(5))
_NUMBERS = (0.0, -0.0, 1.5, 1e-308, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf, 1.0, 2.0**53)
_WHOLE = (0, 1, -1, 2**31, 2**64 + 1, -(10**300))
_CHARACTERS = (
    "aZ0 _-/\\.\"'{}[]:,=#%&*!|>\n\r\t\0\x07\x1b\x7f\x85\u2028\u2029\ufeff\u00e4\u4e16\U0001f600\ud83d\udc80\uffff"
)
_NAMES = ("nonfinite", "step", "null", "NaN", "true", "", "1", "val_loss", "x in s", "type", "metadata", "__fdl__")


def text(random: random.Random) -> str:
    return random.choice((*_NAMES, "".join(random.choices(_CHARACTERS, k=random.randrange(12)))))


def number(random: random.Random) -> float:
    return random.choice((*_NUMBERS, random.uniform(-1e9, 1e9), random.random()))


def value(random: random.Random, depth: int = 3) -> Any:
    kinds = [None, True, False, number(random), random.choice(_WHOLE), text(random)]
    if depth:
        kinds.append([value(random, depth - 1) for _ in range(random.randrange(4))])
        kinds.append(mapping(random, depth - 1))
    return random.choice(kinds)


def mapping(random: random.Random, depth: int = 2) -> dict[str, Any]:
    return {text(random): value(random, depth) for _ in range(random.randrange(5))}


def numbers(random: random.Random) -> dict[str, float]:
    return {text(random): number(random) for _ in range(random.randrange(6))}


def same(one: Any, other: Any) -> bool:
    """Equality in which NaN equals NaN, and 1 neither True nor 1.0. The order of names doesn't count."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_json_that_python_writes_is_read(seed):
    written = value(random.Random(seed), 5)
    assert same(parse_json(json.dumps(written)), written)
    # Another library may repeat a name; the same value is no contradiction.
    item = json.dumps(written)
    assert same(parse_json(f'{{"a": {item}, "b": 1, "a": {item}}}'), {"a": written, "b": 1})


@pytest.mark.parametrize("pair", [("1", "2"), ("1", "true"), ("NaN", "null"), ("[NaN]", "[Infinity]"), ("0.0", "-0.0")])
def test_a_name_with_two_values_is_refused(pair):
    with pytest.raises(ValueError, match="'a' stands for two values"):
        parse_json('{{"a": {}, "a": {}}}'.format(*pair))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_manifest(tmp_path, seed):
    draw = random.Random(seed)
    run = Run(id=text(draw), lineage=tuple(text(draw) for _ in range(3)))
    manifest = Manifest(
        step=abs(draw.choice(_WHOLE)),
        consumed_samples=draw.choice(_WHOLE),
        layout=mapping(draw),
        metrics=numbers(draw),
        settings=mapping(draw),
        versions={text(draw): text(draw)},
        part_of=text(draw),
        **run.signature(),
    )
    temporary = temporary_name(tmp_path / "step")
    names = {f"file{index}-{text(draw)}".replace("/", "_").replace("\0", "_") for index in range(3)}
    temporary.mkdir()
    for name in names:
        # A name on a disk is bytes; Python shows undecodable ones as lone surrogates of this range only.
        (temporary / "".join(one for one in name if not "\ud800" <= one <= "\udfff")).write_text("x")
    publish(temporary, tmp_path / "step", manifest)
    loaded = read_manifest(tmp_path / "step")
    assert loaded is not None and [one for _, one in finished(tmp_path)]
    written, read = asdict(manifest), asdict(loaded)
    assert read.pop("digest") and not written.pop("digest")
    assert same(read, {name: written[name] for name in read})


@pytest.mark.parametrize("seed", SEEDS)
def test_metrics_and_evaluations(tmp_path, seed):
    draw = random.Random(seed)
    log, written = JSONLLogger(str(tmp_path)), []
    for step in range(8):
        metrics = numbers(draw) | {"reduced_train_loss": number(draw)}
        log.log_metrics(metrics, step=step)
        renamed = {name.removesuffix(" in s"): one for name, one in metrics.items() if name != "step"}
        written.append({"step": step} | renamed)
    log.finalize("success")
    assert same(read_metrics(tmp_path), written)
    assert truncate_metrics(tmp_path, finished_steps=5) == 3
    assert same(read_metrics(tmp_path), written[:5])
    figures = {name: one for name, one in numbers(draw).items() if name != "step"}
    add_evaluation(tmp_path, step=3, checkpoint="a", figures=figures)
    assert same(read_metrics(tmp_path / EVALUATIONS_FILE), [{"step": 3, "checkpoint": "a"} | figures])
    for line in (tmp_path / EVALUATIONS_FILE).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # other programs' readers of JSON accept no NaN


def test_a_metric_named_nonfinite_of_an_earlier_version(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "nonfinite": 3.5}\n{"step": 1, "nonfinite": {"x": "nan"}}\n')
    first, second = read_metrics(tmp_path)
    assert first["nonfinite"] == 3.5 and math.isnan(second["x"])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_recipe_and_a_context(tmp_path, seed):
    from nemo2.data.mock import MockDataModule

    draw = random.Random(seed)
    config = Config(MockDataModule, seq_length=draw.choice(_WHOLE), seed=value(draw), tokenizer=mapping(draw))
    try:
        written = to_json(config)
    except ConfigError:
        return
    loaded = from_json(written)
    assert same(loaded.tokenizer, config.tokenizer) and same(loaded.seed, config.seed)
    write_parts(tmp_path, {"data": config})
    if (tmp_path / "context" / "data.json").exists():
        assert same(load_context(tmp_path, "data", build=False).tokenizer, config.tokenizer)


@pytest.mark.parametrize("seed", SEEDS)
def test_effective_configurations_and_changes(tmp_path, seed):
    draw = random.Random(seed)
    config = mapping(draw, 3)
    sections = {"model": plain(config)}
    assert json.dumps(config).count("\\ud") or same(sections["model"], config)  # YAML has no lone surrogates
    write_text(tmp_path / "effective_config.yaml", yaml.safe_dump(sections, sort_keys=False, width=120))
    assert same(RunFolder(tmp_path).effective, sections)
    changes = Changes(harmless=[text(draw)], result=[text(draw)])
    write_text(tmp_path / "changes.json", json.dumps(asdict(changes)))
    assert Changes(**parse_json((tmp_path / "changes.json").read_bytes())) == changes


@pytest.mark.parametrize("seed", SEEDS)
def test_records_of_runs_faults_and_answers(tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    run = begin(tmp_path, None)
    assert run_of(tmp_path) == run
    monkeypatch.setenv(FAULT_DIR_VARIABLE, str(tmp_path / "faults"))
    message = text(draw)
    record_fault(RuntimeError(f"x{message}"), step=3)
    (fault,) = read_faults(tmp_path / "faults")
    assert fault.message.startswith("x")
    monkeypatch.setattr("nemo2.llm.evaluation.answers.shared", lambda items, answer: answer(items))
    requests = [[text(draw), index] for index in range(4)]
    answers = Answers(tmp_path / "answers.jsonl")
    given = answers.to("loglikelihood", requests, lambda some: [[number(draw), text(draw)] for _ in some])
    again = Answers(tmp_path / "answers.jsonl").to("loglikelihood", requests, lambda some: pytest.fail("not stored"))
    assert same(again, given)


@pytest.mark.parametrize("seed", SEEDS)
def test_index_caches(tmp_path, seed):
    draw = random.Random(seed)
    kind = draw.choice(["<i4", ">i8", "u2", "f4", "f8", "?", "<f2"])
    shape = tuple(draw.randrange(4) for _ in range(draw.randrange(4)))
    array = np.frombuffer(draw.randbytes(8 * math.prod(shape)), "u8").reshape(shape).astype(kind)
    if array.dtype.kind == "f" and array.size:
        array.flat[0] = draw.choice((math.nan, math.inf, -0.0))
    array = draw.choice((array, array.T, array[::-1] if shape else array))
    write_array(tmp_path / "a.npy", array)
    for by_hash in (True, False):
        loaded = read_array(tmp_path / "a.npy", by_hash=by_hash)
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        assert loaded.tobytes() == np.ascontiguousarray(array).reshape(shape).tobytes()


@pytest.mark.parametrize("seed", SEEDS)
def test_stored_samples(tmp_path, seed):
    draw = random.Random(seed)
    lengths = [draw.randrange(6) for _ in range(draw.randrange(5))]
    samples = [
        Sample([draw.choice((0, 1, 2**31 - 1)) for _ in range(length)], [draw.random() < 0.5 for _ in range(length)])
        for length in lengths
    ]
    report = Report(records=len(samples) + 1, samples=len(samples))
    report.note(text(draw), text(draw), text(draw))
    write_samples(tmp_path, "samples", iter(samples), report)
    loaded = Samples(tmp_path, "samples")
    assert [(one.ids, one.trained) for one in map(loaded.__getitem__, range(len(loaded)))] == [
        (one.ids, one.trained) for one in samples
    ]
    assert loaded.report == report and list(loaded.lengths) == lengths


@pytest.mark.parametrize("seed", SEEDS)
def test_adapters(tmp_path, seed):
    draw = random.Random(seed)
    alpha = draw.choice((1, 32, 0.5, number(draw) % 100 or 1.0))
    alpha = alpha if math.isfinite(alpha) else 16
    method = draw.choice((LoRA, DoRA))(dim=draw.choice((1, 2, 8)), alpha=alpha, dropout=draw.choice((0, 0.0, 0.1)))
    modules = {}
    for layer in (1, 11, 111):
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            module = _Released(3)
            for _ in range(draw.randrange(1, 3)):
                module.rows_of(torch.randn(method.dim, 4)).copy_(torch.randn(3, method.dim))
            if isinstance(method, DoRA):
                module.lengths_like(torch.ones(3)).copy_(torch.rand(3))
            modules[f"model.layers.{layer}.{name}"] = module
    _write_files(
        tmp_path, dict(_tensors(modules)), _adapter_config(modules, [], method, draw.choice(("", "org/base-1.5")))
    )
    adapters, whole = read_adapters(tmp_path, read_settings(tmp_path))
    assert adapters.keys() == modules.keys() and not whole
    for name, adapter in adapters.items():
        assert adapter.scale == pytest.approx(method.alpha / method.dim)
        product = sum(second @ first for first, second in zip(modules[name].firsts, modules[name].seconds, strict=True))
        assert torch.allclose(adapter.second @ adapter.first, product, atol=1e-5)
        lengths = modules[name].lengths
        assert (adapter.lengths is None) == (lengths is None) and (
            lengths is None or torch.equal(adapter.lengths, lengths)
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_records_of_inputs(tmp_path, seed):
    draw = random.Random(seed)
    item = Input(
        path=text(draw),
        size=draw.choice((None, 0, 2**64 + 1)),
        modified=draw.choice((None, -1, 2**63)),
        sha256=draw.choice((None, "ab")),
    )
    stored = parse_json(json.dumps({item.path: item.record()}))[item.path]
    compared = compare(stored, item)
    # A source without size and hash can't be compared.
    assert (compared.change is None) == (item.size is not None or item.sha256 is not None)
    assert not compared.proven
