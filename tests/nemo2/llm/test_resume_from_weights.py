# SPDX-License-Identifier: Apache-2.0
"""What a start from weights provides, a resume provides: the tokenizer of a release, an imported model, a run's folder."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch

from support import small_runs
from support.small_chats import make_tokenizer, say, write_lines

VOCABULARY = 320
STEPS = 3
SOURCES = ("release", "import", "run")
METHODS = ("LoRA", "DoRA", "CanonicalLoRA", "CanonicalDoRA", "full")
CASES = [(source, peft) for source in SOURCES for peft in ("LoRA", "full")]
CASES += [("release", peft) for peft in METHODS if ("release", peft) not in CASES]


class Killed(BaseException):
    """Ends a run at once, as far as one process can end it for itself."""


class Kill(pl.Callback):
    """Ends the run after the first step, whose checkpoint is saved by then."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            raise Killed


def write_release(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(2)
    config = LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=64
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder, vocab_size=VOCABULARY)


def finetune(
    directory: str, path: str, *, peft: str, chats: str, max_steps: int = STEPS, kill: bool = False
) -> tuple[list[float], Any]:
    """The losses of a run without a tokenizer of its own, and its model's tokenizer."""
    from nemo2 import AutoResume, ModelCheckpoint, NeMoLogger, RestoreConfig, llm
    from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule

    small_runs.release()
    recorder, methods = small_runs.Recorder(), cast(Any, llm.peft.PEFT_STR2CLS)
    sizes = {"ffn_hidden_size": 64, "kv_channels": 8, "layernorm_epsilon": 1e-6, "rotary_base": 10000}
    model = small_runs.build_llama(**sizes, vocab_size=None, seq_length=64, gated_linear_unit=True)
    data = HFDatasetDataModule(chats, seq_length=64, micro_batch_size=2, global_batch_size=4, num_workers=0)
    ckpt = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, save_last=False, save_optim_on_train_end=True)
    with pytest.raises(Killed) if kill else nullcontext():
        llm.finetune(
            model,
            data,
            small_runs.build_trainer(max_steps=max_steps, callbacks=[recorder, *([Kill()] if kill else [])]),
            log=NeMoLogger(log_dir=directory, name="tuned", ckpt=ckpt, use_datetime_version=False),
            resume=AutoResume(
                resume_if_exists=True, resume_ignore_no_checkpoint=True, restore_config=RestoreConfig(path=path)
            ),
            peft=None if peft == "full" else methods[peft](dim=4, dropout=0.0),
        )
    return recorder.losses, model.tokenizer


def prepare(directory: str) -> None:
    """A release, the model imported from it, and samples, in ``directory``."""
    from nemo2.hugging_face.importing import import_weights
    from nemo2.hugging_face.tokenizers import tokenizer_in

    small_runs.quiet()
    root = Path(directory)
    write_lines(root / "chats.jsonl", [say(("user", f"{i}?"), ("assistant", f"{i}!")) for i in range(24)])
    write_release(root / "released")
    import_weights(root / "released", root / "imported", tokenizer=tokenizer_in(root / "released"))


def runs_of(directory: str) -> dict[Any, Any]:
    from nemo2.checkpoint.context import tokenizer_identity

    small_runs.quiet()
    chats = f"{directory}/chats.jsonl"
    paths = {
        "release": f"hf://{directory}/released",
        "import": f"{directory}/imported",
        "run": f"{directory}/base/tuned",
    }
    finetune(f"{directory}/base", paths["release"], peft="full", max_steps=1, chats=chats)
    found: dict[Any, Any] = {}
    for source, peft in CASES:
        options: dict[str, Any] = {"path": paths[source], "peft": peft, "chats": chats}
        place = f"{directory}/{source}_{peft}"
        whole, expected = finetune(f"{place}_whole", **options)
        first, _ = finetune(place, kill=True, **options)
        rest, tokenizer = finetune(place, **options)
        same = tokenizer_identity(tokenizer) == tokenizer_identity(expected)
        found[source, peft] = (whole, [*first, *rest], same)
    return found


def without_the_release(directory: str) -> tuple[int, bool]:
    small_runs.quiet()
    rest, tokenizer = finetune(
        f"{directory}/release_full",
        path=f"hf://{directory}/released",
        peft="full",
        chats=f"{directory}/chats.jsonl",
        max_steps=STEPS + 1,
    )
    return len(rest), tokenizer is not None


@pytest.fixture(scope="module")
def runs(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    directory = tmp_path_factory.mktemp("tuned")
    run_on_ranks(prepare, 1, str(directory))
    found = run_on_ranks(runs_of, 2, str(directory), timeout=600)[0]
    shutil.rmtree(directory / "released")
    found["without its source"] = run_on_ranks(without_the_release, 2, str(directory), timeout=200)[0]
    return found


@pytest.mark.parametrize(("source", "peft"), CASES)
def test_a_resumed_run_has_the_tokenizer_and_the_losses_of_an_uninterrupted_one(runs: Any, source: str, peft: str):
    whole, resumed, same_tokenizer = runs[source, peft]
    assert same_tokenizer and len(set(whole)) == STEPS
    assert resumed == whole


def test_a_run_of_all_parameters_goes_on_with_its_own_copy_of_the_tokenizer_when_the_release_has_gone(runs: Any):
    assert runs["without its source"] == (1, True)
