# SPDX-License-Identifier: Apache-2.0
"""Training on fine-tuning data: the same tokens and losses as transformers in a plain loop, packed or not, in every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo2.base.errors import DataError
from nemo2.data.finetuning.module import ChatDataModule, FineTuningDataModule
from nemo2.data.finetuning.packing import PackedSequenceSpecs, pack
from nemo2.data.tokenizer import ByteTokenizer
from support import finetuned_runs, small_chats
from support.finetuned_runs import SEQ
from support.nightly import each_case, requested

CP2, TP2 = {"context_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "dp2": (False, {}),
    "dp2 packed": (True, {}),
    "cp2": (False, CP2),
    "cp2 packed": (True, CP2),
    "tp2 sp": (False, TP2),
    "tp2 sp packed": (True, TP2),
    "pp2": (False, {"pipeline_model_parallel_size": 2}),
    "pp2 packed": (True, {"pipeline_model_parallel_size": 2}),
}


def conversations(count: int = 20) -> list[dict[str, Any]]:
    """Two turns of lengths that differ as answers do."""
    random = np.random.default_rng(3)
    words = " ".join(small_chats.TEXT).split()
    some = lambda most: " ".join(random.choice(words, size=random.integers(1, most)))  # noqa: E731
    return [
        small_chats.say(("user", some(6)), ("assistant", some(8)), ("user", some(3)), ("assistant", some(2)))
        for _ in range(count)
    ]


def data_of(root: str, tokenizer: Any, *, packed: bool, cp: int) -> ChatDataModule:
    """All conversations in each step, so that their order is of no account."""
    given: dict[str, Any] = {"global_batch_size": 20, "micro_batch_size": 2}
    if packed:
        given = {"global_batch_size": 1, "micro_batch_size": 1, "packed_sequence_specs": PackedSequenceSpecs(SEQ)}

    def make(**changes: Any) -> ChatDataModule:
        return ChatDataModule(
            root,
            seq_length=SEQ,
            tokenizer=tokenizer,
            num_workers=0,
            use_hf_tokenizer_chat_template=True,
            **(given | changes),
        )

    if not packed:
        return make()
    lengths = make().samples("train").lengths - 1  # pyright: ignore[reportOptionalMemberAccess]
    return make(global_batch_size=len(pack(lengths, SEQ, align=2 * cp if cp > 1 else 1)))


def runs(root: str, names: list[str]) -> dict[str, Any]:
    from nemo2.data.tokenizer import AutoTokenizer

    tokenizer = AutoTokenizer(f"{root}/tokenizer", local_files_only=True)
    found = {}
    for name in names:
        packed, layout = CASES[name]
        data = data_of(root, tokenizer, packed=packed, cp=layout.get("context_parallel_size", 1))
        found[name] = finetuned_runs.train(data, **layout)
        found[name]["padding"] = {split: vars(fullness) for split, fullness in data.fullness.items()}
    return found


def one_rank(root: str) -> dict[str, Any]:
    from nemo2.data.tokenizer import AutoTokenizer

    tokenizer = AutoTokenizer(f"{root}/tokenizer", local_files_only=True)
    return {
        name: finetuned_runs.train(data_of(root, tokenizer, packed=packed, cp=1))
        for name, packed in (("plain", False), ("packed", True))
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("chats")
    small_chats.make_tokenizer(root / "tokenizer")
    small_chats.write_lines(root / "training.jsonl", conversations())
    return root


@pytest.fixture(scope="module")
def alone(run_on_ranks, root) -> dict[str, Any]:
    return run_on_ranks(one_rank, 1, str(root))[0]


@pytest.fixture(scope="module")
def found(request, run_on_ranks, root, alone) -> list[dict[str, Any]]:
    compared = [f"{layout}{packed}" for layout in requested(request, "layout") for packed in ("", " packed")]
    return run_on_ranks(runs, 2, str(root), sorted({*requested(request, "name"), *compared}), timeout=280)


@pytest.fixture(scope="module")
def theirs(root, alone) -> dict[str, Any]:
    from tests.nemo2.data.finetuning.test_chat import by_hand  # the mask that nobody had to look for

    tokenizer = small_chats.make_tokenizer(root / "again")
    samples = [by_hand(tokenizer, record) for record in conversations()]
    return finetuned_runs.in_transformers(alone["plain"]["weights"], samples)


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_the_tokens_and_losses_are_those_of_transformers_in_a_plain_loop(alone, theirs, name):
    assert alone[name]["tokens"] == [theirs["tokens"]] * 3
    assert alone[name]["losses"] == pytest.approx(theirs["losses"], abs=2e-6)
    assert theirs["losses"][0] - theirs["losses"][2] > 0.01


def test_packed_is_unpacked(alone):
    plain, packed = alone["plain"], alone["packed"]
    assert packed["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    for name, gradient in plain["gradients"].items():
        torch.testing.assert_close(packed["gradients"][name], gradient, atol=1e-5, rtol=0, msg=name)


REPLICAS = ("dp2", "dp2 packed", "cp2", "cp2 packed")


@pytest.mark.parametrize("name", each_case(REPLICAS, ("dp2 packed", "cp2 packed")))
def test_replicas_and_context_ranks_train_as_one_process(alone, found, name):
    for rank in found:
        assert rank[name]["losses"] == pytest.approx(alone["plain"]["losses"], abs=2e-6)
        for parameter, gradient in alone["plain"]["gradients"].items():
            torch.testing.assert_close(rank[name]["gradients"][parameter], gradient, atol=1e-5, rtol=0, msg=parameter)


@pytest.mark.parametrize("layout", each_case(("dp2", "cp2", "tp2 sp", "pp2"), ("tp2 sp", "pp2")))
def test_packed_is_unpacked_in_every_layout(found, layout):
    """Tensor-parallel ranks and stages begin with weights of their own, so that each layout is compared with itself."""
    for rank in found:
        assert rank[f"{layout} packed"]["losses"] == pytest.approx(rank[layout]["losses"], abs=1e-6)
        assert rank[f"{layout} packed"]["tokens"] == rank[layout]["tokens"]


def test_padding_is_less_packed(found):
    for name, run in found[0].items():
        if CASES[name][0]:
            padding = run["padding"]["train"]
            assert padding["padding"] < padding["padding_unpacked"] - 0.1


def broken(root: str) -> str:
    data = FineTuningDataModule(root, tokenizer=ByteTokenizer(), num_workers=0)
    if torch.distributed.get_rank() == 0:
        data.prepare_data()
    with pytest.raises(DataError) as told:
        data.setup("fit")
    return str(told.value)


def test_what_rank_0_finds_is_told_on_every_rank(run_on_ranks, tmp_path):
    small_chats.write_lines(tmp_path / "training.jsonl", ["{"])
    told = run_on_ranks(broken, 2, str(tmp_path))
    assert all("training.jsonl:1: not JSON" in text for text in told)
