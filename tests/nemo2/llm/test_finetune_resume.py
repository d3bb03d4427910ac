# SPDX-License-Identifier: Apache-2.0
"""A run with additions that dies in any step goes on bit by bit: losses, rates, rows of the data, dropout; the base stays."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from support import small_runs

STEPS = 3
"""The fewest of which a run may die after its first step and before its last."""
SEQ = 48
KINDS = ("LoRA", "DoRA")


class Dies(RuntimeError):
    pass


class Watch(pl.Callback):
    """Rows and losses of each step; dies where it is told to, after ``steps`` steps."""

    def __init__(self, dies_after: int | None) -> None:
        self.dies_after = dies_after
        self.rows: dict[int, list[list[int]]] = {}
        self.losses: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.dies_after:
            raise Dies
        self.rows[trainer.global_step] = batch["tokens"].tolist()

    def on_megatron_step_end(self, step: Any, reduced: Any) -> None:
        self.losses[max(self.rows)] = float(reduced)


def write_data(root: Path) -> None:
    root.mkdir()
    records = [{"input": f"ask {i:03}" + "?" * (i % 9), "output": "answer " * (1 + i % 4)} for i in range(60)]
    (root / "training.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def run(directory: str, *, base: str | None, kind: str | None, packed: bool, dies_after: int | None = None) -> Watch:
    from nemo2.data.finetuning.module import FineTuningDataModule
    from nemo2.data.finetuning.packing import PackedSequenceSpecs
    from nemo2.data.tokenizer import ByteTokenizer
    from nemo2.llm import api, peft

    small_runs.release()
    model = small_runs.build_llama(
        distributed=True, vocab_size=None, gated_linear_unit=True, seq_length=SEQ, schedule=small_runs.cosine(STEPS)
    )
    model.tokenizer = ByteTokenizer()
    data = FineTuningDataModule(
        Path(directory).parent / "data",
        seq_length=SEQ,
        tokenizer=ByteTokenizer(),
        micro_batch_size=1 if packed else 2,
        global_batch_size=4,
        num_workers=0,
        pin_memory=False,
        packed_sequence_specs=PackedSequenceSpecs(SEQ) if packed else None,
    )
    watch = Watch(dies_after)
    parts = small_runs.run_arguments(
        directory,
        model=model,
        data=data,
        base=base,
        checkpoints=small_runs.keep(every_n_train_steps=1, save_top_k=-1),
        max_steps=STEPS if kind else 2,
        callbacks=[watch],
    )
    try:
        if kind is None:
            api.pretrain(**parts)
        else:
            method = peft.PEFT_STR2CLS[kind](dim=4, alpha=8, dropout=0.2, lora_B_init_method="normal")
            api.finetune(**parts, peft=method)
    except Dies:
        pass
    return watch


def tensors_of(directory: str) -> dict[str, Any]:
    """All tensors of the run's newest checkpoint, the optimizer's too."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from nemo2.hugging_face.checkpoint import find_checkpoint

    weights = find_checkpoint(Path(directory)) / "weights"
    reader = FileSystemReader(str(weights))
    stored = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    load(stored, storage_reader=reader, no_dist=True)
    return stored


def one_process(directory: str) -> dict[str, Any]:
    import hashlib

    import torch

    from nemo2.hugging_face.checkpoint import find_checkpoint

    write_data(Path(directory) / "data")
    run(f"{directory}/base", base=None, kind=None, packed=False)
    base = find_checkpoint(Path(f"{directory}/base"))

    def digest() -> str:
        files = sorted(file for file in base.rglob("*") if file.is_file())
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    before, found = digest(), {}
    for kind, packed in (("LoRA", True), ("DoRA", False)):
        options = {"base": str(base), "kind": kind, "packed": packed}
        whole = run(f"{directory}/{kind}", **options)
        expected = tensors_of(f"{directory}/{kind}")
        same: list[Any] = []
        for step in range(1, STEPS):
            place = f"{directory}/{kind} {step}"
            first = run(place, **options, dies_after=step)
            after = run(place, **options)
            ours = tensors_of(place)
            same.append(
                {
                    "rows": first.rows | after.rows == whole.rows and min(after.rows) == step,
                    "losses": first.losses | after.losses == whole.losses,
                    "tensors": expected.keys() == ours.keys()
                    and all(torch.equal(ours[name], expected[name]) for name in expected),
                }
            )
        found[kind] = {
            "same": same,
            "losses": whole.losses,
            "added": sum(".adapter." in name for name in expected),
            "others": [name for name in expected if ".adapter." not in name and name.startswith("module.")],
        }
    return found | {"base stays": digest() == before}


@pytest.fixture(scope="module")
def runs(run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    return run_on_ranks(one_process, 1, str(tmp_path_factory.mktemp("dies")), timeout=300)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_dies_in_any_step_ends_as_if_it_had_not_and_saves_additions_alone(runs, kind):
    found = runs[kind]
    assert len(set(found["losses"].values())) == STEPS
    for step, same in enumerate(found["same"], start=1):
        assert same == {"rows": True, "losses": True, "tensors": True}, f"died after step {step}"
    assert found["added"] > 0 and not found["others"]
    assert runs["base stays"]
