# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core, wired: parallel sizes and groups, the step, precision, overlap, optimizers, and what settles them."""
