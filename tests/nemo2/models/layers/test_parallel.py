# SPDX-License-Identifier: Apache-2.0
"""Models of these layers under every parallelism against one process: the gradient of each parameter at the first step.

Weights drawn by one process are resharded into each layout. Losses and gradient norms are compared over two steps, but
they alone would not do: wrong gradients of single parameters of multi-latent attention hid behind them.
"""

import dataclasses
import functools
import shutil
from typing import Any

import pytest
import torch

BARE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "groups": 2, "ffn": 48, "vocab": 64, "seq": 16}
RUN: dict[str, Any] = {"gbs": 4, "steps": 2, "calculate_per_token_loss": True}

EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 1e-2,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS | {"moe_grouped_gemm": True, "moe_z_loss_coeff": 1e-3},
    "deepseek": EXPERTS
    | {
        "multi_latent_attention": True,
        "num_query_groups": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "qk_layernorm": True,
        "rope_type": "yarn",
        "original_max_position_embeddings": 8,
        "rotary_scaling_factor": 4.0,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 16,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
    },
    "gemma": {
        "post_sublayer_layernorm": True,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "window_size": (5, 0),
        "window_attn_skip_freq": 2,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "bias_activation_fusion": False,
    },
    "gpt_oss": EXPERTS
    | {
        "moe_grouped_gemm": True,
        "softmax_type": "learnable",
        "window_size": (5, 0),
        "window_attn_skip_freq": 2,
        "add_bias_linear": True,
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,
    },
}
TP = {"tp": 2, "sequence_parallel": True}
RING, HEADS = {"cp_comm_type": "p2p"}, {"cp_comm_type": "a2a"}
# What a model is tried under: fields of `Settings`, the expert sizes, and under "config" fields of the model.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "ep2": {"ep": 2},
        "tp2 sp, ep2 of whole experts": TP | {"ep": 2, "etp": 1},
        "cp2 ep2": {"cp": 2, "ep": 2},
    },
    "deepseek": {
        "tp2 sp ep2": TP | {"ep": 2, "etp": 1},
        "cp2 ring": {"cp": 2, "config": RING},
        "ep2, shared experts beside the dispatch": {"ep": 2, "config": {"moe_shared_expert_overlap": True}},
    },
    "gemma": {"tp2 sp": TP, "cp2 heads": {"cp": 2, "config": HEADS}},
    "gpt_oss": {"tp2 sp ep2": TP | {"ep": 2, "etp": 1}, "cp2 ring": {"cp": 2, "config": RING}},
}
MORE_LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "ep2, all-gather dispatch": {"ep": 2, "config": {"moe_token_dispatcher_type": "allgather"}},
        "ep2, one expert after the other": {"ep": 2, "config": {"moe_grouped_gemm": False}},
        "dp2, experts on every rank": {},
        "tp2 sp, experts cut too": TP,
    },
    "deepseek": {"tp2 sp": TP, "ep2": {"ep": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}},
    "gemma": {"tp2": {"tp": 2}, "cp2 ring": {"cp": 2, "config": RING}, "pp2": {"pp": 2}},
    "gpt_oss": {"cp2 heads": {"cp": 2, "config": HEADS}, "ep2": {"ep": 2}},
}
LAYOUTS_OF_FOUR: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "tp2 sp ep2, experts cut too": TP | {"ep": 2},
        "pp2 ep2": {"pp": 2, "ep": 2},
        "cp2 tp2 sp ep4": TP | {"cp": 2, "ep": 4, "etp": 1},
    },
    "deepseek": {"tp2 sp pp2": TP | {"pp": 2}, "cp2 ring tp2 sp ep2": TP | {"cp": 2, "ep": 2, "config": RING}},
    "gpt_oss": {"cp4 ring": {"cp": 4, "config": RING}, "tp2 cp2 ring": {"tp": 2, "cp": 2, "config": RING}},
    "gemma": {"cp4 ring": {"cp": 4, "config": RING}, "tp2 sp cp2": TP | {"cp": 2}},
}


def build(model: str, settings: Any, layout: dict[str, Any], pre: bool, post: bool, vp_stage: int | None) -> Any:
    """A chunk of `model`; what TransformerConfig does not know is set on it, as GPTConfig has it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from bench.bare_megatron import transformer_config
    from nemo2.models.layers import cap_logits, layer_spec, mtp_block_spec

    kind = MLATransformerConfig if MODELS[model].get("multi_latent_attention") else TransformerConfig
    base = transformer_config(settings)
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.init}
    fields |= dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"))
    fields |= {"expert_model_parallel_size": layout.get("ep", 1), "expert_tensor_parallel_size": layout.get("etp")}
    fields |= MODELS[model] | layout.get("config", {})
    known = {field.name for field in dataclasses.fields(kind)}
    config: Any = kind(**{name: value for name, value in fields.items() if name in known})
    for name in fields.keys() - known:
        setattr(config, name, fields[name])
    layers = layer_spec(config, vp_stage=vp_stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=settings.vocab,
        max_sequence_length=settings.seq,
        pre_process=pre,
        post_process=post,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=mtp_block_spec(config, layers, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    if post and getattr(config, "final_logit_softcapping", None):
        cap_logits(chunk.output_layer, config.final_logit_softcapping)
    return chunk


def batches(step: int) -> dict[str, torch.Tensor]:
    """Random tokens, of which the loss skips about a third."""
    from bench.bare_megatron import Settings, random_batches

    batch = random_batches(Settings(**BARE, gbs=RUN["gbs"]))(step)
    keep = torch.rand(batch["tokens"].shape, generator=torch.Generator().manual_seed(step)) > 0.3
    return batch | {"loss_mask": keep.float()}


def train(model: str, layout: dict[str, Any], **files: str) -> dict[str, Any]:
    from megatron.core import parallel_state, tensor_parallel

    from bench import bare_megatron as bare

    def start_parallel(settings: Any) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tp,
            pipeline_model_parallel_size=settings.pp,
            context_parallel_size=settings.cp,
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("etp"),
        )
        torch.manual_seed(settings.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)

    bare.start_parallel = start_parallel  # the bare loop's own knows no experts
    plain = {name: value for name, value in layout.items() if name not in ("ep", "etp", "config")}
    settings = bare.Settings(**BARE | RUN | plain)
    return bare.train(settings, batches, build_model=functools.partial(build, model, settings, layout), **files)  # pyright: ignore[reportArgumentType]


def read(checkpoint: str) -> dict[str, torch.Tensor]:
    """Whole tensors by name. With torch alone, so that Megatron-Core's resharding is not checked against itself."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata.items()
    tensors = {name: torch.zeros(m.size) for name, m in stored if isinstance(m, TensorStorageMetadata)}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def alone(model: str, folder: str) -> dict[str, Any]:
    return train(model, {}, save_weights_to=f"{folder}/weights", save_gradients_to=f"{folder}/gradients")


def together(model: str, layouts: dict[str, dict[str, Any]], reference: str, folder: str) -> dict[str, Any]:
    """Each layout after the other in the same processes: losses, gradient norms and the relative error per parameter."""
    expected, results = read(f"{reference}/gradients"), {}
    for name, layout in layouts.items():
        result = train(model, layout, load_weights_from=f"{reference}/weights", save_gradients_to=f"{folder}/gradients")
        torch.distributed.barrier()
        actual = read(f"{folder}/gradients")
        result["errors"] = {
            key: float((actual[key] - value).norm() / value.norm()) for key, value in expected.items() if value.any()
        }
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(f"{folder}/gradients")
        torch.distributed.barrier()
        results[name] = result
    return results


def check(run_on_ranks: Any, folder: Any, model: str, layouts: dict[str, Any], ranks: int) -> None:
    reference = str(folder / "one")
    expected = run_on_ranks(alone, 1, model, reference)[0]
    results = run_on_ranks(together, ranks, model, layouts, reference, str(folder))[0]
    assert results.keys() == layouts.keys()
    for name, result in results.items():
        assert max(result["errors"].values()) < 1e-5, (name, result["errors"])
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6), name
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5), name


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_as_one(run_on_ranks, tmp_path, model):
    check(run_on_ranks, tmp_path, model, LAYOUTS[model], 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_as_one_in_further_layouts(run_on_ranks, tmp_path, model):
    check(run_on_ranks, tmp_path, model, MORE_LAYOUTS[model], 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_train_as_one(run_on_ranks, tmp_path, model):
    check(run_on_ranks, tmp_path, model, LAYOUTS_OF_FOUR[model], 4)
