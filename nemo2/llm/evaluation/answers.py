# SPDX-License-Identifier: Apache-2.0
"""Distributes an evaluation's requests over the data-parallel replicas of a model, and stores the answers to those of tasks, so
that an interrupted evaluation can resume.

Rank 0 reads and writes the file, which has one line of JSON per answer. Every rank starts with the file's contents, so
all ranks send the same requests to the model.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional, TypeVar

from megatron.core import parallel_state

from nemo2.base import ranks
from nemo2.base.errors import RuntimeFault
from nemo2.base.files import append

_T = TypeVar("_T")
_R = TypeVar("_R")
_log = logging.getLogger(__name__)
_CHUNK = 64
"""The number of requests that each replica answers between two writes."""


class Answers:
    """Answers by request.

    Args:
        file: The file that stores them. None: no file.
        replicas: The number of the model's replicas, which answer in parallel.
        on_progress: Called after each write.
    """

    def __init__(
        self, file: Optional[Path] = None, *, replicas: int = 1, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        self.file = file
        self.chunk = _CHUNK * replicas
        self.on_progress = on_progress
        self.known: dict[str, Any] = ranks.on_rank_zero(lambda: {} if file is None else _read(file), error=RuntimeFault)
        """The known answers, by the digest of the request."""

    def to(self, kind: str, requests: Sequence[Any], answer: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
        """The answers to ``requests``, in order. ``answer`` computes those that aren't known."""
        keys = [_key(kind, request) for request in requests]
        open_ = {key: request for key, request in zip(keys, requests, strict=True) if key not in self.known}
        waiting = sorted(open_, key=lambda key: len(repr(open_[key])))
        for start in range(0, len(waiting), self.chunk):
            now = waiting[start : start + self.chunk]
            answers = dict(zip(now, shared([open_[key] for key in now], answer), strict=True))
            self.known |= answers
            if self.file is not None and ranks.is_rank_zero():
                try:
                    self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    append(self.file, "".join(json.dumps([key, value]) + "\n" for key, value in answers.items()))
                except OSError as error:
                    _log.warning(
                        "%s can't be written (%s). If this evaluation is interrupted, the next one repeats the rest of it.",
                        self.file,
                        error.strerror or error,
                    )
                    self.file = None
            self.on_progress()
        return [self.known[key] for key in keys]


def shared(items: Sequence[_T], answer: Callable[[Sequence[_T]], Sequence[_R]]) -> list[_R]:
    """The answers to ``items``, in order, on every rank. One replica computes each answer.

    With expert parallelism the replicas share their experts and must run together, so every replica computes all answers.
    """
    replicas = parallel_state.get_data_parallel_world_size()
    if replicas == 1 or parallel_state.get_expert_model_parallel_world_size() > 1:
        return list(answer(items)) if items else []
    rank = parallel_state.get_data_parallel_rank()
    mine = list(items[rank::replicas])
    parts = ranks.gather(list(answer(mine)) if mine else [], group=parallel_state.get_data_parallel_group())
    return [parts[place % replicas][place // replicas] for place in range(len(items))]


def _read(file: Path) -> dict[str, Any]:
    """The stored answers. A line that an interruption truncated is ignored, so its request is answered again."""
    answers: dict[str, Any] = {}
    if not file.is_file():
        return answers
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            key, value = json.loads(line)
        except (ValueError, TypeError):
            continue
        answers[key] = value
    if answers and not file.read_text(encoding="utf-8", errors="replace").endswith("\n"):
        append(file, "\n")
    return answers


def _key(kind: str, request: Any) -> str:
    return hashlib.sha256(json.dumps([kind, request], sort_keys=True, default=str).encode()).hexdigest()[:32]
