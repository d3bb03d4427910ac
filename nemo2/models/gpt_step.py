# SPDX-License-Identifier: Apache-2.0
"""Processes one micro-batch of a GPT: fetches it, keeps what this pipeline stage needs, and runs the chunk.

Both functions have NeMo 2.0's names and can be replaced through ``GPTConfig.data_step_fn`` and ``forward_step_fn``.
Tensors are ``[batch, sequence]``. For fine-tuning, several sequences may be packed into one row. The batch then holds
one row and ``cu_seqlens``, the starts of the sequences and the end of the last one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo2.base.backend import get_backend
from nemo2.base.errors import DataError
from nemo2.models.layers.chunks import share_of_rank

FIRST_STAGE_KEYS = ("tokens", "position_ids")
LAST_STAGE_KEYS = ("labels", "loss_mask")
OPTIONAL_KEYS = ("attention_mask", "padding_mask")
PACKING_KEYS = ("cu_seqlens", "cu_seqlens_argmin")


def gpt_data_step(dataloader_iter: Iterator[Any], use_mtp: bool = False) -> dict[str, Tensor | None]:
    """Fetch the next micro-batch, move it to this rank's device, and keep this rank's shard of the sequence.

    The first pipeline stage keeps ``tokens`` and ``position_ids``, and the last stage keeps ``labels`` and
    ``loss_mask``. Every stage keeps ``attention_mask`` and ``padding_mask`` (bool, True for padding, which the losses of
    routers leave out) if the data has them. Other keys of the loader are dropped, and a
    key that this stage does not keep is None. With ``use_mtp`` (multi-token prediction) the last stage keeps the tokens
    too.

    With context parallelism each tensor becomes ``[batch, sequence / cp]``, in Megatron-Core's load-balanced order. The
    last stage then also gets ``num_valid_tokens_in_ub``, the number of tokens that the mask keeps in the whole
    micro-batch.

    A batch with ``cu_seqlens`` (``[1, n]`` or ``[n]``; entries from ``cu_seqlens_argmin``, or from the first negative
    entry, are padding) holds packed sequences. On every stage it returns with ``packed_seq_params`` and without an
    attention mask, and context parallelism splits each sequence separately.

    Args:
        dataloader_iter: Yields micro-batches of whole sequences. Each may be the first of three items of a tuple.
        use_mtp: Keep the tokens on the last stage too, for multi-token prediction.

    Raises:
        StopIteration: the iterator is exhausted.
        DataError: the batch lacks a key that this stage needs, has tokens, labels and a mask of several shapes, packs
            sequences into several rows, or has a sequence that context parallelism can't split.
    """
    batch = _unwrap(next(dataloader_iter))
    # With a virtual pipeline a rank holds several chunks. The keys that its first or last chunk needs are fetched for
    # all of them.
    keep = dict.fromkeys(OPTIONAL_KEYS, False)
    keep |= dict.fromkeys(FIRST_STAGE_KEYS, parallel_state.is_pipeline_first_stage() or use_mtp)
    keep |= dict.fromkeys(LAST_STAGE_KEYS, parallel_state.is_pipeline_last_stage())
    missing = [key for key, needed in keep.items() if needed and batch.get(key) is None]
    if missing:
        raise DataError(
            f"The batch has no {', '.join(missing)}, which a GPT needs; it has {', '.join(batch) or 'no keys'}. "
            "Return these keys from the dataset, or define your own `data_step` on the model."
        )
    shapes = {key: list(batch[key].shape) for key in ("tokens", "labels", "loss_mask") if batch.get(key) is not None}
    if any(shape != shapes.get("tokens", shape) for shape in shapes.values()):
        raise DataError(
            f"The batch has {', '.join(f'{key} of shape {shape}' for key, shape in shapes.items())}. Return one shape for all of "
            "them from the dataset: a label and a weight per token."
        )
    device = get_backend().device
    batch_of_stage = {
        key: batch[key].to(device, non_blocking=True)
        if (needed or key in OPTIONAL_KEYS) and batch.get(key) is not None
        else None
        for key, needed in keep.items()
    }
    if batch.get("cu_seqlens") is not None:
        batch_of_stage |= {key: batch[key] for key in PACKING_KEYS if batch.get(key) is not None}
        batch_of_stage["packed_seq_params"] = get_packed_seq_params(batch_of_stage)
    share = get_batch_on_this_context_parallel_rank(batch_of_stage)
    return {key: value for key, value in share.items() if key not in PACKING_KEYS}


def get_batch_on_this_context_parallel_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's shard of each sequence of a micro-batch: ``[batch, sequence / cp]``, in Megatron-Core's
    load-balanced order.

    Packed sequences (``cu_seqlens``) are split separately, and lose their attention mask. With context parallelism the
    result also has ``num_valid_tokens_in_ub``, the number of tokens that ``loss_mask`` keeps in the whole micro-batch,
    by which the loss weights the shard. Without context parallelism nothing is split. Values that are not tensors of at
    least two dimensions stay unchanged.

    Args:
        batch: A micro-batch of whole sequences.

    Raises:
        DataError: a sequence can't be split into two equal chunks per rank.
    """
    cp = parallel_state.get_context_parallel_world_size()
    # Counted before the split: the loss of a context-parallel rank's shard is weighted by it.
    mask = batch.get("loss_mask") if cp > 1 else None
    count = {} if mask is None else {"num_valid_tokens_in_ub": mask.sum()}
    if batch.get("cu_seqlens") is not None:
        return batch | {"attention_mask": None} | _shares_of_packed(batch) | count
    return batch | (_shares(batch) if cp > 1 else {}) | count


def get_packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams:
    """The starts and ends of the sequences in a packed row, in the format of Megatron-Core's attention ("thd").

    ``cu_seqlens`` (``[1, n]`` or ``[n]``) holds the starts and the last end. Entries from ``cu_seqlens_argmin``, or
    from the first negative entry, are padding. The tokens after the last sequence of the row count as one more
    sequence.

    Args:
        batch: A micro-batch with ``cu_seqlens``.

    Raises:
        DataError: there are several rows, or ``cu_seqlens`` doesn't rise from 0 to at most the row's length.
    """
    ends = _ends_of_packed(batch)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=get_backend().device)
    # The longest sequence, whatever the data says, because Megatron-Core takes a length equal to the row's as a single
    # sequence.
    longest = max(end - start for start, end in zip(ends[:-1], ends[1:], strict=True))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def gpt_forward_step(model: Callable[..., Tensor], batch: dict[str, Tensor | None]) -> Tensor:
    """Run one model chunk on a batch from `gpt_data_step`.

    Returns the loss per token ``[batch, sequence]`` on the last pipeline stage, and hidden states ``[sequence, batch,
    hidden]`` on other stages. A batch without labels returns the logits.

    Args:
        model: The model chunk.
        batch: A batch from `gpt_data_step`.
    """
    optional: dict[str, Any] = {}
    if batch.get("packed_seq_params") is not None:
        optional["packed_seq_params"] = batch["packed_seq_params"]
    if getattr(getattr(model, "config", None), "mtp_num_layers", None):
        # The model computes the losses of further tokens itself, and must know which tokens to leave out.
        optional["loss_mask"] = batch.get("loss_mask")
    if getattr(getattr(model, "config", None), "num_moe_experts", None) and batch.get("padding_mask") is not None:
        optional["padding_mask"] = batch["padding_mask"]
    return model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch.get("labels"),
        **optional,
    )


def check_token_ids(batch: Any, vocab_size: int) -> Any:
    """Check the token ids and labels of a batch, and return the batch. Takes a few microseconds on CPU tensors.

    Without this check an id outside the vocabulary goes unnoticed under tensor parallelism: its embedding is a zero
    vector, and the loss looks plausible. Labels that the loss mask leaves out may have any value. Tensors that are
    already on an accelerator are not checked, because that would wait for the device.

    Raises:
        DataError: an id is negative or not below ``vocab_size``.
    """
    tensors = _unwrap(batch)
    for key in ("tokens", "labels"):
        ids = tensors.get(key)
        if ids is None or ids.device.type != "cpu" or ids.numel() == 0:
            continue
        low, high = torch.aminmax(ids)
        if int(low) >= 0 and int(high) < vocab_size:
            continue
        wrong = (ids < 0) | (ids >= vocab_size)
        if key == "labels" and tensors.get("loss_mask") is not None:
            wrong &= tensors["loss_mask"] != 0
        if wrong.any():
            raise DataError(
                f"{int(wrong.sum())} of {ids.numel()} ids in '{key}' lie outside the vocabulary of {vocab_size} "
                f"(smallest {int(low)}, largest {int(high)}). The data was written with another tokenizer than the "
                "model was built for: pass that tokenizer to the data module, or set model.config.vocab_size."
            )
    return batch


def _unwrap(batch: Any) -> Any:
    # Lightning's fetcher hands out (batch, batch_idx, dataloader_idx) where the step takes the iterator itself.
    return batch[0] if isinstance(batch, tuple) and len(batch) == 3 else batch


def _rows(batch: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a packed batch that have its one row."""
    names = (*FIRST_STAGE_KEYS, *LAST_STAGE_KEYS, "padding_mask")
    return {key: batch[key] for key in names if batch.get(key) is not None}


def _ends_of_packed(batch: dict[str, Any]) -> list[int]:
    """The start of each sequence of a row, and the end of the row."""
    rows = _rows(batch)
    if any(row.shape[0] != 1 for row in rows.values()):
        raise DataError(
            f"A micro-batch of packed sequences must have one row; this one has {max(r.shape[0] for r in rows.values())}. "
            "Set micro_batch_size=1: a packed row already holds several sequences."
        )
    ends = batch["cu_seqlens"].flatten().tolist()
    if batch.get("cu_seqlens_argmin") is not None:
        ends = ends[: int(batch["cu_seqlens_argmin"])]
    ends = ends[: next((index for index, end in enumerate(ends) if end < 0), len(ends))]
    # Stages in the middle of the pipeline see no tokens: the length of the row then is what the sequences say.
    length = next((row.shape[1] for row in rows.values()), ends[-1])
    if ends[0] != 0 or sorted(ends) != ends or ends[-1] > length:
        raise DataError(
            f"cu_seqlens must start at 0, never decrease, and end at or before the row's {length} tokens; this batch has "
            f"{ends}."
        )
    if ends[-1] < length:
        ends.append(length)  # what follows the last sequence is padding, and rotary positions need every token covered
    return ends


def _shares_of_packed(batch: dict[str, Any]) -> dict[str, Tensor]:
    ends = _ends_of_packed(batch)
    sequences = list(zip(ends[:-1], ends[1:], strict=True))
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return {key: share_of_rank(row, sequences, cp, rank, dim=1) for key, row in _rows(batch).items()}


def _shares(batch: dict[str, Any]) -> dict[str, Tensor]:
    cp = parallel_state.get_context_parallel_world_size()
    shares = {}
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        dim = 1 if key != "attention_mask" else 2
        length = value.shape[dim]
        if length % (2 * cp):
            raise DataError(
                f"'{key}' is {length} tokens long, which context_parallel_size={cp} cannot split into {2 * cp} equal "
                f"chunks. Use a data.seq_length that is a multiple of {2 * cp}, such as "
                f"{max(length - length % (2 * cp), 2 * cp)}."
            )
        rank = parallel_state.get_context_parallel_rank()
        shares[key] = share_of_rank(value, [(0, length)], cp, rank, dim=dim)
    return shares
