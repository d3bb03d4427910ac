# SPDX-License-Identifier: Apache-2.0
"""Whether the recipes for one GPU take the memory that their rehearsal counts, and how fast they are there.

    python -m bench.gpu.memory                               # all of RECIPES
    python -m bench.gpu.memory llama31_8b_24gb:lora

Recipes run as they ship, on random weights and random tokens, for a few steps of few micro-batches.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from typing import Any

from bench.gpu.worker import start_alone
from nemo2.base.gpus import GIB

RECIPES = (
    "llama31_8b_24gb:lora",
    "qwen3_600m_24gb",
    "qwen3_600m_24gb:full",
    "qwen3_600m_24gb:lora",
    "llama32_1b_80gb",
    "llama32_1b_80gb:full",
)
STEPS, WARM_UP, MICRO_BATCHES = 8, 4, 4


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE", help="NAME, NAME:full or NAME:lora")
    parser.add_argument(
        "--gpu", default="H100", help="the GPU of the rehearsal (default H100; its memory decides nothing)"
    )
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU: says that it runs")
    parser.add_argument("--count", action="store_true", help="print the counted bytes as JSON, and run nothing")
    arguments = parser.parse_args()
    if arguments.count:
        counted = {
            name: counted_peak(recipe_of(name, toy=arguments.toy), gpu=arguments.gpu) for name in arguments.recipes
        }
        print(json.dumps(counted))
        return 0
    counting = count_elsewhere()
    start_alone()

    from bench.gpu.arms import empty_device, timed_run
    from nemo2.base.backend import get_backend

    print("| recipe | counted GiB | measured GiB | reserved GiB | ms a micro-batch | tokens/s |", flush=True)
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    failed, counted = 0, {}
    for name in arguments.recipes:
        recipe = recipe_of(name, toy=arguments.toy)
        tokens = recipe.data.micro_batch_size * recipe.data.seq_length
        empty_device()
        try:
            turn, _ = timed_run(recipe, warm_up=WARM_UP)
            reserved = get_backend().memory_figures().get("reserved_peak_bytes", 0)
            seconds = min(turn.seconds) / MICRO_BATCHES
            cells = (
                f"{turn.peak_bytes / GIB:.1f} | {reserved / GIB:.1f} | {1000 * seconds:.0f} | {tokens / seconds:,.0f}"
            )
        except Exception as error:  # out of memory above all: the others still count
            traceback.print_exc()
            failed += 1
            cells = f"{type(error).__name__}: {str(error).splitlines()[0][:200]} | | |"
        counted = counted or json.loads(counting.communicate()[0].splitlines()[-1])
        print(f"| {name} | {counted[name] / GIB:.1f} | {cells} |", flush=True)
    return 1 if failed else 0


def recipe_of(name: str, *, toy: bool) -> Any:
    """A recipe with its own micro-batches, fewer of them, and random data."""
    from nemo2 import Config, recipes
    from nemo2.data import MockDataModule, NullTokenizer

    shipped, _, variant = name.partition(":")
    module: Any = recipes.get(shipped)
    if variant:
        recipe = module.finetune_recipe(peft_scheme=None if variant == "full" else variant)
    else:
        recipe = module.pretrain_recipe()
    config = recipe.model.config
    config.vocab_size = module.RECIPE.vocabulary
    if toy:
        from nemo2.preflight.rehearse.shrink import small_sizes

        for field, value in small_sizes(config).items():
            setattr(config, field, value)
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
        recipe.data.seq_length = config.seq_length
        recipe.data.micro_batch_size = 1
    recipe.data = Config(
        MockDataModule,
        tokenizer=Config(NullTokenizer, vocab_size=config.vocab_size),
        seq_length=recipe.data.seq_length,
        micro_batch_size=recipe.data.micro_batch_size,
        global_batch_size=MICRO_BATCHES * recipe.data.micro_batch_size,
        num_train_samples=STEPS * MICRO_BATCHES * recipe.data.micro_batch_size,
        num_workers=0 if toy else 2,
    )
    recipe.trainer.max_steps = STEPS
    recipe.trainer.limit_val_batches = recipe.trainer.num_sanity_val_steps = 0
    recipe.trainer.enable_progress_bar = recipe.trainer.enable_checkpointing = False
    recipe.log.ckpt = recipe.resume = None
    return recipe


def count_elsewhere() -> subprocess.Popen[str]:
    """A process that prints the counted peaks, beside the first run. It sees no GPU: a rehearsal must not."""
    command = [sys.executable, "-m", "bench.gpu.memory", *sys.argv[1:], "--count"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=hidden, stdout=subprocess.PIPE, text=True)


def counted_peak(recipe: Any, *, gpu: str) -> int:
    """Bytes at the peak of a step, as `nemo2.preflight.rehearse` counts them."""
    from nemo2.preflight.rehearse import rehearse

    return max(rank.memory.total for rank in rehearse(recipe, gpus=f"{gpu}x1", advice=False, check=False).ranks)


if __name__ == "__main__":
    raise SystemExit(main())
