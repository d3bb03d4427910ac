# SPDX-License-Identifier: Apache-2.0
"""The config.json of a trained model whose weights come from a release: the release's, with what training has changed.

nemo2 owns the fields that decide what a model computes (`settings.meaning`). All others come out as they went in: special
tokens, the longest position that a server accepts, settings of kernels, and fields that nemo2 doesn't know.
"""

import copy
from collections.abc import Mapping
from typing import Any

from nemo2.models.conversion.settings import differences, text_config
from nemo2.models.conversion.table import Conversion

_NOT_EXPORTED = ("quantization_config", "compression_config", "auto_map")
"""Fields about files that an export doesn't have: quantised weights and code."""
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "model_max_length")


def config_of_release(conversion: Conversion, ours: Any, release: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json, except the dtype, for nemo2's configuration of a model whose weights come from a release.

    Args:
        conversion: The conversion of the release and of ``ours``.
        ours: nemo2's configuration, with the number of exported rows as its ``vocab_size``.
        release: The contents of the release's config.json.

    Raises:
        ConfigError: training has changed the model to one that the family's config.json can't express.
    """
    theirs = {name: value for name, value in text_config(release).items() if name not in _NOT_EXPORTED}
    described = {"architectures": [conversion.architectures[0]], **conversion.hf_config(ours)}
    if "text_config" in release:  # only the text model is exported
        theirs |= {name: described[name] for name in ("architectures", "model_type")}
    # Switches that differ from the release's. Several may stand for one field of ours: a release with biases in one
    # half of its layers becomes a model, and so an export, with biases in all.
    theirs |= {name: on for name, on in described.items() if isinstance(on, bool) and bool(theirs.get(name)) != on}
    own_rows = {**theirs, "vocab_size": ours.vocab_size} if "vocab_size" in theirs else theirs
    if not differences(ours, conversion.config(own_rows)):
        return _long_enough(conversion, ours, own_rows)
    changed = {name: value for name, value in described.items() if value is not None or name not in theirs}
    return _long_enough(conversion, ours, {**theirs, **changed, **{n: theirs[n] for n in _LENGTHS if n in theirs}})


def _long_enough(conversion: Conversion, ours: Any, hf: dict[str, Any]) -> dict[str, Any]:
    """``hf``, with the length of training sequences where they were longer than the release's positions. The release's length
    stays where rotary positions are stretched relative to it."""
    longer = copy.copy(hf)
    for name in _LENGTHS:
        if isinstance(length := hf.get(name), int) and length < ours.seq_length:
            longer[name] = ours.seq_length
    return hf if differences(ours, conversion.config(longer)) else longer
