# SPDX-License-Identifier: Apache-2.0
"""Background saves end, whatever becomes of the processes that write them."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nemo2.checkpoint import background, writer_process
from nemo2.checkpoint.background import BackgroundWrite, Image, Saves
from support import small_runs
from support.waiting import wait_for_end, wait_until

SIZE = 3_000_001


def begun(folder: Path, *, name: str = "step=6", timeout_seconds: float | None = 20.0) -> BackgroundWrite:
    files = []
    for number in range(2):
        image = Image.take()
        with image.filling() as stream:
            stream.write(content(number))
        files.append((image, str(folder / f"{number}.distcp")))
    return BackgroundWrite(name, files, timeout_seconds)


def content(number: int) -> bytes:
    return bytes([number + 1]) * SIZE


def ended(write: BackgroundWrite, *, within: float = 30.0) -> BackgroundWrite:
    wait_until(write.poll, within)
    return write


def whole(folder: Path, write: BackgroundWrite) -> bool:
    for number in range(2):
        path = folder / f"{number}.distcp"
        assert path.read_bytes() == content(number)
        assert write.hashes[str(path)] == hashlib.sha256(content(number)).hexdigest()
    return write.error is None


def pid(write: BackgroundWrite) -> int:
    return write._attempt._process.pid


def forget_spare() -> None:
    while Image._spare:
        Image.take().give_back(keep=0)


def descriptors() -> int:
    forget_spare()
    return len(os.listdir("/proc/self/fd"))


def test_files_reach_the_disk_and_nothing_is_left_open(tmp_path):
    before = descriptors()
    write = ended(begun(tmp_path))
    assert whole(tmp_path, write) and not write.warnings
    assert descriptors() == before


def test_memory_is_filled_again_by_the_next_save_and_holds_nothing_of_the_one_before(tmp_path):
    forget_spare()
    image = Image.take()
    with image.filling() as stream:
        stream.write(b"a longer one")
    image.give_back(keep=1)
    again = Image.take()
    assert again is image
    with again.filling() as stream:
        stream.write(b"short")
    assert os.pread(again.descriptor, 100, 0) == b"short"
    again.give_back(keep=0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_dies_or_stops_is_replaced_and_told_by_the_checkpoints_name(tmp_path, number):
    write = begun(tmp_path)
    first = pid(write)
    os.kill(first, number)
    if number == signal.SIGSTOP:
        write.poll()  # hears what it said before
        write._attempt._heard -= background.SILENCE_SECONDS
    ended(write)
    assert whole(tmp_path, write)
    (told,) = write.warnings
    assert told.startswith("step=6: on rank 0, the process that writes its files in the background ")
    assert ("killed by SIGKILL" if number == signal.SIGKILL else "has not responded for") in told
    assert "another process writes them" in told
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_all_processes_of_a_rank_ends_no_writer(tmp_path, number):
    write = begun(tmp_path)
    wait_until(
        lambda: ignored(pid(write)) >> (number - 1) & 1
    )  # its interpreter starts; until then it would be replaced
    os.kill(pid(write), number)
    ended(write)
    assert whole(tmp_path, write) and not write.warnings


def ignored(pid: int) -> int:
    """The mask of the signals that a process ignores."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return int(line.split()[1], 16)


def test_after_two_lost_writers_this_process_writes(tmp_path, monkeypatch):
    before, lost = descriptors(), []

    class Lost(background._Process):
        def __init__(self, files: Any, record: str) -> None:
            super().__init__(files, record)
            self._process.kill()
            lost.append(self._process.pid)

    monkeypatch.setattr(background, "_Process", Lost)
    write = ended(begun(tmp_path))
    assert whole(tmp_path, write) and len(lost) == 2
    assert "this process writes them" in write.warnings[-1]
    assert descriptors() == before


def test_a_machine_without_room_for_a_process_writes_all_the_same(tmp_path, monkeypatch):
    def none_left(*args: Any, **kwargs: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", none_left)
    write = ended(begun(tmp_path))
    assert whole(tmp_path, write) and "Cannot allocate memory" in write.warnings[0]


def test_the_time_limit_is_held_by_the_parent(tmp_path, monkeypatch):
    """Here the writers are stopped and the limit is shorter than the silence that would tell."""

    class Stopped(background._Process):
        def __init__(self, files: Any, record: str) -> None:
            super().__init__(files, record)
            os.kill(self._process.pid, signal.SIGSTOP)

    monkeypatch.setattr(background, "_Process", Stopped)
    monkeypatch.setattr(
        background._Thread, "trouble", lambda *_: None
    )  # it isn't stopped, however slow this machine is
    write = ended(begun(tmp_path, timeout_seconds=0.3))
    assert whole(tmp_path, write)
    assert all("save_timeout_seconds=0.3" in told for told in write.warnings) and len(write.warnings) == 2


def test_what_the_disk_says_is_an_error_and_no_reason_to_try_other_writers(tmp_path):
    (tmp_path / "1.distcp").mkdir()
    write = ended(begun(tmp_path))
    assert write.error is not None and "Is a directory" in write.error and not write.warnings


def reason_under_a_limit(part: str) -> str:
    import resource

    from nemo2.checkpoint.writing import with_reason

    Path(part).write_bytes(bytes(5000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    return with_reason("unexpected pos 704 vs 598", [part])


def test_an_error_of_torchs_archive_writer_gets_the_systems_reason(run_on_ranks, tmp_path):
    from nemo2.checkpoint.writing import with_reason

    [reason] = run_on_ranks(reason_under_a_limit, 1, str(tmp_path / "part"), init_process_group=False)
    assert "File too large: the limit of this process is 5000 bytes" in reason and "pos" not in reason
    assert with_reason("unexpected pos 704 vs 598", [str(tmp_path / "part")]).startswith("unexpected pos")


def test_a_failure_that_passes_is_tried_again_and_one_that_does_not_is_told(tmp_path, monkeypatch):
    failures = {"left": 2, "errno": 116}

    def flaky(*args: Any) -> str:
        if failures["left"]:
            failures["left"] -= 1
            raise OSError(failures["errno"], "Stale file handle")
        return "written"

    assert writer_process.persistently(flaky, 1, "x", pauses=(0.0, 0.0, 0.0)) == "written"
    failures.update(left=4)
    with pytest.raises(OSError, match="Stale"):
        writer_process.persistently(flaky, 1, "x", pauses=(0.0, 0.0, 0.0))
    failures.update(left=1, errno=28)
    with pytest.raises(OSError):
        writer_process.persistently(flaky, 1, "x", pauses=(0.0, 0.0, 0.0))


def test_the_third_save_waits_for_the_first():
    published: list[str] = []
    saves = Saves()
    for name in ("first", "second"):
        saves.make_room()
        saves.add(BackgroundWrite(name, [], None), lambda name=name: published.append(name), pytest.fail)
    assert published == []
    saves.make_room()
    assert published == ["first"] and len(saves) == 1


def test_a_parent_that_dies_takes_its_writer_along_even_a_stopped_one(tmp_path, warm_interpreter):
    script = tmp_path / "parent.py"
    script.write_text(f"""
import os, signal, time
from nemo2.checkpoint import background
image = background.Image()
os.write(image.descriptor, bytes(1000))
process = background._Process([(image, {str(tmp_path / "0.distcp")!r})], "")
while process._heard == process._started:  # until its interpreter runs, nothing ends it with its parent
    process.look()
    time.sleep(0.02)
os.kill(process._process.pid, signal.SIGSTOP)
print(process._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
    # A writer that waits to write: it can't be done before it is stopped.
    os.mkfifo(tmp_path / "0.distcp")
    ran = subprocess.run([warm_interpreter, script], capture_output=True, text=True, check=False)
    child = int(ran.stdout)
    wait_for_end(child)


def test_no_process_is_forked_with_the_locks_of_this_one(tmp_path):
    """A writer is an interpreter of its own: whatever lock a thread of this process holds at that moment, it doesn't have."""
    held = threading.Lock()
    with_the_lock = tmp_path / "forked"
    os.register_at_fork(after_in_child=lambda: held.locked() and with_the_lock.touch())
    with held:
        assert whole(tmp_path, ended(begun(tmp_path)))
    assert not with_the_lock.exists()


def test_the_writers_answer_is_one_line_of_json(tmp_path):
    image = Image()
    os.write(image.descriptor, b"abc")
    job = json.dumps(
        {
            "files": [[image.descriptor, str(tmp_path / "x")]],
            "record": str(tmp_path / "record"),
            "ignored_signals": [],
            "dies_with_parent": False,
        }
    )
    alive, _ = os.pipe()  # whose end would be the parent's end
    ran = subprocess.run(
        [sys.executable, "-I", "-S", writer_process.__file__, job],
        pass_fds=[image.descriptor], stdin=alive, capture_output=True, check=True,
    )  # fmt: skip
    answer = json.loads(ran.stdout.lstrip(b"."))
    assert answer == {"hashes": {str(tmp_path / "x"): hashlib.sha256(b"abc").hexdigest()}}
    assert json.loads((tmp_path / "record").read_text()) == {"x": hashlib.sha256(b"abc").hexdigest()}


def failing_after_a_save(directory: str, first: list[int]) -> list[str]:
    """A step fails on the ranks ``first`` once all ranks have written the save of the step before; the other ranks
    continue until it is published."""
    import lightning.pytorch as pl
    import torch

    small_runs.quiet()
    original, folder = background.Saves.finish, Path(directory)
    background.Saves.finish = lambda self, *, blocking: blocking and original(self, blocking=blocking)

    class Failing(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step != 1:
                return
            wait_until(
                lambda: len(list(folder.glob(".unfinished-*/.written-[01]"))) == 2 or (folder / "step=1").exists()
            )
            if torch.distributed.get_rank() not in first:
                wait_until((folder / "step=1").exists)
            raise RuntimeError("the step failed")

    keep = small_runs.keep(directory, every_n_train_steps=1, save_optim_on_train_end=False)
    with pytest.raises(RuntimeError, match="the step failed"):
        small_runs.fit(
            small_runs.build_llama(),
            max_steps=2,
            callbacks=[keep, Failing()],
            tensor_model_parallel_size=2,
            ckpt_async_save=True,
        )
    torch.distributed.barrier()
    background.Saves.finish = original
    names = sorted(path.name for path in folder.iterdir() if path.name not in (".lock", ".run"))
    small_runs.release()
    small_runs.fit(
        small_runs.build_llama(), max_steps=2, ckpt_path=str(folder / "step=1"), tensor_model_parallel_size=2
    )
    return names


@pytest.mark.parametrize("first", [[0, 1], [1], [0]])
def test_a_save_that_all_ranks_have_written_is_published_when_a_step_fails(run_on_ranks, tmp_path, first):
    from nemo2.checkpoint.directory import changed, problems, read_manifest

    for names in run_on_ranks(failing_after_a_save, 2, str(tmp_path), first, timeout=240.0):
        assert names == ["step=1"]
    path = tmp_path / "step=1"
    assert not problems(path) and not changed(path) and not problems(path, of_context=True)
    manifest = read_manifest(path)
    assert manifest is not None and manifest.run and not any(".written" in name for name in manifest.files)
    assert "manifest.json" not in manifest.files and len(manifest.hashes) == len(manifest.files)


def with_a_stopped_writer(directory: str) -> tuple[list[str], str]:
    """Three steps that are saved in the background, while rank 1's first writer is stopped and its second killed."""
    import torch

    disturbances = [signal.SIGSTOP, signal.SIGKILL] if torch.distributed.get_rank() == 1 else []
    original = background._Process

    class Disturbed(original):
        def __init__(self, files: Any, record: str) -> None:
            super().__init__(files, record)
            if disturbances:
                self._heard -= background.SILENCE_SECONDS  # a stopped one says nothing more
                os.kill(self._process.pid, disturbances.pop(0))

    background._Process = Disturbed
    said: list[str] = []
    background.rank_zero_info = lambda form, words: said.append(words)
    keep = small_runs.keep(directory, save_top_k=-1, every_n_train_steps=1)
    small_runs.fit(
        small_runs.build_llama(), max_steps=3, callbacks=[keep], tensor_model_parallel_size=2, ckpt_async_save=True
    )
    return said, str(sorted(path.name for path in Path(directory).iterdir() if path.name[0] != "."))


def test_a_run_whose_writers_are_stopped_and_killed_saves_every_step_and_says_so(run_on_ranks, tmp_path):
    from nemo2.checkpoint.directory import changed, problems

    answers = run_on_ranks(with_a_stopped_writer, 2, str(tmp_path), timeout=120.0)
    assert {names for _, names in answers} == {"['step=1', 'step=2', 'step=3']"}
    for path in tmp_path.glob("step=*"):
        assert not problems(path) and not changed(path)
    said = answers[0][0]
    assert len(said) == 2 and all("step=" in words and "on rank 1" in words for words in said), said


@pytest.mark.parametrize(
    "view",
    [lambda one: one[3:9], lambda one: one[5], lambda one: one[8:16].view(2, 4), lambda one: one.bfloat16()[3:9]],
    ids=["a slice", "a number", "a matrix", "bfloat16"],
)
def test_a_view_is_written_from_its_place_and_without_what_lies_around_it(view):
    import torch

    from nemo2.checkpoint.writing import in_own_storage

    given = view(torch.arange(100.0))
    found = in_own_storage(given)
    assert torch.equal(found, given) and found.data_ptr() == given.data_ptr()
    assert found.untyped_storage().size() == found.numel() * found.itemsize
    for other in (torch.arange(100.0)[::2], torch.arange(4.0)[:0], torch.arange(4.0)):
        assert in_own_storage(other).data_ptr() == other.data_ptr() and torch.equal(in_own_storage(other), other)


def planned_elsewhere(directory: str) -> tuple[int, int]:
    """Bytes that a save is to write, and those of them that lie outside the memory of the parameters and their gradients'
    and optimizer's buffers, because they were copied for it."""
    from nemo2.checkpoint import writing

    taken: list[Any] = []
    original = writing.WatchedSaveStrategy.copy_state

    def copy_state(self: Any, request: Any) -> Any:
        taken.extend(tensor for _, _, (_, tensors) in request.async_fn_args[1] for _, tensor in tensors)
        return original(self, request)

    writing.WatchedSaveStrategy.copy_state = copy_state
    trainer = small_runs.build_trainer(max_steps=1, ckpt_async_save=True)
    trainer.fit(small_runs.build_llama(), small_runs.TokenData())
    trainer.save_checkpoint(Path(directory) / "step=1")
    io: Any = trainer.strategy.checkpoint_io
    io.maybe_finalize_save_checkpoint(blocking=True)
    optimizer: Any = trainer.strategy.optimizers[0]
    live = list(trainer.strategy.megatron_parallel.parameters())
    live += [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    spans = [(one.untyped_storage().data_ptr(), one.untyped_storage().size()) for one in live if hasattr(one, "numel")]
    there = [any(start <= one.data_ptr() < start + size for start, size in spans) for one in taken]
    sizes = [one.numel() * one.itemsize for one in taken]
    return sum(sizes), sum(size for size, here in zip(sizes, there, strict=True) if not here)


def test_a_background_save_copies_nothing_before_its_copy(run_on_ranks, tmp_path):
    (total, copied) = run_on_ranks(planned_elsewhere, 1, str(tmp_path))[0]
    assert copied < 0.01 * total, f"{copied} of {total} bytes were copied"
