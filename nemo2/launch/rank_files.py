# SPDX-License-Identifier: Apache-2.0
"""The files from which a rank builds its recipe, among them the launching script, for the names that the recipe refers to.

Ranks run the module level of the script again. There it may parse arguments, so that it must see its own, not those of
the program that starts a rank.
"""

import ast
import sys
import tokenize
from collections.abc import Sequence
from typing import Any, Optional

from nemo2.config.serialize import to_json
from nemo2.launch.rank import CONFIG, MAIN
from nemo2.training.run_dir.records import RECIPE_FILE


def rank_files(recipe: Any) -> dict[str, str]:
    """The texts of the files by name: `CONFIG`; the same recipe as JSON, for the run's directory; and `MAIN`, if the
    recipe refers to names of the launching script."""
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    text = to_json(recipe)
    files = {CONFIG: ZlibJSONSerializer().serialize(recipe), RECIPE_FILE: text}
    if '"__main__"' in text and (script := main_script()) is not None:
        files[MAIN] = script
    return files


def main_script() -> Optional[str]:
    """The source of this process's script, with its arguments. None: it has no file, as in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return None
    with tokenize.open(file) as source:
        return with_arguments(source.read(), sys.argv)


def with_arguments(source: str, argv: Sequence[str]) -> str:
    """The script with a line that sets ``sys.argv``, after the statements that Python wants first: the docstring and
    imports from ``__future__``.

    Raises:
        SyntaxError: it isn't Python.
    """
    line = 0
    for number, statement in enumerate(ast.parse(source).body):
        docstring = number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (docstring or future):
            break
        line = statement.end_lineno or line
    lines = source.splitlines(keepends=True)
    before = "".join(lines[:line])
    newline = "" if not before or before.endswith("\n") else "\n"
    assignment = f"import sys as _sys; _sys.argv = {list(argv)!r}  # the launching script's own\n"
    return f"{before}{newline}{assignment}{''.join(lines[line:])}"
