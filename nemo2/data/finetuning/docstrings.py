# SPDX-License-Identifier: Apache-2.0
"""Instructions that every machine has: functions of Python's standard library and their docstrings."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union

from nemo2.config.capture import configurable
from nemo2.data.base import arguments_of
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.finetuning.published import PublishedDataModule, Splits
from nemo2.data.stdlib import python_stdlib_corpus
from nemo2.data.tokenizer import Tokenizer

_LONGEST = 120
"""The longest signature or answer, in characters. Longer ones are left out."""


@configurable
class StdlibDocstringDataModule(PublishedDataModule):
    """Fine-tune on the running interpreter's standard library: the instruction is a function's signature, and the
    answer is the first line of its docstring.

    Nothing is downloaded. 90% of the records are for training, 5% for validation, 5% for the test. The arguments
    that are not listed here are those of `FineTuningDataModule`.

    Args:
        dataset_root: A folder with the three files, or where to write them. None: ``stdlib_docstrings`` under
            `datasets_home`.
        force_redownload: Write the files again.

    Raises:
        DataError: the folder is not writable, or this interpreter has no sources.
    """

    hub = "the standard library"
    folder = "stdlib_docstrings"
    shares = {"train": 0.9, "validation": 0.05, "test": 0.05}

    def __init__(
        self,
        dataset_root: Optional[Union[str, Path]] = None,
        seq_length: int = 2048,
        tokenizer: Optional[Tokenizer] = None,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Optional[list[int]] = None,
        force_redownload: bool = False,
        seed: int = 1234,
        memmap_workers: int = 1,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        packed_sequence_specs: Optional[PackedSequenceSpecs] = None,
        dataset_kwargs: Optional[dict[str, Any]] = None,
    ) -> None:
        super().__init__(delete_raw=False, **arguments_of(PublishedDataModule, locals()))

    def check_download(self) -> None:
        """Nothing is downloaded."""

    def download(self) -> Splits:
        return {"train": list(documented_functions())}

    def record(self, held: dict[str, Any]) -> dict[str, Any]:
        return held


def documented_functions(max_bytes: int = 12_000_000) -> Iterator[dict[str, str]]:
    """Each signature once, with the first line of its docstring, in the order of the library's files.

    Args:
        max_bytes: The amount of the library's text to read.
    """
    signatures = set()
    for file in python_stdlib_corpus(max_bytes=max_bytes):
        for node in ast.walk(_parsed(file)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (text := ast.get_docstring(node)):
                continue
            signature, answer = f"def {node.name}({ast.unparse(node.args)}):", text.splitlines()[0].strip()
            if signature not in signatures and answer and max(len(signature), len(answer)) <= _LONGEST:
                signatures.add(signature)
                yield {"input": signature, "output": answer}


def _parsed(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about escapes in the library's own strings
        try:
            return ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # templates for later versions of Python
            return ast.Module(body=[], type_ignores=[])
