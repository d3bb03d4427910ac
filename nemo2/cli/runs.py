# SPDX-License-Identifier: Apache-2.0
"""``nemo2 pretrain``, ``finetune``, ``validate`` and ``generate``: the commands that run a model."""

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.sources import Overrides, RecipeName, changed, finetuned_name, name_of_run, recipe_tree

PRETRAIN_EXAMPLE = "Example: nemo2 pretrain llama_tiny trainer.max_steps=50 optim.config.lr=1e-3 --devices 2"
FINETUNE_EXAMPLE = "Example: nemo2 finetune llama3_8b --peft dora resume.restore_config.path=hf:///models/Llama-3-8B"
VALIDATE_EXAMPLE = "Example: nemo2 validate llama_tiny --checkpoint RUN_DIR/checkpoints/NAME --devices 2"
GENERATE_EXAMPLE = "Example: nemo2 generate RUN_DIR/checkpoints/NAME --prompt 'def main(' --max-new-tokens 40"

Executor = Annotated[str, typer.Option("--executor", help="'local', or a cluster's profile (`nemo2 cluster list`).")]
Devices = Annotated[Optional[int], typer.Option("--devices", min=1, help="Processes per node; sets trainer.devices.")]
Nodes = Annotated[Optional[int], typer.Option("--nodes", min=1, help="Nodes; sets trainer.num_nodes.")]
RunName = Annotated[Optional[str], typer.Option("--name", help="The run's name; sets log.name.")]
Directory = Annotated[Optional[Path], typer.Option("--dir", help="The folder that holds runs; sets log.log_dir.")]
Dryrun = Annotated[bool, typer.Option("--dryrun", "-n", help="Check everything, print what would run, start nothing.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return once submitted, on executors that can.")]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes", help="Go on from a checkpoint that the recipe no longer fits (resume.accept_changes)."
    ),
]
Chain = Annotated[
    int, typer.Option("--chain", min=1, help="Slurm: jobs, each after the one before, that share the run.")
]
PluginNames = Annotated[
    Optional[list[str]],
    typer.Option(
        "--plugins",
        help="Plugins by name, 'NsysPlugin(start_step=5,end_step=8)'; several, or the option several times.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Start a run that does not fit its GPUs by formula.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before submitting to a cluster.")]


def register(app: typer.Typer) -> None:
    app.command("pretrain", epilog=PRETRAIN_EXAMPLE)(pretrain)
    app.command("finetune", epilog=FINETUNE_EXAMPLE)(finetune)
    app.command("validate", epilog=VALIDATE_EXAMPLE)(validate)
    app.command("generate", epilog=GENERATE_EXAMPLE)(generate)


def pretrain(
    name: RecipeName,
    overrides: Overrides = None,
    executor: Executor = "local",
    devices: Devices = None,
    nodes: Nodes = None,
    run_name: RunName = None,
    directory: Directory = None,
    dryrun: Dryrun = False,
    detach: Detach = False,
    chain: Chain = 1,
    accept_changes: AcceptChanges = False,
    plugins: PluginNames = None,
    force: Force = False,
    yes: Yes = False,
) -> None:
    """Pre-train a recipe, with your changes applied."""
    recipe = _logged(name, overrides or [], own_name=name_of_run(name), name=run_name, directory=directory)
    if accept_changes:
        recipe.resume.accept_changes = True
    _launch(
        recipe,
        executor,
        devices=devices,
        nodes=nodes,
        dryrun=dryrun,
        detach=detach,
        chain=chain,
        plugins=plugins,
        force=force,
        yes=yes,
    )


def finetune(
    name: RecipeName,
    overrides: Overrides = None,
    peft: Annotated[
        Optional[str], typer.Option(help="'lora' (what nothing else means), 'dora', or 'full' for all parameters.")
    ] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Let several samples share a row.")] = False,
    executor: Executor = "local",
    devices: Devices = None,
    nodes: Nodes = None,
    run_name: RunName = None,
    directory: Directory = None,
    dryrun: Dryrun = False,
    detach: Detach = False,
    chain: Chain = 1,
    accept_changes: AcceptChanges = False,
    plugins: PluginNames = None,
    force: Force = False,
    yes: Yes = False,
) -> None:
    """Fine-tune the model of a recipe, with your changes applied: resume.restore_config.path names its weights."""
    name = _with_method(name, peft)
    settings = {"packed_sequence": True} if packed else {}
    recipe = _logged(name, overrides or [], own_name=name_of_run(name), name=run_name, directory=directory, **settings)
    if accept_changes:
        recipe.resume.accept_changes = True
    _launch(
        recipe,
        executor,
        devices=devices,
        nodes=nodes,
        dryrun=dryrun,
        detach=detach,
        chain=chain,
        plugins=plugins,
        force=force,
        yes=yes,
    )


def validate(
    name: RecipeName,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Optional[Path],
        typer.Option(help="The checkpoint to measure. Without it, what the recipe's resume settings find."),
    ] = None,
    executor: Executor = "local",
    devices: Devices = None,
    nodes: Nodes = None,
    run_name: RunName = None,
    directory: Directory = None,
    dryrun: Dryrun = False,
    detach: Detach = False,
    plugins: PluginNames = None,
    force: Force = False,
    yes: Yes = False,
) -> None:
    """Measure the validation loss of a checkpoint."""
    from nemo2.config import Config, Partial

    own = name_of_run(name)
    recipe = _logged(name, overrides or [], own_name=own and f"{own}_validate", name=run_name, directory=directory)
    from nemo2.checkpoint.auto_resume import AutoResume
    from nemo2.llm.api import validate as entry

    parts = {field: getattr(recipe, field) for field in ("model", "data", "trainer", "log", "optim")}
    resume = recipe.resume
    if checkpoint is not None:
        resume = Config(AutoResume, resume_from_path=str(_existing(checkpoint)))
    _launch(
        Partial(entry, **parts, resume=resume),
        executor,
        devices=devices,
        nodes=nodes,
        dryrun=dryrun,
        detach=detach,
        plugins=plugins,
        force=force,
        yes=yes,
    )


def generate(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="A checkpoint folder, or a run directory for its newest one; several with --html."),
    ],
    prompt: Annotated[
        Optional[list[str]],
        typer.Option("--prompt", "-p", help="A prompt; may be given several times. '-' reads standard input."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add to each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many likeliest tokens; 0 means all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample within this probability mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out what is less likely than this share of the likeliest.")
    ] = 0.0,
    stop: Annotated[Optional[list[str]], typer.Option(help="End before this word; may be given several times.")] = None,
    prompts_file: Annotated[
        Optional[Path], typer.Option("--prompts", help='A file of JSON lines, {"input": PROMPT} each.')
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are completed together.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 1234,
    output: Annotated[Optional[Path], typer.Option(help="Also write JSON lines there.")] = None,
    html: Annotated[Optional[Path], typer.Option(help="Write a page with all checkpoints' texts side by side.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python that lies beside the tokenizer's files. Read it before."),
    ] = False,
) -> None:
    """Complete prompts with the model of a checkpoint, in this process."""
    from nemo2.errors import ConfigError

    if bool(prompt) == bool(prompts_file):
        raise ConfigError("generate needs a prompt, --prompt 'def main(', or a file of them, --prompts FILE.")
    if len(checkpoints) > 1 and (html is None or output is not None):
        raise ConfigError(
            f"{len(checkpoints)} checkpoints: --html FILE writes their texts side by side. --output takes one checkpoint's."
        )
    texts = [sys.stdin.read() if text == "-" else text for text in prompt or ()]
    paths = [_existing(checkpoint) for checkpoint in checkpoints]
    from nemo2.llm.api import generate as entry

    alone = len(texts) == 1 and html is None
    if alone:
        print(texts[0], end="", flush=True)

    def complete(path: Path) -> list[Any]:
        return entry(
            path=str(path),
            prompts=texts or None,
            input_dataset=prompts_file,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop=stop,
            max_batch_size=batch_size,
            random_seed=seed,
            output_path=str(output) if output else None,
            trust_remote_code=trust_remote_code,
            on_text=(lambda place, text: print(text, end="", flush=True)) if alone else None,
        )

    if html is not None:
        from nemo2.llm.side_by_side import names_of, side_by_side

        answers = {name: complete(path) for name, path in zip(names_of(checkpoints), paths, strict=True)}
        how = f"temperature {temperature}, top-k {top_k}, top-p {top_p}, min-p {min_p}, seed {seed}"
        html.write_text(side_by_side(answers, subtitle=how), "utf-8")
        print(html)
        return
    completions = complete(paths[0])
    if alone:
        print()
        return
    for number, completion in enumerate(completions):
        if number:
            print("-" * 40)
        print(completion_text(completion))


def completion_text(completion: Any) -> str:
    """The prompt with what the model added."""
    return completion if isinstance(completion, str) else f"{completion.prompt}{completion.text}"


def _with_method(name: str, peft: Optional[str]) -> str:
    """``NAME:METHOD``; a recipe in JSON, which says itself how it trains, as it is.

    Raises:
        ConfigError: an unknown method, or two.
    """
    from nemo2.cli.sources import FINETUNING
    from nemo2.errors import ConfigError
    from nemo2.names import did_you_mean

    _, named = finetuned_name(name)
    if peft is not None and peft not in FINETUNING:
        raise ConfigError(
            f"--peft {peft}{did_you_mean(peft, list(FINETUNING))} It is one of {', '.join(FINETUNING)}; any other method is set "
            "as peft=Class(...)."
        )
    if named is not None and peft not in (None, named):
        raise ConfigError(f"{name} says {named}, and --peft says {peft}: say one.")
    if name_of_run(name) is None:
        if peft is not None:
            raise ConfigError(f"--peft {peft}: {name} says itself how it trains.")
        return name
    return name if named else f"{name}:{peft or 'lora'}"


def _logged(
    source: str,
    overrides: list[str],
    *,
    own_name: Optional[str],
    name: Optional[str],
    directory: Optional[Path],
    **finetuning: Any,
) -> Any:
    """The recipe with its changes. Its run is called ``own_name`` unless a change, or ``--name``, says otherwise.

    Raises:
        ConfigError: a change and an option name the run, or its folder, differently.
    """
    from nemo2.errors import ConfigError

    before: dict[str, Any] = {}

    def make() -> Any:
        recipe = recipe_tree(source, **finetuning)
        if own_name is not None:
            recipe.log.name = own_name
        before.update(name=recipe.log.name, log_dir=recipe.log.log_dir)
        return recipe

    log = (recipe := changed(make, overrides)).log
    for option, field, asked in (
        ("--name", "name", name),
        ("--dir", "log_dir", None if directory is None else str(directory)),
    ):
        if asked is None:
            continue
        now = getattr(log, field)
        if now not in (before[field], asked):
            raise ConfigError(f"{option} {asked} contradicts log.{field}={now}: leave one of them out.")
        setattr(log, field, asked)
    return recipe


def _existing(path: Path) -> Path:
    from nemo2.errors import CheckpointError

    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint folder or the run directory that holds it.")
    return path.absolute()


def _launch(
    recipe: Any,
    executor: str,
    *,
    devices: Optional[int],
    nodes: Optional[int],
    dryrun: bool,
    detach: bool,
    yes: bool,
    plugins: Optional[list[str]],
    force: bool,
    chain: int = 1,
) -> None:
    from nemo2.launch import launch
    from nemo2.launch.plugins import named

    if plugins:
        import nemo2.plugins  # noqa: F401  (whose names it announces)

    if executor != "local" and not (yes or dryrun) and sys.stdin.isatty():
        typer.confirm(f"Submit to {executor!r}?", abort=True)
    result = launch(
        recipe,
        executor,
        devices=devices,
        nodes=nodes,
        dryrun=dryrun,
        detach=detach,
        chain=chain,
        plugins=named(plugins or []),
        force=force,
    )
    if result.status == "continued":
        raise typer.Exit(result.exit_code)
    if result.jobs and result.status == "submitted":
        print(
            f"`nemo2 jobs logs {result.experiment_id}` follows it, `nemo2 jobs cancel {result.experiment_id}` ends it"
        )
    elif result.status == "submitted":
        print(f"submitted as {result.experiment_id}; `nemo experiment status {result.experiment_id}` tells how it is")
    elif result.run_dir is not None:
        print(f"run directory: {result.run_dir}")
        report = result.run_dir / "report.html"
        if report.is_file():
            print(f"report: {report}")
