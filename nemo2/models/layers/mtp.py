# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2) whose further losses count the same however the
sequence is split, and whatever the mask.

The further losses are means that Megatron-Core takes inside the model, over the tokens of one context-parallel rank. Ranks
keep different numbers of tokens: the mask, and the end of the sequence, which has no token to predict. Averaged over the
ranks such means are another loss: single gradients were off by 11 % with two ranks (0.16.1). `weigh_further_losses` gives
each rank's share the weight of its tokens.

Where each trained token counts the same, the mean is over the global batch (`nemo2.models.step_tokens`). Megatron-Core takes
the sum over the trained tokens instead (0.16), or the mean of each micro-batch, times its trained tokens (0.19): the weight of
the loss then depends on how short the answers are, or on how they are packed.
"""

import copy
from itertools import chain
from typing import Any, Optional

import torch
from megatron.core.transformer import multi_token_prediction as upstream
from torch import Tensor

from nemo2.models.layers.moe import WeightedRouter
from nemo2.models.step_tokens import further, trained_over

# 0.16 takes the sum of the further losses where each token counts the same; newer versions a mean there too.
_MEAN_PER_TOKEN = hasattr(upstream, "process_mtp_loss")
_PASSES_PADDING = "padding_mask" in upstream.MultiTokenPredictionBlock.forward.__code__.co_varnames


def answer_without_labels(chunk: Any) -> None:
    """Make `chunk`, the end of a GPT with multi-token prediction, return the logits of the next token if there are no
    labels. 0.16.1 requires labels for its additional predictions; 0.19 computes them in vain, and fails with a cache of keys."""
    full = chunk.config

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) <= 4 and kwargs.get("labels") is None:  # the fifth
            module.mtp_process, module.config = False, copy.copy(full)
            module.config.mtp_num_layers = None

    def after(module: Any, args: Any, output: Any) -> None:
        module.mtp_process, module.config = True, full

    chunk.register_forward_pre_hook(before, with_kwargs=True)
    chunk.register_forward_hook(after, always_call=True)


def tie_output_layer(chunk: Any) -> None:
    """Let the output layer of `chunk`, the end of a pipelined GPT with multi-token prediction, have no weight if the embedding's
    is shared: the embedding is on this stage too. Megatron-Core gives the layer a weight that nothing trains, and refuses to save
    it; without labels it would be the one that is used."""
    if chunk.share_embeddings_and_output_weights and not chunk.pre_process:
        chunk.output_layer.weight = None
        chunk.shared_embedding_or_output_weight = lambda: chunk.embedding.word_embeddings.weight


def weigh_further_losses(chunk: Any) -> None:
    """Make the further losses of `chunk`, the end of a GPT with multi-token prediction, those of the whole sequence or of
    the global batch from now on.

    Does nothing with neither context parallelism nor `calculate_per_token_loss`. Costs an exchange of the mask's ends that
    Megatron-Core also does, and, unless each token counts the same, one all-reduce of a few numbers over the context-parallel
    ranks per micro-batch.
    """
    config = chunk.config
    if config.context_parallel_size == 1 and not config.calculate_per_token_loss:
        return
    weights = FurtherLosses(chunk)
    chunk.register_forward_pre_hook(weights.look_at_the_batch, with_kwargs=True)
    chunk.compute_language_model_loss = weights.loss


def leave_out_padding(chunk: Any) -> None:
    """Give the routers in the layers of multi-token prediction of `chunk`, the end of a GPT, the padding of their tokens,
    as 0.19 does. 0.16 and 0.19's hybrids don't pass the mask to these layers.

    Recomputation reads the same mask: the last stage computes the backward of a micro-batch right after its forward.
    """
    passes = _PASSES_PADDING and not hasattr(chunk, "mtp_pattern")
    if passes or not chunk.config.num_moe_experts:
        return
    routers = [[one for one in layer.modules() if isinstance(one, WeightedRouter)] for layer in chunk.mtp.layers]

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        padding = kwargs.get("padding_mask")
        padding = None if padding is None else padding.int()
        for depth in routers:
            if padding is not None:
                padding, _ = upstream.roll_tensor(
                    padding,
                    shifts=-1,
                    dims=-1,
                    cp_group=module.pg_collection.cp,
                    packed_seq_params=kwargs.get("packed_seq_params"),
                )
            for router in depth:
                router.further_padding = None if padding is None else padding.bool().transpose(0, 1)

    def after(module: Any, args: Any, output: Any) -> None:
        if (
            not torch.is_grad_enabled()
        ):  # no recomputation, and a training step of another schedule may not pass by here
            for router in chain.from_iterable(routers):
                router.further_padding = None

    chunk.register_forward_pre_hook(before, with_kwargs=True)
    chunk.register_forward_hook(after)


class FurtherLosses:
    """Stands between a GPT and its cross-entropy, which the GPT calls for the additional losses first and for its
    own loss last."""

    def __init__(self, chunk: Any) -> None:
        self.config = chunk.config
        self.group = chunk.pg_collection.cp
        self.cross_entropy = chunk.compute_language_model_loss
        self.labels: Optional[Tensor] = None
        self.weights: list[Tensor] = []
        """Weights of the further-token losses that are still to come, in their order."""

    def look_at_the_batch(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook: the weights of this micro-batch."""
        del module, args
        self.labels, self.weights = kwargs.get("labels"), []
        if self.labels is None:
            return
        of_the_batch = [trained_over(further(depth + 1)) for depth in range(self.config.mtp_num_layers)]
        if self.config.calculate_per_token_loss and not _MEAN_PER_TOKEN:
            self.weights = of_the_batch
            return
        mask = kwargs.get("loss_mask")
        mask = torch.ones_like(self.labels) if mask is None else mask
        counts = [mask.sum()]
        for _ in range(self.config.mtp_num_layers):
            mask, count = upstream.roll_tensor(
                mask, shifts=-1, dims=-1, cp_group=self.group, packed_seq_params=kwargs.get("packed_seq_params")
            )
            counts.append(count)
        own = torch.stack([count.float() for count in counts])
        if self.config.calculate_per_token_loss:
            # Multiplied by its own tokens over its own further tokens there.
            weights = own[1:] / own[0].clamp(min=1) * torch.stack(of_the_batch)
        else:
            whole = own[1:].clone()
            torch.distributed.all_reduce(whole, group=self.group)
            # Divided by its own further tokens there, and by the number of ranks when gradients are averaged.
            weights = own[1:] * self.group.size() / whole.clamp(min=1)
        self.weights = list(weights)

    def loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Per token, `[batch, sequence]`; in the place of `compute_language_model_loss`."""
        losses = self.cross_entropy(labels, logits)
        if labels is self.labels or not self.weights:
            return losses
        return _Weighted.apply(losses, self.weights.pop(0))


class _Weighted(torch.autograd.Function):
    """losses * weight. A weight of 0, a shard without tokens, has a gradient of 0, whatever the division by its
    tokens gives."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return losses * weight.to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return torch.where(weight > 0, gradient * weight.to(gradient.dtype), torch.zeros_like(gradient)), None
