# SPDX-License-Identifier: Apache-2.0
"""``nemo2 serve``: a checkpoint handed over to vLLM's or transformers' server."""

import os
import sys
from typing import Annotated, Literal, Optional

import typer

from nemo2.cli.run_names import Checkpoint, checkpoint_called

SERVE_EXAMPLE = "Example: nemo2 serve runs/first --port 8001 --print"


def register(app: typer.Typer) -> None:
    app.command("serve", epilog=SERVE_EXAMPLE)(serve)


def serve(
    checkpoint: Checkpoint,
    engine: Annotated[
        Optional[Literal["vllm", "transformers"]],
        typer.Option(help="Whose server. Without it, vLLM's where it is installed, else transformers'."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address it listens at; 0.0.0.0 answers other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port it listens at.")] = 8000,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", "-tp", min=1, help="GPUs that each layer is split over (vLLM).")
    ] = 1,
    dtype: Annotated[
        Optional[Literal["bf16", "fp16", "fp32"]], typer.Option(help="Without it, as the weights are stored.")
    ] = None,
    max_length: Annotated[
        Optional[int], typer.Option(min=1, help="Tokens of prompt and answer; without it the run's length (vLLM).")
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="The model's name in requests (vLLM).")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the weights, also where vLLM could load them.")
    ] = False,
    also: Annotated[
        Optional[list[str]], typer.Option("--also", help="A further argument for the engine; may be repeated.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Tell the commands; write and start nothing.")] = False,
) -> None:
    """Serve the model of a checkpoint over HTTP, as OpenAI's clients ask: exported once, then vLLM or transformers."""
    folder = checkpoint_called(checkpoint)
    from nemo2.llm.engines import Asked
    from nemo2.llm.serving import plan_serving

    asked = Asked(
        host=host,
        port=port,
        tensor_parallel_size=tensor_parallel,
        dtype=dtype,
        max_length=max_length,
        model_name=name,
        further=also or (),
    )
    serving = plan_serving(str(folder), asked, engine=engine, merge=merge, only_told=print_only)
    for note in serving.notes:
        print(note, file=sys.stderr)
    if print_only:
        print(serving.text())
        return
    serving.prepare()
    print(f"{serving.text()}\nThe model answers as {serving.model_name!r}.", file=sys.stderr, flush=True)
    # The engine takes this process' place: signals reach it, and its exit code is ours.
    os.execv(serving.command[0], list(serving.command))
