# SPDX-License-Identifier: Apache-2.0
"""Computes the loss that is differentiated and the loss that is reported from a model's output.

Megatron-Core's schedules call the loss function once per micro-batch, on the last pipeline stage. It returns ``(loss,
num_tokens, report)``. The schedule divides the loss by the tokens and by the number of micro-batches. With
``calculate_per_token_loss`` it instead divides by the tokens of the whole global batch, after all gradients are
computed (Megatron-Core ``schedules.forward_step_calc_loss``, ``finalize_model_grads``).
"""

from collections.abc import Sequence
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor, nn

Report = dict[str, Tensor]
DataT = TypeVar("DataT", bound=Any)
"""NeMo's name for a batch, for annotations of your own reductions."""
ReductionT = TypeVar("ReductionT", bound=Any)
"""NeMo's name for a reduction's report of a micro-batch."""


class MegatronLossReduction(nn.Module):
    """Define a loss by subclassing this class: ``forward`` per micro-batch, ``reduce`` once per step.

    A call without arguments returns the reduction itself. ``model.training_loss_reduction`` and
    ``model.training_loss_reduction()`` are therefore the same object, whether a module defines a property or a method.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if args or kwargs else self

    weight: Optional[Tensor] = None
    """The count behind the last mean that `reduce` returned. Validation weights its global batches by it. None:
    equal weights."""

    def setup(self, batch: Any) -> None:
        """Called before ``forward`` with the same micro-batch, for state that both need. Does nothing by default."""

    def forward(self, batch: Any, forward_out: Tensor) -> tuple[Tensor, Tensor, Report]:
        """Return the summed loss (differentiable), the number of tokens in the sum (int), and the report."""
        raise TypeError(f"{type(self).__name__} must define forward(batch, forward_out)")

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Report]) -> Optional[Tensor]:
        """One scalar for the step from the reports of its micro-batches, the same on all data- and context-parallel
        ranks."""
        raise TypeError(f"{type(self).__name__} must define reduce(reports)")


class MaskedTokenLossReduction(MegatronLossReduction):
    """Compute the mean cross-entropy over the tokens that the mask keeps.

    The reported loss is the mean over *all* kept tokens of the global batch. Sums and counts are added over
    micro-batches and over the data- and context-parallel ranks, and then divided.

    The differentiated loss is the same in every layout: the mean over the kept tokens of each micro-batch, or with
    ``per_token`` over those of the whole global batch.

    Args:
        validation_step: Accepted for NeMo's signature. Training and validation steps are reduced in the same way.
        val_drop_last: In validation and tests, leave out the samples after the last whole global batch. False: those
            samples count like all others, in a batch that is filled with samples whose mask is empty.
        per_token: The model's ``calculate_per_token_loss``: Megatron-Core divides once, at the end of the step.
    """

    REPORT = "loss_sum_and_token_count"

    def __init__(self, validation_step: bool = False, val_drop_last: bool = True, per_token: bool = False) -> None:
        super().__init__()
        self.validation_step = validation_step
        self.val_drop_last = val_drop_last
        self.per_token = per_token

    def forward(self, batch: dict[str, Tensor], forward_out: Tensor) -> tuple[Tensor, Tensor, Report]:
        """Reduce one micro-batch.

        ``forward_out`` [batch, sequence] is the loss per token. ``batch["loss_mask"]`` has the same shape, and 1 keeps
        a token. With context parallelism both are this rank's shard of the sequences, and
        ``batch["num_valid_tokens_in_ub"]`` is the number of kept tokens in the whole micro-batch.
        """
        loss_sum, num_tokens = masked_token_loss(forward_out, batch["loss_mask"])
        report = torch.stack([loss_sum.detach(), num_tokens.to(loss_sum.dtype)])
        if not self.per_token and batch.get("num_valid_tokens_in_ub") is not None:
            loss_sum = loss_sum * _weight_of_share(num_tokens, batch["num_valid_tokens_in_ub"])
        return loss_sum, num_tokens, {self.REPORT: report}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Report]) -> Tensor:
        total = torch.stack([report[self.REPORT] for report in losses_reduced_per_micro_batch]).sum(dim=0)
        _all_reduce_over_data_and_context(total)
        self.weight = total[1]
        return total[0] / total[1].clamp(min=1)


class MaskedTokenLossReductionWithLossMask(MaskedTokenLossReduction):
    """Compute the loss of models that decide which tokens count.

    The forward step returns the loss per token and a mask, which replaces the batch's mask. With
    ``val_drop_last=False``, samples whose mask in the batch is empty still don't count, such as the samples that fill
    the last global batch.
    """

    def forward(
        self,
        batch: dict[str, Tensor],
        forward_out: tuple[Tensor, Tensor],  # pyright: ignore[reportIncompatibleMethodOverride]
    ) -> tuple[Tensor, Tensor, Report]:
        """``forward_out``: the loss per token and the mask, both [batch, sequence], this context-parallel rank's
        shard."""
        from megatron.core import parallel_state

        loss_per_token, loss_mask = forward_out
        if not self.val_drop_last:
            loss_mask = loss_mask * _samples_with_tokens(batch["loss_mask"])
        batch["loss_mask"] = loss_mask
        if parallel_state.get_context_parallel_world_size() > 1:
            batch["num_valid_tokens_in_ub"] = _sum_over_context(loss_mask.sum())
        return super().forward(batch, loss_per_token)


class ScalarLossReduction(MegatronLossReduction):
    """Reduce the losses of modules whose ``training_step`` returns a scalar, as Lightning modules do.

    The step's loss is the mean over micro-batches and data-parallel ranks.

    Args:
        optional: Steps may return no loss, such as validation steps that only log. `reduce` then returns None.
    """

    REPORT = "loss"

    def __init__(self, optional: bool = False) -> None:
        super().__init__()
        self.optional = optional

    def forward(self, batch: Any, forward_out: Any) -> tuple[Tensor, Tensor, Report]:
        loss = forward_out.get("loss") if isinstance(forward_out, dict) else forward_out
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            if self.optional:
                return torch.zeros(()), torch.ones((), dtype=torch.int), {}
            returned = type(forward_out).__name__
            if isinstance(loss, Tensor):
                returned += f" {'of' if loss is forward_out else 'with a loss of'} shape {tuple(loss.shape)}"
            raise TypeError(
                f"training_step must return a scalar loss, or a dict with a scalar 'loss', but it returned {returned}. "
                "To return something else, define `training_loss_reduction` on the module."
            )
        # A copy, because the schedule divides the loss in place, and the user may log their own tensor later.
        loss = loss.float().reshape(()).clone()
        return loss, torch.ones((), dtype=torch.int, device=loss.device), {self.REPORT: loss.detach().clone()}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Report]) -> Optional[Tensor]:
        if self.optional and not all(losses_reduced_per_micro_batch):
            return None
        total = torch.stack([report[self.REPORT] for report in losses_reduced_per_micro_batch]).mean()
        total = torch.stack([total, torch.ones_like(total)])
        _all_reduce_over_data_and_context(total)
        return total[0] / total[1]


class OutputCollection(MegatronLossReduction):
    """Collect the outputs of a prediction's forward steps, without a loss."""

    REPORT = "output"

    def forward(self, batch: Any, forward_out: Any) -> tuple[Tensor, Tensor, Report]:
        return torch.zeros(()), torch.ones((), dtype=torch.int), {self.REPORT: forward_out}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Report]) -> Any:
        """The single output; or several tensors concatenated along the batch; or a list. None: there are no outputs."""
        outputs = [report[self.REPORT] for report in losses_reduced_per_micro_batch]
        if len(outputs) <= 1:
            return outputs[0] if outputs else None
        return torch.cat(outputs) if all(isinstance(output, Tensor) for output in outputs) else outputs


def masked_token_loss(loss_per_token: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of ``loss_per_token`` [any shape] where the mask is set, in fp32, and the number of kept tokens (int)."""
    mask = loss_mask.reshape(-1).float()
    loss_sum = torch.sum(loss_per_token.reshape(-1).float() * mask)
    return loss_sum, mask.sum().detach().to(torch.int)


def _weight_of_share(num_tokens: Tensor, of_whole: Tensor) -> Tensor:
    """The weight of a context-parallel rank's loss: its share of the kept tokens.

    Megatron-Core divides a rank's loss by the rank's own tokens and averages over the context-parallel ranks. A mask
    keeps more tokens on one rank than on another, so each rank's loss must be weighted by its tokens. Without the
    weight the gradients are those of another loss: single gradients were off by 14 % with two ranks and a third of the
    tokens masked.
    """
    from megatron.core import parallel_state

    return num_tokens * parallel_state.get_context_parallel_world_size() / of_whole.clamp(min=1)


def _samples_with_tokens(loss_mask: Tensor) -> Tensor:
    """[batch, 1]: 0 for samples without any kept token in the data, such as those that fill the last global batch;
    otherwise 1."""
    return (_sum_over_context((loss_mask != 0).sum(dim=-1, keepdim=True)) > 0).to(loss_mask.dtype)


def _sum_over_context(value: Tensor) -> Tensor:
    """The sum over the context-parallel ranks, in place."""
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_world_size() > 1:
        group: Any = parallel_state.get_context_parallel_group()
        torch.distributed.all_reduce(value, group=group)
    return value


def _all_reduce_over_data_and_context(value: Tensor) -> None:
    from megatron.core import parallel_state

    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        torch.distributed.all_reduce(value, group=group)
