# SPDX-License-Identifier: Apache-2.0
"""Computes how far a student's next-token distribution is from its teacher's, with the vocabulary sharded over
tensor-parallel ranks.

The loss is the forward Kullback-Leibler divergence of softened distributions, times the square of the temperature, so
that the size of the gradients doesn't depend on the temperature (Hinton et al. 2015, arXiv:1503.02531):

    T^2 * sum over tokens v of q(v) * (log q(v) - log p(v)),    q = softmax(teacher / T),    p = softmax(student / T)
"""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from torch import Tensor


@dataclass(frozen=True)
class TeacherLogits:
    """The stored part of a teacher's logits for a micro-batch."""

    values: Tensor
    """``[batch, sequence, vocabulary / tp]``. With the likeliest tokens only: ``[batch, sequence, k]``, the same on
    every rank."""
    ids: Optional[Tensor] = None
    """The ids of the ``k`` likeliest tokens, in the whole vocabulary. None: all tokens of this rank's shard."""

    @property
    def num_bytes(self) -> int:
        """The bytes of both tensors."""
        return sum(one.numel() * one.element_size() for one in (self.values, self.ids) if one is not None)

    @classmethod
    def of(cls, logits: Tensor, top_k: Optional[int]) -> "TeacherLogits":
        """Store this rank's shard ``[batch, sequence, vocabulary / tp]``, or the ``top_k`` likeliest tokens. None:
        all."""
        if top_k is None:
            return cls(logits)
        first = parallel_state.get_tensor_model_parallel_rank() * logits.size(-1)
        values, ids = logits.topk(min(top_k, logits.size(-1)), dim=-1)
        values, ids = _gathered(values), _gathered(ids + first)
        values, places = values.topk(min(top_k, values.size(-1)), dim=-1)
        return cls(values, ids.gather(-1, places))


def distillation_loss(student: Tensor, teacher: TeacherLogits, *, temperature: float = 1.0) -> Tensor:
    """The loss of each token ``[batch, sequence]``, in fp32, the same on every tensor-parallel rank.

    Args:
        student: Logits ``[batch, sequence, vocabulary / tp]``, which receive the gradient.
        teacher: The teacher's logits. With ``ids``, q is a distribution over these tokens only. p always covers the
            whole vocabulary, so probability that the student gives to other tokens raises the loss.
    """
    log_p = log_softmax_over_ranks(student.float() / temperature)
    if teacher.ids is None:
        log_q = log_softmax_over_ranks(teacher.values.float() / temperature)
        # Columns that pad the vocabulary are -inf on both sides. They are excluded, so 0 * inf isn't computed.
        counts = log_q > float("-inf")
        difference = torch.where(counts, log_q, 0.0) - torch.where(counts, log_p, 0.0)
        divergence = reduce_from_tensor_model_parallel_region((log_q.exp() * difference).sum(-1))
    else:
        log_q = (teacher.values.float() / temperature).log_softmax(-1)
        divergence = (log_q.exp() * log_q).sum(-1) - _expected(log_p, log_q.exp(), teacher.ids)
    return divergence * temperature**2


def cross_entropy(student: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of the text's next token, for each token ``[batch, sequence]``, in fp32. The same on every
    tensor-parallel rank."""
    log_p = log_softmax_over_ranks(student.float())
    return -_expected(log_p, torch.ones_like(labels[..., None], dtype=log_p.dtype), labels[..., None])


def log_softmax_over_ranks(logits: Tensor) -> Tensor:
    """This rank's shard of the logarithm of the softmax over the vocabulary of all tensor-parallel ranks.
    Differentiable."""
    largest = logits.detach().amax(-1, keepdim=True)
    group: Any = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits - largest
    total = reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1, keepdim=True))
    # Each rank's columns depend on the total, whose gradient is the sum over all ranks.
    return shifted - copy_to_tensor_model_parallel_region(total).log()


def _expected(log_p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """The sum of ``q * log_p`` over the tokens ``ids``, of which each rank has some columns."""
    own = log_p.size(-1)
    places = ids - parallel_state.get_tensor_model_parallel_rank() * own
    here = (places >= 0) & (places < own)
    picked = torch.where(here, log_p.gather(-1, places.clamp(0, own - 1)), 0.0)
    return reduce_from_tensor_model_parallel_region((q * picked).sum(-1))


def _gathered(tensor: Tensor) -> Tensor:
    """The ranks' tensors, concatenated along the last axis."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if ranks == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    group: Any = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
