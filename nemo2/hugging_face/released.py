# SPDX-License-Identifier: Apache-2.0
"""A released model: its config.json, its tensors, and the parts of nemo2's tensors made of them."""

import fnmatch
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from nemo2.base.advice import advice
from nemo2.base.errors import CheckpointError, ConfigError, Nemo2Error
from nemo2.base.names import listed
from nemo2.checkpoint.foreign_files import read_object
from nemo2.hugging_face.quantised import Plain, Source, sources
from nemo2.hugging_face.safetensors_files import CONFIG, open_folder
from nemo2.hugging_face.streams import Computed, Copy, Stretch, merged
from nemo2.hugging_face.tensor_source import DTYPES, cast, misfits
from nemo2.models.conversion.families import conversion_for, conversion_of
from nemo2.models.conversion.pieces import Piece, Shape
from nemo2.models.conversion.settings import TRAINED_OTHERWISE, contradicted, missing_field, refusal, text_config
from nemo2.models.conversion.table import Conversion, Entry, released_shapes

_log = logging.getLogger(__name__)
_ALL = slice(None)
_COMPUTED_BYTES = 64 << 20
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "num_nextn_predict_layers", "num_local_experts", "num_experts",
           "n_routed_experts", "num_attention_heads", "n_head", "num_key_value_heads")  # fmt: skip
"""Fields that set the lengths of lists which are built before any tensor is checked."""
_MOST = 100_000
_SIZES = ("vocab_size", "padded_vocab_size", "hidden_size", "n_embd", "intermediate_size", "ffn_hidden_size", "num_hidden_layers",
          "n_layer", "num_layers", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim")  # fmt: skip
"""Fields that are whole numbers in every family. None: the family's default."""


@dataclass(frozen=True, kw_only=True)
class Released:
    """The weights in a folder, and their conversion to a model of ``config``."""

    folder: Path
    hf_config: Mapping[str, Any]
    """The contents of config.json."""
    conversion: Conversion
    config: Any
    """nemo2's configuration."""
    tensors: Mapping[str, Source]
    """The tensors by their names in the family's table."""
    entries: tuple[Entry, ...]

    def dtype_of(self, entry: Entry) -> torch.dtype:
        """The dtype in the file. For several pieces, the dtype that can represent them all."""
        dtypes = [self.tensors[piece.name].dtype for piece in entry.pieces if piece.name is not None]
        return entry.dtype or reduce(torch.promote_types, dtypes or [next(iter(self.tensors.values())).dtype])

    def stretches(self, entry: Entry, dtype: torch.dtype) -> list[Stretch]:
        """The bytes of an entry's tensor in this dtype, row by row."""
        return merged(stretch for piece in entry.pieces for stretch in self._stretches(entry, piece, dtype))

    def values(self, entry: Entry) -> Tensor:
        """The whole tensor of an entry, in memory."""
        return torch.cat([part for _, part in self.part(entry, slice(0, entry.own_shape[0]))])

    def part(self, entry: Entry, rows: slice, columns: slice = _ALL) -> Iterator[tuple[int, Tensor]]:
        """``rows`` and ``columns`` of an entry's tensor, piece by piece, each with its first row. Only the needed
        parts of the file are read."""
        first = 0
        for piece in entry.pieces:
            start, stop = max(rows.start, first), min(rows.stop, first + piece.rows)
            if start < stop:
                yield start, self._rows(entry, piece, start - first, stop - first, columns)
            first += piece.rows

    def _stretches(self, entry: Entry, piece: Piece, dtype: torch.dtype) -> Iterator[Stretch]:
        row_bytes = dtype.itemsize * math.prod(entry.own_shape[1:])
        source = None if piece.name is None else self.tensors[piece.name]
        plain = piece.step == 1 and not piece.transposed and not piece.normalised
        if isinstance(source, Plain) and plain and source.dtype == dtype:
            before = piece.start + (piece.at or 0) * (source.shape[1] if piece.at is not None else 0)
            yield Copy(source.stored.file, source.stored.place + before * row_bytes, piece.rows * row_bytes)
            return
        step = max(1, _COMPUTED_BYTES // max(1, row_bytes))

        def blocks() -> Iterator[Tensor]:
            for first in range(0, piece.rows, step):
                rows = self._rows(entry, piece, first, min(piece.rows, first + step), _ALL)
                yield cast(rows, dtype, of=piece.name or entry.key)

        yield Computed(piece.rows * row_bytes, blocks)

    def _rows(self, entry: Entry, piece: Piece, first: int, last: int, columns: slice) -> Tensor:
        """Rows ``first`` to ``last`` of a piece."""
        if piece.name is None:
            width = entry.own_shape[1:2] and (len(range(*columns.indices(entry.own_shape[1]))),)
            return torch.zeros((last - first, *width, *entry.own_shape[2:]), dtype=self.dtype_of(entry))
        source = self.tensors[piece.name]
        rows = slice(piece.start + first * piece.step, min(piece.stop, piece.start + last * piece.step), piece.step)
        if piece.normalised:
            whole = source.part(piece.at, rows, _ALL)
            return torch.nn.functional.normalize(whole.float(), dim=-1).to(source.dtype)[:, columns]
        if piece.transposed:
            return source.part(piece.at, columns, rows).transpose(0, 1)
        return source.part(piece.at, rows, columns)


def open_released(folder: Path, config: Optional[Any] = None) -> Released:
    """Open the released model in ``folder``, after all checks that need no tensor.

    Args:
        folder: A folder with config.json and safetensors.
        config: nemo2's configuration. None: derived from config.json.

    Raises:
        CheckpointError: a file is missing, truncated or a pickle; or tensors are missing, superfluous, or of another
            shape or dtype. The message lists all of them.
        ConfigError: nemo2 has no such model, or not with these settings.
        SecurityError: a name in the index leads out of the folder.
    """
    hf_config = read_object(folder, CONFIG)
    conversion = (
        conversion_for(hf_config, file=folder / CONFIG)
        if config is None
        else conversion_of(config, hf_config.get("architectures") or ())
    )
    files = sources(open_folder(folder), hf_config)
    names = hf_config.get("architectures") or []
    if config is not None and not set(names) & set(conversion.architectures):
        raise CheckpointError(
            f"{folder} contains a {', '.join(names) or 'model without a name'}, but "
            f"model.config={type(config).__name__} is for {' or '.join(conversion.architectures)}. Use the recipe of that "
            "family, or other weights."
        )
    theirs: Any = None  # what config.json describes, if nemo2 has such a model
    try:
        theirs = described(conversion, hf_config)
    except ConfigError:
        if config is None:
            raise
    if config is None:
        ours = theirs
        further = (one for one in conversion.entries(ours, vocab_rows=1) if one.key.startswith("module.mtp."))
        # transformers names multi-token prediction in config.json but drops its weights.
        if ours.mtp_num_layers and not any(piece.name in files for entry in further for piece in entry.pieces):
            _log.warning(
                "%s lacks the %d multi-token prediction layers that config.json names. nemo2 reads the model without "
                "them.",
                folder,
                ours.mtp_num_layers,
            )
            ours.mtp_num_layers = None
        config = ours
    tensors = conversion.named_as_in_table(files)
    contradictions = "" if theirs is None else contradicted(config, theirs, CONFIG)
    tensors = _without_copy_of_embedding(folder, tensors, conversion, config, contradictions)
    entries = tuple(_entries(folder, conversion, config, tensors))
    entries = tuple(_with_zeros(folder, conversion, hf_config, theirs, entries, tensors))
    wanted = released_shapes(entries)
    tensors = _without_zeros(folder, wanted, tensors)
    _refuse_misfits(folder, conversion, wanted, tensors, contradictions)
    if contradictions:
        _log.warning(TRAINED_OTHERWISE, folder, contradictions)
    _refuse_other_dtypes(folder, wanted, tensors, hf_config)
    return Released(
        folder=folder, hf_config=hf_config, conversion=conversion, config=config, tensors=tensors, entries=entries
    )


def described(conversion: Conversion, hf_config: Mapping[str, Any]) -> Any:
    """nemo2's configuration for the contents of config.json.

    Raises:
        ConfigError: nemo2's model doesn't support the settings, or Megatron-Core rejects them.
    """
    fields = {**hf_config, **text_config(hf_config)}
    for name in _SIZES:
        least = 0 if name == "intermediate_size" else 1  # 0: a model without feed-forward layers
        if (size := fields.get(name)) is not None and (type(size) is not int or size < least):
            raise refusal(fields, name, f"it must be a whole number of at least {least}")
    for name in _COUNTS:
        if isinstance(count := fields.get(name), int | float) and count > _MOST:
            raise refusal(
                fields,
                name,
                (f"no model has more than {_MOST}, and this number would fill the memory of this machine"),
            )
    try:
        return conversion.config(hf_config)
    except Nemo2Error:
        raise
    except KeyError as error:
        raise missing_field(hf_config, error.args[0]) from error
    except (ValueError, AssertionError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f"config.json ({conversion.architectures[0]}) describes a model that cannot be built ({reason}). Check "
            "its sizes."
        ) from error


def _without_copy_of_embedding(
    folder: Path, tensors: dict[str, Source], conversion: Conversion, config: Any, contradictions: str
) -> dict[str, Source]:
    """The tensors without the output layer if it is the embedding, which some files contain twice.

    Raises:
        CheckpointError: the two differ.
    """
    embedding, output = conversion.vocabulary_names(config)
    if not config.share_embeddings_and_output_weights or not {embedding, output} <= tensors.keys():
        return tensors
    copy, own = tensors[output], tensors[embedding]
    if copy.shape != own.shape or not _equal(copy, own):
        raise CheckpointError(
            f"{folder}: {output} differs from {embedding}, but "
            + (
                f"the recipe ties them: {contradictions}. Set model.config.share_embeddings_and_output_weights=False."
                if "share_embeddings_and_output_weights" in contradictions
                else "config.json says tie_word_embeddings=true, so it would be dropped. If the model has its own output layer, "
                "set tie_word_embeddings to false in config.json."
            )
        )
    return {name: source for name, source in tensors.items() if name != output}


def _equal(one: Source, other: Source) -> bool:
    step = max(1, _COMPUTED_BYTES // max(1, one.shape[1] * one.dtype.itemsize))
    parts = (slice(first, first + step) for first in range(0, one.shape[0], step))
    return all(torch.equal(one.part(None, rows, _ALL), other.part(None, rows, _ALL)) for rows in parts)


def _entries(folder: Path, conversion: Conversion, config: Any, tensors: Mapping[str, Source]) -> Iterator[Entry]:
    """The entries for this file's vocabulary. A configuration may pad it to more rows."""
    name, _ = conversion.vocabulary_names(config)
    there = tensors[name].shape[0] if name in tensors else config.vocab_size or 1
    rows = config.vocab_size or there
    if rows < there:
        raise CheckpointError(
            f"{folder}: {name} has {there} rows, but model.config.vocab_size={rows}, so tokens would be lost. Set "
            f"vocab_size={there}, or leave it unset."
        )
    yield from conversion.entries(config, vocab_rows=rows, released_rows=there)


def _with_zeros(
    folder: Path,
    conversion: Conversion,
    hf_config: Mapping[str, Any],
    theirs: Any,
    entries: Sequence[Entry],
    tensors: Mapping[str, Source],
) -> Iterator[Entry]:
    """Zeros for biases that nemo2's model has and that, according to config.json, the release lacks."""
    wanted = {name for name in released_shapes(entries) if name.endswith(".bias") and name not in tensors}
    lacked = {name for pattern in conversion.unbiased(hf_config) for name in fnmatch.filter(wanted, pattern)}
    if wanted - lacked:
        released = set() if theirs is None else released_shapes(conversion.entries(theirs, vocab_rows=1)).keys()
        lacked |= wanted - released
    if lacked:
        _log.warning("%s has no %s: the model's are zero.", folder, listed(sorted(lacked)))
    for entry in entries:
        pieces = (replace(piece, name=None) if piece.name in lacked else piece for piece in entry.pieces)
        yield replace(entry, pieces=tuple(pieces))


def _without_zeros(folder: Path, wanted: Mapping[str, Shape], tensors: dict[str, Source]) -> dict[str, Source]:
    """The tensors without biases that nemo2's model lacks, if they are zero.

    Raises:
        CheckpointError: some are not zero.
    """
    extra = [name for name in tensors if name.endswith(".bias") and name not in wanted]
    weights = {name.removesuffix("bias") + "weight" for name in extra} & set(wanted)
    extra = [name for name in extra if name.removesuffix("bias") + "weight" in weights]
    if filled := [name for name in extra if tensors[name].part(None, _ALL, _ALL).count_nonzero()]:
        raise CheckpointError(
            f"{folder}: {listed(filled)} {'is' if len(filled) == 1 else 'are'} not zero, but nemo2's model has no "
            f"such {'bias' if len(filled) == 1 else 'biases'} and would compute different values."
        )
    if extra:
        _log.warning(
            "%s has %s, which are zero. nemo2's model has no such biases, so it drops them.", folder, listed(extra)
        )
    return {name: source for name, source in tensors.items() if name not in extra}


def _refuse_misfits(
    folder: Path,
    conversion: Conversion,
    wanted: Mapping[str, Shape],
    tensors: Mapping[str, Source],
    contradictions: str,
) -> None:
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted and not conversion.is_ignored(name)]
    other = [
        f"{name} has shape {list(tensors[name].shape)} there, and {list(shape)} by the configuration"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems = misfits(missing, extra, other, model="this model")
    if problems and contradictions:
        first = (
            [f"{missing[0]} is missing"] if missing else [f"{extra[0]} has no place in this model"] if extra else other
        )
        raise CheckpointError(
            f"{folder} is another {conversion.architectures[0]} than the recipe describes: {contradictions}. Remove these "
            f"settings, or "
            f"{advice('start with --from, which takes the model from config.json', 'take its values')}. For example, {first[0]}."
        )
    if problems:
        raise CheckpointError(
            f"{folder} is not the {conversion.architectures[0]} that its configuration describes: "
            f"{'; '.join(problems)}."
        )


def _refuse_other_dtypes(
    folder: Path, wanted: Mapping[str, Shape], tensors: Mapping[str, Source], hf_config: Mapping[str, Any]
) -> None:
    wrong = [name for name in wanted if tensors[name].dtype not in DTYPES]
    if not wrong:
        return
    kinds = sorted({str(tensors[name].dtype).removeprefix("torch.") for name in wrong})
    method = (hf_config.get("quantization_config") or {}).get("quant_method")
    raise CheckpointError(
        f"{folder}: {listed(wrong)} {'has' if len(wrong) == 1 else 'have'} dtype "
        f"{', '.join(kinds)}{f', by quantization_config.quant_method={method!r}' if method else ''}. nemo2 reads "
        "weights in bfloat16, float16, float32 or float64. It also reads two quantized formats: FP8 with "
        "weight_scale_inv by blocks (DeepSeek V3) and MXFP4 (GPT-OSS). Use a release that is not quantized."
    )
