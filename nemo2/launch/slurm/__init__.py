# SPDX-License-Identifier: Apache-2.0
"""Slurm: a job script of nemo2, passed to sbatch here or over SSH, that continues one run until it is done or has
failed."""
