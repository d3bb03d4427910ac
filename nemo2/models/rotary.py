# SPDX-License-Identifier: Apache-2.0
"""Rotary positions that are stretched beyond the length of a model's first training: dynamic NTK, a raised base,
LongRoPE, YaRN.

A kind determines the frequencies for a sequence of a given length. With two of the kinds the frequencies change beyond
the original length. All tokens of a sequence use the frequencies of its full length, so a token's keys that were cached
at a shorter length may no longer match (`Stretching.longest_alike`, which generation uses). Packed sequences use the
frequencies of the longest sequence in their batch.

Formulas and defaults are those of transformers' ``modeling_rope_utils.py``. Linear interpolation is Megatron-Core's
``seq_len_interpolation_factor``, and Llama 3.1's scaling is `scale_positions`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable


@configurable
@dataclass
class Stretching(ABC):
    """How positions are stretched: by the number of tokens in the model's first training, and a factor. To be
    subclassed."""

    original_length: int
    """The longest sequence, in tokens, before the stretch."""
    factor: float
    """The factor by which sequences may become longer."""

    def __post_init__(self) -> None:
        if self.original_length < 2 or not 1 <= self.factor < math.inf:
            raise ConfigError(
                f"model.config.rope_stretching ({type(self).__name__}) has original_length={self.original_length} and "
                f"factor={self.factor}: original_length must be at least 2, and factor must be finite and at least 1."
            )

    @abstractmethod
    def frequencies(self, plain: Tensor, *, base: float, length: int) -> Tensor:
        """Radians per position for a sequence of ``length`` tokens, in the shape of ``plain``, the unstretched
        frequencies."""

    @property
    def amplitude(self) -> float:
        """The factor of rotated channels of queries and keys."""
        return 1.0

    def longest_alike(self, length: int) -> Optional[int]:
        """The longest sequence with the same frequencies as one of ``length`` tokens. None: any longer sequence."""
        return None

    def check(self, width: int) -> None:  # noqa: B027  # most kinds suit every width
        """Check that heads with ``width`` rotated channels can be stretched.

        Raises:
            ConfigError: they can't.
        """


@configurable
@dataclass
class DynamicNTK(Stretching):
    """The rotary base grows with the length of sequences beyond the original length.

    Source: bloc97 and emozilla, "Dynamically Scaled RoPE", 2023, as in transformers.
    """

    def frequencies(self, plain: Tensor, *, base: float, length: int) -> Tensor:
        width = 2 * len(plain)
        beyond = self.factor * max(length, self.original_length) / self.original_length - (self.factor - 1)
        return _at(base * beyond ** (width / (width - 2)), plain)

    def longest_alike(self, length: int) -> Optional[int]:
        return max(length, self.original_length)

    def check(self, width: int) -> None:
        _check_raised(type(self).__name__, width)


@configurable
@dataclass
class RaisedBase(Stretching):
    """The rotary base is raised, by the same power of the factor for every length, as in Hunyuan's releases."""

    def frequencies(self, plain: Tensor, *, base: float, length: int) -> Tensor:
        width = 2 * len(plain)
        return _at(base * self.factor ** (width / (width - 2)), plain)

    def check(self, width: int) -> None:
        _check_raised(type(self).__name__, width)


@configurable
@dataclass
class LongRope(Stretching):
    """Each frequency has its own divisor: one for sequences up to the original length, another beyond it.

    Source: Ding et al. 2024, arXiv:2402.13753, as in Phi-3's and Phi-4's releases.
    """

    short_factors: list[float]
    """One divisor for each two rotated channels."""
    long_factors: list[float]
    attention_factor: Optional[float] = None
    """`amplitude`. None: sqrt(1 + ln(factor) / ln(original_length))."""

    def frequencies(self, plain: Tensor, *, base: float, length: int) -> Tensor:
        factors = self.long_factors if length > self.original_length else self.short_factors
        return _at(base, plain, torch.tensor(factors, dtype=plain.dtype, device=plain.device))

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor == 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    def longest_alike(self, length: int) -> Optional[int]:
        return self.original_length if length <= self.original_length else None

    def check(self, width: int) -> None:
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if len(factors) != width // 2 or not all(0 < factor < math.inf for factor in factors):
                raise ConfigError(
                    f"model.config.rope_stretching.{name} has {len(factors)} numbers: heads with {width} rotated channels need "
                    f"{width // 2} finite numbers, each above 0."
                )


@configurable
@dataclass
class Yarn(Stretching):
    """Slow frequencies are divided by the factor, fast ones stay, and those between are divided partly. The same for
    every length.

    Source: Peng et al. 2023, arXiv:2309.00071, sections 3.2 to 3.4.
    """

    beta_fast: float = 32.0
    """The number of turns within the original length from which on a frequency stays."""
    beta_slow: float = 1.0
    """The number of turns below which a frequency is divided by the whole factor."""
    round_to_channels: bool = True
    """Whether the range between the two starts and ends at whole channels."""
    attention_factor: Optional[float] = None
    """`amplitude`. None: 1 + ln(factor) / 10."""

    def frequencies(self, plain: Tensor, *, base: float, length: int) -> Tensor:
        width = 2 * len(plain)
        first, last = (self._channel(turns, base, width) for turns in (self.beta_fast, self.beta_slow))
        if self.round_to_channels:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        last += 0.001 if first == last else 0.0
        divided = ((torch.arange(len(plain), dtype=plain.dtype, device=plain.device) - first) / (last - first)).clamp(
            0, 1
        )
        return _at(base, plain, self.factor) * divided + _at(base, plain) * (1 - divided)

    @property
    def amplitude(self) -> float:
        return 1 + 0.1 * math.log(self.factor) if self.attention_factor is None else self.attention_factor

    def _channel(self, turns: float, base: float, width: int) -> float:
        """The channel with this number of turns within the original length."""
        return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


def rotary_embedding(
    config: Any, *, kind: Callable[..., RotaryEmbedding] = RotaryEmbedding, **settings: Any
) -> RotaryEmbedding:
    """A rotary embedding with the config's channels. ``kind`` is its class, and ``settings`` are its other arguments."""
    return kind(
        kv_channels=config.kv_channels,
        rotary_percent=config.rotary_percent,
        rotary_interleaved=config.rotary_interleaved,
        use_cpu_initialization=config.use_cpu_initialization,
        **settings,
    )


class StretchedRotaryEmbedding(RotaryEmbedding):
    """Megatron-Core's rotary embedding, with the frequencies of a `Stretching`."""

    def __init__(self, *, stretching: Stretching, rotary_base: float, **settings: Any) -> None:
        super().__init__(rotary_base=rotary_base, **settings)  # pyright: ignore[reportArgumentType]  # a float does as well
        self.stretching, self.rotary_base = stretching, rotary_base

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles ``[max_seq_len, rotated channels / 2]`` of a sequence that ends there."""
        positions = torch.arange(offset, offset + max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        length = offset + max_seq_len
        return torch.outer(positions, self.stretching.frequencies(self.inv_freq, base=self.rotary_base, length=length))

    def get_rotary_seq_len(self, inference_context: Any, transformer: Any, hidden: Any, *rest: Any, **more: Any) -> int:
        """Megatron-Core's value, but with a cache the current length. Megatron-Core's own is the capacity of the
        cache."""
        length = super().get_rotary_seq_len(inference_context, transformer, hidden, *rest, **more)
        if inference_context is None:
            return length
        hidden = hidden if transformer.input_tensor is None else transformer.input_tensor
        alike = self.stretching.longest_alike(inference_context.sequence_len_offset + hidden.size(0))
        return length if alike is None else min(alike, length)


def _check_raised(kind: str, width: int) -> None:
    if width <= 2:
        raise ConfigError(
            f"model.config.rope_stretching={kind} needs heads with more than 2 rotated channels, not {width}. Raise "
            "model.config.kv_channels or model.config.rotary_percent."
        )


def _at(base: float, plain: Tensor, factors: Any = 1.0) -> Tensor:
    """Frequencies of this base, each divided by its factor, rounded as in transformers."""
    shares = torch.arange(0, 2 * len(plain), 2, dtype=plain.dtype, device=plain.device) / (2 * len(plain))
    return 1.0 / (factors * base**shares)


def scale_positions(model: Any, config: Any, *, scale_factor: float) -> None:
    """Scale the rotary frequencies of a chunk, as Llama 3.1. Megatron-Core's `rope_scaling` fixes three of the four numbers."""
    numbers = {name: getattr(config, name) for name in ("low_freq_factor", "high_freq_factor", "old_context_len")}
    frequencies = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = scale_rotary_frequencies(frequencies, scale_factor=scale_factor, **numbers)


def scale_rotary_frequencies(
    frequencies: Tensor,
    *,
    scale_factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: int,
) -> Tensor:
    """Llama 3.1's rotary frequencies: a new tensor of the same shape, in radians per position.

    A frequency with more than ``high_freq_factor`` turns within ``old_context_len`` positions stays. A frequency with
    fewer than ``low_freq_factor`` turns is divided by ``scale_factor``. Between the two, the result changes linearly
    with the number of turns, or jumps if both factors are equal (Llama 4). Source: ``apply_scaling`` in
    meta-llama/llama-models, ``llama3/model.py``.
    """
    turns = old_context_len * frequencies / (2 * math.pi)
    if high_freq_factor == low_freq_factor:
        unscaled = (turns >= low_freq_factor).to(frequencies.dtype)
    else:
        unscaled = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (unscaled + (1.0 - unscaled) / scale_factor)
