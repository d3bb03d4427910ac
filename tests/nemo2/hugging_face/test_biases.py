# SPDX-License-Identifier: Apache-2.0
"""A bias that one side lacks: zeros where the other has it, and never dropped unless it is zero."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo2 import llm
from nemo2.hugging_face.exporting import export_weights
from support import hf_parity as parity
from support.hf_models import HIDDEN, VOCABULARY, Row
from support.released_models import import_release
from tests.nemo2.hugging_face.test_bad_input import refused, weights, write

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def exported(checkpoint: Path, out: Path) -> tuple[Any, dict[str, list[str]], dict[str, torch.Tensor]]:
    """transformers' model of an exported checkpoint, what it missed or didn't know, and the file's tensors."""
    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(export_weights(checkpoint, out), output_loading_info=True)
    missed = {name: sorted(map(str, what)) for name, what in loading.items() if what}
    return parity.plain(model), missed, load_file(out / "model.safetensors")


def of_half_biased_llamas(root: str) -> dict[str, Any]:
    """By the field that is on: how far logits are apart after an import and an export, and what the export adds."""
    parity.start()
    results = {}
    for field in ("attention_bias", "mlp_bias"):
        folder = Path(root) / field
        model = parity.make(Row(name="", config="LlamaConfig", fields=SIZES | {field: True}, switches=""), folder)
        released = parity.Released(folder)
        checkpoint = import_release(folder, folder / "ours")
        ours = parity.our_logits(released.chunk(released.config(), checkpoint))
        again, loading, tensors = exported(checkpoint, folder / "out")
        expected = parity.logits_of(model)
        results[field] = {
            "import": parity.apart(ours, expected),
            "export": parity.apart(parity.logits_of(again), expected),
            "loading": loading,
            "added": {name: bool(tensor.any()) for name, tensor in tensors.items() if name not in released.file},
            "same": all(tensor.equal(tensors[name]) for name, tensor in released.file.items()),
        }
    return results


def test_layers_with_biases_in_one_half_get_zeros_in_the_other(run_on_ranks: Any, tmp_path: Path) -> None:
    (found,) = run_on_ranks(of_half_biased_llamas, 1, str(tmp_path))
    parts = {
        "attention_bias": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        "mlp_bias": (*QKV, "self_attn.o_proj"),
    }
    for field, one in found.items():
        assert one["import"] < 1e-5 and one["export"] < 1e-5 and one["loading"] == {} and one["same"]
        assert one["added"] == {f"model.layers.{n}.{part}.bias": False for n in range(2) for part in parts[field]}


def with_biases(value: float, *parts: str) -> dict[str, torch.Tensor]:
    """A Llama's tensors, with biases of these linear layers; the last channel of the last is ``value``."""
    tensors = weights()
    names = [f"model.layers.{layer}.{part}" for layer in range(2) for part in parts]
    tensors |= {f"{name}.bias": torch.zeros(tensors[f"{name}.weight"].size(0)) for name in names}
    tensors[f"{names[-1]}.bias"][-1] = value
    return tensors


def test_biases_that_our_model_lacks_have_to_be_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path / "hf", with_biases(1e-3, *QKV))
    refused(
        source,
        r"model.layers.1.self_attn.v_proj.bias is not zero, but nemo2's model has no such bias and would compute",
    )
    assert import_release(write(tmp_path / "zero" / "hf", with_biases(0.0, *QKV)), tmp_path / "ours").is_dir()
    assert "model.layers.1.self_attn.v_proj.bias, which are zero. nemo2's model has no such biases" in caplog.text
    other = with_biases(0.0, *QKV) | {"model.rotary.bias": torch.zeros(2)}
    refused(write(tmp_path / "other" / "hf", other), "model.rotary.bias has no place in this model")


def test_biases_that_only_the_named_model_has_are_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from support.resharding import whole_tensors

    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 2}
    config = llm.LlamaConfig(**sizes, num_query_groups=1, add_qkv_bias=True)
    tensors = whole_tensors(import_release(write(tmp_path / "hf"), tmp_path / "ours", config=config))
    bias = tensors["module.decoder.layers.self_attention.linear_qkv.bias"]
    assert bias.shape == (2, 16) and not bias.any()
    assert "has no model.layers.0.self_attn.k_proj.bias" in caplog.text and "the model's are zero" in caplog.text


def test_a_bias_that_config_json_promises_must_be_there(tmp_path: Path) -> None:
    tensors = with_biases(0.5, *QKV)
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    told = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    refused(write(tmp_path / "hf", tensors, **told), "model.layers.0.self_attn.k_proj.bias is missing")
    half = write(tmp_path / "half" / "hf", with_biases(0.5, *QKV), attention_bias=True)
    refused(half, "model.layers.0.self_attn.o_proj.bias, model.layers.1.self_attn.o_proj.bias are missing")


def of_models_without_biases(root: str) -> dict[str, Any]:
    """Models of ours without the biases that transformers' class always has, exported: logits, and what was loaded."""
    parity.start()
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": 96, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "seq_length": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    gpt2: dict[str, Any] = {"n_embd": HIDDEN, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 64}
    gpt2 |= {"vocab_size": VOCABULARY, "activation_function": "gelu"}
    without = {"add_bias_linear": False, "bias_activation_fusion": False}
    results = {}
    for name, config, fields in (
        ("Qwen2Config", llm.Qwen2Config(**sizes, num_query_groups=2, add_qkv_bias=False), SIZES),
        ("GPT2Config", llm.GPTConfig126M(**sizes, **without), gpt2),
    ):
        folder = Path(root) / name
        parity.make(Row(name="", config=name, fields=fields, switches=""), folder)
        file = folder / "model.safetensors"
        kept = {key: tensor for key, tensor in load_file(file).items() if not key.endswith(".bias") or "ln_" in key}
        save_file(kept, file)
        checkpoint = import_release(folder, folder / "ours", config=config)
        chunk = config.configure_model(None).eval()
        parity.load(chunk, checkpoint)
        model, loading, tensors = exported(checkpoint, folder / "out")
        results[name] = {
            "apart": parity.apart(parity.our_logits(chunk), parity.logits_of(model)),
            "loading": loading,
            "biases": sorted(key for key in tensors if key not in kept),
            "zero": not any(tensor.any() for key, tensor in tensors.items() if key not in kept),
        }
    return results


def test_biases_that_hugging_face_s_class_always_has_are_exported_as_zeros(run_on_ranks: Any, tmp_path: Path) -> None:
    (found,) = run_on_ranks(of_models_without_biases, 1, str(tmp_path))
    counts = {"Qwen2Config": 3, "GPT2Config": 4}
    for name, one in found.items():
        assert one["apart"] < 1e-5 and one["loading"] == {} and one["zero"], (name, one)
        assert len(one["biases"]) == 2 * counts[name], one["biases"]
