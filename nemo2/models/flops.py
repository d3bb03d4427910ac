# SPDX-License-Identifier: Apache-2.0
"""How many floating-point operations training a model needs, counted from its config.

Counted are the matrix products of the forward pass and the two of the backward pass (gradient of the input, gradient of
the weight), a multiply-add as two operations. Not counted: embedding look-up, norms, activations, router, softmax, the
width-four convolution of Mamba's mixers, and anything computed twice because of recomputation: these are *model* FLOPs,
the numerator of MFU.

Attention scores come in two conventions that differ by up to a third at long sequences, so every figure must say which:
``causal=True`` counts the lower triangle that a causal model needs (Megatron-LM's ``num_floating_point_operations`` and
our logs), ``causal=False`` the whole square (PaLM, arXiv:2204.02311, appendix B; NeMo 2.0's ``flops_formulas.py``). Both
count a layer with a sliding window as if it saw everything, as those formulas do.
"""

from typing import Any

from nemo2.models.walker import shape_of


def model_flops_per_token(config: Any, seq_length: int, *, vocab_size: int | None = None, causal: bool = True) -> float:
    """Training FLOPs per token of a sample of ``seq_length`` tokens.

    ``config`` is a built ``GPTConfig`` or a config tree of one, of any family (`nemo2.models.walker`). ``vocab_size`` counts
    the output layer; None takes ``config.vocab_size``, and where that is None too the output layer is left out.

    Raises:
        ConfigError: a layer for which there is no formula here.
    """
    return shape_of(config, vocab_size).flops_per_token(seq_length, causal=causal)


def model_flops_per_step(
    config: Any, seq_length: int, global_batch_size: int, *, vocab_size: int | None = None, causal: bool = True
) -> float:
    """Training FLOPs of one optimizer step, over all devices."""
    per_token = model_flops_per_token(config, seq_length, vocab_size=vocab_size, causal=causal)
    return per_token * seq_length * global_batch_size
