# SPDX-License-Identifier: Apache-2.0
"""Messages of other libraries that say nothing about a run of ours, by name. Everything else they say is shown."""

import logging
import warnings

_WARNINGS = (
    # Megatron-Core, of what a machine without Transformer Engine and Apex falls back to: our layers say what runs.
    r"Transformer Engine and Apex are not installed.*",
    r"Apex is not installed.*",
    # torch, of a package that nvidia-resiliency-ext brings.
    r"The pynvml package is deprecated.*",
    # Megatron-Core 0.16 warns of the default of its own field.
    r"full scope is deprecated.*",
    # torch's checkpoint reader, of the class that Megatron-Core's format is made of.
    r"Please use DTensor instead.*",
)
_LIGHTNING = "lightning.pytorch.utilities.rank_zero"


def quiet_known_warnings() -> None:
    """Filter the messages above. Costs nothing and imports nothing of theirs."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger(_LIGHTNING).addFilter(_no_advertisement)


def _no_advertisement(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("💡")
