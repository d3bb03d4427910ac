# SPDX-License-Identifier: Apache-2.0
"""The small models and the data of the parity table: between them every kind of layer, as our own configurations have it.

A model's settings are those that change what is computed; what only changes how (dispatchers, recomputation, how context
parallelism exchanges) belongs to a layout. Samples are functions of their index alone, so every layout sees the same
global batches.
"""

from dataclasses import dataclass, field
from typing import Any

SEQ, VOCAB, GLOBAL_BATCH, STEPS = 32, 128, 8, 10
CLIP = 0.25
"""Below the gradient norm of every model here at every step, so that clipping is always active."""

_DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": VOCAB,
    "seq_length": SEQ,
    # Wider than usual: with small weights attention is all but uniform, and its gradients are all but rounding.
    "init_method_std": 0.08,
}
_EXPERTS: dict[str, Any] = {"hidden_size": 32, "num_moe_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2}
_LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_query_groups": 8,
    "kv_channels": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "yarn",
    "original_max_position_embeddings": 16,
    "rotary_scaling_factor": 4.0,
    "mscale": 0.7,
}
_DEEPSEEK: dict[str, Any] = (
    _EXPERTS
    | _LATENT
    | {
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_overlap": False,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
    }
)
_PADDED: dict[str, Any] = {"vocab_size": None, "make_vocab_size_divisible_by": 8}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row's model: one of our families, made small."""

    family: str
    """``module:ConfigClass`` below `nemo2.models`."""
    about: str
    config: dict[str, Any] = field(default_factory=dict)
    """On top of the sizes that all have."""
    packed: bool = False
    """Several sequences in a row of the data."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    peft: dict[str, Any] = field(default_factory=dict)
    """A method of `nemo2.models.peft`, ``kind``, and its arguments: the model is frozen, and what that adds is trained."""

    @property
    def tokens(self) -> int:
        """Ids that its data may have. Where the configuration leaves the vocabulary to the tokenizer, a number that no layout
        divides."""
        return VOCAB if self.config.get("vocab_size", VOCAB) else 101


# Second factors don't begin at zero, so that every gradient counts from the first step on.
_LORA: dict[str, Any] = {"kind": "LoRA", "dim": 4, "alpha": 16, "lora_B_init_method": "normal"}
LLAMA, MIXTRAL, DEEPSEEK = "llama:LlamaConfig", "mixtral:MixtralConfig", "deepseek:DeepSeekConfig"
MODELS: dict[str, Model] = {
    "llama": Model(family=LLAMA, about="Llama-like: RMSNorm, SwiGLU, rotary positions, 8 heads in 4 groups, 4 layers"),
    "llama, 8 layers": Model(family=LLAMA, about="the same, deeper", config={"num_layers": 8}),
    "llama, mean over tokens": Model(
        family=LLAMA,
        about="`calculate_per_token_loss`: every token of the global batch weighs the same",
        config={"calculate_per_token_loss": True},
    ),
    "llama, packed": Model(family=LLAMA, about="each sample packs several sequences of different lengths", packed=True),
    "llama, padded vocabulary": Model(
        family=LLAMA, about="101 tokens, padded to 104 rows, or to 112 with TP 2", config=_PADDED
    ),
    "llama, sgd": Model(
        family=LLAMA,
        about="SGD, which unlike Adam shows a gradient that is wrong by a factor, or clipped differently per rank",
        optimizer={"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.5},
    ),
    "llama, dropout": Model(family=LLAMA, about="dropout of 0.1 on hidden states", config={"hidden_dropout": 0.1}),
    "llama, LoRA": Model(family=LLAMA, about="frozen, with pairs of rank 4 beside every linear layer", peft=_LORA),
    "llama, canonical LoRA": Model(
        family=LLAMA, about="the parts of fused layers have pairs of their own", peft=_LORA | {"kind": "CanonicalLoRA"}
    ),
    "llama, DoRA": Model(family=LLAMA, about="lengths of rows are trained too", peft=_LORA | {"kind": "DoRA"}),
    "gpt, tied": Model(
        family="gpt3:GPTConfig126M",
        about="GPT-3-like: LayerNorm, biases, GELU, learned positions; the output layer is the embedding",
        config={"num_query_groups": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "gpt, tied, padded vocabulary": Model(
        family="gpt3:GPTConfig126M",
        about="the same with 101 tokens",
        config=_PADDED | {"num_query_groups": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "gemma2": Model(
        family="gemma2:Gemma2Config",
        about="Gemma-2-like: every other layer sees 8 tokens back, scores and logits are soft-capped, embeddings tied",
        config={
            "kv_channels": 8,
            "query_pre_attn_scalar": 8,
            "window_size": (7, 0),
            # Low enough to bend the scores and logits of a model that hasn't learned anything.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "mixtral": Model(
        family=MIXTRAL,
        about="Mixtral-like: 8 experts of which a token visits 2, load-balancing and z-loss",
        config=_EXPERTS | {"moe_z_loss_coeff": 1e-3},
    ),
    "mixtral, LoRA": Model(
        family=MIXTRAL,
        about="frozen; each expert has pairs of its own",
        config=_EXPERTS | {"moe_z_loss_coeff": 1e-3},
        # With an alpha of 16 two experts of a token come to a tie at step 6.
        peft=_LORA | {"alpha": 8},
    ),
    "mixtral, DoRA": Model(
        family=MIXTRAL,
        about="lengths of rows too",
        config=_EXPERTS | {"moe_z_loss_coeff": 1e-3},
        peft=_LORA | {"kind": "DoRA"},
    ),
    "deepseek": Model(
        family=DEEPSEEK,
        about="DeepSeek-like: multi-latent attention with YaRN, a dense layer, shared experts, groups, sequence-wise loss",
        config=_DEEPSEEK,
    ),
    "deepseek, multi-token": Model(
        family=DEEPSEEK, about="the same, predicting a second token", config=_DEEPSEEK | {"mtp_num_layers": 1}
    ),
    "deepseek, multi-token, mean over tokens": Model(
        family=DEEPSEEK, about="both", config=_DEEPSEEK | {"mtp_num_layers": 1, "calculate_per_token_loss": True}
    ),
    "deepseek, multi-token, padded vocabulary": Model(
        family=DEEPSEEK, about="predicting a second token of 101", config=_DEEPSEEK | _PADDED | {"mtp_num_layers": 1}
    ),
}


def build_model(name: str, changes: dict[str, Any], *, optimizer: dict[str, Any] | None = None) -> Any:
    """The LightningModule of a row; ``changes`` are its layout's own settings of the model."""
    import importlib

    from megatron.core.optimizer import OptimizerConfig

    from nemo2.data.tokenizer import NullTokenizer
    from nemo2.mcore.optim.megatron import MegatronOptimizerModule
    from nemo2.models.gpt import GPTModel

    model = MODELS[name]
    module, config_class = model.family.split(":")
    family = importlib.import_module(f"nemo2.models.{module}")
    config = getattr(family, config_class)(**_DENSE | model.config | changes)
    adam = {"optimizer": "adam", "lr": 2e-3, "weight_decay": 0.01, "adam_beta2": 0.95, "clip_grad": CLIP}
    optim = MegatronOptimizerModule(OptimizerConfig(**adam | model.optimizer | (optimizer or {})))
    return GPTModel(config, optim=optim, tokenizer=NullTokenizer(model.tokens), model_transform=_method(model.peft))


def _method(settings: dict[str, Any]) -> Any:
    from nemo2.models import peft

    options = dict(settings)
    return getattr(peft, options.pop("kind"))(**options) if options else None


def sample(index: int, *, packed: bool = False, tokens: int = VOCAB) -> dict[str, Any]:
    """Sample ``index``, ``[SEQ]`` each: random ones of ``tokens``, of which the loss leaves out about a third.

    Packed samples hold three sequences whose lengths are multiples of 4, so that 2 context-parallel ranks can cut them,
    and padding.
    """
    import torch

    generator = torch.Generator().manual_seed(7919 * index + 1)
    text = torch.randint(tokens, (SEQ + 1,), generator=generator)
    kept = {
        "tokens": text[:-1].contiguous(),
        "labels": text[1:].contiguous(),
        "loss_mask": (torch.rand(SEQ, generator=generator) > 0.3).float(),
        "position_ids": torch.arange(SEQ),
    }
    if not packed:
        return kept
    lengths = [[8, 12, 4], [16, 4, 8], [4, 4, 20], [12, 12, 4]][index % 4]
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    places = torch.cat([torch.arange(length) for length in [*lengths, SEQ - ends[-1]]])
    mask = kept["loss_mask"] * (torch.arange(SEQ) < ends[-1])
    return kept | {
        "position_ids": places,
        "loss_mask": mask,
        "cu_seqlens": torch.tensor([*ends, -1], dtype=torch.int32),
    }
