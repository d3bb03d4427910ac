# SPDX-License-Identifier: Apache-2.0
"""Rules of fine-tuning: the initial weights, and the layers that a PEFT method adapts."""

from collections.abc import Iterator
from typing import Any

from nemo2.base.advice import advice
from nemo2.errors import ConfigError
from nemo2.models.walker import linear_layers
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

PEFT = Topic("Fine-tuning", needs_sizes=False, recipe="llama3_8b:lora")


@PEFT.rule(
    "fine-tuning-begins-with-weights",
    recipe="mamba2_130m:full",
    broken="trainer.devices=2 trainer.accelerator=auto",
    mended="trainer.devices=2 trainer.accelerator=auto resume.restore_config.path=hf://organisation/name",
    local=True,
)
def _weights(facts: Facts) -> Iterator[str]:
    """A run of `llm.finetune` must name the weights to start from.

    Otherwise: The run would train adapters on random weights, or train the whole model from random weights.
    """
    # "peft" is a parameter of llm.finetune only.
    parameters = getattr(facts.at("__signature_info__"), "parameters", {})
    if "peft" in parameters and not names_weights(facts.at("resume"), facts.strategy):
        yield (
            "resume.restore_config=None: llm.finetune starts from existing weights, but the recipe names none. "
            f"{advice('Add --from with', 'Set resume.restore_config.path to')} a checkpoint, an imported model "
            "(nemo://organisation/name) or a Hugging Face release (hf:///folder, hf://organisation/name)."
        )


@PEFT.settled("peft-settings-are-in-range", broken="peft.dim=0", mended="peft.dim=1")
def _peft_settings_are_in_range() -> None:
    """The rank, scale and dropout of a PEFT method must be in range.

    Otherwise: The PEFT method raises an error on every rank.
    """


@PEFT.rule("peft-fits-the-layers", broken="peft.target_modules=[linear_qvk]", mended="peft.target_modules=[linear_qkv]")
def _targets(facts: Facts) -> Iterator[str]:
    """The layers that a PEFT method targets must exist and must be at least as wide as its rank.

    Otherwise: The run stops on every rank before it builds the model.
    """
    method = facts.parts.get("peft")
    if method is None or facts.config is None:
        return
    from nemo2.models.conversion.families import modules_with_weights

    for refuse, there in (
        (method.refuse_unknown_targets, linear_layers),
        (method.refuse_unknown_modules, modules_with_weights),
    ):
        try:
            refuse(there(facts.config))
        except ConfigError as error:
            yield str(error)


def names_weights(resume: Any, strategy: Any) -> bool:
    """Whether a run with these parts, or their nodes in a recipe, names weights to start from."""
    owners = ((resume, "restore_config"), (resume, "resume_from_path"), (strategy, "restore_config"))
    return any(getattr(owner, name, None) for owner, name in owners)
