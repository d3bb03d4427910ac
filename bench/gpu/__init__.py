# SPDX-License-Identifier: Apache-2.0
"""Benchmarks on a GPU: speed against a bare Megatron-Core loop, Hugging Face's Trainer and the chip's own matrix products."""
