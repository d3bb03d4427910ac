# SPDX-License-Identifier: Apache-2.0
"""Computes the logits of the next token of every row, with Megatron-Core's cache of keys, values and states.

Every rank of a tensor-, expert- and pipeline-parallel group must feed the same tokens and gets the same logits.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.base.variables import all_set
from nemo2.models.rotary import StretchedRotaryEmbedding, Stretching

_PRODUCT = "_forward_impl"
"""The method of Megatron-Core's linear layers, column- and row-parallel, that computes the matrix product."""


class CachedDecoder:
    """Process each token once. The cost of a token grows with the previous tokens only through attention.

    Args:
        core: This rank's pipeline stage, in ``eval`` mode, `without_sequence_parallelism` and without context
            parallelism.
        batch_size: Rows that are processed together.
        max_sequence_length: The largest number of tokens of a row, prompt and continuation.
    """

    def __init__(self, core: nn.Module, *, batch_size: int, max_sequence_length: int) -> None:
        self.core: Any = core
        self.sizes = batch_size, max_sequence_length
        self.context: Any = StaticInferenceContext(*self.sizes)
        self.stretching = stretching_of(core)
        self.seen: list[Tensor] = []

    def feed(self, tokens: Tensor) -> Tensor:
        """The logits ``[batch, vocabulary]`` in fp32 after the last of ``tokens`` ``[batch, length]``, on every rank.

        The first call takes any length. Each later call takes one token per row.
        """
        if self.context.sequence_len_offset and tokens.size(1) > 1:
            raise ValueError(
                f"feed: a call after the first takes one token per row, not {tokens.size(1)}, because Megatron-Core doesn't "
                "mask the tokens of one call against each other."
            )
        if self.stretching is not None:
            tokens = self._with_those_that_turn_otherwise(tokens, self.stretching)
        logits = logits_of_stage(self.core, tokens, self.context)
        self.context.sequence_len_offset += tokens.size(1)
        self.context.enable_decode_mode()
        last = None if logits is None else logits[:, -1].float()
        return from_last_stage(last, (tokens.size(0), self.core.vocab_size))

    def _with_those_that_turn_otherwise(self, tokens: Tensor, stretching: Stretching) -> Tensor:
        """All tokens so far, to be processed again if the longer sequence has other rotary frequencies, because
        their cached values were computed with the old ones."""
        self.seen.append(tokens)
        alike = stretching.longest_alike(self.context.sequence_len_offset)
        if alike is None or self.context.sequence_len_offset + tokens.size(1) <= alike:
            return tokens
        self.context = StaticInferenceContext(*self.sizes)
        return torch.cat(self.seen, dim=1)


def logits_of_stage(core: Any, tokens: Tensor, context: Any = None) -> Optional[Tensor]:
    """The logits ``[batch, length, vocabulary]`` of ``tokens`` ``[batch, length]`` on ranks of the last pipeline stage. None:
    another stage.

    Every rank of the pipeline must call it.

    Args:
        context: Megatron-Core's inference context, with which only the last token has logits. None: the plain forward,
            which with sequence parallelism needs a length that the tensor-parallel size divides.
    """
    batch, length = tokens.shape
    start = 0 if context is None else context.sequence_len_offset
    positions = torch.arange(start, start + length, device=tokens.device).expand(batch, length).contiguous()
    options = {"inference_context": context, "runtime_gather_output": True}
    return through_stage(core, lambda: core(tokens, positions, None, **options), batch=batch, length=length)


def through_stage(core: Any, run: Callable[[], Tensor], *, batch: int, length: int) -> Optional[Tensor]:
    """The result of ``run``, this pipeline stage's forward, on the last stage. The others send theirs on. None: another stage.

    Args:
        core: The stage. ``run`` reads what the stage before has sent from it.
        batch: The number of sequences.
        length: The tokens of each sequence on this context-parallel rank.
    """
    config = core.config
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    dtype = config.pipeline_dtype or config.params_dtype
    if not parallel_state.is_pipeline_first_stage():
        share = length // config.tensor_model_parallel_size if config.sequence_parallel else length
        device = next(core.parameters()).device
        hidden = torch.empty(share, batch, config.hidden_size, dtype=dtype, device=device)
        torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
        core.set_input_tensor(hidden)
    output = run()
    if parallel_state.is_pipeline_last_stage():
        return output
    following = parallel_state.get_pipeline_model_parallel_next_rank()
    torch.distributed.send(output.to(dtype).contiguous(), following, group=group)
    return None


def from_last_stage(value: Optional[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The last pipeline stage's fp32 ``value`` of this ``shape``, on every stage. Megatron-Core's own function requires a
    GPU."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        assert value is not None, "a single stage is the last one"
        return value
    value = torch.empty(shape, device=get_backend().device) if value is None else value.contiguous()
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(value, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return value


def without_sequence_parallelism(core: nn.Module) -> AbstractContextManager[None]:
    """A context in which ``core`` runs without sequence parallelism, because a single token can't be sharded. The
    parameters stay the same.

    Experts then process each token once for every tensor-parallel rank. Megatron-Core's own switch
    (``set_model_to_sequence_parallel``) isn't used: it keeps a permanent list of the modules of every model, and also
    enables settings that were off.
    """
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    holders = {id(one): one for module in core.modules() for one in (module, getattr(module, "config", None))}
    fields = ((holder, name) for holder in holders.values() for name in names)
    return all_set([(holder, name, False) for holder, name in fields if getattr(holder, name, None) is True])


@contextmanager
def with_plain_products(core: nn.Module) -> Iterator[None]:
    """A context in which linear layers multiply without Megatron-Core's autograd function, whose overhead is as long as the
    product of a single token and a small matrix. It doesn't support sequence parallelism."""
    kinds = ColumnParallelLinear, RowParallelLinear
    layers = [module for module in core.modules() if isinstance(module, kinds)]
    for layer in layers:
        setattr(layer, _PRODUCT, _multiplied)
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, _PRODUCT)


def _multiplied(input: Tensor, weight: Tensor, bias: Optional[Tensor] = None, **_: Any) -> Tensor:
    product = torch.matmul(input, weight.t())
    return product if bias is None else product + bias


def agreed(picked: Tensor) -> Tensor:
    """The tokens that the first rank picked, on every rank of the model. Rounding may differ between ranks, and ranks that
    pick different tokens would deadlock."""
    if not parallel_state.is_initialized():
        return picked
    groups: Any = parallel_state.get_expert_model_parallel_group(), parallel_state.get_model_parallel_group()
    chosen = picked.to(get_backend().device)
    for group in groups:
        if group.size() > 1:
            torch.distributed.broadcast(chosen, torch.distributed.get_process_group_ranks(group)[0], group=group)
    return chosen.cpu()


def core_of(model: Any) -> LanguageModule | None:
    """The Megatron-Core model inside a LightningModule or a wrapper. None: there is none."""
    while isinstance(model, nn.Module) and not isinstance(model, LanguageModule):
        model = getattr(model, "module", None)
    return model if isinstance(model, LanguageModule) else None


def required_core(model: Any) -> LanguageModule:
    """`core_of` a model that generates or scores texts.

    Raises:
        ConfigError: it contains no Megatron-Core language model, or its layout supports neither.
    """
    core = core_of(model)
    if core is None:
        raise ConfigError(
            f"{type(model).__name__} contains no Megatron-Core language model, and only these can generate and score texts."
        )
    refuse_layouts()
    return core


def stretching_of(core: Any) -> Optional[Stretching]:
    """The stretching of a Megatron-Core model's rotary positions. None: they aren't stretched."""
    embedding = getattr(core, "rotary_pos_emb", None)
    embedding = getattr(embedding, "global_layers", embedding)
    return embedding.stretching if isinstance(embedding, StretchedRotaryEmbedding) else None


def refuse_another_vocabulary(model: Any, num_tokens: int) -> None:
    """Check that the model's embedding has a row for each of a tokenizer's ``num_tokens`` tokens.

    Raises:
        ConfigError: the embedding has too few rows.
    """
    rows = getattr(core_of(model), "vocab_size", num_tokens)
    if num_tokens > rows:
        raise ConfigError(
            f"The tokenizer has {num_tokens} tokens, but the model's embedding has {rows} rows: the model was trained with "
            "another tokenizer. Use the tokenizer of the model's checkpoint (nemo2.checkpoint.context.load_context)."
        )


def refuse_layouts() -> None:
    """Check that a model can generate and score texts in its layout.

    Raises:
        ConfigError: a parallel size isn't supported.
    """
    if not parallel_state.is_initialized():
        return
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    for name, size, supported in (
        ("context_parallel_size", parallel_state.get_context_parallel_world_size(), 1),
        ("virtual_pipeline_model_parallel_size", virtual or 1, None),
    ):
        if size > 1:
            raise ConfigError(
                f"Generation and scoring need {name}={supported}, but this model runs with {size}. Load the model with "
                f"{name}={supported}."
            )
