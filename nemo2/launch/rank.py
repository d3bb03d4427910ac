# SPDX-License-Identifier: Apache-2.0
"""The process that a job's script starts for each rank: ``python -m nemo2.launch.rank FOLDER``.

The folder holds the recipe as nemo-run serialises it. Each rank's output goes to files of its own in the folder of this life, so
that nothing is said once per rank; what comes before this module runs goes to its task's file.
"""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Optional

from nemo2.errors import Preempted
from nemo2.place import here
from nemo2.run_dir.faults import install_fault_hook, record_fault

CONFIG = "config"
"""The recipe in the job's folder."""
MAIN = "__main__.py"
"""The launching script in the job's folder, where the recipe names something of it."""
LIFE_VARIABLE = "NEMO2_LIFE"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOK_SECONDS = 15.0


def main(folder: Path) -> None:
    place = here()
    install_fault_hook()
    if life := os.environ.get(LIFE_VARIABLE):
        speak_into(Path(life), place.rank)
        end_with_a_later_life(Path(life), look_seconds=_LOOK_SECONDS if place.local_rank == 0 else 4 * _LOOK_SECONDS)
    signal.signal(signal.SIGTERM, _stop_early)
    if interface := interface_towards(place.address):
        os.environ.setdefault(INTERFACE_VARIABLE, interface)
    run(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is asked to stop now is done


def run(folder: Path) -> None:
    """Build the recipe and call it."""
    import fiddle
    from nemo_run.config import Partial
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
    from nemo_run.run.experiment import maybe_load_external_main

    if (folder / MAIN).is_file():
        maybe_load_external_main(str(folder))
    recipe: Any = ZlibJSONSerializer().deserialize((folder / CONFIG).read_text(encoding="utf-8"))
    try:
        fiddle.build(fiddle.cast(Partial, recipe))()
    except Exception as error:
        record_fault(error)
        raise


def speak_into(life: Path, rank: int) -> None:
    """Have stdout and stderr of this process, its native code's too, go to files of this rank. Appends."""
    for stream, descriptor, ending in ((sys.stdout, 1, "out"), (sys.stderr, 2, "err")):
        stream.flush()
        file = os.open(life / f"rank-{rank:05d}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


def end_with_a_later_life(life: Path, *, look_seconds: float) -> None:
    """Have this process end where the job has begun another life: its node was cut off, the scheduler gave it up, and what it
    writes is another's now. Nothing is saved."""
    later = life.with_name(str(int(life.name) + 1))

    def watch() -> None:
        while not later.exists():
            time.sleep(look_seconds)
        print(f"{later} has begun, so this node is given up: ends, unsaved", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="later life").start()


def interface_towards(address: Optional[str]) -> Optional[str]:
    """The network interface that leads to rank 0, for gloo, which takes the one that this host's name resolves to: the loopback,
    where /etc/hosts has the name beside 127.0.1.1. None where the name does no harm, or nothing is known."""
    import psutil

    try:
        if not socket.gethostbyname(socket.gethostname()).startswith("127.") or address is None:
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: asks the kernel for the way
            own = probe.getsockname()[0]
    except OSError:
        return None
    if own.startswith("127."):
        return None
    names = psutil.net_if_addrs().items()
    return next((name for name, addresses in names if any(one.address == own for one in addresses)), None)


def _stop_early(number: int, frame: Any) -> None:
    """Until training begins, where `PreemptionCallback` takes the signal over."""
    error = Preempted(f"{signal.Signals(number).name} before the first step: nothing to save yet.")
    record_fault(error)
    raise error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
