# SPDX-License-Identifier: Apache-2.0
"""The recorder sees every collective and message with its group, and from issue to completion."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo2.report.trace.events import kind_of_group


def communicate() -> list[dict[str, Any]]:
    from nemo2.report.trace.recorder import CommunicationRecorder

    # gloo's, because a machine with GPUs gives its ranks NCCL, which has no collectives of CPU tensors.
    group = dist.new_group([0, 1], backend="gloo", group_desc="DATA_PARALLEL_GROUP_WITH_CP")
    pipeline = dist.new_group([0, 1], backend="gloo", group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
    rank = dist.get_rank()
    with CommunicationRecorder() as recorder:
        x, y = torch.ones(1000), torch.empty(2000)
        dist.all_reduce(x, group=group)
        work = dist.all_gather_into_tensor(y, x, group=group, async_op=True)
        time.sleep(0.05)
        assert work is not None
        work.wait()
        operation = dist.P2POp(dist.isend if rank == 0 else dist.irecv, x, 1 - rank, group=pipeline)
        for request in dist.batch_isend_irecv([operation]):
            request.wait()
        assert torch.equal(y[:1000], torch.full((1000,), 2.0))
        with pytest.raises(RuntimeError, match="active"), CommunicationRecorder():
            pass
    dist.all_reduce(x, group=group)
    return [vars(one) | {"kind": one.kind} for one in recorder.communications]


@pytest.mark.quick
def test_collectives_and_messages_are_recorded_with_their_groups(run_on_ranks):
    for rank, found in enumerate(run_on_ranks(communicate, 2)):
        assert [(one["name"], one["kind"], one["size_bytes"]) for one in found] == [
            ("all_reduce", "dp", 4000),
            ("all_gather", "dp", 8000),
            ("send" if rank == 0 else "recv", "pp", 4000),
        ]
        assert all(one["issued"] <= one["returned"] and one["done"] >= one["issued"] for one in found)
        # Each was waited for once, after its call came back; the gather a while after.
        assert all(len(one["waits"]) == 1 and one["returned"] <= one["waits"][0][0] for one in found)
        assert found[1]["waits"][0][0] - found[1]["returned"] > 40e6


@pytest.mark.parametrize(
    ("description", "kind"),
    [
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP", "dp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "expert_dp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("EMBEDDING_GROUP", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "cp"),
        ("undefined", "other"),
    ],
)
def test_groups_are_known_by_megatron_cores_descriptions(description, kind):
    assert kind_of_group(description) == kind
