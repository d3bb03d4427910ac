# SPDX-License-Identifier: Apache-2.0
"""``nemo2 serve``: exports a checkpoint and starts vLLM's or transformers' server on it."""

import os
import sys
from typing import Annotated, Literal, Optional

import typer

from nemo2.cli.adapter import AT_LEAST_1
from nemo2.cli.begin_from import Weights, WeightsOption, named_weights
from nemo2.config.dtypes import ShortDtype


def serve(
    checkpoint: Weights = None,
    *,
    source: WeightsOption = None,
    engine: Optional[Literal["vllm", "transformers"]] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "-tp", min=1)] = 1,
    dtype: Optional[ShortDtype] = None,
    max_length: Annotated[Optional[int], AT_LEAST_1] = None,
    name: Optional[str] = None,
    merge: bool = False,
    also: Optional[list[str]] = None,
    print_only: Annotated[bool, typer.Option("--print")] = False,
) -> None:
    """Serve a checkpoint over HTTP with an OpenAI-compatible API.

    Exports the model once, then starts vLLM's or transformers' server.

    Args:
        engine: Server to use. Default: vLLM if installed, otherwise transformers.
        host: Address to listen on; 0.0.0.0 accepts other machines.
        port: Port to listen on.
        tensor_parallel: Tensor-parallel size (vLLM).
        dtype: Data type of the model. Default: as stored.
        max_length: Maximum tokens of prompt plus answer. Default: the run's sequence length (vLLM).
        name: The model's name in requests. Default: the name of CHECKPOINT.
        merge: Merge adapters into the weights, even if vLLM could load them.
        also: Another argument for the server, such as --also=--compile; may be repeated.
        print_only: Print the commands, but write and start nothing.

    Example: nemo2 serve runs/first --port 8001 --print
    """
    path = named_weights(checkpoint, source)
    from nemo2.llm.engines import ServingOptions
    from nemo2.llm.serving import plan_serving

    options = ServingOptions(
        host=host,
        port=port,
        tensor_parallel_size=tensor_parallel,
        dtype=dtype,
        max_length=max_length,
        model_name=name,
        further=also or (),
    )
    serving = plan_serving(path, options, engine=engine, merge=merge, print_only=print_only)
    for note in serving.notes:
        print(note, file=sys.stderr)
    if print_only:
        print(serving.text())
        return
    serving.prepare()
    print(f"{serving.text()}\nRequests name the model {serving.model_name!r}.", file=sys.stderr, flush=True)
    if serving.directory is not None:
        os.chdir(serving.directory)
    # The engine replaces this process, so that it receives signals and its exit code is the command's.
    os.execv(serving.command[0], list(serving.command))
