# SPDX-License-Identifier: Apache-2.0
"""Reads what NeMo 2.0 wrote: names, module paths, scripts, notebooks, and the descriptions of runs and checkpoints."""
