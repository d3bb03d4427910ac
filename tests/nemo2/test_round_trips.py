# SPDX-License-Identifier: Apache-2.0
"""Whatever a writer of nemo2 accepts, its reader reads: random values, NaN, control characters and lone surrogates."""

import json
import math
import random
from dataclasses import asdict
from typing import Any

import pytest
import yaml

from nemo2 import Config
from nemo2.checkpoint.changes import Changes
from nemo2.checkpoint.context import load_context, write_parts
from nemo2.checkpoint.directory import Manifest, finished, publish, read_manifest, temporary_name
from nemo2.checkpoint.lineage import Run, begin, run_of
from nemo2.config.serialize import from_json, to_json
from nemo2.errors import ConfigError
from nemo2.evaluation.answers import Answers
from nemo2.files import parse_json
from nemo2.run_dir.effective import plain
from nemo2.run_dir.faults import FAULT_DIR_VARIABLE, read_faults, record_fault
from nemo2.run_dir.metrics import JSONLLogger
from nemo2.run_dir.records import EVALUATIONS_FILE, add_evaluation, read_metrics, truncate_metrics, write_text
from nemo2.run_dir.run_folder import RunFolder

SEEDS = range(25)
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
    monkeypatch.setattr("nemo2.evaluation.answers.shared", lambda items, answer: answer(items))
    requests = [[text(draw), index] for index in range(4)]
    answers = Answers(tmp_path / "answers.jsonl")
    given = answers.to("loglikelihood", requests, lambda some: [[number(draw), text(draw)] for _ in some])
    again = Answers(tmp_path / "answers.jsonl").to("loglikelihood", requests, lambda some: pytest.fail("not stored"))
    assert same(again, given)
