# SPDX-License-Identifier: Apache-2.0
"""Messages of other libraries that say nothing about a nemo2 run, by name.

The listed warnings aren't shown. Lightning's messages about its setup go to the run's log, and to the console if
``$NEMO2_VERBOSE`` is set (``nemo2 -v``). All other messages are shown.
"""

import logging
import os
import re
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

VERBOSE_VARIABLE = "NEMO2_VERBOSE"
_WARNINGS = (
    # Megatron-Core, of what a machine without Transformer Engine and Apex falls back to: our layers say what runs.
    r"Transformer Engine and Apex are not installed.*",
    r"Apex is not installed.*",
    # torch, of a package that nvidia-resiliency-ext brings.
    r"The pynvml package is deprecated.*",
    # Megatron-Core 0.16 warns about the default of its own field.
    r"full scope is deprecated.*",
    # torch's checkpoint reader, of the class that Megatron-Core's format is made of.
    r"Please use DTensor instead.*",
    # torch's checkpoint reader in one process, which an export is, and of an order of arguments that Megatron-Core has.
    r"torch\.distributed is disabled, unavailable or uninitialized.*",
    r"The argument order of load has been changed.*",
    # Lightning, wherever a program called srun is installed: our launcher starts the ranks.
    r"The `srun` command is available.*",
)
_MESSAGES = {
    # Wherever there is a CUDA toolkit and no GPU: that there is no GPU.
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    # Megatron-Core, of its own writer of checkpoints, which one process uses.
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    # Megatron-Core 0.19: advice to port GPTs to another class, which users can't follow.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
}
"""Messages by their loggers."""
_LIGHTNING = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
    "lightning.pytorch.accelerators.cuda",
)
"""Loggers of Lightning's, with which `nemo2.checkpoint.auto_resume` speaks too."""
_SET_UP = re.compile(
    r"(GPU|TPU|HPU|IPU) available: |Initializing distributed: |-{20}|LOCAL_RANK: |`Trainer\.\w+` stopped: "
    r"|You are using a CUDA device |No checkpoint to resume from|Restor(ing|ed all) states from the checkpoint "
    r"|`Trainer\(\w+=1(\.0)?\)` was configured so "
)
"""Which devices there are, how a GPU multiplies float32, that processes have met, that a run has ended as it should, that a new
run starts at the beginning, that a resumed run reads its checkpoint, and what a setting of 1 means."""

_early: deque[logging.LogRecord] = deque(maxlen=200)
"""Said before there was a log."""
_log: Optional[logging.Handler] = None


def quiet_known_warnings() -> None:
    """Filter the messages above. Takes no time and imports none of the libraries."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # Megatron-Core 0.19 has a docstring with an escape that isn't one. An installer that compiles no byte code leaves its
    # warning to the first command. What a compiler warns of has the file as its module.
    warnings.filterwarnings("ignore", module=r".*[/\\]megatron[/\\]core[/\\]")
    for name, message in _MESSAGES.items():
        logging.getLogger(name).addFilter(lambda record, message=message: message not in str(record.msg))
    for name in _LIGHTNING:
        logging.getLogger(name).addFilter(_to_the_log)


@contextmanager
def silenced(*loggers: str) -> Iterator[None]:
    """A context without the messages of these loggers and those below them, but for errors."""
    levels = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def verbose() -> bool:
    """Whether the user has requested the messages that otherwise go only to the log."""
    return bool(os.environ.get(VERBOSE_VARIABLE))


def send_to(handler: Optional[logging.Handler]) -> None:
    """Send the messages kept off the console to ``handler``, including earlier ones. None: keep them."""
    global _log
    _log = handler
    while handler is not None and _early:
        handler.handle(_early.popleft())


def _to_the_log(record: logging.LogRecord) -> bool:
    if str(record.msg).startswith("💡"):  # an advertisement
        return False
    if record.levelno > logging.INFO or verbose() or not _SET_UP.match(str(record.msg)):
        return True
    if _log is None:
        _early.append(record)
    else:
        _log.handle(record)
    return False
