# SPDX-License-Identifier: Apache-2.0
"""``nemo2 translate``: converts a NeMo 2.0 script's imports, or a NeMo 2.0 run to a recipe, and lists the lines to
edit."""

import sys
from pathlib import Path
from typing import Optional

from nemo2.base.errors import ConfigError
from nemo2.base.files import refuse_existing, text_of, write_file
from nemo2.cli.adapter import Result
from nemo2.cli.flags import Output
from nemo2.from_nemo.notebook import translated_notebook
from nemo2.from_nemo.script import translated


def translate(
    script: Path,
    *,
    output: Output = None,
) -> Result:
    """Convert a NeMo 2.0 script, or a NeMo 2.0 run to a recipe.

    The command never runs the script. It lists the lines that it removed and the lines that you must edit.

    Exit code 1: you have lines to edit.

    Args:
        script: A NeMo 2.0 script or notebook, or the directory of a NeMo 2.0 run or checkpoint.
        output: Output file; for a recipe .py or .json. Default: print.

    Example: nemo2 translate pretrain.py --output pretrain_nemo2.py
    """
    if output is not None:
        refuse_existing(output)
    text, left, taken_out = _of_run(script, output) if script.is_dir() else _of_script(script)
    if output is not None:
        write_file(output, text, new=True)
    for line in (*taken_out, *left):
        print(line, file=sys.stderr)
    return Result(
        {"text": text, "removed": taken_out, "left": left},
        text.removesuffix("\n") if output is None else "",
        int(bool(left)),
    )


def _of_script(script: Path) -> tuple[str, list[str], list[str]]:
    text = text_of(script)
    try:
        if script.suffix == ".ipynb":
            notebook, *said = translated_notebook(text, translated)
            left, taken_out = ([f"{script}: {place}: {message}" for place, message in lines] for lines in said)
            return notebook, left, taken_out
        done = translated(text)
    except SyntaxError as error:
        raise ConfigError(f"{script} can't be read as Python: {error}.") from None
    left, taken_out = (
        [f"{script}:{line}: {message}" for line, message in lines] for lines in (done.left, done.taken_out)
    )
    return done.text, left, taken_out


def _of_run(folder: Path, output: Optional[Path]) -> tuple[str, list[str], list[str]]:
    from nemo2.config.codegen import function_source
    from nemo2.config.serialize import to_json
    from nemo2.from_nemo.recipe import recipe_of

    done = recipe_of(folder)
    left = [f"{done.source}: {one}" for one in done.left]
    if output is not None and output.suffix == ".json":
        return to_json(done.recipe, indent=1) + "\n", left, []
    entry = done.recipe.__fn_or_cls__.__name__
    header = "A run of NeMo 2.0, by `nemo2 translate`."
    return function_source(done.recipe, header=header, name=f"{entry}_recipe"), left, []
