# SPDX-License-Identifier: Apache-2.0
"""The process that a job's script starts for each rank: ``python -m nemo2.launch.rank FOLDER``.

The folder holds the recipe in nemo-run's serialization. Each rank writes its output to its own files in the folder of
this life, so that no message appears once per rank. Output from before this module runs goes to the task's file.
"""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import Preempted
from nemo2.base.place import here
from nemo2.launch.trusted_files import KERNEL_CACHE, refuse_untrusted_kernel_cache
from nemo2.training.run_dir.faults import install_fault_hook, record_fault

CONFIG = "config"
"""The recipe's file in the job's folder."""
MAIN = "__main__.py"
"""The launching script in the job's folder, if the recipe refers to its names."""
LIFE_VARIABLE = "NEMO2_LIFE"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_POLL_SECONDS = 15.0


def main(folder: Path) -> None:
    place = here()
    install_fault_hook()
    if life := os.environ.get(LIFE_VARIABLE):
        redirect_output(Path(life), place.rank)
        end_with_a_later_life(Path(life), look_seconds=_POLL_SECONDS if place.local_rank == 0 else 4 * _POLL_SECONDS)
    signal.signal(signal.SIGTERM, _stop_early)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:  # as the job's script has torchrun do, which the rank inherits
            signal.signal(number, signal.SIG_DFL)
    refuse_untrusted_kernel_cache(os.environ.get(KERNEL_CACHE))
    if interface := interface_towards(place.address):
        os.environ.setdefault(INTERFACE_VARIABLE, interface)
    run(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the run is finished, so a signal changes nothing


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


def redirect_output(life: Path, rank: int) -> None:
    """Redirect stdout and stderr of this process, including its native code's, to this rank's files. Appends."""
    for stream, descriptor, ending in ((sys.stdout, 1, "out"), (sys.stderr, 2, "err")):
        stream.flush()
        file = os.open(life / f"rank-{rank:05d}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


def end_with_a_later_life(life: Path, *, look_seconds: float) -> None:
    """End this process if the job has begun another life. Nothing is saved.

    In that case this node was cut off and the scheduler has replaced it, so the run's files now belong to the later
    life.
    """
    later = life.with_name(str(int(life.name) + 1))

    def watch() -> None:
        while not later.exists():
            time.sleep(look_seconds)
        print(f"{later} has begun, so this node is given up: ends, unsaved", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="later life").start()


def interface_towards(address: Optional[str]) -> Optional[str]:
    """The network interface that leads to rank 0, for gloo. None: the name is harmless, or the interface is unknown.

    gloo uses the interface of this host's name, which is the loopback if /etc/hosts maps the name to 127.0.1.1.
    """
    import psutil

    try:
        if not socket.gethostbyname(socket.gethostname()).startswith("127.") or address is None:
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing, only asks the kernel for the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    if own.startswith("127."):
        return None
    names = psutil.net_if_addrs().items()
    return next((name for name, addresses in names if any(one.address == own for one in addresses)), None)


def _stop_early(number: int, frame: Any) -> None:
    """Handle the signal until training begins, when `PreemptionCallback` takes over."""
    error = Preempted(f"{signal.Signals(number).name} before the first step: nothing to save yet.")
    record_fault(error)
    raise error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
