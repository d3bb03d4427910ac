# SPDX-License-Identifier: Apache-2.0
"""The rules are tested as on a machine without optional packages."""

import pytest


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without optional packages, whatever this one has."""
    from nemo2.base.backend import extras
    from nemo2.preflight.checks.rules import parts

    optional = ("transformer_engine", "wandb", "mamba_ssm", "causal_conv1d")
    find = extras.has
    for module in (extras, parts):
        monkeypatch.setattr(module, "has", lambda name: name not in optional and find(name))
    monkeypatch.setattr(extras, "have_te", lambda: False)
