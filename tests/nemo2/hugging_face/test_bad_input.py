# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with files that somebody else has made: refused before a target exists, with all that is wrong at once."""

import errno
import itertools
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo2 import llm
from nemo2.base.errors import CheckpointError, ConfigError, OutputExists, SecurityError
from nemo2.hugging_face.exporting import export_weights
from support.released_models import import_release

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
}


LAYER = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
    "input_layernorm": (8,), "post_attention_layernorm": (8,),
}  # fmt: skip
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
OUR_SIZES: dict[str, Any] = {"hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 2, "num_query_groups": 1}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    tensors = {"model.embed_tokens.weight": torch.randn(16, 8), "model.norm.weight": torch.randn(8)}
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.{part}.weight": torch.randn(shape) for part, shape in LAYER.items()}
    return tensors | {"lm_head.weight": torch.randn(16, 8)}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, shards: int = 1, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    items = list((weights() if tensors is None else tensors).items())
    if shards == 1:
        save_file(dict(items), folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(items[shard::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refused(source: Path, match: str, error: type[Exception] = CheckpointError, **options: Any) -> None:
    """Importing is refused in these words, and nothing is left beside the source."""
    target = source.parent / "target"
    before = sorted(source.parent.iterdir())
    with pytest.raises(error, match=match):
        import_release(source, target, **options)
    assert sorted(source.parent.iterdir()) == before


def test_good_input_is_taken(tmp_path: Path) -> None:
    assert import_release(write(tmp_path / "hf", shards=3), tmp_path / "target").is_dir()


def test_an_output_layer_beside_a_tied_embedding(tmp_path: Path) -> None:
    """Left out where it is the same. Where it isn't, neither the file nor config.json is believed alone."""
    tensors = weights()
    other = write(tmp_path / "other" / "hf", tensors, tie_word_embeddings=True)
    refused(
        other, r"lm_head.weight differs from model.embed_tokens.weight, but config.json says tie_word_embeddings=true"
    )
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    same = write(tmp_path / "same" / "hf", tensors, tie_word_embeddings=True)
    assert import_release(same, tmp_path / "target").is_dir()


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    """Gemma 2's layers follow from their number where config.json doesn't list them."""
    source = write(tmp_path / "hf", architectures=["Gemma2ForCausalLM"], model_type="gemma2")
    file, left_out = source / "config.json", ("num_hidden_layers", "hidden_act")
    told = json.loads(file.read_text())
    file.write_text(json.dumps({name: told[name] for name in told if name not in left_out}))
    refused(source, r"config.json \(Gemma2ForCausalLM\) has no num_hidden_layers, .*: add it", ConfigError)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (
            MIXTRAL | {"num_experts_per_tok": 1},
            r"config.json \(MixtralForCausalLM\) describes a model that cannot be built",
        ),
        # Megatron-Core has a TypeError, a ZeroDivisionError or nothing for these.
        *[
            (
                {name: value},
                rf"config.json \(LlamaForCausalLM\) has {name}={re.escape(repr(value))}: it must be a whole number",
            )
            for name, value in (
                ("hidden_size", "wide"),
                ("vocab_size", [1]),
                ("head_dim", 0),
                ("intermediate_size", -1),
            )
        ],
        # Before anything is counted up to them.
        *[
            (MIXTRAL | {name: 10**12}, rf"{name}=1000000000000: no model has more than 100000")
            for name in ("num_hidden_layers", "num_attention_heads", "num_local_experts")
        ],
        ({"architectures": ["LammaForCausalLM"]}, "did you mean 'LlamaForCausalLM'"),
    ],
)
def test_sizes_and_models_that_there_are_none_of(tmp_path: Path, told: dict[str, Any], match: str) -> None:
    """Whatever Megatron-Core says of them, the user is told which file says so."""
    refused(write(tmp_path / "hf", **told), match, ConfigError)


def test_further_predictions_that_a_file_lacks_are_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers writes DeepSeek V3."""
    from nemo2.hugging_face.released import open_released
    from support import hf_parity as parity
    from support.hf_models import ROWS

    (row,) = (row for row in ROWS if row.name == "DeepSeek V3")
    parity.make(row, tmp_path / "with")
    assert open_released(tmp_path / "with").config.mtp_num_layers == 1
    parity.make(replace(row, released=None), tmp_path / "without")
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    released = open_released(tmp_path / "without")
    assert released.config.mtp_num_layers is None and "lacks the 1 multi-token prediction layers" in caplog.text


@pytest.mark.parametrize(
    ("bytes_left", "match"), [(4, "not a safetensors file"), (100, "not a safetensors file"), (-1, "cut off")]
)
def test_a_truncated_file(tmp_path: Path, bytes_left: int, match: str) -> None:
    source = write(tmp_path / "hf")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_left])
    refused(source, match)


def test_a_file_with_something_behind_its_tensors(tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    with open(source / "model.safetensors", "ab") as file:
        file.write(b"more")
    refused(source, r"has \d+ bytes, but its tensors need \d+, so the file was changed")


def test_missing_shards_are_named_together(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", shards=4)
    (source / "model-00002-of-00004.safetensors").unlink()
    (source / "model-00004-of-00004.safetensors").unlink()
    refused(source, "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors, but these files are missing")


def test_a_tensor_that_the_index_promises_and_no_file_has(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", shards=2)
    file = source / "model-00001-of-00002.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "embed" not in name}, file)
    refused(source, "model.embed_tokens.weight is in no file, although")


def test_missing_and_extra_tensors_and_other_shapes_are_named_at_once(tmp_path: Path) -> None:
    tensors = weights()
    tensors["vision.patch.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(9)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.layers.0.input_layernorm.weight"]
    refused(
        write(tmp_path / "hf", tensors),
        r"(?s)model.layers.0.input_layernorm.weight, model.layers.1.mlp.up_proj.weight are missing; vision.patch.weight has no "
        r"place.*; model.norm.weight has shape \[9\] there, and \[8\] by the configuration",
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_dtypes_that_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = weights()
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors[name] = tensors[name].to(dtype)
    name = str(dtype).removeprefix("torch.")
    refused(
        write(tmp_path / "hf", tensors),
        rf"layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight have dtype {name}. nemo2 reads weights in bfloat16",
    )


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            llm.MixtralConfig(num_layers=2, **OUR_SIZES, num_moe_experts=2, moe_ffn_hidden_size=12),
            "contains a LlamaForCausalLM, but model.config=MixtralConfig is for MixtralForCausalLM",
        ),
        (llm.LlamaConfig(num_layers=3, **OUR_SIZES), "model.layers.2.input_layernorm.weight.*missing"),
        (llm.LlamaConfig(num_layers=2, **OUR_SIZES, vocab_size=12), "vocab_size=12, so .* lost. Set vocab_size=16"),
    ],
)
def test_a_configuration_of_another_family_or_size(tmp_path: Path, config: Any, match: str) -> None:
    refused(write(tmp_path / "hf"), match, config=config)


def test_pickles_are_refused_with_what_converts_them(tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    (source / "model.safetensors").unlink()
    torch.save(weights(), source / "pytorch_model.bin")
    refused(source, r"pickles \(pytorch_model.bin\).*convert them with: python -c .*from_pretrained.*save_pretrained")


def test_the_command_that_converts_pickles_is_one(tmp_path: Path) -> None:
    """As `nemo2 show` says it, of a folder whose name needs quoting."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from nemo2.hugging_face.identify import identify
    from tests.nemo2.hugging_face.test_api import make_tokenizer

    source = tmp_path / "it's a model"
    model = LlamaForCausalLM(LlamaConfig(**{name: CONFIG[name] for name in CONFIG if name != "architectures"}))
    model.config.save_pretrained(source)
    make_tokenizer(source, 16)
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    (command,) = identify(source).commands
    python, option, program = shlex.split(command)
    assert (python, option) == ("python", "-c")
    exec(program, {})
    converted = tmp_path / "it's a model-safetensors"
    assert import_release(converted, tmp_path / "ours").is_dir() and (converted / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/outside.safetensors"])
def test_an_index_that_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "hf", shards=2)
    index = source / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(said))
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "outside.safetensors")
    refused(source, "leads out of its folder", SecurityError)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "model.safetensors.index.json"])
def test_links_are_followed_in_hugging_face_s_own_cache_only(tmp_path: Path, name: str) -> None:
    cached = write(tmp_path / "models--org--name" / "snapshots" / "1234", shards=2)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    for file in list(cached.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    assert import_release(cached, tmp_path / "ours").is_dir()
    source = write(tmp_path / "hf", shards=2)
    (source / name).rename(tmp_path / name)
    (source / name).symlink_to(tmp_path / name)
    refused(source, f"{name} is a link to", SecurityError)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("header", "content", "match"),
    [
        (b"{", 0, "not a safetensors file"),
        ({"a": ENTRY | {"shape": [3]}}, 8, "its shape .3. needs 12"),
        ({"a": ENTRY | {"dtype": "X7"}}, 8, "dtype 'X7', which nemo2 doesn't know"),
        ({"a": ENTRY, "b": ENTRY}, 16, "starts at byte"),
        ({"a": ENTRY | {"shape": [-2]}}, 8, "not a safetensors file"),
        (TWICE, 8, "stands for two values"),
        (None, 0, "its header would have"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: Any, content: int, match: str) -> None:
    source = write(tmp_path / "hf")
    text = b"" if header is None else header if isinstance(header, bytes) else json.dumps(header).encode()
    size = 1 << 60 if header is None else len(text)
    (source / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + bytes(content))
    refused(source, match)


def test_a_target_that_exists_is_replaced_only_if_asked(tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    for convert, begin, name in ((import_release, source, "ours"), (export_weights, tmp_path / "ours", "out")):
        target = tmp_path / name
        convert(begin, target)
        (target / "mine.txt").write_text("kept")
        with pytest.raises(OutputExists, match="overwrite=True"):
            convert(begin, target)
        assert (target / "mine.txt").read_text() == "kept"
        convert(begin, target, overwrite=True)
        assert not (target / "mine.txt").exists()
    assert {"hf", "ours", "out"} == {path.name for path in tmp_path.iterdir()}


def test_what_is_read_and_runs_with_checkpoints_are_never_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "releases" / "hf")
    for target in (source, source.parent):
        with pytest.raises(CheckpointError, match="would be deleted"):
            import_release(source, target, overwrite=True)
    checkpoint = import_release(source, tmp_path / "run" / "checkpoints" / "step=1")
    for target in (checkpoint, checkpoint.parent, tmp_path / "run", tmp_path):
        for export in (export_weights, lambda path, to, **how: llm.export_ckpt(path, "hf", to, **how)):
            with pytest.raises(CheckpointError, match="would be deleted"):
                export(checkpoint, target, overwrite=True)
    with pytest.raises(CheckpointError, match="would be deleted"):
        import_release(source, tmp_path / "run", overwrite=True)
    assert (source / "config.json").is_file() and (checkpoint / "manifest.json").is_file()


def test_only_checkpoints_and_exports_are_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, plain = write(tmp_path / "hf"), tmp_path / "plain"
    (plain / "notes").mkdir(parents=True)
    checkpoint = import_release(source, tmp_path / "ours")
    for convert, begin in ((import_release, source), (export_weights, checkpoint)):
        with pytest.raises(CheckpointError, match="neither a checkpoint nor an export"):
            convert(begin, plain, overwrite=True)
        with pytest.raises(ConfigError, match="is a file: name a directory"):
            convert(begin, source / "config.json", overwrite=True)
        with pytest.raises(ConfigError, match="config.json is a file, not a directory"):
            convert(begin, source / "config.json" / "deeper")
    (there := shutil.copytree(checkpoint, tmp_path / "there") / "notes").mkdir()
    monkeypatch.chdir(there)
    with pytest.raises(CheckpointError, match="notes would be deleted"):
        import_release(source, there.parent, overwrite=True)
    assert (plain / "notes").is_dir() and there.is_dir()


def test_weights_are_not_written_in_dtypes_that_lose_them(tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    ours = import_release(source, tmp_path / "ours")
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64, "int8", "nothing", 5):
        for convert, begin in ((import_release, source), (export_weights, ours)):
            with pytest.raises(ConfigError, match="dtype="):
                convert(begin, tmp_path / "new", dtype=dtype)
    half = export_weights(ours, tmp_path / "half", dtype="bf16")  # pyright: ignore[reportArgumentType]
    assert {one.dtype for one in load_file(half / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_numbers_beyond_fp16_are_refused_and_leave_nothing(tmp_path: Path, name: str) -> None:
    tensors = weights()
    tensors[name].view(-1)[1] = 1e5
    source = write(tmp_path / "hf", tensors)
    refused(source, f"float16: {name} has values", ConfigError, dtype=torch.float16)
    ours = import_release(source, tmp_path / "ours", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="float16: .* has values"):
        export_weights(ours, tmp_path / "out", dtype=torch.float16)
    assert {"hf", "ours"} == {path.name for path in tmp_path.iterdir()}


def test_a_class_of_another_family_than_the_weights_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    for kind in (llm.GemmaConfig2B, llm.GemmaModel):
        with pytest.raises(ConfigError, match=f"LlamaForCausalLM, which is no {kind.__name__}"):
            llm.import_ckpt(cast(Any, kind), source, tmp_path / "out")
    for name, kind in (("config", llm.LlamaConfig), ("model", llm.LlamaModel)):
        llm.import_ckpt(cast(Any, kind), source, tmp_path / name)


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_disk_that_fills_up_half_way_leaves_nothing(tmp_path: Path, direction: str) -> None:
    convert, begin = import_release, write(tmp_path / "hf")
    if direction == "export":
        convert, begin = export_weights, import_release(begin, tmp_path / "ours")
    before = sorted(path.name for path in tmp_path.iterdir())
    writes = itertools.count(1)

    def full(real: Any) -> Any:
        def write_some(*arguments: Any) -> int:
            if next(writes) > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        return write_some

    with (
        mock.patch("os.pwrite", full(os.pwrite)),
        mock.patch("os.copy_file_range", full(os.copy_file_range)),
        pytest.raises(CheckpointError, match="No space left on device.*The incomplete folder was deleted"),
    ):
        convert(begin, tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    small = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    with mock.patch("os.statvfs", return_value=small):
        refused(source, "GB are free there. Free some")


def test_a_checkpoint_that_is_not_the_model_it_describes_is_not_exported(tmp_path: Path) -> None:
    ours = import_release(write(tmp_path / "hf"), tmp_path / "ours")
    biased, tied = {"add_qkv_bias": True}, {"share_embeddings_and_output_weights": True}
    for options, match in ((biased, "linear_qkv.bias is missing"), (tied, "module.output_layer.weight has no place")):
        with pytest.raises(CheckpointError, match=match):
            export_weights(ours, tmp_path / "out", config=llm.LlamaConfig(num_layers=2, **OUR_SIZES, **options))
    (ours / "weights" / "__0_0.distcp").open("r+b").write(b"changed")
    with pytest.raises(CheckpointError, match="is damaged.*SHA-256 differs"):
        export_weights(ours, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (ours / "context" / "model.json").unlink()
    with pytest.raises(ConfigError, match="does not describe its model"):
        export_weights(ours, tmp_path / "out")
