# SPDX-License-Identifier: Apache-2.0
"""Parses the forms of ``paths`` and ``split`` strictly into the arguments of Megatron's dataset builder."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.data.token_files import strip_suffix

Paths = Union[str, Path, Sequence[Any], Mapping[str, Any]]
SPLITS = ("train", "validation", "test")
"""In the order of Megatron-Core's `Split`."""


@dataclass(frozen=True)
class Blend:
    """Datasets that are mixed.

    `weights` are shares of the samples, in any unit. None: every dataset is used once, in proportion to its size. A
    single dataset has no weights.
    """

    prefixes: tuple[str, ...]
    weights: Optional[tuple[float, ...]] = None

    def for_megatron(self) -> tuple[list[str], Optional[list[float]]]:
        """The value of ``BlendedMegatronDatasetConfig.blend``."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


def parse_paths(paths: Paths) -> Union[Blend, dict[str, Optional[Blend]]]:
    """One `Blend` to split into train, validation and test, or one `Blend` or None for each of these.

    The forms are a prefix; a list of prefixes; a flat list ``[weight, prefix, weight, prefix, ...]``; and a dictionary
    with any of these forms, or None, under "train", "validation" and "test". Prefixes may end in .bin or .idx.

    Raises:
        ConfigError: another form, or weights that aren't valid shares.
    """
    if isinstance(paths, Mapping):
        for key in paths:
            if key not in SPLITS:
                raise ConfigError(f"paths has the key {key!r}{did_you_mean(str(key), SPLITS)}")
        blends = {split: _blend(paths[split], f"paths[{split!r}]") if paths.get(split) else None for split in SPLITS}
        if not any(blends.values()):
            raise ConfigError("paths is a dictionary without datasets. Give a dataset at least for 'train'.")
        return blends
    return _blend(paths, "paths")


def empty_share(shares: str, split: str) -> Optional[str]:
    """A sentence, if ``shares`` (the argument ``split`` of data modules) leaves no data to the split of this name."""
    share = float(parse_split(shares).split(",")[SPLITS.index(split)])
    if share or split == "test":
        return None
    if split == "train":
        return f"data.split={shares!r} leaves no training data. Set its first number above 0."
    return (
        f"data.split={shares!r} leaves no validation data. Set its second number above 0, or set "
        "trainer.limit_val_batches=0 to skip validation."
    )


def parse_split(split: str) -> str:
    """The shares of train, validation and test in Megatron's notation: three decimal numbers, "900,50,50".

    Megatron extracts the digits from any string. This function returns only text that Megatron can't misread, and
    rejects the rest.

    Raises:
        ConfigError: not one to three numbers, 0 or more, separated by commas, or all 0.
    """
    try:
        numbers = [float(number) for number in str(split).split(",")]
    except ValueError:
        numbers = []
    good = 1 <= len(numbers) <= 3 and all(math.isfinite(n) and n >= 0 for n in numbers) and sum(numbers) > 0
    if not good:
        raise ConfigError(
            f"split={split!r}: must be the shares of train, validation and test, such as '900,50,50'. Each share must "
            "be at least 0, and at least one must be above 0."
        )
    return ",".join(np.format_float_positional(number, trim="-") for number in (*numbers, 0.0, 0.0)[:3])


def _blend(value: Any, where: str) -> Blend:
    items = [value] if isinstance(value, (str, Path)) else value
    if not isinstance(items, Sequence) or not items:
        raise ConfigError(
            f"{where}={value!r}: must be the path of a dataset without suffix, a list of them, or a list "
            "[weight, path, weight, path, ...]."
        )
    numbers = [_as_number(item) for item in items]
    if all(number is None for number in numbers):
        return Blend(tuple(_prefix(item, where) for item in items))
    if len(items) % 2 or any((number is None) != bool(place % 2) for place, number in enumerate(numbers)):
        raise ConfigError(
            f"{where}={list(items)!r}: weights and paths must alternate, [weight, path, weight, path, ...], or give no "
            "weights at all."
        )
    weights = [number for number in numbers if number is not None]
    for weight, item in zip(weights, items[1::2], strict=True):
        if not math.isfinite(weight) or weight <= 0:
            raise ConfigError(
                f"{where}: the weight of {item} is {weight:g}, but a weight must be above 0. Remove the dataset "
                "instead."
            )
    prefixes = tuple(_prefix(item, where) for item in items[1::2])
    return Blend(prefixes, tuple(weights) if len(prefixes) > 1 else None)


def _as_number(item: Any) -> Optional[float]:
    if isinstance(item, bool) or not isinstance(item, (int, float, str)):
        return None
    try:
        return float(item)
    except ValueError:
        return None


def _prefix(item: Any, where: str) -> str:
    if not isinstance(item, (str, Path)) or not str(item).strip():
        raise ConfigError(f"{where} has {item!r} where the path of a dataset is expected.")
    text = str(item).strip()
    return strip_suffix(text) if "://" in text else os.path.expanduser(strip_suffix(text))
