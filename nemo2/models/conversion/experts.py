# SPDX-License-Identifier: Apache-2.0
"""What the conversions of models with experts share: rows of routers, of routed and shared experts and of the layers that predict
further tokens, and settings of experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

import torch

from nemo2.models.conversion.decoder import attention, decoder, gated_feed_forward
from nemo2.models.conversion.pieces import cat, one
from nemo2.models.conversion.settings import Config, Translation, meaning, refusal
from nemo2.models.conversion.table import Row, linear, norm, under


def rows_with_experts(config: Any, further: Sequence[Row] = ()) -> list[Row]:
    """A model with these attention layers, experts in some layers and a feed-forward in the others. ``further`` are rows of the
    layers with experts."""
    layers = dense_or_experts(config, dense=gated_feed_forward(), experts=[*experts(), *further])
    return decoder(config, [*attention(config), *layers])


def experts(*, stacked: bool = False) -> list[Row]:
    """A layer's norm, router and experts, under the names of Qwen 3, DeepSeek and others. ``stacked``: the file has one tensor
    for all experts, as Qwen 3.5's."""
    expert = "mlp.experts.*."
    first = "mlp.experts.experts.linear_fc1."
    second = "mlp.experts.experts.linear_fc2."
    separate = [
        *linear(first, cat(f"{expert}gate_proj.", f"{expert}up_proj.")),
        *linear(second, one(f"{expert}down_proj.")),
    ]
    together = [
        Row(f"{first}weight", one("mlp.experts.gate_up_proj", stacked=True)),
        Row(f"{second}weight", one("mlp.experts.down_proj", stacked=True)),
    ]
    return [
        *norm("pre_mlp_layernorm.", one("post_attention_layernorm.")),
        Row("mlp.router.weight", one("mlp.gate.weight")),
        *(together if stacked else separate),
    ]


def dense_or_experts(config: Any, *, dense: list[Row], experts: list[Row]) -> list[Row]:
    """``dense`` in the layers without experts, and ``experts`` in the layers with them."""
    flags = meaning(config)["experts_in"]
    without_experts = [layer for layer, has_experts in enumerate(flags) if not has_experts]
    with_experts = [layer for layer, has_experts in enumerate(flags) if has_experts]
    return [
        *(replace(row, layers=without_experts) for row in dense),
        *(replace(row, layers=with_experts) for row in experts),
    ]


def beside_experts(config: Any) -> list[Row]:
    """The bias of the router and the shared experts, under DeepSeek's names."""
    rows: list[Row] = []
    if config.moe_router_enable_expert_bias:
        rows.append(Row("mlp.router.expert_bias", one("mlp.gate.e_score_correction_bias"), dtype=torch.float32))
    if config.moe_shared_expert_intermediate_size:
        rows += shared_experts("mlp.shared_experts.")
    return rows


def shared_experts(path: str) -> list[Row]:
    """A layer's shared experts, whose names in the file begin with ``path``."""
    return [
        *linear("mlp.shared_experts.linear_fc1.", cat(f"{path}gate_proj.", f"{path}up_proj.")),
        *linear("mlp.shared_experts.linear_fc2.", one(f"{path}down_proj.")),
    ]


def further_predictions(config: Any, attention: list[Row]) -> list[Row]:
    """The layers of multi-token prediction, after the last layer. The file repeats the embedding and the output layer for
    them, which are not read again (`REPEATED`)."""
    layer = [
        *norm("enorm.", one("enorm.")),
        *norm("hnorm.", one("hnorm.")),
        *linear("eh_proj.", one("eh_proj.")),
        *under("transformer_layer.", "", [*attention, *experts(), *beside_experts(config)]),
        *norm("final_layernorm.", one("shared_head.norm.")),
    ]
    layers = range(config.mtp_num_layers or 0)
    return under("mtp.layers.*.", "model.layers.*.", layer, layers=layers, shift=config.num_layers)


REPEATED = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")


def expert_weights(*, default: bool = False) -> Translation:
    """Whether the weights of a token's experts are divided by their sum."""
    return Translation(
        lambda hf: {"moe_router_pre_softmax": not hf.get("norm_topk_prob", default)},
        lambda own: {"norm_topk_prob": not own.moe_router_pre_softmax},
    )


def _layers_with_experts(hf: Config) -> dict[str, Any]:
    dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    experts_in = [int(n not in dense and (n + 1) % step == 0) for n in range(hf["num_hidden_layers"])]
    return {"moe_layer_freq": 1 if all(experts_in) else experts_in}


def _dense_layers(own: Any) -> dict[str, Any]:
    dense = [layer for layer, experts in enumerate(meaning(own)["experts_in"]) if not experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT_LAYERS = Translation(_layers_with_experts, _dense_layers)
"""The layers without experts, which Qwen 2's models of experts name as well."""


def dense_then_experts(width: Optional[int] = None, *, default: int = 0) -> Translation:
    """DeepSeek's fields of the layers without experts, which come first, and of shared experts.

    ``width`` is the width of an expert if config.json omits it, and ``default`` is the value of both fields. A ``width`` of
    None: config.json must have it.
    """

    def ours(hf: Config) -> dict[str, Any]:
        dense, shared = (hf.get(name, default) or 0 for name in ("first_k_dense_replace", "n_shared_experts"))
        each = hf["moe_intermediate_size"] if width is None else hf.get("moe_intermediate_size", width)
        return {
            "moe_layer_freq": [int(layer >= dense) for layer in range(hf["num_hidden_layers"])],
            "moe_shared_expert_intermediate_size": shared * each or None,
        }

    def theirs(own: Any) -> dict[str, Any]:
        experts_in = meaning(own)["experts_in"] or []
        return {
            "first_k_dense_replace": experts_in.index(1) if 1 in experts_in else len(experts_in),
            "n_shared_experts": (own.moe_shared_expert_intermediate_size or 0) // (own.moe_ffn_hidden_size or 1),
        }

    return Translation(ours, theirs)


FURTHER_PREDICTIONS = Translation(
    lambda hf: {"mtp_num_layers": hf.get("num_nextn_predict_layers", hf.get("num_mtp_layers", 0)) or None},
    lambda own: {"num_nextn_predict_layers": own.mtp_num_layers or 0},
)
"""The number of layers of multi-token prediction."""


def check_routing(hf: Config, fields: Config) -> None:
    """Check that Megatron-Core's router chooses and weights the same experts as the released model's router.

    The released router ranks groups by the sum of the best two scores of each, and divides the chosen experts' weights
    by their sum.

    Raises:
        ConfigError: the routers differ.
    """
    best, groups = fields["moe_router_topk"], fields["moe_router_group_topk"] or 1
    if best == 1:
        raise refusal(hf, "num_experts_per_tok", "nemo2's router doesn't normalize the weight of a single expert to 1")
    if (fields["moe_router_num_groups"] or 1) > 1 and best // groups != 2:
        raise refusal(
            hf,
            "num_experts_per_tok",
            f"with topk_group={groups}, nemo2's router ranks groups by the sum of their best {best // groups} scores, and the "
            "released model by the sum of their best 2",
        )
