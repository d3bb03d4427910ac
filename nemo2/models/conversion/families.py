# SPDX-License-Identifier: Apache-2.0
"""All families that can be converted, and which of them a configuration is of."""

from collections.abc import Mapping
from typing import Any

from nemo2.errors import ConfigError
from nemo2.models.conversion.llama import LLAMA
from nemo2.models.conversion.mixtral import MIXTRAL
from nemo2.models.conversion.table import Conversion
from nemo2.names import did_you_mean

FAMILIES: tuple[Conversion, ...] = (LLAMA, MIXTRAL)


def conversion_of(config: Any) -> Conversion:
    """Of a configuration of ours; a family's own class counts before one that it is derived from.

    Raises:
        ConfigError: no family has it.
    """
    for kind in type(config).__mro__:
        for family in FAMILIES:
            if kind in family.configs:
                return family
    known = sorted(kind.__name__ for family in FAMILIES for kind in family.configs)
    raise ConfigError(
        f"model.config={type(config).__name__}: there is no conversion between Hugging Face and such a model. Those with one "
        f"are {', '.join(known)} and what is derived from them."
    )


def conversion_for(released: Mapping[str, Any]) -> Conversion:
    """Of what a config.json says.

    Raises:
        ConfigError: it names an architecture that nemo2 has no model of, or none.
    """
    names = [str(name) for name in released.get("architectures") or []]
    known = {name: family for family in FAMILIES for name in family.architectures}
    for name in names:
        if name in known:
            return known[name]
    if not names:
        raise ConfigError(
            "config.json: architectures is missing, so that nothing tells what model it is. Add it, such as "
            '"architectures": ["LlamaForCausalLM"].'
        )
    raise ConfigError(
        f"config.json: architectures={names}: nemo2 has no conversion for it{did_you_mean(names[0], known)}"
    )
