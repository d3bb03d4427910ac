# SPDX-License-Identifier: Apache-2.0
"""The reason of a failed save or load in one line, also where Megatron-Core reports the errors of several ranks as one."""

from torch.distributed.checkpoint.api import CheckpointException

from nemo2.base import ranks
from nemo2.base.errors import ON_ANOTHER_RANK

_WORDS = 400


def reason_of(error: BaseException) -> str:
    """The error in one line. If several ranks report an error, that of the first rank."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return ON_ANOTHER_RANK
        rank, failure = min(error.failures.items())
        words = reason_of(failure[0] if isinstance(failure, tuple) else failure)
        return words if words.startswith("on rank ") else f"on rank {rank}, {words}"
    words = " ".join(str(error).split()).rstrip(".") or repr(error)
    return words if len(words) <= _WORDS else f"{words[:_WORDS]} ..."


def reason_of_any(error: BaseException) -> str:
    """`reason_of` the error. Of Megatron-Core's errors, which every rank raises, some rank's that has a reason."""
    if not isinstance(error, CheckpointException):
        return reason_of(error)
    reasons = ranks.gather(reason_of(error) if error.failures else None)
    return next((reason for reason in reasons if reason is not None), reason_of(error))
