# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of two nodes on one machine, and what runs of ours survive on it. `make cluster`."""
