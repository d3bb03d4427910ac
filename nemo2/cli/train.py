# SPDX-License-Identifier: Apache-2.0
"""``nemo2 pretrain`` and ``nemo2 finetune``."""

from functools import partial
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.cli.begin_from import From, finetuning_of, give_weights, named_weights
from nemo2.cli.flags import Performance
from nemo2.cli.launching import TRAINING, TrainingOptions, changes_of, launched, logged
from nemo2.cli.own_data import Data
from nemo2.cli.sources import Method, OptionalRecipe, Overrides, RecipeName, method_of, name_of_run, recipe_tree


def pretrain(
    name: RecipeName,
    overrides: Overrides = None,
    *,
    data: Data = None,
    source: From = None,
    performance: Performance = False,
    options: TrainingOptions = TRAINING,
) -> None:
    """Pre-train a model from a recipe.

    Example: nemo2 pretrain llama_tiny trainer.max_steps=50 optim.config.lr=1e-3 --devices 2
    """
    recipe = logged(
        lambda: _with_weights(source, name, performance=performance),
        overrides or [],
        own_name=partial(name_of_run, name),
        options=options,
        data=data,
    )
    launched(recipe, name=name, changes=changes_of(overrides, data, performance, source), options=options)


def finetune(
    name: OptionalRecipe = None,
    overrides: Overrides = None,
    *,
    peft: Optional[Method] = None,
    packed: bool = False,
    data: Data = None,
    source: From = None,
    performance: Performance = False,
    options: TrainingOptions = TRAINING,
) -> None:
    """Fine-tune the model of a recipe, or the weights of --from.

    With a recipe and --from, the weights decide the model and the recipe decides the rest.

    Args:
        peft: Method, by default lora. 'full' trains all parameters. Any other: the change peft=Class(...).
        packed: Pack several samples into one sequence.

    Example: nemo2 finetune llama3_8b --peft dora resume.restore_config.path=hf:///models/Llama-3-8B
    """
    overrides = overrides or []
    if name is not None and "=" in name:  # the first change of a command without a recipe
        name, overrides = None, [name, *overrides]
    if name is None:
        if source is None:
            raise ConfigError("Name a recipe (`nemo2 list --finetune`), or the weights to fine-tune: --from FOLDER.")
        if performance:
            raise ConfigError(
                "--performance: only recipes have a performance mode. Name one, or leave --performance out."
            )
        from nemo2.hugging_face.checkpoint import name_of_weights

        method, own_name = peft or "lora", lambda _: name_of_weights(source).rpartition("/")[2]
        called, make = source, lambda: finetuning_of(source, method=method, packed=packed)
    else:
        called, own_name = (with_method := _with_method(name, peft)), partial(name_of_run, with_method)
        packing = {"packed_sequence": True} if packed else {}
        make = lambda: _with_weights(source, with_method, performance=performance, **packing)  # noqa: E731
    recipe = logged(make, overrides, own_name=own_name, options=options, data=data)
    changes = changes_of(overrides, data, performance, None if name is None else source)
    launched(recipe, name=called, changes=changes, options=options)


def _with_weights(source: Optional[str], name: str, **how: Any) -> Any:
    if source is None:
        return recipe_tree(name, **how)
    named_weights(None, source)  # refused before the recipe is built, which takes seconds
    recipe = recipe_tree(name, **how)
    give_weights(recipe, source)
    return recipe


def _with_method(name: str, peft: Optional[str]) -> str:
    """``NAME:METHOD``. The name of a file with every setting stays as it is, because the file sets the method itself.

    Raises:
        ConfigError: two methods.
    """
    made_to_order, named = method_of(name)
    if named is not None and peft not in (None, named):
        raise ConfigError(f"{name} sets {named}, and --peft sets {peft}: use one of them.")
    if not made_to_order:
        if peft is not None:
            raise ConfigError(f"--peft {peft}: {name} sets its own method. Leave --peft out.")
        return name
    return name if named else f"{name}:{peft or 'lora'}"
