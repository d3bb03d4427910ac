# SPDX-License-Identifier: Apache-2.0
"""Tries Transformer Engine's attention on the first GPU, in a process of its own: ``python -m nemo2.preflight.doctor.attention``.

A library that is missing or too old shows only when a kernel runs, and the backward needs more than the forward: Transformer
Engine 2.17.1 computes with cuDNN 9.19 and ends with it in the backward, for which it requires 9.22.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo2.base.backend.cudnn import loaded_cudnn
from nemo2.base.backend.extras import have_te
from nemo2.preflight.doctor.finding import Finding, checked
from nemo2.preflight.doctor.machine import TOPIC

SECONDS = 180.0
"""Enough for the import of torch and Transformer Engine from a network disk."""
_NEWER = "pip install 'nvidia-cudnn-cu13>=9.22'  # cu12 for CUDA 12"
_ANOTHER = "export CUDNN_HOME=<site-packages>/nvidia/cudnn, torch's own"
_UNFUSED = "model.config.attention_backend=unfused trains without it, in more memory"


def attention() -> Iterator[Finding]:
    """Whether a forward and a backward of Transformer Engine's attention run."""
    if not have_te():
        return
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
        answer = json.loads(answers[-1]) if answers else {"error": _last(done.stderr), "cudnn": []}
    except subprocess.TimeoutExpired:
        answer = {"error": f"no answer within {SECONDS:g} s", "cudnn": []}
    yield finding(answer)


def finding(answer: dict[str, Any]) -> Finding:
    """The finding of what the process answered: ``error``, and the files of ``cudnn`` that it had loaded."""
    error, files = answer["error"], answer["cudnn"]
    fix = _UNFUSED
    if "RESHAPE_MODE" in error:
        fix = _NEWER
    elif len(files) > 1:
        fix = _ANOTHER
    value = f"Transformer Engine's attention fails: {error}" if error else "Transformer Engine's, forward and backward"
    costs = f"two versions of cuDNN are loaded: {', '.join(files)}" if len(files) > 1 else "no model trains on this GPU"
    return checked(not error, topic=TOPIC, name="attention", value=value, costs=costs, fix=fix)


def main() -> None:
    error = ""
    try:
        try_attention()
    except Exception as caught:  # libraries raise RuntimeError, OSError and ImportError; each is the answer
        error = _last(str(caught))
    print(json.dumps({"error": error, "cudnn": loaded_cudnn(Path("/proc/self/maps").read_text())}))


def try_attention() -> None:
    """A causal attention of grouped queries, ``[256, 1, 8, 64]``, forward and backward.

    Raises:
        RuntimeError: a kernel didn't run. Other errors: a library can't be loaded.
    """
    import torch
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    sizes = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    queries, keys, values = (torch.randn(256, 1, heads, 64, **sizes) for heads in (8, 2, 2))
    core = te.DotProductAttention(8, 64, num_gqa_groups=2, qkv_format="sbhd", attn_mask_type="causal")
    core(queries, keys, values).float().sum().backward()
    torch.cuda.synchronize()


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "it ended without a word"


if __name__ == "__main__":
    main()
