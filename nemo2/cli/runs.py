# SPDX-License-Identifier: Apache-2.0
"""``nemo2 pretrain``, ``finetune``, ``validate`` and ``generate``: the commands that run a model."""

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.begin_from import From, WeightsOption, finetuning_of, give_weights, named_weights
from nemo2.cli.commands import not_with, only_with
from nemo2.cli.flags import AsJson, MinP, Performance, Temperature, TopK, TopP, said
from nemo2.cli.launching import LaunchOptions, TrainingOptions, launched, logged, with_options
from nemo2.cli.own_data import Data
from nemo2.cli.run_names import checkpoint_called
from nemo2.cli.sources import OptionalRecipe, Overrides, RecipeName, method_of, name_of_run, recipe_tree

PRETRAIN_EXAMPLE = "Example: nemo2 pretrain llama_tiny trainer.max_steps=50 optim.config.lr=1e-3 --devices 2"
FINETUNE_EXAMPLE = "Example: nemo2 finetune llama3_8b --peft dora resume.restore_config.path=hf:///models/Llama-3-8B"
VALIDATE_EXAMPLE = "Example: nemo2 validate llama_tiny --checkpoint RUN_DIR/checkpoints/NAME --devices 2"
GENERATE_EXAMPLE = "Example: nemo2 generate RUN_DIR/checkpoints/NAME --prompt 'def main(' --max-new-tokens 40"

_STANDARD = Path("-")
"""Standard input or output, in place of a file name."""


def register(app: typer.Typer) -> None:
    app.command("pretrain", epilog=PRETRAIN_EXAMPLE)(pretrain)
    app.command("finetune", epilog=FINETUNE_EXAMPLE)(finetune)
    app.command("validate", epilog=VALIDATE_EXAMPLE)(validate)
    app.command("generate", epilog=GENERATE_EXAMPLE)(generate)


@with_options
def pretrain(
    name: RecipeName,
    overrides: Overrides = None,
    data: Data = None,
    source: From = None,
    performance: Performance = False,
    *,
    options: TrainingOptions,
) -> None:
    """Pre-train a model from a recipe."""
    settings = {"performance": True} if performance else {}
    recipe = logged(
        lambda: _with_weights(recipe_tree(name, **settings), source),
        overrides or [],
        own_name=name_of_run(name),
        options=options,
        data=data,
    )
    launched(recipe, name=name, changes=_changes(overrides, data, performance, source), options=options)


@with_options
def finetune(
    name: OptionalRecipe = None,
    overrides: Overrides = None,
    peft: Annotated[
        Optional[str], typer.Option(help="Method: 'lora' (default), 'dora', or 'full' to train all parameters.")
    ] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Pack several samples into one sequence.")] = False,
    data: Data = None,
    source: From = None,
    performance: Performance = False,
    *,
    options: TrainingOptions,
) -> None:
    """Fine-tune the model of a recipe, or of the weights that --from names.

    With a recipe and --from, the weights decide the model and the recipe decides the rest.
    """
    overrides = overrides or []
    if name is not None and "=" in name:  # the first change of a command without a recipe
        name, overrides = None, [name, *overrides]
    if name is None:
        _refuse_without_recipe(source, peft, performance)
        assert source is not None
        from nemo2.hugging_face.checkpoint import name_of_weights

        method, own_name = peft or "lora", name_of_weights(source).rpartition("/")[2]
        called, make = source, lambda: finetuning_of(source, method=method, packed=packed)
    else:
        called, own_name = (made := _with_method(name, peft)), name_of_run(made)
        settings = ({"packed_sequence": True} if packed else {}) | ({"performance": True} if performance else {})
        make = lambda: _with_weights(recipe_tree(made, **settings), source)  # noqa: E731
    recipe = logged(make, overrides, own_name=own_name, options=options, data=data)
    changes = _changes(overrides, data, performance, None if name is None else source)
    launched(recipe, name=called, changes=changes, options=options)


@with_options
def validate(
    name: RecipeName,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Optional[str],
        typer.Option(
            help="The checkpoint or run to validate. Default: the checkpoint that the recipe would resume from."
        ),
    ] = None,
    data: Data = None,
    performance: Performance = False,
    *,
    options: LaunchOptions,
) -> None:
    """Compute the validation loss of a checkpoint, on the data of a recipe."""
    from nemo2.config import Config, Partial

    own, settings = name_of_run(name), {"performance": True} if performance else {}
    own = own and f"{own}_validate"
    recipe = logged(
        lambda: recipe_tree(name, **settings),
        overrides or [],
        own_name=own,
        options=options,
        data=data,
    )
    from nemo2.checkpoint.auto_resume import AutoResume
    from nemo2.llm.api import validate as entry

    parts = {field: getattr(recipe, field) for field in ("model", "data", "trainer", "log", "optim")}
    resume = recipe.resume
    if checkpoint is not None:
        _refuse_other_start(recipe, checkpoint)
        resume = Config(AutoResume, resume_from_path=str(checkpoint_called(checkpoint)))
    changes = _changes(overrides, data, performance)
    launched(Partial(entry, **parts, resume=resume), name=name, changes=changes, options=options)


def _changes(
    overrides: Optional[list[str]], data: Optional[str], performance: bool, source: Optional[str] = None
) -> list[str]:
    """The words of the command line that change the recipe, for the block at the start."""
    named = [word for option, value in (("--data", data), ("--from", source)) if value for word in (option, value)]
    return [*(overrides or []), *named, *["--performance"] * performance]


def _with_weights(recipe: Any, source: Optional[str]) -> Any:
    if source is not None:
        give_weights(recipe, source)
    return recipe


def _refuse_without_recipe(source: Optional[str], peft: Optional[str], performance: bool) -> None:
    """Raise ConfigError if a command without a recipe lacks weights, or has an option that only recipes have."""
    from nemo2.errors import ConfigError

    if source is None:
        raise ConfigError("Name a recipe (`nemo2 list --finetune`), or the weights to fine-tune: --from FOLDER.")
    if performance:
        raise ConfigError("--performance: only recipes have a performance mode. Name one, or leave --performance out.")
    _refuse_unknown_method(peft)


def _refuse_unknown_method(peft: Optional[str]) -> None:
    from nemo2.cli.sources import FINETUNING
    from nemo2.errors import ConfigError
    from nemo2.names import did_you_mean

    if peft is not None and peft not in FINETUNING:
        raise ConfigError(
            f"--peft {peft}{did_you_mean(peft, list(FINETUNING))} It is one of {', '.join(FINETUNING)}; any other method is set "
            "as peft=Class(...)."
        )


def _refuse_other_start(recipe: Any, checkpoint: str) -> None:
    """Raise ConfigError if the command line names a start besides ``--checkpoint``, which replaces ``recipe.resume``."""
    import fiddle as fdl

    from nemo2.config.walk import iterate_nodes
    from nemo2.errors import ConfigError

    for place, node in iterate_nodes(recipe.resume):
        for field in node.__arguments__:
            if said(node, field) and not isinstance(getattr(node, field), fdl.Buildable):
                path = ".".join(part for part in ("resume", place, field) if part)
                raise ConfigError(
                    f"--checkpoint {checkpoint} contradicts {path}={getattr(node, field)}: leave one of them out."
                )


def generate(
    checkpoints: Annotated[
        Optional[list[str]],
        typer.Argument(
            help="A checkpoint directory, a run (directory or name), or released weights (hf://organisation/name, or their "
            "folder). Takes several with --html.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        Optional[list[str]],
        typer.Option("--prompt", "-p", help="A prompt; may be repeated. '-' reads standard input."),
    ] = None,
    source: WeightsOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate per prompt.")] = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    stop: Annotated[Optional[list[str]], typer.Option(help="Stop before this text; may be repeated.")] = None,
    prompts_file: Annotated[
        Optional[Path],
        typer.Option("--prompts", help="A JSON-lines file of {\"input\": PROMPT}; '-' reads standard input."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts to complete in one batch.")] = 4,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 1234,
    output: Annotated[
        Optional[Path],
        typer.Option(help="Also write JSON lines to this file; '-': print only JSON lines."),
    ] = None,
    html: Annotated[
        Optional[Path], typer.Option(help="Write an HTML page with the texts of all checkpoints side by side.")
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the Python code beside the tokenizer's files. Read it first."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text from prompts with the model of a checkpoint, in this process."""
    from nemo2.errors import ConfigError

    only_with("temperature", "top_k", "top_p", "min_p", "seed")
    not_with("as_json", "output", "html")
    if bool(prompt) == bool(prompts_file):
        if prompt:
            raise ConfigError(f"--prompt {prompt[0]!r} and --prompts {prompts_file}: leave one of them out.")
        raise ConfigError("generate needs a prompt: either --prompt TEXT, or --prompts FILE with several prompts.")
    named = checkpoints or [None]
    if len(named) > 1 and (html is None or output is not None):
        raise ConfigError(
            f"{len(named)} checkpoints: --output supports only one. --html FILE writes their texts side by side."
        )
    if len(named) > 1 and prompts_file == _STANDARD:
        raise ConfigError(
            f"--prompts -: standard input can be read only once, but there are {len(named)} checkpoints. Give a file."
        )
    texts = [sys.stdin.read() if text == "-" else text for text in prompt or ()]
    paths = [named_weights(checkpoint, source) for checkpoint in named]
    from nemo2.llm.api import generate as entry

    lines_only = as_json or output == _STANDARD
    alone = len(texts) == 1 and html is None and not lines_only
    if alone:
        print(texts[0], end="", flush=True)

    def complete(path: str) -> list[Any]:
        return entry(
            path=path,
            prompts=texts or None,
            input_dataset=Path("/dev/stdin") if prompts_file == _STANDARD else prompts_file,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop=stop,
            max_batch_size=batch_size,
            random_seed=seed,
            output_path="/dev/stdout" if lines_only else str(output) if output else None,
            trust_remote_code=trust_remote_code,
            on_text=(lambda place, text: print(text, end="", flush=True)) if alone else None,
        )

    if html is not None:
        from nemo2.llm.side_by_side import names_of, side_by_side

        answers = {
            name: complete(path) for name, path in zip(names_of([Path(path) for path in paths]), paths, strict=True)
        }
        how = f"temperature {temperature}, top-k {top_k}, top-p {top_p}, min-p {min_p}, seed {seed}"
        html.write_text(side_by_side(answers, subtitle=how), "utf-8")
        print(html)
        return
    completions = complete(paths[0])
    if alone:
        print()
    if alone or lines_only:
        return
    for number, completion in enumerate(completions):
        if number:
            print("-" * 40)
        print(completion_text(completion))


def completion_text(completion: Any) -> str:
    """The prompt with the generated text."""
    return completion if isinstance(completion, str) else f"{completion.prompt}{completion.text}"


def _with_method(name: str, peft: Optional[str]) -> str:
    """``NAME:METHOD``. The name of a file with every setting stays as it is, because the file sets the method itself.

    Raises:
        ConfigError: an unknown method, or two methods.
    """
    from nemo2.errors import ConfigError

    made_to_order, named = method_of(name)
    _refuse_unknown_method(peft)
    if named is not None and peft not in (None, named):
        raise ConfigError(f"{name} sets {named}, and --peft sets {peft}: use one of them.")
    if not made_to_order:
        if peft is not None:
            raise ConfigError(f"--peft {peft}: {name} sets its own method. Leave --peft out.")
        return name
    return name if named else f"{name}:{peft or 'lora'}"
