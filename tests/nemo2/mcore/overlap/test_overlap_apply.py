# SPDX-License-Identifier: Apache-2.0
"""Settings of the gradient buffers that are written beside the callback's answers."""

import pytest

from nemo2.config.provenance import adjust, adjustments
from nemo2.mcore.overlap.apply import leave_one_bucket
from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig


def test_a_bucket_size_that_nothing_uses_is_told_with_its_line() -> None:
    said: list[str] = []
    ddp = DistributedDataParallelConfig(bucket_size=1000)
    leave_one_bucket(ddp, say=lambda words, *values: said.append(words % values))
    assert ddp.bucket_size is None
    [sentence] = said
    assert sentence.startswith(f"strategy.ddp_config.bucket_size=1000 ({__file__}:")
    assert sentence.endswith(
        "does not take effect: overlap_grad_reduce is off, so Megatron-Core puts all gradients into one bucket."
    )
    assert adjustments(ddp)["bucket_size"][-1].why.startswith("overlap_grad_reduce is off")


def test_a_size_that_nobody_set_goes_without_a_word() -> None:
    ddp = DistributedDataParallelConfig()
    adjust(ddp, "bucket_size", 1000, why="a callback's default")
    leave_one_bucket(ddp, say=lambda *_: pytest.fail("nobody asked for it"))
    assert ddp.bucket_size is None


def test_overlapped_reductions_keep_their_buckets() -> None:
    ddp = DistributedDataParallelConfig(bucket_size=1000, overlap_grad_reduce=True)
    leave_one_bucket(ddp)
    assert ddp.bucket_size == 1000
