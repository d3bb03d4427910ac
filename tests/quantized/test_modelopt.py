# SPDX-License-Identifier: Apache-2.0
"""A checkpoint quantised by NVIDIA's ModelOpt, on CPUs. ``make test-quantize`` runs it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quantize
TEXT = "What does the function return for an empty list of numbers? It returns zero.\n" * 100


def quantised(root: str) -> dict[str, str]:
    """A run's checkpoint as Hugging Face's form has it, and quantised in two ways."""
    from nemo2 import llm
    from support import answering_runs

    os.environ |= {"HF_HUB_OFFLINE": "1", "NEMO2_EXPORTS_CACHE": f"{root}/exports"}
    run = answering_runs.save(f"{root}/run", config={"hidden_size": 64, "ffn_hidden_size": 128})
    Path(f"{root}/text.txt").write_text(TEXT)
    sizes = {"calibration_dataset_size": 8, "calibration_batch_size": 4, "calibration_seq_len": 32}
    found = {}
    for algorithm in ("fp8", "int8_sq"):
        how = llm.QuantizationConfig(algorithm=algorithm, calibration_dataset=f"{root}/text.txt", **sizes)
        found[algorithm] = str(llm.ptq(run, llm.ExportConfig(path=f"{root}/{algorithm}"), quantization_config=how))
    [exported] = Path(f"{root}/exports").iterdir()
    return found | {"exported": str(exported)}


@pytest.fixture(scope="module")
def folders(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    (found,) = run_on_ranks(quantised, 1, str(tmp_path_factory.mktemp("quantised")), timeout=280)
    return {name: Path(folder) for name, folder in found.items()}


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_weights_in_eight_bits_are_the_exported_ones_to_half_a_step(folders: dict[str, Path]) -> None:
    import torch

    before, after = tensors(folders["exported"]), tensors(folders["fp8"])
    layers = [name for name in before if f"{name}_scale" in after]
    assert len(layers) == 2 * 7  # of each layer's attention and feed-forward block
    for name in layers:
        scale = after[f"{name}_scale"]
        assert after[name].dtype is torch.float8_e4m3fn and after[name.replace("weight", "input_scale")] > 0
        # Three bits of mantissa: a sixteenth of a number, and of the smallest half a step.
        apart = (after[name].float() * scale - before[name]).abs()
        assert bool((apart <= before[name].abs() / 16 + scale / 2).all())
    kept = [name for name in before if name not in layers]
    assert all(torch.equal(before[name], after[name]) for name in kept)


@pytest.mark.parametrize(("algorithm", "bits"), [("fp8", "FP8"), ("int8_sq", "W8A8_SQ_PER_CHANNEL")])
def test_the_folder_says_how_it_is_quantised_and_has_its_tokenizer(
    folders: dict[str, Path], algorithm: str, bits: str
) -> None:
    import transformers

    told = json.loads((folders[algorithm] / "hf_quant_config.json").read_text())
    assert told["quantization"]["quant_algo"] == bits
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folders[algorithm])
    whole: Any = transformers.AutoTokenizer.from_pretrained(folders["exported"])
    assert tokenizer(TEXT)["input_ids"] == whole(TEXT)["input_ids"]
    if algorithm == "int8_sq":
        assert sum(str(one.dtype) == "torch.int8" for one in tensors(folders[algorithm]).values()) == 2 * 7
