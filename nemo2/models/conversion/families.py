# SPDX-License-Identifier: Apache-2.0
"""All families that can be converted, and which of them a configuration is of."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from nemo2.errors import ConfigError
from nemo2.models.conversion.baichuan import BAICHUAN
from nemo2.models.conversion.chatglm import CHATGLM, GLM
from nemo2.models.conversion.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from nemo2.models.conversion.gemma import GEMMA, GEMMA2, GEMMA3
from nemo2.models.conversion.gpt2 import GPT2
from nemo2.models.conversion.gpt_oss import GPT_OSS
from nemo2.models.conversion.llama import LLAMA
from nemo2.models.conversion.llama4 import LLAMA4
from nemo2.models.conversion.llama_nemotron import LLAMA_NEMOTRON
from nemo2.models.conversion.mistral import MISTRAL
from nemo2.models.conversion.mixtral import MIXTRAL
from nemo2.models.conversion.nemotron import NEMOTRON
from nemo2.models.conversion.phi3 import PHI3
from nemo2.models.conversion.qwen2 import QWEN2
from nemo2.models.conversion.qwen3 import QWEN3, QWEN3_MOE
from nemo2.models.conversion.ssm import MAMBA, NEMOTRON_H
from nemo2.models.conversion.starcoder import STARCODER, STARCODER2
from nemo2.models.conversion.table import Conversion
from nemo2.names import did_you_mean
from nemo2.parallel.norm_names import module_of_key

FAMILIES: tuple[Conversion, ...] = (
    LLAMA, LLAMA4, LLAMA_NEMOTRON, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA, GEMMA2, GEMMA3, PHI3, GPT_OSS,
    DEEPSEEK_V2, DEEPSEEK_V3, NEMOTRON, NEMOTRON_H, MAMBA, STARCODER, STARCODER2, BAICHUAN, GLM, CHATGLM, GPT2,
)  # fmt: skip


def conversion_of(config: Any, architectures: Sequence[str] = ()) -> Conversion:
    """The conversion of a nemo2 configuration. A family's own class takes precedence over its base class.

    If a family has several conversions (ChatGLM: its own names, and as a GLM), the one for any of ``architectures``, or
    else the first.

    Raises:
        ConfigError: no family has the configuration.
    """
    for kind in type(config).__mro__:
        found = [family for family in FAMILIES if kind in family.configs]
        if found:
            return next((family for family in found if set(architectures) & set(family.architectures)), found[0])
    known = sorted(kind.__name__ for family in FAMILIES for kind in family.configs)
    raise ConfigError(
        f"model.config={type(config).__name__}: there is no conversion between Hugging Face and such a model. Those with one "
        f"are {', '.join(known)} and what is derived from them."
    )


def conversion_for(released: Mapping[str, Any]) -> Conversion:
    """The conversion for a config.json.

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


def modules_with_weights(config: Any) -> Optional[list[str]]:
    """The full names of all modules that have weights, as plain layers have them, those of routed experts without the expert's
    number; None where no family has the model."""
    try:
        rows = conversion_of(config).rows(config)
    except ConfigError:
        return None
    found = []
    for row in rows:
        layers = range(config.num_layers) if row.layers is None else row.layers
        keys = [row.key.replace("*", str(layer), 1) for layer in layers] if "*" in row.key else [row.key]
        found += [module_of_key(key) for key in keys]
    return list(dict.fromkeys(found))
