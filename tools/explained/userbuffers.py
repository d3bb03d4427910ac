# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel overlap: which GEMM of a layer hides which exchange, and how, from one of the shipped presets."""

import re
from dataclasses import fields
from typing import Any

from nemo2.mcore.overlap.presets import preset
from nemo2.mcore.overlap.tp_overlap_cfg import (
    BESIDE,
    GATHERS,
    SCATTERS,
    BulkOverlapCfg,
    PipelineOverlapCfg,
    RingExchangeOverlapCfg,
)
from nemo2.report.pictures.svg import Canvas
from tools.explained.kit import COMMUNICATION, FORWARD, LEFT, SMALL, TOP, WIDTH, box, note, sheet, signed

NAME = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"
_FROM, _HIGH = 70.0, 22.0
_MESSAGES = 0.75
"""The total time of a GEMM's messages, in units of the GEMM's time. An assumption of the figure, which its text
states."""


def methods() -> Canvas:
    """The three ways on a timeline, each with the GEMMs of the preset that go that way."""
    found: dict[str, list[str]] = {}
    settings: dict[str, Any] = {}
    chosen = preset(NAME)
    for field in fields(chosen):
        one = getattr(chosen, field.name)
        found.setdefault(one.method, []).append(field.name)
        settings[field.name] = one
    (tp,) = map(int, re.findall(r"tp(\d+)", NAME))
    canvas = sheet("Tensor-parallel overlap: which GEMM hides what")
    y = note(canvas, TOP + 8, NAME, tone="ink") + 6
    for method, gemms in found.items():
        canvas.text(LEFT, y + 8, method.replace("_", " "), "ink", strong=True)
        lines = [
            [one for one in gemms if exchanged(one) == exchange] for exchange in dict.fromkeys(map(exchanged, gemms))
        ]
        for line in lines:
            y += 15
            canvas.text(LEFT, y + 8, ", ".join(line), size=SMALL)
            canvas.text(WIDTH - LEFT, y + 8, exchanged(line[0]), anchor="end", size=SMALL)
        splits = {settings[gemm].num_splits for gemm in gemms} if method == "pipeline" else {tp}
        (pieces,) = {1} if method == "bulk" else splits
        y = _timeline(canvas, y + 15, method, pieces) + 18
    y = note(
        canvas,
        y,
        "fprop: the forward GEMM; dgrad: of its input's gradient; wgrad: of its weights' gradient. Time "
        f"to the right, assuming that an exchange takes {_MESSAGES} of its GEMM's time; dashed: the end without overlap. In "
        "bulk the exchange belongs to another GEMM",
    )
    return signed(canvas, y - 14, BulkOverlapCfg, PipelineOverlapCfg, RingExchangeOverlapCfg)


def exchanged(gemm: str) -> str:
    """Communication hidden behind a GEMM."""
    if gemm in GATHERS:
        return "all-gather of its input"
    if gemm in SCATTERS:
        return "reduce-scatter of its output"
    assert gemm in BESIDE
    return "all-gather for wgrad" if gemm.endswith("dgrad") else "reduce-scatter of dgrad"


def _timeline(canvas: Canvas, y: float, method: str, pieces: int) -> float:
    """Two lanes: the GEMM's pieces and the messages beside them."""
    across = (WIDTH - LEFT - _FROM) / (1 + _MESSAGES)
    gemm = 1.0 / pieces
    if method == "bulk":
        messages = [(0.0, _MESSAGES, "")]
    elif method == "pipeline":  # a split is sent once it is computed
        sent = _MESSAGES / pieces
        messages = [((index + 1) * gemm, sent, f"{index}") for index in range(pieces)]
    else:  # a chunk arrives while the one before is multiplied; the rank's own is there
        sent = _MESSAGES / (pieces - 1)
        messages = [(index * gemm, min(sent, gemm), f"{index + 1}") for index in range(pieces - 1)]
    canvas.text(LEFT, y + 15, "GEMM", "ink", size=SMALL)
    canvas.text(LEFT, y + _HIGH + 18, "exchange", "ink", size=SMALL)
    for index in range(pieces):
        words = f"{index}" if pieces > 1 else "one GEMM"
        box(canvas, _FROM + index * gemm * across, y, gemm * across, _HIGH, words, FORWARD, size=SMALL)
    for start, length, words in messages:
        box(canvas, _FROM + start * across, y + _HIGH + 3, length * across, _HIGH, words, COMMUNICATION, size=SMALL)
    end = _FROM + (1 + _MESSAGES) * across
    canvas.line(end - 1, y, end - 1, y + 2 * _HIGH + 3, "ink", dashed=True)
    return y + 2 * _HIGH + 3
