# SPDX-License-Identifier: Apache-2.0
"""The directory and environment of the documents' examples."""

import pytest


@pytest.fixture(autouse=True)
def no_rendezvous_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer leaves its port in the environment of its process; an example that took it over would find it in use."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
