# SPDX-License-Identifier: Apache-2.0
"""Which Transformer Engine Megatron-Core's configurations find while they are made."""

import pytest
from megatron.core import utils as megatron_utils
from megatron.core.utils import get_te_version, is_te_min_version
from packaging.version import Version

from nemo2.base.backend import te_version
from nemo2.base.backend.extras import has
from nemo2.base.backend.te_version import megatron_finds


@pytest.mark.skipif(has("transformer_engine"), reason="the package of this process goes first")
def test_a_version_is_found_inside_and_nowhere_else() -> None:
    before = megatron_utils._te_version
    with megatron_finds("2.9.0"):
        assert get_te_version() == Version("2.9.0")
        assert is_te_min_version("2.9.0") and not is_te_min_version("2.10.0")
        with megatron_finds(None):
            assert get_te_version() == Version("2.9.0")
    assert megatron_utils._te_version is before
    with pytest.raises(KeyError), megatron_finds("2.9.0"):
        raise KeyError
    assert megatron_utils._te_version is before


def test_the_package_of_this_process_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_version, "has", lambda name: True)
    before = megatron_utils._te_version
    with megatron_finds("2.9.0"):
        assert megatron_utils._te_version is before
