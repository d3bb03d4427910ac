# SPDX-License-Identifier: Apache-2.0
"""Generation by modules that only map tokens to logits and have no cache to decode with."""

from typing import Any

import pytest
import torch


class UncachedDecoder:
    """Takes the place of `nemo2.models.decoding.CachedDecoder`."""

    def __init__(self, core: Any, **sizes: int) -> None:
        self.core = core

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.core(tokens)[:, -1]


@pytest.fixture(autouse=True)
def decode_without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module that imports it, `nemo2.models.generate` takes any module for a model."""
    monkeypatch.setattr("nemo2.models.generate.CachedDecoder", UncachedDecoder)
    monkeypatch.setattr("nemo2.models.generate.required_core", lambda model: model)
