# SPDX-License-Identifier: Apache-2.0
"""A few of the pairs of layouts that `make reshard` runs: one of each kind of difficulty."""

from pathlib import Path

import pytest

from support import resharding
from support.nightly import each_case
from support.resharding import SHARDED, Cut, Pair

ONE = Cut(1)
PAIRS = [
    Pair(ONE, Cut(2, "pp2 vp2")),
    Pair(ONE, Cut(2, "do")),
    Pair(Cut(2, "do"), Cut(2, "do"), exact=True),
    Pair(Cut(2, "ep2 do"), ONE, moe=True),
    Pair(Cut(2, "fsdp2 bf16"), Cut(2, "tp2 do bf16")),
    Pair(Cut(2, "do"), Cut(2, "mfsdp")),
]

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("pair", each_case(PAIRS, PAIRS[2:5]), ids=str)
def test_a_checkpoint_is_the_same_training_in_another_layout(run_on_ranks, tmp_path_factory, pair, sources):
    directory = sources.setdefault(pair.source, [tmp_path_factory.mktemp("saved"), None])
    if directory[1] is None:
        directory[1] = run_on_ranks(resharding.save, pair.saved.world, *pair.source, str(directory[0]))[0]
    again: Path = tmp_path_factory.mktemp("again") / "checkpoint"
    losses = run_on_ranks(
        resharding.load, pair.loaded.world, pair.loaded, pair.moe, pair.exact, str(directory[0]), str(again)
    )[0]
    outcome = resharding.compare(pair, str(directory[0]), str(again), directory[1], losses)
    assert outcome.good, outcome


@pytest.fixture(scope="module")
def sources() -> dict:
    return {}


def test_the_comparison_notices_a_changed_tensor_and_a_changed_loss(run_on_ranks, tmp_path, sources):
    import torch
    from torch.distributed.checkpoint import save

    pair = Pair(ONE, ONE)
    if pair.source not in sources:
        sources[pair.source] = [tmp_path, run_on_ranks(resharding.save, 1, *pair.source, str(tmp_path))[0]]
    folder, losses = sources[pair.source]
    saved, other = folder / "step=3", tmp_path / "other"
    assert resharding.compare(pair, str(folder), str(saved), losses, losses).good
    assert not resharding.compare(pair, str(folder), str(saved), losses, [losses[0] * 1.00001, *losses[1:]]).good
    tensors = resharding.whole_tensors(saved)
    name = next(name for name in tensors if name.startswith("optimizer.state.exp_avg_sq."))
    tensors[name].view(-1)[0] = torch.nextafter(tensors[name].view(-1)[0], torch.tensor(1.0))
    save(dict(tensors), checkpoint_id=str(other / "weights"), no_dist=True)
    outcome = resharding.compare(pair, str(folder), str(other), losses, losses)
    assert outcome.different == [name] and not outcome.good


def test_the_whole_matrix_covers_every_axis():
    words = {word for pair in resharding.PAIRS for cut in (pair.saved, pair.loaded) for word in cut.text.split()}
    assert {"tp2", "pp2", "vp2", "cp2", "ep2", "etp1", "etp2", "do", "sp", "bf16"} <= words
    ways = {(pair.saved.text.split()[0] in SHARDED, pair.loaded.text.split()[0] in SHARDED)
            for pair in resharding.PAIRS if pair.saved.text and pair.loaded.text}  # fmt: skip
    assert ways == {(False, False), (False, True), (True, False), (True, True)}
    assert set(SHARDED) <= words
    assert len(resharding.PAIRS) >= 50
    assert len({str(pair) for pair in resharding.PAIRS}) == len(resharding.PAIRS)
