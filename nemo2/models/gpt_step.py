# SPDX-License-Identifier: Apache-2.0
"""One micro-batch of a GPT: fetch it, keep what this pipeline stage needs, run the chunk.

Both functions go by NeMo 2.0's names and may be replaced through ``GPTConfig.data_step_fn`` and ``forward_step_fn``.
Tensors are ``[batch, sequence]``. Several sequences may be packed into one row, for fine-tuning: then the batch holds
one row and ``cu_seqlens``, where each sequence begins and the last one ends.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from nemo2.backend import get_backend
from nemo2.errors import DataError
from nemo2.models.layers.chunks import share_of_rank

FIRST_STAGE_KEYS = ("tokens", "position_ids")
LAST_STAGE_KEYS = ("labels", "loss_mask")
PACKING_KEYS = ("cu_seqlens", "cu_seqlens_argmin")
# Megatron-Core 0.17 added a required flag for its hybrid context parallelism, which a plain batch never uses.
_CP_SLICE_FLAGS = (
    {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
)


def gpt_data_step(dataloader_iter: Iterator[Any], use_mtp: bool = False) -> dict[str, Tensor | None]:
    """The next micro-batch as this rank needs it: on its device, cut to its share of the sequence.

    The first pipeline stage keeps ``tokens`` and ``position_ids``, the last one ``labels`` and ``loss_mask``, and every
    stage ``attention_mask`` where the data brings one; whatever else the loader gives stays behind. A key this stage
    does not keep is None. With ``use_mtp`` (multi-token prediction) the last stage needs the tokens too. With context
    parallelism each tensor becomes ``[batch, sequence / cp]``, in Megatron-Core's load-balanced order, and the last stage
    also gets ``num_valid_tokens_in_ub``, the tokens that the mask keeps in the whole micro-batch.

    A batch with ``cu_seqlens`` (``[1, n]`` or ``[n]``; entries from ``cu_seqlens_argmin``, or from the first negative one,
    are padding) holds packed sequences: it comes back with ``packed_seq_params`` and without an attention mask, on every
    stage, and context parallelism splits each sequence for itself.

    Raises:
        StopIteration: the iterator is used up.
        DataError: the batch lacks a key that this stage needs, packs sequences into several rows, or has a sequence that
            cannot be cut for context parallelism.
    """
    batch = _unwrap(next(dataloader_iter))
    # With a virtual pipeline a rank holds several chunks: what the rank's first or last chunk needs is fetched for all.
    keep = {"attention_mask": False}
    keep |= dict.fromkeys(FIRST_STAGE_KEYS, parallel_state.is_pipeline_first_stage() or use_mtp)
    keep |= dict.fromkeys(LAST_STAGE_KEYS, parallel_state.is_pipeline_last_stage())
    missing = [key for key, needed in keep.items() if needed and batch.get(key) is None]
    if missing:
        raise DataError(
            f"A batch for a GPT must hold {', '.join(missing)}; this one holds {', '.join(batch) or 'nothing'}. "
            "Return these keys from the dataset, or give the model its own `data_step`."
        )
    device = get_backend().device
    kept = {
        key: batch[key].to(device, non_blocking=True)
        if (needed or key == "attention_mask") and batch.get(key) is not None
        else None
        for key, needed in keep.items()
    }
    if batch.get("cu_seqlens") is not None:
        kept |= {key: batch[key] for key in PACKING_KEYS if batch.get(key) is not None}
        kept["packed_seq_params"] = get_packed_seq_params(kept)
    share = get_batch_on_this_context_parallel_rank(kept)
    return {key: value for key, value in share.items() if key not in PACKING_KEYS}


def get_batch_on_this_context_parallel_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of each sequence of a micro-batch: ``[batch, sequence / cp]``, in Megatron-Core's load-balanced order.

    Packed sequences (``cu_seqlens``) are cut each for itself, and lose their attention mask. With context parallelism the
    share also has ``num_valid_tokens_in_ub``, the tokens that ``loss_mask`` keeps in the whole micro-batch, by which the loss
    weighs it. Without, nothing is cut. What is no tensor of two dimensions or more stays as it is.

    Raises:
        DataError: a sequence can't be split into two equal chunks per rank.
    """
    cp = parallel_state.get_context_parallel_world_size()
    # Counted while the sequences are whole: what a context-parallel rank's share of the loss weighs.
    mask = batch.get("loss_mask") if cp > 1 else None
    count = {} if mask is None else {"num_valid_tokens_in_ub": mask.sum()}
    if batch.get("cu_seqlens") is not None:
        return batch | {"attention_mask": None} | _shares_of_packed(batch) | count
    return batch | (_shares(batch) if cp > 1 else {}) | count


def get_packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams:
    """Where the sequences of a packed row begin and end, as Megatron-Core's attention wants it ("thd").

    ``cu_seqlens`` (``[1, n]`` or ``[n]``) are the beginnings and the last end; entries from ``cu_seqlens_argmin``, or from the
    first negative one, are padding. What follows the last sequence of the row counts as one more.

    Raises:
        DataError: there are several rows, or ``cu_seqlens`` doesn't rise from 0 to at most the row's length.
    """
    ends = _ends_of_packed(batch)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=get_backend().device)
    # The longest sequence, whatever the data says: Megatron-Core takes a length equal to the row's for one sequence.
    longest = max(end - start for start, end in zip(ends[:-1], ends[1:], strict=True))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def gpt_forward_step(model: Callable[..., Tensor], batch: dict[str, Tensor | None]) -> Tensor:
    """Runs one model chunk on a batch from `gpt_data_step`.

    Returns the per-token loss ``[batch, sequence]`` on the last pipeline stage, hidden states
    ``[sequence, batch, hidden]`` elsewhere. A batch without labels gives the logits.
    """
    optional: dict[str, Any] = {}
    if batch.get("packed_seq_params") is not None:
        optional["packed_seq_params"] = batch["packed_seq_params"]
    if getattr(getattr(model, "config", None), "mtp_num_layers", None):
        # The losses of further tokens are made inside the model, which must know what to leave out.
        optional["loss_mask"] = batch.get("loss_mask")
    return model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch.get("labels"),
        **optional,
    )


def check_token_ids(batch: Any, vocab_size: int) -> Any:
    """The batch itself, after a look at its token ids and labels; a few microseconds on CPU tensors.

    Without it an id outside the vocabulary is silent under tensor parallelism: the embedding is a zero vector and the
    loss looks plausible. Labels that the loss mask leaves out may hold anything. Tensors already on an accelerator
    are not looked at, because that would wait for the device.

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
    """The tensors of a packed batch that lie along its one row."""
    names = (*FIRST_STAGE_KEYS, *LAST_STAGE_KEYS)
    return {key: batch[key] for key in names if batch.get(key) is not None}


def _ends_of_packed(batch: dict[str, Any]) -> list[int]:
    """Where each sequence of a row begins, and where the row ends."""
    rows = _rows(batch)
    if any(row.shape[0] != 1 for row in rows.values()):
        raise DataError(
            f"Packed sequences must come one row at a time; this micro-batch has {max(r.shape[0] for r in rows.values())}. "
            "Use micro_batch_size=1: a row of several sequences already is a micro-batch."
        )
    ends = batch["cu_seqlens"].flatten().tolist()
    if batch.get("cu_seqlens_argmin") is not None:
        ends = ends[: int(batch["cu_seqlens_argmin"])]
    ends = ends[: next((index for index, end in enumerate(ends) if end < 0), len(ends))]
    # Stages in the middle of the pipeline see no tokens: the length of the row then is what the sequences say.
    length = next((row.shape[1] for row in rows.values()), ends[-1])
    if ends[0] != 0 or sorted(ends) != ends or ends[-1] > length:
        raise DataError(f"cu_seqlens must rise from 0 to at most the row's {length} tokens; this batch has {ends}.")
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
    sequences = {key: value for key, value in batch.items() if isinstance(value, Tensor) and value.dim() > 1}
    for key, value in sequences.items():
        length = value.shape[1 if key != "attention_mask" else 2]
        if length % (2 * cp):
            raise DataError(
                f"'{key}' is {length} tokens long, which context_parallel_size={cp} cannot split into {2 * cp} equal "
                f"chunks. Use a data.seq_length that is a multiple of {2 * cp}, such as {length - length % (2 * cp)}."
            )
    group: Any = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(sequences, cp_group=group, **_CP_SLICE_FLAGS)
