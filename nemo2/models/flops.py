# SPDX-License-Identifier: Apache-2.0
"""Counts the floating-point operations of training from a model's config.

The count includes the matrix products of the forward and the two of the backward (gradient of the input, gradient of
the weight), with a multiply-add as two operations. It excludes embedding lookup, norms, activations, router, softmax,
the width-four convolution of Mamba's mixers, and recomputation: these are *model* FLOPs, the numerator of MFU.

Attention scores have two conventions that differ by up to a third at long sequences, so every figure must name its
convention. ``causal=True`` counts the lower triangle that a causal model needs (Megatron-LM's
``num_floating_point_operations`` and nemo2's logs). ``causal=False`` counts the whole square (PaLM, arXiv:2204.02311,
appendix B; NeMo 2.0's ``flops_formulas.py``). Like those formulas, both count a layer with a sliding window as if it
attended to all tokens.
"""

from typing import Any

from nemo2.models.walker import shape_of


def model_flops_per_token(config: Any, seq_length: int, *, vocab_size: int | None = None, causal: bool = True) -> float:
    """Training FLOPs per token of a sample of ``seq_length`` tokens.

    ``config`` is a built ``GPTConfig`` or a config tree of one, of any family (`nemo2.models.walker`). ``vocab_size``
    is the size of the output layer. None: ``config.vocab_size``; if that is None too, the output layer is left out.

    Raises:
        ConfigError: a layer without a formula.
    """
    return shape_of(config, vocab_size).flops_per_token(seq_length, causal=causal)


def model_flops_per_step(
    config: Any, seq_length: int, global_batch_size: int, *, vocab_size: int | None = None, causal: bool = True
) -> float:
    """Training FLOPs of one optimizer step, over all devices."""
    per_token = model_flops_per_token(config, seq_length, vocab_size=vocab_size, causal=causal)
    return per_token * seq_length * global_batch_size
