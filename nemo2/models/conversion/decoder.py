# SPDX-License-Identifier: Apache-2.0
"""The conversion of a decoder whose config.json has one field for each of nemo2's settings, rotary positions, and little
else. A family names its fields, and the rest as two functions."""

from collections.abc import Callable, Sequence
from typing import Any, Optional

from nemo2.models.conversion.positions import KINDS, partial_positions, positions, positions_of, rope_of
from nemo2.models.conversion.settings import Config, Field, read, said, written
from nemo2.models.conversion.table import Conversion, Row


def decoder_conversion(
    architecture: str,
    model: Any,
    kind: type,
    *,
    rows: Callable[[Any], list[Row]],
    fields: Sequence[Field],
    only: Config,
    ours: Callable[[Config], dict[str, Any]] = lambda hf: {},
    theirs: Callable[[Any], dict[str, Any]] = lambda ours: {},
    theta: float = 10_000.0,
    partial: Optional[float] = None,
    also: Sequence[str] = (),
    flat: Callable[[Config], Config] = lambda hf: hf,
    **more: Any,
) -> Conversion:
    """The conversion between ``kind``, a configuration of nemo2, and config.json.

    Args:
        fields, only: As in `read`.
        ours: nemo2's other settings for a config.json.
        theirs: The inverse of ``ours``.
        theta: The rotary base if config.json omits it.
        partial: The share of rotated channels if config.json omits it. None: all, and no other share is supported.
        also: Other architectures of config.json with the same text model.
        flat: A config.json's text model, with rotary positions as most decoders have them. ``ours`` gets it too.
        more: Other fields of `Conversion`.
    """

    def config(released: Config) -> Any:
        hf = flat(released)
        settings = {"rope_stretching": None, **read(hf, fields, only=only)}
        rope = rope_of(hf, theta=theta, partial=1.0 if partial is None else partial, kinds=KINDS)
        if partial is None:
            settings |= positions(hf, rope, longest=settings["seq_length"])
        else:
            settings |= {**partial_positions(hf, rope, longest=settings["seq_length"]), "rotary_percent": rope.partial}
        return kind(**settings | ours(hf))

    def hf_config(own: Any) -> dict[str, Any]:
        share = None if partial is None else own.rotary_percent
        config_json = {**written(own, fields, only=only), **positions_of(own, partial=share), **theirs(own)}
        return said(own, config_json, config)

    return Conversion(
        architectures=(architecture, *also),
        model=model,
        configs=(kind,),
        rows=rows,
        config=config,
        hf_config=hf_config,
        **more,
    )
