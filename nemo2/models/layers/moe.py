# SPDX-License-Identifier: Apache-2.0
"""A router whose losses have the same weight for every mask, padding, packing and layout.

Megatron-Core's router is right for batches without padding of which every token is trained, on one data-parallel rank. It differs
elsewhere, in 0.16.1 and 0.19.2 unless a version is named:

- where each trained token counts the same, its losses grow with the untrained tokens (`nemo2.models.step_tokens`), and in 0.16
  they shrink with the ranks that share a sequence
- padding enters its losses and the counts behind its bias, because nobody passes a padding mask on
- with a padding mask the loss of a sequence takes the mean length for the length, each rank weighs its part by its own tokens,
  the counts behind the bias fail on their shapes, and a micro-batch of padding divides by zero
- the loss over all replicas is divided by their number
"""

from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo2.models.layers.spec import exchanged
from nemo2.models.step_tokens import ALL, PRESENT, trained_over

_ATTACH: Any = TopKRouter.attach_and_log_load_balancing_loss
_MULTIPLIES_BY_RANKS = "tp_cp_group" in _ATTACH.__code__.co_names
"""0.19 multiplies a loss that it attaches by the ranks that share a sequence where each token counts the same."""
_OVER_REPLICAS = (
    {"needs_dp_avg": False} if "needs_dp_avg" in _ATTACH.__code__.co_varnames else {"reduce_group_has_dp": True}
)


def with_weighted_routers(spec: Any) -> Any:
    """A copy of a spec of a model's layers, a user's own too, whose routers weigh their losses as `WeightedRouter`."""
    return exchanged(spec, {TopKRouter: WeightedRouter})


class WeightedRouter(TopKRouter):
    """Megatron-Core's router with its own losses. Built and called as it is."""

    _tokens: Any = 1
    """Tokens without padding of the micro-batch, over the ranks that share its sequences. At least 1."""
    _counted: str = ALL
    further_padding: Optional[Tensor] = None
    """The padding of a layer of multi-token prediction that isn't given any (`nemo2.models.layers.mtp.leave_out_padding`)."""

    def forward(self, input: Tensor, padding_mask: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """``input`` [sequence, batch, hidden]; ``padding_mask`` [sequence, batch], True for padding, this rank's share of the
        sequence or, with sequence parallelism, that of all tensor-parallel ranks."""
        padding_mask = self.further_padding if padding_mask is None else padding_mask
        if padding_mask is not None and padding_mask.size(0) != input.size(0):
            # Megatron-Core splits the mask on the first pipeline stage only.
            start = parallel_state.get_tensor_model_parallel_rank() * input.size(0)
            padding_mask = padding_mask.narrow(0, start, input.size(0))
        if self.routing_type == "quantile_balancing":
            padding_mask = None  # unknown to that rule
        return super().forward(input, padding_mask)

    def routing(self, logits: Tensor, padding_mask: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """``logits`` [sequence, batch, experts]."""
        self._counted = ALL if padding_mask is None else PRESENT
        if padding_mask is None:
            self._tokens = logits.size(0) * logits.size(1) * self.tp_cp_group.size()
        else:
            self._tokens = _reduced((~padding_mask).sum().float(), self.tp_cp_group).clamp(min=1)
        return super().routing(logits, padding_mask)

    def apply_z_loss(self, logits: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """``logits`` [tokens, experts]. The loss is the mean square of their log-sum-exp (arXiv:2202.08906, equation 5)."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits, dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0.0)
        loss = coefficient * squares.sum() / self._tokens
        return self._attach(logits, "z_loss", coefficient, loss, loss * self._weight(self._tokens))

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        chosen = _reduced(routing_map.sum(dim=0), self.tp_cp_group)
        loss = self._balance(scores_for_aux_loss, chosen, self._tokens, coefficient)
        return self._attach(probs, "load_balancing_loss", coefficient, loss, loss * self._weight(self._tokens))

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        by_sequence = (seq_length, bsz, -1)
        chosen = _reduced(routing_map.reshape(by_sequence).sum(dim=0), self.tp_cp_group)
        tokens = (chosen.sum(dim=-1) / self.topk).clamp(min=1)
        scores = scores_for_aux_loss.reshape(by_sequence).sum(dim=0)
        losses = (scores * chosen).sum(dim=-1) * coefficient * chosen.size(-1) / (self.topk * tokens * tokens)
        weighted = (losses * self._weight(tokens)).sum() if self.calculate_per_token_loss else losses.mean()
        return self._attach(probs, "seq_load_balancing_loss", coefficient, losses.mean(), weighted)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        chosen = _reduced(routing_map.sum(dim=0), self.tp_dp_cp_group)
        tokens = (chosen.sum() / self.topk).clamp(min=1)
        counted, steps = self.global_tokens_per_expert, self.ga_steps
        assert counted is not None and steps is not None, "they exist with this loss"
        counted += chosen
        steps += 1
        # The experts' shares over the micro-batches so far, as counts of this one.
        shares = counted / counted.sum().clamp(min=1)
        loss = self._balance(scores_for_aux_loss, shares * self.topk * tokens, tokens, coefficient)
        # Each replica has a part of the loss, and gradients are averaged over replicas.
        replicas = self.tp_dp_cp_group.size() // self.tp_cp_group.size()
        weighted = loss * (self._weight(tokens) if self.calculate_per_token_loss else replicas)
        return self._attach(
            probs,
            "global_load_balancing_loss",
            coefficient,
            loss,
            weighted,
            group=self.tp_dp_cp_group,
            **_OVER_REPLICAS,
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Optional[Tensor] = None) -> None:
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    def _balance(self, scores: Tensor, chosen: Tensor, tokens: Any, coefficient: float) -> Tensor:
        """This rank's part of the loss (arXiv:2101.03961, equation 4). ``scores`` [tokens, experts] are this rank's;
        ``chosen`` [experts] counts the tokens of every expert among ``tokens``."""
        return switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=chosen,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=chosen.size(-1),
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )

    def _weight(self, tokens: Any) -> Any:
        """The weight of a mean over ``tokens``."""
        return tokens * trained_over(self._counted) if self.calculate_per_token_loss else 1.0

    def _attach(
        self,
        activation: Tensor,
        name: str,
        coefficient: float,
        loss: Tensor,
        weighted: Tensor,
        *,
        group: Any = None,
        **over: Any,
    ) -> Tensor:
        """``activation`` with the gradient of ``weighted``. ``loss`` is logged: its sum over ``group``."""
        # What Megatron-Core multiplies by, so that the product is 1.
        tokens: Any = 1 / self.tp_cp_group.size() if _MULTIPLIES_BY_RANKS else 1
        return self.attach_and_log_load_balancing_loss(
            activation,
            coefficient,
            loss.detach() + (weighted - weighted.detach()),
            name,
            self.tp_cp_group if group is None else group,
            valid_token_count=tokens,
            **over,
        )


def _reduced(counts: Tensor, group: Any) -> Tensor:
    return reduce_from_tensor_model_parallel_region(counts, group)
