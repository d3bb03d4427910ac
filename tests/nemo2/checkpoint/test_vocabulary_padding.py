# SPDX-License-Identifier: Apache-2.0
"""A vocabulary is filled up for the tensor-parallel size: a checkpoint of another size holds the same rows, and more or fewer
empty ones."""

import logging
from pathlib import Path
from typing import Any

import pytest

from support import resharding, small_runs
from support.nightly import each_case

UNIT, TOKENS = 5, small_runs.VOCAB
ROWS = {1: 65, 2: 70}
"""Rows of the embedding, by tensor-parallel size: the next multiple of `UNIT` times the size."""
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
CUT = {"tensor_model_parallel_size": 2}
KINDS = ("FSDP2Strategy", "Megatron-FSDP", "FSDPStrategy")

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def fit(kind: str, *, tokens: int = TOKENS, precision: str = "32", **options: Any) -> dict[str, Any]:
    import nemo2 as nl
    from nemo2.data.tokenizer import NullTokenizer

    small_runs.release()
    distributed = kind in ("distributed", "Megatron-FSDP")
    model = small_runs.build_llama(vocab_size=None, make_vocab_size_divisible_by=UNIT, distributed=distributed)
    model.tokenizer = NullTokenizer(tokens)
    strategy: dict[str, Any] = {"distributed": CUT, "cut": CUT, "Megatron-FSDP": {"fsdp": "megatron"}, "whole": {}}.get(
        kind, {}
    )
    if kind in ("FSDPStrategy", "FSDP2Strategy"):
        strategy = {"strategy": getattr(nl, kind)()}
    return small_runs.fit(model, max_steps=3, precision=precision, **strategy, **options)


def saving_at_start(again: str) -> Any:
    import lightning.pytorch as pl

    class SaveAgain(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(again)

    return SaveAgain()


def there_and_back(directory: str, kind: str) -> None:
    """Two tensor-parallel ranks save; the other strategy, which cuts no tensors, loads and saves; and that is loaded back."""
    fit("distributed", callbacks=[small_runs.keep(f"{directory}/cut", every_n_train_steps=2, save_top_k=-1)])
    fit(kind, ckpt_path=f"{directory}/cut/step=2", callbacks=[saving_at_start(f"{directory}/whole")])
    fit("distributed", ckpt_path=f"{directory}/whole", callbacks=[saving_at_start(f"{directory}/back")])


@pytest.mark.parametrize("kind", each_case(KINDS, KINDS[:2]))
def test_rows_and_their_moments_survive_another_padding_there_and_back(run_on_ranks, tmp_path, kind):
    import torch

    run_on_ranks(there_and_back, 2, str(tmp_path), kind, timeout=120.0)
    saved = resharding.whole_tensors(tmp_path / "cut" / "step=2")
    for name, rows in (("whole", ROWS[1]), ("back", ROWS[2])):
        found = resharding.whole_tensors(tmp_path / name)
        padded = [key for key in saved.keys() & found.keys() if key.endswith(PADDED)]
        moments = [key for key in padded if "exp_avg" in key]
        assert len(moments) == 4 and len(padded) - len(moments) >= 2, sorted(found)
        for key in padded:
            assert len(saved[key]) == ROWS[2] and len(found[key]) == rows, key
            assert torch.equal(found[key][:TOKENS], saved[key][:TOKENS]), key


def another_vocabulary(directory: str) -> dict[str, Any]:
    from nemo2.base.errors import CheckpointError

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    told: list[str] = []
    logging.getLogger("nemo2").addHandler(Told())
    path = f"{directory}/step=2"
    found: dict[str, Any] = {}
    fit("cut", callbacks=[small_runs.keep(directory, every_n_train_steps=2, save_top_k=-1)])
    for kind in KINDS:
        with pytest.raises(CheckpointError) as caught:
            fit(kind, tokens=TOKENS + 30, ckpt_path=path)
        found[kind] = str(caught.value)
    told.clear()
    fit("whole", ckpt_path=path)
    found["same vocabulary"] = [message for message in told if "has a vocabulary of" in message]
    fit("whole", tokens=TOKENS + 30, ckpt_path=path)
    found["another vocabulary"] = [message for message in told if "has a vocabulary of" in message]
    return found


def test_another_vocabulary_is_refused_by_sharded_strategies_and_told_by_megatrons(run_on_ranks, tmp_path):
    found, other = run_on_ranks(another_vocabulary, 2, str(tmp_path), timeout=120.0)
    for kind in KINDS:
        for answers in (found, other):
            assert "has shape (70, 32) in the checkpoint and (95, 32) in this model" in answers[kind]
    assert found["same vocabulary"] == other["same vocabulary"] == other["another vocabulary"] == []
    [told] = found["another vocabulary"]
    assert "has a vocabulary of 70 rows, but this model has 95" in told
    assert Path(tmp_path).name in told
