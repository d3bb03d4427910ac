# SPDX-License-Identifier: Apache-2.0
"""Quantised releases against what transformers, and DeepSeek's own script, make of the same numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo2.hugging_face.quantised import mapped, sources
from nemo2.hugging_face.safetensors_files import read_header

_ALL = slice(None)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(1)
    blocks = torch.randint(256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "a.safetensors")
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = sources(read_header(tmp_path / "a.safetensors"), {})
    assert ours.keys() == {"w"} and ours["w"].shape == theirs.shape == (3, 128, 10)
    for expert in range(3):
        assert ours["w"].part(expert, _ALL, _ALL).equal(theirs[expert])
        assert ours["w"].part(expert, slice(40, 90), slice(1, 9, 2)).equal(theirs[expert, 40:90, 1:9:2])


def test_fp8_by_blocks_is_what_deepseek_s_script_makes_of_it(tmp_path: Path) -> None:
    """``inference/fp8_cast_bf16.py``: each number times the factor of its block of 128 x 128."""
    torch.manual_seed(2)
    weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
    factors = torch.rand(3, 2) + 0.5
    save_file({"w": weight, "w_scale_inv": factors}, tmp_path / "a.safetensors")
    spread = factors.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    theirs = (weight.float() * spread).to(torch.bfloat16)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    ours = sources(read_header(tmp_path / "a.safetensors"), config)
    assert ours.keys() == {"w"} and ours["w"].dtype == torch.bfloat16
    assert ours["w"].part(None, _ALL, _ALL).equal(theirs)
    assert ours["w"].part(None, slice(100, 290, 3), slice(120, 140)).equal(theirs[100:290:3, 120:140])


@pytest.mark.parametrize("pad", [0, 1])
def test_tensors_that_begin_at_any_byte_are_read(tmp_path: Path, pad: int) -> None:
    from nemo2.checkpoint.reading import Stored

    value = torch.randn(7, 5)
    (tmp_path / "raw").write_bytes(b"x" * pad + value.numpy().tobytes())
    assert mapped(Stored(file=str(tmp_path / "raw"), place=pad, dtype=torch.float32, shape=(7, 5))).equal(value)


def test_an_fp8_release_is_imported_as_bfloat16(tmp_path: Path) -> None:
    from nemo2.hugging_face.exporting import export_weights
    from support import released_models
    from support.released_models import import_release
    from tests.nemo2.hugging_face.test_bad_input import weights, write

    tensors = {name: value.to(torch.bfloat16) for name, value in weights().items()}
    names = [name for name in tensors if "proj" in name]
    expected = dict(tensors)
    for name in names:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
        expected[name] = (tensors[name].float() * 0.5).to(torch.bfloat16)
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = write(tmp_path / "hf", tensors, quantization_config=quantised)
    exported = released_models.tensors(export_weights(import_release(source, tmp_path / "ours"), tmp_path / "out"))
    assert exported.keys() == expected.keys()
    assert all(exported[name].equal(value) for name, value in expected.items())
