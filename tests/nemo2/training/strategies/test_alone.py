# SPDX-License-Identifier: Apache-2.0
"""A process alone trains whoever holds the port that it inherited."""

import os
import socket

from support import small_runs


def beside_a_taken_port() -> list[float]:
    small_runs.quiet()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(taken.getsockname()[1])
        losses = small_runs.fit(small_runs.build_llama(), max_steps=2)["losses"]
    small_runs.release()
    return losses


def test_a_run_of_one_process_needs_no_port(run_on_ranks):
    [losses] = run_on_ranks(beside_a_taken_port, 1, init_process_group=False)
    assert len(losses) == 2
