# SPDX-License-Identifier: Apache-2.0
"""`make drill`: disturbs a run in every way that has cost somebody a run, runs the same command again, and compares.

After each disturbance a plain rerun must resume from the last finished save, report that, and end with exactly the loss
curve of an undisturbed run; `metrics.jsonl` is compared digit by digit. Prints a line per case; ``--output FILE``
writes a table. ``--only REGEX`` runs the cases whose names match, ``--sigterms N`` sets the repetitions of SIGTERM
(30), and ``--saves N`` the number of background saves (500).
"""

import argparse
import datetime
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support import ranks, tuned_runs
from support.tuned_runs import METHODS, SAMPLES
from tests.long.drill import command, faults
from tests.long.drill.command import STEPS, Ended, Run

VALIDATES = {"limit_val_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}
_ASKING = (signal.SIGHUP, signal.SIGUSR1)
_UNDISTURBED: dict[str, dict[int, float]] = {}
Case = tuple[str, Callable[[Path, dict[int, str]], str]]


class NotSo(Exception):
    """A case didn't go as it has to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only cases in whose name this is found")
    parser.add_argument("--sigterms", type=int, default=30, help="repetitions of SIGTERM at a random moment")
    parser.add_argument("--saves", type=int, default=500, help="background saves in a row")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--output", type=Path, help="write the table there")
    parser.add_argument("--keep", type=Path, help="keep the runs' directories there")
    options = parser.parse_args()
    chosen = [case for case in cases(options.sigterms, options.saves, options.seed) if re.search(options.only, case[0])]
    if not chosen:
        parser.error(f"--only {options.only}: no case has a name like that")
    # Started by nohup, the drill would hand on that the end of a terminal is to be ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ranks.prepare()
    import support.quiet  # noqa: F401  (ranks are forked from this process)

    speak()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drill") as temporary:
        folder = options.keep or Path(temporary)
        undisturbed = Run(folder / "undisturbed")
        ended = undisturbed()
        if not ended.done:
            raise SystemExit(f"drill: the undisturbed run failed\n{ended.said}")
        reference = command.curve(undisturbed)
        assert len(set(reference.values())) == STEPS, reference
        lines = list(run(chosen, folder, reference))
    good = sum(line.endswith("| ok |") for line in lines)
    summary = f"{good} of {len(lines)} cases, in {time.monotonic() - started:.0f} s"
    print(f"\n{summary}")
    if options.output is not None:
        options.output.write_text(table(lines, summary))
    raise SystemExit(0 if good == len(lines) else 1)


def run(chosen: list[Case], folder: Path, reference: dict[int, str]) -> Iterator[str]:
    for number, (name, case) in enumerate(chosen):
        directory = folder / str(number)
        try:
            line = f"| {name} | {case(directory, reference)} | ok |"
        except Exception as error:
            line = f"| {name} | {type(error).__name__}: {error} | not so |"
        print(line if len(line) < 1500 else f"{line[:700]} ... {line[-700:]}", flush=True)
        yield line


def cases(sigterms: int, saves: int, seed: int) -> list[Case]:
    kill = faults.die
    found: list[Case] = []
    for asynchronous in (False, True):
        how = "background" if asynchronous else "foreground"
        found += [
            (
                f"rank {rank} killed in step {step}, saves in the {how}",
                disturbed(faults.at_step(step, rank, kill), asynchronous),
            )
            for rank, step in ((0, 2), (1, 1), (1, 5), (1, 8))
        ]
        found.append(
            (
                f"rank 1 killed in a validation, saves in the {how}",
                disturbed(faults.in_validation(1), asynchronous, trainer=VALIDATES),
            )
        )
    for phase in (
        "before anything is written",
        "before the shards",
        "after the shards",
        "before metadata.json",
        "before the manifest",
        "before the rename",
        "after the rename",
        "while old ones are deleted",
    ):
        found.append((f"rank killed in a save {phase}", disturbed(faults.in_save(phase, 1))))
        if phase != "before the shards":
            found.append((f"rank killed in a background save {phase}", disturbed(faults.in_save(phase, 1), True)))
    found += [
        ("rank 1 killed in a save after some shards", disturbed(faults.after_some_shards(1))),
        (
            "rank 1 killed while its background writer writes",
            disturbed(faults.writers(lambda pid, number: faults.die() if number == 2 else None, 1), True),
        ),
        (
            "a background writer killed",
            survived(_once(signal.SIGKILL), "step=6.* was killed by SIGKILL.*another process"),
        ),
        ("a background writer stopped", survived(_once(signal.SIGSTOP), "step=6.* has not responded.*another process")),
        ("every background writer stopped", survived(_always(signal.SIGSTOP), "this process writes them")),
        (f"{saves} background saves in a row, writers stopped and killed at any point", in_a_row(saves, seed)),
        ("a rank stopped for good (SIGSTOP)", hung),
        ("all ranks stopped for longer than the watchdog waits, then continued (Ctrl-Z, fg)", paused),
        *((f"{number.name} to rank {rank}", asked(number, rank)) for rank, number in enumerate(_ASKING)),
        ("trainer.max_time over", out_of_time),
        *(
            (f"the disk full, saves in the {how}", disk_full(how == "background"))
            for how in ("foreground", "background")
        ),
        *(
            (f"the run's folder removed while it trains, saves in the {how}", folder_removed(how == "background"))
            for how in ("foreground", "background")
        ),
        ("two runs in one directory", two_runs),
        *((f"rank {rank} fails after a background save is written", failed_after_save(rank)) for rank in (0, 1)),
        ("a metric is NaN in every step, rank 1 killed in step 8", not_a_number),
        ("another run in the folder of a run", in_anothers_folder),
        ("one byte of the corpus changed between two runs", corpus_changed),
        ("the corpus truncated while it is read", corpus_truncated),
        ("SIGTERM in the last step of the last epoch", asked_at_the_end),
    ]
    kinds = [(peft, "records") for peft in METHODS]
    kinds += [(peft, samples) for samples in SAMPLES[1:] for peft in ("full", "LoRA")]
    found += [
        (f"fine-tuning, {peft}, {samples}: rank 1 killed in step 5", tuned(peft, samples)) for peft, samples in kinds
    ]
    for name, damage, says in (
        ("a truncated shard", faults.truncate, "bytes were written|were written"),
        ("a flipped bit", faults.flip_a_bit, "SHA-256 differs"),
        ("a lost shard", faults.lose_a_shard, "is missing"),
        ("a lost .metadata", faults.lose("weights/.metadata"), "is missing"),
        ("a lost metadata.json", faults.lose("weights/metadata.json"), "is missing"),
        ("a lost manifest", faults.lose("manifest.json"), "manifest.json is missing"),
        ("a torn manifest", faults.tear_the_manifest, "cannot be read"),
        ("a deleted context/", faults.lose("context"), "context/.*is missing"),
    ):
        found.append((f"{name} in the newest checkpoint", damaged(damage, says)))
    found.append(("every checkpoint damaged: refused, nothing started", all_damaged))
    chance = random.Random(seed)
    for number in range(sigterms):
        share, to = chance.random(), chance.choice(("rank 0", "rank 1", "all ranks"))
        found.append((f"SIGTERM {number + 1} to {to}", sigterm(share, to, asynchronous=number % 2 == 1)))
    found += [
        ("nemo2 pretrain: rank 1 killed", cli("kill")),
        ("nemo2 pretrain: SIGTERM to the command", cli("command")),
    ]
    found += [
        ("nemo2 pretrain: SIGTERM to rank 1", cli("rank")),
        ("nemo2 pretrain: the command killed", orphaned("command", signal.SIGKILL)),
        ("nemo2 pretrain: torchrun killed", orphaned("torchrun", signal.SIGKILL)),
        ("nemo2 pretrain: the terminal closed", orphaned("command", signal.SIGHUP)),
    ]
    return found


# ------------------------------------------------------------------------------------------------------ the cases


def disturbed(
    fault: faults.Fault, asynchronous: bool = False, says: str = "", **options: Any
) -> Callable[[Path, dict[int, str]], str]:
    """Run into a fault, then run again."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        run = Run(directory, asynchronous=asynchronous, **options)
        first = run(fault)
        require(not first.done, f"the fault did nothing: {first.said[-500:]}")
        require(bool(re.search(says, first.said)), f"the run said nothing of {says!r}: {first.said[-800:]}")
        return rerun(run, reference, first)

    return case


def survived(fault: faults.Fault, says: str) -> Callable[[Path, dict[int, str]], str]:
    """A run whose background writers are disturbed ends as an undisturbed one, and says what it did."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        run = Run(directory, asynchronous=True)
        ended = run(fault)
        require(ended.done, f"it ended with {ended.codes}: {ended.said[-800:]}")
        require(bool(re.search(says, ended.said)), f"the run said nothing of {says!r}: {ended.said[-800:]}")
        require(command.curve(run) == reference, "the curve differs")
        require(max(command.checkpoints(run)) == STEPS, f"saved were {sorted(command.checkpoints(run))}")
        require(not leftovers(run), f"left behind: {leftovers(run)}")
        return "went on to the end and said so; the curve is equal"

    return case


def _once(number: int) -> faults.Fault:
    return faults.writers(lambda pid, count: os.kill(pid, number) if count == 2 else None, 1)


def _always(number: int) -> faults.Fault:
    return faults.writers(lambda pid, count: os.kill(pid, number), 1)


def in_a_row(count: int, seed: int) -> Callable[[Path, dict[int, str]], str]:
    def case(directory: Path, reference: dict[int, str]) -> str:
        from tests.long.drill import saves

        directory.mkdir()
        found = ranks.run(saves.loop, 2, str(directory), count, seed, timeout=max(120.0, 3.0 * count))
        require(not found[0]["bad"] and not found[0]["left"], f"not whole: {found[0]['bad']}; left: {found[0]['left']}")
        require(all(one["descriptors"] <= 0 for one in found), f"descriptors are left: {found}")
        hit = [name for one in found for name in one["disturbed"]]
        told = len(found[0]["told"])
        times = f"{found[0]['seconds']:.0f} s, the longest stall {found[0]['longest']:.1f} s"
        return f"all whole; {len(hit)} writers of both ranks disturbed, {told} replacements told; {times}"

    return case


def damaged(damage: Callable[[Path], None], says: str) -> Callable[[Path, dict[int, str]], str]:
    """Kill a run that has saved twice, damage what it saved last, run again."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        run = Run(directory)
        first = run(faults.at_step(8, 1, faults.die))
        found = command.checkpoints(run)
        require(max(found) == 6, f"saved were {sorted(found)}")
        damage(found[6])
        return rerun(run, reference, first, says=says, expected=6 if "context" in says else 3)

    return case


def all_damaged(directory: Path, reference: dict[int, str]) -> str:
    run = Run(directory)
    run(faults.at_step(8, 1, faults.die))
    before = command.curve(run)
    for path in command.checkpoints(run).values():
        faults.flip_a_bit(path)
    for attempt in (1, 2):
        ended = run()
        require(not ended.done and "CheckpointError" in ended.said, f"run {attempt} went on: {ended.said[-600:]}")
        require("SHA-256 differs" in ended.said, f"it didn't say why: {ended.said[-600:]}")
        require(command.curve(run) == before, "something was trained")
    return "two reruns refused with CheckpointError, exit code 1; no step was done"


def hung(directory: Path, reference: dict[int, str]) -> str:
    run = Run(directory, hang_seconds=25.0)  # more than a step and a save take on a busy machine
    first = run(faults.at_step(5, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    stacks = sorted((directory / "run").glob("rank-*.stacks"))
    require(first.seconds < 120 and not first.done, f"it took {first.seconds:.0f} s: {first.codes}")
    require(any("most recent call first" in path.read_text() for path in stacks), "no stacks were left")
    for path in stacks:
        path.unlink()
    return f"ended after {first.seconds:.0f} s with stacks; " + rerun(run, reference, first)


def paused(directory: Path, reference: dict[int, str]) -> str:
    run = Run(directory, hang_seconds=12.0, asynchronous=True)
    under_way = run.start()
    while len(command.curve(run)) < 5 and not under_way.codes:
        under_way.poll()
        time.sleep(0.002)
    for number, seconds in ((signal.SIGSTOP, 20.0), (signal.SIGCONT, 0.0)):
        for pid in under_way.pids:
            os.kill(pid, number)
        time.sleep(seconds)
    ended = under_way.wait()
    require(ended.done, f"it ended with {ended.codes}: {ended.said[-800:]}")
    told = re.findall(r"rank (\d) didn't run for \d+ s", ended.said)
    require(set(told) == {"0", "1"}, f"the ranks said {told}: {ended.said[-800:]}")
    require(command.curve(run) == reference, "the curve differs")
    return "went on where it was, both ranks said so; the curve is equal"


def asked(number: signal.Signals, rank: int) -> Callable[[Path, dict[int, str]], str]:
    """A signal that saves and stops, to one rank."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        run = Run(directory)
        first = run(faults.at_step(5, rank, lambda: os.kill(os.getpid(), number)))
        require(set(first.codes) == {143}, f"exit codes {first.codes}: {first.said[-600:]}")
        require(f"{number.name} after step" in first.said, f"it didn't say why: {first.said[-600:]}")
        return f"exit codes {first.codes}; " + rerun(run, reference, first, newest_is_all=True)

    return case


def out_of_time(directory: Path, reference: dict[int, str]) -> str:
    run = Run(directory, max_seconds=10.0)
    assert run.max_seconds is not None
    first = run(faults.at_step(4, 0, lambda: time.sleep(12)))
    done = len(command.curve(run))
    require(first.done and done == 4, f"it ended after {done} steps with {first.codes}: {first.said[-500:]}")
    require(max(command.checkpoints(run)) == 4, f"saved were {sorted(command.checkpoints(run))}")
    runs = 0
    while len(command.curve(run)) < STEPS:  # the same command, with the same limit
        before, again = len(command.curve(run)), run()
        runs += 1
        require(again.done, f"rerun {runs} failed with {again.codes}: {again.said[-800:]}")
        require(len(command.curve(run)) > before, f"rerun {runs} did no step: {again.said[-500:]}")
        own = "Time limit reached" not in again.said or again.seconds >= run.max_seconds
        require(own, f"rerun {runs} ended after {again.seconds:.0f} s: it counted the time of the runs before")
    require(command.curve(run) == reference, "the curve differs")
    return f"exit codes {first.codes} after 4 steps, saved; {runs} reruns did the rest; the curve is equal"


def disk_full(asynchronous: bool) -> Callable[[Path, dict[int, str]], str]:
    """Checkpoints on a file system of a few hundred kB that is filled before the second save."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        run = Run(directory, asynchronous=asynchronous)
        place = directory / "run" / "checkpoints"
        place.mkdir(parents=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "drill", str(place)], capture_output=True, check=False
        )
        require(mounted.returncode == 0, f"mounting a small tmpfs needs root: {mounted.stderr.decode().strip()}")
        try:
            ballast = place / "ballast"

            def fill() -> None:
                free = os.statvfs(place)
                ballast.write_bytes(b"\0" * (free.f_bavail * free.f_frsize - 20_000))

            def fault() -> None:
                from nemo2.checkpoint.io import MegatronCheckpointIO

                if asynchronous:  # once the index and the manifest are written
                    faults.writers(lambda pid, number: fill() if number == 2 else None, 0)()
                elif faults.rank() == 0:
                    faults.before(MegatronCheckpointIO, "save_checkpoint", fill, call=2)

            first = run(fault)
            told = re.search(r"SaveFailed: .*No space left on device.* MB are free on this disk", first.said)
            require(not first.done and told is not None, f"no named error: {first.said[-500:]}")
            require(sorted(command.checkpoints(run)) == [3], f"left were {sorted(command.checkpoints(run))}")
            again = run()
            require(not again.done and "SaveFailed" in again.said, "it is still full, and nobody said so")
            ballast.unlink()
            return rerun(run, reference, first)
        finally:
            subprocess.run(["umount", str(place)], check=False)

    return case


def folder_removed(asynchronous: bool) -> Callable[[Path, dict[int, str]], str]:
    """Files written after the removal exist, and the loss of earlier files is reported."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        run = Run(directory, asynchronous=asynchronous)

        def faults_of_rank() -> None:
            faults.at_step(4, 0, lambda: time.sleep(5))()  # until the save of step 3 is written; step 4 publishes it
            faults.at_step(5, 0, lambda: shutil.rmtree(directory / "run"))()

        ended = run(faults_of_rank)
        require(ended.done, f"it ended with {ended.codes}: {ended.said[-800:]}")
        require("metrics.jsonl was removed during the run" in ended.said, f"it said nothing: {ended.said[-800:]}")
        left = command.curve(run)
        require(left == {step: reference[step] for step in range(4, STEPS)}, f"the curve has {sorted(left)}")
        require(max(command.checkpoints(run)) == STEPS, f"saved were {sorted(command.checkpoints(run))}")
        return "went on to the end and said what was removed; the rest of the curve is equal"

    return case


def failed_after_save(victim: int) -> Callable[[Path, dict[int, str]], str]:
    def case(directory: Path, reference: dict[int, str]) -> str:
        run = Run(directory, asynchronous=True)
        ended = run(faults.fails_after_a_save(victim))
        require(not ended.done and "the step failed" in ended.said, f"it ended with {ended.codes}: {ended.said[-500:]}")
        require(3 in command.checkpoints(run), f"saved were {sorted(command.checkpoints(run))}")
        ended = run()
        require(ended.done and command.curve(run) == reference, f"it ended with {ended.codes}: {ended.said[-500:]}")
        return "the save was published, and the next run resumed from it"

    return case


def not_a_number(directory: Path, reference: dict[int, str]) -> str:
    run = Run(directory, logs={"own": math.nan})
    return rerun(run, reference, run(faults.at_step(8, 1, faults.die)))


def in_anothers_folder(directory: Path, reference: dict[int, str]) -> str:
    run = Run(directory)
    first = run(faults.at_step(8, 1, faults.die))
    before = contents(directory / "run")
    other = replace(run, resumes=False)()
    require(not other.done and "of another run" in other.said, f"the other run ended with {other.codes}: {other.said}")
    require(contents(directory / "run") == before, "the other run changed files")
    return "the other refused, no file changed; " + rerun(run, reference, first)


def tuned(peft: str, samples: str) -> Callable[[Path, dict[int, str]], str]:
    """Fine-tuning from a released folder, killed after its first save."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        folder = directory.parent / "weights"
        if not folder.is_dir():
            ranks.run(tuned_runs.prepare, 1, str(folder))
        tuning = {"path": f"hf://{folder}/released", "folder": str(folder), "peft": peft, "samples": samples}
        whole, run = Run(directory / "whole", tuning=tuning), Run(directory / "killed", tuning=tuning)
        ended = whole()
        require(ended.done, f"the undisturbed run ended with {ended.codes}: {ended.said[-800:]}")
        curve = command.curve(whole)
        require(len(set(curve.values())) == STEPS, f"the losses are {curve}")
        first = run(faults.at_step(5, 1, faults.die))
        require(sorted(command.checkpoints(run)) == [3], f"saved were {sorted(command.checkpoints(run))}")
        return rerun(run, curve, first)

    return case


def contents(folder: Path) -> dict[str, bytes]:
    """The checkpoints and metrics of a run."""
    files = [*(folder / "checkpoints").rglob("*"), folder / "metrics.jsonl"]
    return {str(path): path.read_bytes() for path in files if path.is_file() and path.name != ".lock"}


def with_a_corpus(directory: Path) -> tuple[Run, dict[int, str], bytes]:
    """A run on token files, the curve of an undisturbed one, and the contents of the .bin file."""
    from support import small_corpora, small_runs

    directory.mkdir(parents=True)
    prefix = directory / "corpus"
    small_corpora.corpus(prefix, documents=80, high=small_runs.VOCAB - 1, end=small_runs.VOCAB - 2)
    undisturbed = Run(directory / "undisturbed", corpus=prefix)
    ended = undisturbed()
    require(ended.done, f"the undisturbed run ended with {ended.codes}: {ended.said[-800:]}")
    return Run(directory, corpus=prefix), command.curve(undisturbed), prefix.with_suffix(".bin").read_bytes()


def corpus_changed(directory: Path, reference: dict[int, str]) -> str:
    run, reference, tokens = with_a_corpus(directory)
    first = run(faults.at_step(8, 1, faults.die))
    done, file = command.curve(run), directory / "corpus.bin"
    place = len(tokens) // 4 * 2
    file.write_bytes(tokens[:place] + bytes([tokens[place] ^ 1]) + tokens[place + 1 :])
    ended = run()
    require(not ended.done and f"{file} has other contents" in ended.said, f"it went on: {ended.said[-800:]}")
    require(command.curve(run) == done, "something was trained")
    file.write_bytes(tokens)
    return "refused, with the file; restored: " + rerun(run, reference, first)


def corpus_truncated(directory: Path, reference: dict[int, str]) -> str:
    run, reference, tokens = with_a_corpus(directory)
    file = directory / "corpus.bin"
    first = run(faults.at_step(8, 1, lambda: os.truncate(file, 100)))
    require(set(first.codes) == {1}, f"exit codes {first.codes}: {first.said[-500:]}")
    require(f"{file} had {len(tokens)} bytes" in first.said, f"it didn't say why: {first.said[-800:]}")
    file.write_bytes(tokens)
    return "ended with an error that names the file; restored: " + rerun(run, reference, first)


def asked_at_the_end(directory: Path, reference: dict[int, str]) -> str:
    run = Run(directory, max_steps=-1, trainer={"max_epochs": 1, "limit_train_batches": STEPS})
    ended = run(faults.at_step(STEPS, 0, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    require(ended.done and command.curve(run) == reference, f"it ended with {ended.codes}: {ended.said[-800:]}")
    again = run()
    require(again.done and "No step was trained" in again.said, f"the rerun said nothing: {again.said[-800:]}")
    return "ended as it would; the rerun said that it trains nothing"


def two_runs(directory: Path, reference: dict[int, str]) -> str:
    run = Run(directory)
    first = run.start(faults.at_step(6, 0, lambda: time.sleep(12)))
    while not command.checkpoints(run):
        time.sleep(0.1)
    second = run()
    require(not second.done and "Another run is writing to" in second.said, f"the second ran: {second.said[-500:]}")
    ended = first.wait()
    require(ended.done, f"the first was disturbed: {ended.said[-500:]}")
    require(command.curve(run) == reference, "the curve differs")
    return "the second refused with CheckpointError, the first ended undisturbed"


def sigterm(share: float, to: str, *, asynchronous: bool) -> Callable[[Path, dict[int, str]], str]:
    """SIGTERM at a random moment of the run: ``share`` of the way from its start to its usual end."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        run = Run(directory, asynchronous=asynchronous)
        under_way = run.start()
        # By the steps, not by the clock: the machine's load decides how long a run takes.
        wanted = share * STEPS
        while len(command.curve(run)) < int(wanted):
            under_way.poll()
            if under_way.codes:
                break
            time.sleep(0.002)
        time.sleep((wanted % 1) * 0.15)
        for rank, pid in enumerate(under_way.pids):
            if to in ("all ranks", f"rank {rank}") and rank not in under_way.codes:
                os.kill(pid, signal.SIGTERM)
        first = under_way.wait()
        if first.done:
            require(command.curve(run) == reference, "the curve differs")
            return "came when the run was over"
        codes = set(first.codes)
        before_training = not command.curve(run)
        require(143 in codes or (before_training and -15 in codes), f"exit codes {first.codes}: {first.said[-600:]}")
        return f"exit codes {first.codes}; " + rerun(run, reference, first, newest_is_all=143 in codes)

    return case


def starting(directory: Path, name: str) -> subprocess.Popen:
    settings = "trainer.max_steps=40 trainer.log_every_n_steps=1 log.ckpt.every_n_train_steps=10 data.seq_length=64"
    line = [sys.executable, "-m", "nemo2", "pretrain", "llama_tiny", *settings.split(), "--devices", "2"]
    environment = {**os.environ, "NEMORUN_HOME": str(directory / "nemo_run"), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [*line, "--dir", str(directory), "--name", name], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def orphaned(victim: str, number: int) -> Callable[[Path, dict[int, str]], str]:
    """Kill the launcher of the ranks. The ranks end, the lock is released, and the same command resumes."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        import psutil

        process = starting(directory, "disturbed")
        while len(losses_of(directory / "disturbed")) < 3 and process.poll() is None:
            time.sleep(0.05)
        everyone = psutil.Process(process.pid).children(recursive=True)
        ranks_of_run = [one for one in everyone if "RANK" in one.environ()]
        torchrun = psutil.Process(rank_one(process.pid)).parent()
        require(torchrun is not None and len(ranks_of_run) >= 2, "the run has no ranks")
        os.kill(process.pid if victim == "command" or torchrun is None else torchrun.pid, number)
        started = time.monotonic()
        _, left = psutil.wait_procs(everyone, timeout=90)
        for one in left:
            one.kill()
        took = time.monotonic() - started
        process.communicate(timeout=120)
        require(not left, f"{len(left)} processes were there after {took:.0f} s")
        again = starting(directory, "disturbed")
        said = again.communicate(timeout=900)[0]
        require(again.returncode == 0, f"the rerun ended with {again.returncode}: {said[-800:]}")
        require(len(losses_of(directory / "disturbed")) == 40, "steps are missing")
        return f"all processes ended within {took:.0f} s; the same command went on to the end"

    return case


def cli(how: str) -> Callable[[Path, dict[int, str]], str]:
    """The faults of a run that ``nemo2 pretrain`` starts: torchrun, nemo-run, exit codes."""

    def case(directory: Path, reference: dict[int, str]) -> str:
        def start(name: str) -> subprocess.Popen:
            return starting(directory, name)

        if "cli" not in _UNDISTURBED:  # one for all cases: they run the same command
            said = start("whole").communicate(timeout=900)[0]
            _UNDISTURBED["cli"] = losses_of(directory / "whole")
            require(len(_UNDISTURBED["cli"]) == 40, f"the undisturbed run failed: {said[-800:]}")
        expected = _UNDISTURBED["cli"]
        process = start("disturbed")
        while len(losses_of(directory / "disturbed")) < 15 and process.poll() is None:
            time.sleep(0.05)
        if how == "command":
            process.terminate()
        else:
            os.kill(rank_one(process.pid), signal.SIGKILL if how == "kill" else signal.SIGTERM)
        said = process.communicate(timeout=900)[0]
        require(process.returncode == (1 if how == "kill" else 143), f"exit code {process.returncode}: {said[-800:]}")
        again = start("disturbed")
        output = again.communicate(timeout=900)[0]
        require(again.returncode == 0, f"the rerun ended with {again.returncode}: {output[-800:]}")
        require(losses_of(directory / "disturbed") == expected, "the curve differs")
        resumed = re.search(r"Resuming from \S+ \(step (\d+)\)", output)
        require(resumed is not None, f"the rerun didn't say what it did: {output[-800:]}")
        return f"exit code {process.returncode}; resumed from step {resumed[1] if resumed else '?'}; the curve is equal"

    return case


# ------------------------------------------------------------------------------------------------------ checks


def rerun(
    run: Run,
    reference: dict[int, str],
    first: Ended,
    *,
    says: str = "",
    expected: int | None = None,
    newest_is_all: bool = False,
) -> str:
    """Run the same command again, undisturbed; what it did, once it is as it should be."""
    done, kept = len(command.curve(run)), [*command.checkpoints(run)]
    newest = max(kept, default=0) if expected is None else expected
    if newest_is_all:
        # The line of the step that was saved last may still have been to be written; the rerun writes it.
        require(newest - done in (0, 1), f"{done} steps were told, and step {newest} saved")
    # A rank that was stopped while it still started has left nothing: the rerun is an ordinary first run.
    begun = bool(done or kept) or (run.directory / "run" / "checkpoints" / ".run").exists()
    again = run()
    require(again.done, f"the rerun failed with {again.codes}: {again.said[-1200:]}")
    require(bool(re.search(says, again.said)), f"the rerun said nothing of {says!r}: {again.said[-800:]}")
    # The survivors publish a save that all ranks had written, unless they are killed too: then the rerun does.
    kept += map(int, re.findall(r"Saved \S+/step=(\d+)\S*, which all ranks had written", again.said))
    newest = max([newest, *kept]) if expected is None else newest
    told = f"(step {max(kept, default=0)})" if kept else "starting from the beginning"
    require(told in again.said or not begun, f"the rerun didn't say {told!r}: {again.said[-800:]}")
    if expected is not None and expected != max(kept, default=0):
        require(f"step={expected}" in again.said, "it didn't say what it fell back to")
    curve = command.curve(run)
    wrong = [step for step in range(STEPS) if curve.get(step) != reference[step]]
    require(not wrong, f"the curve differs in steps {wrong}")
    require(max(command.checkpoints(run)) == STEPS, "the last step isn't saved")
    require(not leftovers(run), f"left behind: {leftovers(run)}")
    steps = f"ended after {done} steps, " if done else ""
    where = f"went on from step {newest}" if newest else "started from the beginning, where nothing was saved yet"
    return f"{steps}{where}; the curve is equal"


def leftovers(run: Run) -> list[str]:
    place = run.directory / "run" / "checkpoints"
    return [path.name for path in place.iterdir() if path.name.startswith((".unfinished", ".trash", ".replaced"))]


def require(true: bool, what: str) -> None:
    if not true:
        raise NotSo(" ".join(what.split()))


def losses_of(directory: Path) -> dict[int, float]:
    from nemo2.training.run_dir.records import read_metrics

    found = sorted(directory.glob("*/metrics.jsonl"))
    records = read_metrics(found[-1]) if found else []
    return {record["step"]: record["reduced_train_loss"] for record in records if "reduced_train_loss" in record}


def rank_one(launcher: int) -> int:
    import psutil

    for process in psutil.Process(launcher).children(recursive=True):
        if process.environ().get("RANK") == "1":
            return process.pid
    raise NotSo("there is no rank 1")


def speak() -> None:
    """Messages of a run go to its output."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.INFO)


def table(lines: list[str], summary: str) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("megatron-core", "torch", "lightning"))
    head = [
        "# The fault drill",
        "",
        f"`make drill`, {datetime.date.today()}: {summary}. Python {platform.python_version()}, {versions}; CPU, gloo.",
        "",
        "| disturbance | what the rerun did | |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *lines, ""])


if __name__ == "__main__":
    main()
