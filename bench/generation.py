# SPDX-License-Identifier: Apache-2.0
"""Compares the tokens per second of `llm.generate`'s loop with transformers' ``generate``, with the same weights in one
process.

    python bench/generation.py    # 12 layers, 95 M parameters; batches of 1 and 8, prompts of 32 and 512 tokens

The two take turns, so that a slow minute of the machine affects both. Results are medians over turns, in processor
seconds of one thread, so that other work on the machine matters little. The time of a further token is the time of a
whole answer minus that of its first token.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nemo2.base.columns import columns

NEW = 48
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 2048}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    theirs, ours = models()
    rows = []
    for batch in (1, 8):
        for length in (32, 512):
            ids = torch.randint(0, SIZES["vocab_size"], (batch, length))
            ways: dict[str, Callable[[int], Any]] = {
                "nemo2": lambda new, ids=ids: of_ours(ours, ids, new),
                "transformers": lambda new, ids=ids: of_theirs(theirs, ids, new),
            }
            assert ways["nemo2"](NEW) == ways["transformers"](NEW), "the two take different tokens"
            whole, further = medians(ways, turns)
            speed = {name: batch * NEW / seconds for name, seconds in whole.items()}
            ratio = f"{speed['nemo2'] / speed['transformers']:.2f}"
            told = (f"{speed[name]:.1f}" for name in ways), (f"{further[name] * 1e3:.1f}" for name in ways)
            rows.append((batch, length, *told[0], ratio, *told[1]))
            print(*rows[-1], flush=True)
    head = (
        "batch",
        "prompt",
        "nemo2 tokens/s",
        "transformers tokens/s",
        "ratio",
        "nemo2 ms a step",
        "transformers ms a step",
    )
    print("\n".join(columns(rows, head=head, right=range(7))))


def medians(ways: dict[str, Callable[[int], Any]], turns: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each way's whole answers, and of a step of it after the first."""
    whole: dict[str, list[float]] = {name: [] for name in ways}
    further: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            times = [time.process_time()]
            for new in (1, NEW):
                way(new)
                times.append(time.process_time())
            whole[name].append(times[2] - times[1])
            further[name].append((times[2] - 2 * times[1] + times[0]) / (NEW - 1))
    return (
        {name: statistics.median(times) for name, times in whole.items()},
        {name: statistics.median(times) for name, times in further.items()},
    )


def models() -> tuple[Any, Any]:
    """A random Llama of transformers', and ours with its weights."""
    import transformers
    from megatron.core import parallel_state, tensor_parallel
    from torch._C._distributed_c10d import HashStore

    from nemo2.base.backend import get_backend
    from support import hf_parity

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, initializer_range=0.05)).eval()  # pyright: ignore
    get_backend().install()
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        released = hf_parity.Released(Path(folder))
        return model, released.chunk(released.config())


class Numbers:
    """Tokens as they are."""

    vocab_size = SIZES["vocab_size"]

    def text_to_ids(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def ids_to_text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def of_ours(model: Any, ids: torch.Tensor, new: int) -> list[list[int]]:
    from nemo2.models.generate import generate

    prompts = [Numbers().ids_to_text(row) for row in ids.tolist()]
    return [one.token_ids for one in generate(model, Numbers(), prompts, max_new_tokens=new, temperature=0)]


def of_theirs(model: Any, ids: torch.Tensor, new: int) -> list[list[int]]:
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return made[:, ids.size(1) :].tolist()


if __name__ == "__main__":
    main()
