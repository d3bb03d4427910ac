# SPDX-License-Identifier: Apache-2.0
"""Asks Hugging Face's hub whether it answers, before a library of Hugging Face does. Those libraries repeat each request for
half a minute."""

import contextlib
import sys
from collections.abc import Iterator

_TIMEOUT_SECONDS = 5


@contextlib.contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Say that the hub is asked for ``name``. While this lasts and the hub doesn't answer, Hugging Face's libraries use their
    cache only.

    Raises:
        ConnectionError: the hub doesn't answer, and the cache doesn't suffice.
    """
    from huggingface_hub import constants

    from nemo2.base.ranks import is_rank_zero  # with torch, which a tokenizer from a file doesn't need

    if constants.HF_HUB_OFFLINE:
        yield
        return
    if is_rank_zero():
        print(f"Asking {constants.ENDPOINT} for {name}.", file=sys.stderr, flush=True)
    constants.HF_HUB_OFFLINE = not _answers(constants.ENDPOINT)
    try:
        yield
    except Exception as error:  # any of a library's readers
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError(
                f"{constants.ENDPOINT} doesn't answer, and its local cache has no whole copy"
            ) from error
        raise
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers(endpoint: str) -> bool:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=_TIMEOUT_SECONDS)
    except Exception:  # httpx's errors, or requests' in older versions of the client
        return False
    return True
