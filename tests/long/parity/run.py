# SPDX-License-Identifier: Apache-2.0
"""Runs rows and stores each row's results in a file. A restart continues with the missing rows.

Two rows run at once, because the ranks of one row often wait for messages and leave the processors idle.
"""

import dataclasses
import fcntl
import hashlib
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support import ranks
from tests.long.parity import measure, models, verdict
from tests.long.parity.layouts import Row

Report = dict[str, Any]
Runner = Callable[..., list[Any]]
"""``runner(function, world_size, *arguments)``: what each rank returned. `support.ranks.run`, or a test's own."""


def prepare() -> None:
    """Let ranks start with the common modules already imported."""
    ranks.prepare("support.quiet", "nemo2.models.deepseek", "nemo2.models.gpt3", "nemo2.models.mixtral")


def run_rows(
    rows: list[Row], folder: Path, *, again: bool = False, timeout: float = 300.0, at_once: int = 2
) -> list[Report]:
    """Every row's report, in order; a line for each as soon as it is done. One that ``folder`` has already is not run anew
    unless it failed, or ``again``."""
    reports: dict[str, Report] = {}

    def done(report: Report) -> None:
        reports[report["name"]] = report
        print(f"[{len(reports):3}/{len(rows)}] {line(report)}", flush=True)

    left = []
    for row in rows:
        report = None if again else _kept(_path(folder, row), row)
        if report is None or report["verdict"].startswith("fails"):
            left.append(row)
        else:
            done(report)
    if left:
        with ThreadPoolExecutor(at_once) as workers:  # which wait for ranks
            for finished in as_completed([workers.submit(_run_and_keep, row, folder, timeout) for row in left]):
                done(finished.result())
    return [reports[row.name] for row in rows]


def _run_and_keep(row: Row, folder: Path, timeout: float) -> Report:
    def runner(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        return ranks.run(function, world, *arguments, timeout=timeout, quiet=True)

    report = run_row(row, folder, runner)
    path = _path(folder, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _path(folder: Path, row: Row) -> Path:
    return folder / f"{slug(row.name)}.json"


def run_row(row: Row, folder: Path, runner: Runner) -> Report:
    """Run the reference on one process, unless it has run, and then the row's ranks. An error of the row is returned,
    not raised."""
    started, cpu = time.monotonic(), ranks.cpu_seconds()
    report: Report = {
        "name": row.name,
        "model": row.run.model,
        "layout": row.layout,
        "ranks": row.ranks,
        "precision": row.run.precision,
        "megatron_core": version("megatron-core"),
        "fingerprint": fingerprint(row),
    }
    try:
        reference = reference_of(row, folder, runner)
        answer = runner(measure.layout, row.ranks, row.run, str(_reference_folder(row, folder)))[0]
        found = verdict.differences(answer, reference)
        report |= found | {"bounds": reference["bounds"], "parameters": len(answer["errors"])}
        if "fp32_losses" in reference:
            losses = {"of_layout": answer["losses"], "of_one_process": reference["losses"]}
            report["from_fp32"] = {
                whose: verdict.largest(these, reference["fp32_losses"]) for whose, these in losses.items()
            }
        exceeded = verdict.broken(found, reference["bounds"])
        report["verdict"] = f"fails: {', '.join(exceeded)}" if exceeded else "holds"
        if row.refused:
            report["verdict"] = "fails: not refused"
    except Exception as error:  # whatever it is belongs to this row; the others still run
        text = str(error)
        refused = row.refused is not None and "ConfigError" in text and row.refused in text
        report |= {"verdict": "refused" if refused else "fails: error", "error": _last_line(text)}
        if not refused:
            report["trace"] = text
    return report | {
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(ranks.cpu_seconds() - cpu, 1),
    }


def reference_of(row: Row, folder: Path, runner: Runner) -> Report:
    """The run of one process from the weights it leaves in the folder, and the bounds for those who start from them."""
    home = _reference_folder(row, folder)
    run = _reference_run(row)
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever needs it at the same time waits
        stored = _kept(home / "reference.json", run)
        return stored if stored is not None else _make_reference(run, home, runner)


def _make_reference(run: measure.Run, home: Path, runner: Runner) -> Report:
    report = runner(measure.reference, 1, run, str(home))[0]
    weak = [norm for norm in report["grad_norms"] if norm <= models.CLIP]
    assert not weak, f"clipping is not active where the gradient norm is {weak}"
    bounds: dict[str, float] = verdict.BOUNDS
    if run.precision != "32":
        varied = [dataclasses.replace(run, variation=variation) for variation in verdict.VARIATIONS]
        answers = [runner(measure.in_another_order, 1, one, str(home))[0] for one in varied]
        bounds = verdict.spread([report | {"gradients": measure.gradients_in(home)}, *answers])
        in_fp32 = runner(measure.in_another_order, 1, dataclasses.replace(run, precision="32"), str(home))[0]
        report["fp32_losses"] = in_fp32["losses"]
    report |= {"bounds": bounds, "fingerprint": fingerprint(run)}
    (home / "reference.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def line(report: Report) -> str:
    """The line of a row for the terminal."""
    head = f"{report['ranks']} ranks  {report['name']:66} {report['verdict']:10}"
    if "loss" not in report:
        return f"{head} {report.get('error', '')[:120]}"
    return (
        f"{head} loss {report['loss']:.1e}  norm {report['grad_norm']:.1e}  gradient {report['gradient']:.1e} "
        f"({report['parameter']})  {report['seconds']:.0f} s"
    )


def slug(name: str) -> str:
    """A file's name for a row."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{words[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def fingerprint(what: Row | measure.Run) -> str:
    """A digest of a row or run and the model it trains: a kept result of another is not taken for it."""
    this_run = what.run if isinstance(what, Row) else what
    more = [what.ranks, what.refused] if isinstance(what, Row) else []
    # What a model hasn't got of what others have doesn't make it another one.
    model = {
        name: value
        for name, value in dataclasses.asdict(models.MODELS[this_run.model]).items()
        if name != "peft" or value
    }
    whole = [dataclasses.asdict(this_run), model, models.STEPS, models.CLIP]
    return hashlib.sha256(json.dumps(whole + more, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _kept(path: Path, what: Any) -> Report | None:
    report = json.loads(path.read_text()) if path.is_file() else {}
    return report if report.get("fingerprint") == fingerprint(what) else None


def _reference_run(row: Row) -> measure.Run:
    return measure.Run(model=row.run.model, precision=row.run.precision, micro_batch_size=row.run.micro_batch_size)


def _reference_folder(row: Row, folder: Path) -> Path:
    run = _reference_run(row)
    return folder / "references" / slug(f"{run.model} {run.precision} {run.micro_batch_size}")


def _last_line(text: str) -> str:
    """The last line of a traceback."""
    lines = [one for one in text.strip().splitlines() if one.strip()]
    return lines[-1] if lines else text
