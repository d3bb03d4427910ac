# SPDX-License-Identifier: Apache-2.0
"""Slurm: a job script of ours, handed to sbatch here or over SSH, that goes on with one run until it is done or has failed."""
