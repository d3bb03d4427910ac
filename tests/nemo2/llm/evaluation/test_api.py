# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoint measured on text files, from Python and from the command line."""

from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import ConfigError, DataError
from support import small_runs

TEXTS = {"short.txt": "def main():\n", "long.txt": "for line in sys.stdin: print(line.rstrip()) # ä\n" * 3}


def measured(directory: str) -> dict[str, Any]:
    import contextlib
    import io

    from nemo2 import llm
    from nemo2.cli import main

    data = small_runs.random_bytes()
    model = small_runs.build_llama(vocab_size=None)
    model.tokenizer = data.tokenizer
    small_runs.fit(model, data, max_steps=1, callbacks=[small_runs.keep(f"{directory}/checkpoints")])
    small_runs.release()
    files = [f"{directory}/{name}" for name in TEXTS]
    found = llm.perplexity(directory, files)
    small_runs.release()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["evaluate", directory, *(word for file in files for word in ("--text", file))])
    return {
        "figures": {Path(file).name: (one.num_bytes, one.num_tokens, one.bits_per_byte, one.loss) for file, one in found.items()},
        "code": code,
        "printed": printed.getvalue(),
    }  # fmt: skip


def test_texts_are_measured_by_bytes(run_on_ranks, tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    (found,) = run_on_ranks(measured, 1, str(tmp_path), timeout=180)
    for name, (num_bytes, num_tokens, bits, loss) in found["figures"].items():
        assert num_bytes == num_tokens == len(TEXTS[name].encode())  # a token per byte
        assert bits == pytest.approx(loss / 0.6931471805599453)
        assert 4 < loss < 8  # one step from uniform over some 257 tokens, ln 257 = 5.55
    assert found["code"] == 0
    head, short, long, together = found["printed"].splitlines()[-4:]
    assert head.split() == ["text", "bytes", "tokens", "loss", "perplexity", "bits", "per", "byte"]
    assert short.split()[1:4] == ["12", "12", f"{found['figures']['short.txt'][3]:.4f}"]
    assert together.split()[:2] == ["all", str(sum(len(text.encode()) for text in TEXTS.values()))]


def test_the_command_tells_figures_of_texts_and_tasks_as_json(tmp_path, monkeypatch, command):
    from nemo2.llm.evaluation.perplexity import Perplexity

    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a text")
    figures = {"a.txt": Perplexity(nats=8.0, num_tokens=4, num_bytes=16)}
    results = {"results": {"arc": {"acc,none": 0.5, "acc_stderr,none": "N/A"}}, "config": {"model": object()}}
    monkeypatch.setattr("nemo2.llm.evaluation.api.perplexity", lambda *_, **__: figures)
    monkeypatch.setattr("nemo2.llm.evaluation.api.evaluate", lambda *_, **__: results)
    monkeypatch.setattr("nemo2.llm.evaluation.harness.require_lm_eval", lambda: None)
    told = command("evaluate", tmp_path, "--text", "a.txt", "--tasks", "arc", "--json").json
    assert told["tasks"] == results["results"]
    assert (told["texts"]["a.txt"]["num_bytes"], told["texts"]["a.txt"]["loss"]) == (16, 2.0)
    lines = command("evaluate", tmp_path, "--text", "a.txt", "--tasks", "arc").out.splitlines()
    assert lines[1].split()[:4] == ["a.txt", "16", "4", "2.0000"] and lines[-1].split() == ["arc", "acc", "0.5000"]


def test_files_that_are_no_texts_are_refused_before_a_model_is_loaded(tmp_path):
    from nemo2 import llm

    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "empty.txt").touch()
    for name, words in (
        ("picture.png", "isn't UTF-8 text"),
        ("empty.txt", "is empty"),
        ("none", "can't be read"),
    ):
        with pytest.raises(DataError, match=words):
            llm.perplexity("nowhere", [str(tmp_path / name)])
    with pytest.raises(ConfigError, match="at least one text file"):
        llm.perplexity("nowhere", [])


def test_tasks_without_lm_eval_say_how_to_get_it(monkeypatch):
    import importlib.util

    from nemo2 import llm

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lm-eval"):
        llm.evaluate("nowhere", ["arc_easy"])


def test_tasks_without_a_name_are_refused(tmp_path, command):
    for tasks in ("", ","):
        assert "--tasks" in command("evaluate", tmp_path, "--tasks", tasks, code=2).err
