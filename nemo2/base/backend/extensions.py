# SPDX-License-Identifier: Apache-2.0
"""C++ extensions that Megatron-Core compiles at their first use, which is within the first step."""

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo2.base import ranks
from nemo2.base.errors import RuntimeFault

_log = logging.getLogger(__name__)

_WHOLE = frozenset({"core_attn", "moe", "mlp", "shared_experts"})
"""The modules whose recomputation keeps their outputs. That of all others discards them."""
_STALE_SECONDS = 180.0
"""No compilation of these small sources takes as long: a lock of this age belongs to a process that was killed."""


def discards_outputs(config: Any) -> bool:
    """Whether the recomputation of this configuration discards outputs, which Megatron-Core 0.17 and newer restore by an
    extension."""
    return getattr(config, "recompute_granularity", None) == "selective" and not _WHOLE.issuperset(
        config.recompute_modules or ()
    )


def build_extensions(config: Any, *, local_rank: int) -> None:
    """Compile what the first step of ``config`` would compile. The first rank of each node compiles, and the others load
    the result from torch's cache. Every rank must call it, after the process groups were made.

    Raises:
        RuntimeFault: a node has no C++ compiler or no ninja, or the compilation failed.
    """
    from megatron.core.tensor_parallel import random

    build = getattr(random, "_get_share_storage", None)
    if build is None or not discards_outputs(config):
        return
    first = local_rank == 0  # a rank that waited for a stale lock would load what nobody has built
    try:
        ranks.in_turn(lambda: _build(build, "share_storage_ext" if first else None), first=first, error=RuntimeFault)
    except Exception as error:
        reason = str(error) if isinstance(error, RuntimeFault) else f"{type(error).__name__}: {error}"
        raise RuntimeFault(
            f"model.config.recompute_modules={config.recompute_modules}: Megatron-Core restores discarded outputs by a C++ "
            f"extension, whose compilation failed: {reason.partition(chr(10))[0]}. Install a C++ compiler and ninja on "
            f"every node (`nemo2 doctor` looks for them), or list only {', '.join(sorted(_WHOLE))}."
        ) from error


def _build(build: Any, name: str | None) -> None:
    """``name``: the extension whose lock may be stale. None: another rank has built it."""
    if name is not None:
        _remove_stale_lock(_folder(name) / "lock", name)
        if not (_folder(name) / f"{name}.so").exists():
            _log.warning("Compiling Megatron-Core's extension %s, which takes half a minute.", name)
    build()


def _folder(name: str) -> Path:
    """The folder in which torch compiles the extension."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def _remove_stale_lock(lock: Path, name: str) -> None:
    """Remove the lock of a compilation whose process was killed, for which torch would wait for ever."""
    began: dict[float, float] = {}
    reported = False
    with suppress(FileNotFoundError):  # the other process has compiled it
        while True:
            modified = lock.stat().st_mtime
            waited = time.monotonic() - began.setdefault(modified, time.monotonic())
            age = max(time.time() - modified, waited)  # the clock of a file server may be ahead of this host's
            if age >= _STALE_SECONDS:
                _log.warning("Removed %s, which a process that was killed left %.0f s ago.", lock, age)
                lock.unlink()
            elif not reported:
                reported = True
                _log.warning(
                    "Waiting for another process that compiles %s, or for %s to be %.0f s old.",
                    name,
                    lock,
                    _STALE_SECONDS,
                )
            time.sleep(0.2)
