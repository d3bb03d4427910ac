# SPDX-License-Identifier: Apache-2.0
"""Compares nemo2's models with transformers' models with the same weights, which are read from and written to
transformers' files.

Weights go through the families' tables in memory (`whole`, `taken_apart`), into a chunk of any layout by the offsets of
Megatron-Core's sharded state.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from support import small_runs
from support.hf_models import LENGTH, ROWS, VOCABULARY, Row

SEED = 5


# transformers' side


def make(row: Row, folder: Path) -> Any:
    """transformers' model with every parameter disturbed, and its files (or those of the release) in ``folder``."""
    import transformers

    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, row.config)(**row.fields))
    if row.built_as is not None:
        row.built_as(model)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator)
    write(model, folder, row)
    if row.computes_as is not None:
        row.computes_as(model)
    return plain(model)


def write(model: Any, folder: Path, row: Row) -> None:
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    if row.released is not None:
        tensors, config = row.released(
            load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        )
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))


UNKNOWN_FIELDS = {
    "bos_token_id": 1,
    "eos_token_id": [2, 8],
    "pad_token_id": 0,
    "residual_in_fp32": True,
    "time_step_min": 0.0123,
    "a_field_of_the_future": {"any": ["value"]},
    "transformers_version": "4.99.0",
}
"""Fields that nemo2's configuration doesn't have."""
AS_ANOTHER = ("ChatGLM 3 (by a GLM)", "Qwen 3.5 MoE, stacked")
"""Rows that are exported in a form that transformers reads without the release's code."""


def add_unknown_fields(release: Path, *, longest: Optional[int] = None) -> dict[str, Any]:
    """config.json of a release after `UNKNOWN_FIELDS` were written to it, and ``longest`` as the longest sequence, unless that
    decides what the model computes."""
    config = json.loads((release / "config.json").read_text()) | UNKNOWN_FIELDS
    stretched = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get(
        "rope_type", "default"
    ) != "default"
    if longest is not None and isinstance(config.get("max_position_embeddings"), int) and not stretched:
        config["max_position_embeddings"] = longest
    (release / "config.json").write_text(json.dumps(config))
    return config


def comparable(name: str, *configs: dict[str, Any]) -> list[dict[str, Any]]:
    """What an export has of each config.json: all, or the special tokens of rows that are exported as another model."""
    from nemo2.models.conversion.settings import SPECIAL_TOKENS

    return [{field: config[field] for field in SPECIAL_TOKENS} if name in AS_ANOTHER else config for config in configs]


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens(), use_cache=False).logits


def greedy_tokens(chunk: Any, model: Any, *, prompt_length: int = 12, count: int = 8) -> list[list[list[int]]]:
    """The tokens after each of two prompts: nemo2's with its caches of keys and states, and transformers'."""
    from nemo2.models.decoding import CachedDecoder

    prompts = tokens()[:, :prompt_length]
    decoder = CachedDecoder(chunk, batch_size=len(prompts), max_sequence_length=prompt_length + count)
    ours = [prompts]
    with torch.no_grad():
        for _ in range(count):
            ours.append(decoder.feed(ours[-1]).argmax(-1, keepdim=True))
    theirs = model.generate(prompts, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return [found[:, prompt_length:].tolist() for found in (torch.cat(ours, dim=1), theirs)]


def plain(model: Any) -> Any:
    """``model`` with attention and experts step by step."""
    model.eval().float()
    for config in {
        id(c): c for c in (model.config, *(getattr(m, "config", model.config) for m in model.modules()))
    }.values():
        config._attn_implementation = config._experts_implementation = "eager"
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # transformers' Nemotron-H limits steps by another field of its configuration.
            module.time_step_limit = (0.0, float("inf"))
    return model


# Files and our tensors


def whole(entries: Iterable[Any], file: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """nemo2's unsharded stored tensors by key, made from the tensors of a file."""
    found: dict[str, Tensor] = {}
    for entry in entries:
        parts = []
        for piece in entry.pieces:
            if piece.name is None:
                parts.append(torch.zeros(piece.rows, *entry.own_shape[1:]))
                continue
            tensor = file[piece.name] if piece.at is None else file[piece.name][piece.at]
            tensor = tensor.transpose(-1, -2) if piece.transposed else tensor
            parts.append(tensor[piece.start : piece.stop : piece.step])
        stored = found.setdefault(entry.key, torch.full(entry.shape, torch.nan))
        stored[entry.at] = torch.cat(parts)
    return found


def taken_apart(entries: Iterable[Any], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `whole`."""
    parts: dict[str, list[tuple[Any, Tensor]]] = {}
    for entry in entries:
        tensor = stored[entry.key][entry.at]
        for piece, rows in zip(entry.pieces, tensor.split([piece.rows for piece in entry.pieces]), strict=True):
            if piece.name is not None:
                parts.setdefault(piece.name, []).append((piece, rows))
    found = {}
    for name, pieces in parts.items():
        rows = max(piece.stop for piece, _ in pieces)
        experts = max(-1 if piece.at is None else piece.at for piece, _ in pieces) + 1
        tensor = torch.full((max(experts, 1), rows, *pieces[0][1].shape[1:]), torch.nan)
        for piece, part in pieces:
            tensor[piece.at or 0, piece.start : piece.stop : piece.step] = part
        tensor = tensor if experts else tensor[0]
        found[name] = (tensor.transpose(-1, -2) if pieces[0][0].transposed else tensor).contiguous()
    return found


def shards(chunk: Any) -> list[Any]:
    """The tensors that a chunk stores, each with this rank's part of it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from nemo2.mcore.parallel.sharded_state import sharded_state

    with torch.no_grad():
        state = sharded_state(chunk)
        apply_factories(state)
    return [leaf for leaf in nested_values(state) if isinstance(leaf, ShardedTensor)]


def place(leaf: Any) -> tuple[Any, ...]:
    """The position of this rank's part in the whole tensor."""
    stacked = leaf.prepend_axis_num
    sizes = leaf.data.shape
    return (
        *leaf.global_offset[:stacked],
        *(slice(start, start + size) for start, size in zip(leaf.global_offset[stacked:], sizes, strict=True)),
    )


def fill(chunk: Any, stored: Mapping[str, Tensor]) -> None:
    for leaf in shards(chunk):
        leaf.data.detach().copy_(stored[leaf.key][place(leaf)])


def load(chunk: Any, checkpoint: Path) -> None:
    """Load this rank's chunk from a checkpoint of the whole model, in the way of Megatron-Core."""
    from megatron.core import dist_checkpointing

    from nemo2.mcore.parallel.sharded_state import sharded_state

    # Extra state is Transformer Engine's, and empty here.
    asked = {name: leaf for name, leaf in sharded_state(chunk).items() if not name.endswith("_extra_state")}
    loaded: Any = dist_checkpointing.load(asked, str(checkpoint / "weights"))
    chunk.load_state_dict({name.removeprefix("module."): tensor for name, tensor in loaded.items()}, strict=False)


def stored_by(chunk: Any) -> dict[str, Tensor]:
    """The unsharded tensors by key, of a chunk that is the whole model."""
    found: dict[str, Tensor] = {}
    for leaf in shards(chunk):
        found.setdefault(leaf.key, torch.full(leaf.global_shape, torch.nan))[place(leaf)] = leaf.data.detach()
    return found


# Our side


class Released:
    """A folder in Hugging Face's form, and what our side makes of it."""

    def __init__(self, folder: Path):
        from safetensors.torch import load_file

        from nemo2.models.conversion.families import conversion_for

        self.json = json.loads((folder / "config.json").read_text())
        self.conversion = conversion_for(self.json)
        self.file = self.conversion.named_as_in_table(load_file(folder / "model.safetensors"))

    def config(self, **layout: Any) -> Any:
        from nemo2.hugging_face.released import described

        config = described(self.conversion, self.json)
        if not any(f"layers.{config.num_layers}." in name for name in self.file):
            config.mtp_num_layers = None
        for name, value in {"moe_aux_loss_coeff": 0.0, **layout}.items():
            setattr(config, name, value)
        if config.pipeline_model_parallel_size > 1:
            config.pipeline_dtype = torch.float32
        return config

    def entries(self, config: Any) -> list[Any]:
        return list(self.conversion.entries(config, vocab_rows=config.vocab_size))

    def chunk(self, config: Any, checkpoint: Path | None = None) -> Any:
        """This rank's part of the model, from the files, or from a checkpoint that was made of them."""
        chunk = config.configure_model(None).eval()
        if checkpoint is None:
            fill(chunk, whole(self.entries(config), self.file))
        else:
            load(chunk, checkpoint)
        return chunk


def export(released: Released, chunk: Any, folder: Path) -> None:
    """Write our model as transformers reads it."""
    from safetensors.torch import save_file

    conversion = released.conversion
    folder.mkdir()
    config = conversion.hf_config(chunk.config) | {"architectures": list(conversion.architectures[:1])}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = taken_apart(released.entries(chunk.config), stored_by(chunk))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def start(**layout: Any) -> None:
    small_runs.start_megatron(**{k: v for k, v in layout.items() if k != "sequence_parallel"})
    small_runs.freeze_what_is_loaded()


def our_logits(chunk: Any) -> Tensor:
    """``[batch, sequence, vocabulary]`` on the ranks of the last pipeline stage; hidden states on the others, which are sent."""
    from megatron.core import parallel_state as ps

    ids = tokens()
    with torch.no_grad():
        if not ps.is_pipeline_first_stage():
            length = LENGTH // (chunk.config.tensor_model_parallel_size if chunk.config.sequence_parallel else 1)
            hidden = torch.empty(length, ids.size(0), chunk.config.hidden_size)
            torch.distributed.recv(hidden, ps.get_pipeline_model_parallel_prev_rank())
            chunk.set_input_tensor(hidden)
        found = chunk(ids, torch.arange(LENGTH).expand_as(ids), None)
        if not ps.is_pipeline_last_stage():
            torch.distributed.send(found.contiguous(), ps.get_pipeline_model_parallel_next_rank())
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


# Both sides

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2, SP": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
}


def folder_of(root: str, row: Any) -> Path:
    return Path(root) / str(ROWS.index(row))


def result_or_error(function: Any, *arguments: Any) -> Any:
    """What a function returns, or what it raises: one row's fault isn't the others'."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def both_ways(root: str, names: list[str]) -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    start()
    return {row.name: result_or_error(one_row, root, row) for row in ROWS if row.name in names}


def one_row(root: str, row: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    from nemo2.hugging_face.exporting import export_weights
    from nemo2.models.conversion.families import conversion_of
    from support.released_models import import_release

    folder = folder_of(root, row)
    folder.mkdir(parents=True)
    model = make(row, folder)
    config_json = add_unknown_fields(folder)
    expected = logits_of(model)
    torch.save(expected, folder / "logits.pt")
    released = Released(folder)
    chunk = released.chunk(released.config(mtp_num_layers=None))
    found: dict[str, Any] = {
        "family": released.conversion.configs[0].__module__.rpartition(".")[2],
        "import": apart(our_logits(chunk), expected),
    }
    if row.trained:
        found["step"] = one_step(model, chunk, released, row, folder)
    config = released.config()
    checkpoint = import_release(folder, folder / "imported")
    whole = released.chunk(config, checkpoint)
    found["import"] = max(found["import"], apart(our_logits(whole), expected))
    found["greedy"] = greedy_tokens(whole, model)
    back = export_weights(checkpoint, folder / "back")
    found["config"] = comparable(row.name, config_json, json.loads((back / "config.json").read_text()))
    if conversion_of(config) is released.conversion:
        tensors = load_file(back / "model.safetensors")
    else:  # ChatGLM, which goes out as a GLM
        tensors = taken_apart(released.entries(config), stored_by(whole))
    found["back"] = differing(tensors, released.file)
    found |= exported(row, released, chunk, folder / "exported")
    return found


def differing(tensors: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that aren't bit by bit what the file has."""
    return sorted(
        name
        for name in {*theirs, *tensors}
        if name not in theirs or name not in tensors or not torch.equal(theirs[name], tensors[name])
    )


def exported(row: Any, released: Any, chunk: Any, folder: Path) -> dict[str, Any]:
    """Of other weights in our model: what transformers computes with them, and what we read again."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(9)
    for parameter in chunk.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    stored, entries = stored_by(chunk), released.entries(chunk.config)
    again = whole(entries, taken_apart(entries, stored))
    answer: dict[str, Any] = {"again": sorted(key for key in stored if not torch.equal(stored[key], again[key]))}
    told = released.conversion.hf_config(chunk.config)
    assert json.loads(json.dumps(told)) == told
    if not row.readable:
        return answer
    export(released, chunk, folder)
    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    answer["loading"] = {name: sorted(map(str, what)) for name, what in loading.items() if what}
    answer["export"] = apart(our_logits(chunk), logits_of(plain(model)))
    return answer


def one_step(model: Any, chunk: Any, released: Any, row: Any, folder: Path) -> dict[str, float]:
    """Losses of the first step and gradients, as files: each parameter replaced by its gradient."""
    ids = tokens()
    labels = ids.roll(-1, dims=1)
    positions = torch.arange(ids.size(1)).expand_as(ids)
    loss = chunk(ids, positions, None, labels=labels).mean()
    theirs = torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    theirs.backward()
    weights = [(parameter, parameter.data) for parameter in (*chunk.parameters(), *model.parameters())]
    for parameter, _ in weights:
        assert parameter.grad is not None
        parameter.data = parameter.grad
    write(model, folder / "gradients", row)
    ours = taken_apart(released.entries(chunk.config), stored_by(chunk))
    file = Released(folder / "gradients").file
    for parameter, data in weights:
        parameter.data, parameter.grad = data, None
    worst = max(float((ours[name] - file[name]).norm() / file[name].norm()) for name in file)
    return {
        "loss": float(((loss - theirs).abs() / theirs).detach()),
        "gradients": worst,
        "compared": len(file) - len(ours),
    }


def at_layouts(root: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each named row at each of its layouts how far the logits are from transformers'; None on ranks without any."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for layout, own in LAYOUTS.items():
        started: dict[str, Any] = {}
        rows = [row for row in ROWS if row.name in names and layout in row.layouts]
        for row in sorted(rows, key=lambda row: len(row.with_tp)):
            sizes = {**own, **(row.with_tp if layout.startswith("TP") else {})}
            if sizes != started:
                start(**sizes)
                started = sizes
            found[row.name][layout] = result_or_error(at_layout, folder_of(root, row), sizes)
    return found


def at_layout(folder: Path, sizes: dict[str, Any]) -> float | None:
    from megatron.core import parallel_state

    released = Released(folder)
    chunk = released.chunk(released.config(**sizes, parallel_output=False), folder / "imported")
    logits = our_logits(chunk)
    if not parallel_state.is_pipeline_last_stage():
        return None
    return apart(logits, torch.load(folder / "logits.pt"))
