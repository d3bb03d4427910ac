# SPDX-License-Identifier: Apache-2.0
"""`make demo-finetune`: a model is fine-tuned by LoRA on this machine, merged, exported, and answers the same in transformers.

The base is the model of `make demo`, or of a shorter run if the demo has not run. The model learns to answer signatures
of Python's standard library with the first lines of their docstrings. Exits non-zero if a command or a check fails.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.demo import claim, layout, run, say  # noqa: E402  # a script has only its own folder on the path

RUNS = Path("demo_run")
PLACE = RUNS / "finetune"
BASE_STEPS, STEPS, TOKENS = 100, 150, 16
BASE = (
    f"nemo2 pretrain llama_tiny trainer.max_steps={BASE_STEPS} trainer.limit_val_batches=0 "
    f"trainer.plugins=fp32 {layout()} --dir {PLACE} --name base"
)
TUNE = (
    "nemo2 finetune llama_tiny resume.restore_config.path={base} peft.dim=32 "
    "optim.config.lr=1e-2 optim.lr_scheduler.warmup_steps=10 "
    f"trainer.max_steps={STEPS} trainer.val_check_interval=50 trainer.limit_val_batches=4 trainer.log_every_n_steps=10 "
    f"data.dataset_root={PLACE}/docstrings trainer.plugins=fp32 {layout()} --dir {PLACE} --name tuned"
)
QUESTIONS = ("def read_text(self, path):", "def is_empty(self):", "def close(self):")


def main() -> None:
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = time.monotonic()
    shutil.rmtree(PLACE, ignore_errors=True)

    base = newest(RUNS / "llama_tiny")
    if base is None:
        say("Train a base: a Llama of 4 M parameters on Python's standard library.")
        run(BASE)
        base = newest(PLACE / "base")
    say("Fine-tune it by LoRA: a signature is answered with the first line of its docstring.")
    run(TUNE.format(base=base))
    tuned = PLACE / "tuned"

    say("What does it answer, before and after?")
    merged, exported = PLACE / "merged", PLACE / "hugging_face"
    run(f"nemo2 export {tuned} --merge --to checkpoint --output {merged}")
    before, after = answers(f"{base}"), answers(f"{merged}")
    for question in QUESTIONS:
        print(f"  {question}\n    before: {before[question]!r}\n    after:  {after[question]!r}")

    say("Merged and exported, it answers the same in transformers.")
    run(f"nemo2 export {merged} --output {exported}")
    check(tuned, before, after, in_transformers(exported))
    print(f"\nDone in {time.monotonic() - started:.0f} s. Look at\n  {exported}\n  {PLACE / 'docstrings'}")


def newest(run_dir: Path) -> Path | None:
    """The last checkpoint of a run that came to its end."""
    return max(run_dir.glob("*/checkpoints/*-last"), key=lambda path: path.stat().st_mtime, default=None)


def answers(checkpoint: str) -> dict[str, str]:
    """A checkpoint's answers to each question, the likeliest tokens."""
    from nemo2 import llm

    found = llm.generate(checkpoint, prompts=list(QUESTIONS), max_new_tokens=TOKENS, temperature=0.0)
    return {question: made.text for question, made in zip(QUESTIONS, found, strict=True)}


def in_transformers(folder: Path) -> dict[str, str]:
    """The completions by transformers, with its own model and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id or 0)
        found[question] = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def check(tuned: Path, before: dict[str, str], after: dict[str, str], theirs: dict[str, str]) -> None:
    """Hold the run against what it is said to show."""
    lines = [
        json.loads(line) for file in tuned.glob("*/metrics.jsonl") for line in file.read_text().splitlines() if line
    ]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    claim(
        len(losses) > 1 and losses[-1] < losses[0],
        f"the loss on functions that it hasn't seen falls: {', '.join(f'{loss:.2f}' for loss in losses)}",
    )
    claim(all(before[question] != after[question] for question in QUESTIONS), "every answer is another one")
    claim(
        any(text.strip()[:1].isupper() for text in after.values()),
        "they read as docstrings do, from a capital letter on",
    )
    for question in QUESTIONS:
        claim(theirs[question].strip() == after[question].strip(), f"transformers answers {theirs[question].strip()!r}")


if __name__ == "__main__":
    main()
