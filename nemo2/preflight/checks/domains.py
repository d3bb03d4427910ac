# SPDX-License-Identifier: Apache-2.0
"""The valid numbers of each numeric field of a model, an optimizer and a trainer, with the reasons.

A row (`nemo2.config.domains`) has an interval and the computation that Megatron-Core or Lightning does with the value. The
rows of nemo2's own classes, such as schedules and data modules, stand beside the classes.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, Union, get_args, get_origin

from nemo2.config.capture import captured_arguments
from nemo2.config.domains import Choice, Domain, out_of_range
from nemo2.config.value_types import type_hints

_count = partial(Domain, "[1, inf)", kind="whole")
_natural = partial(Domain, "[0, inf)", kind="whole")
_pattern = partial(Domain, "[1, inf)", kind="whole", items="[0, 1]")
_positive = partial(Domain, "(0, inf)")
_weight = partial(Domain, "[0, inf)")
_decay = partial(Domain, "[0, 1)")
_share = partial(Domain, "[0, 1]")


def _rows(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """The domain of each field. A key names the fields that share a domain."""
    return {name: domain for names, domain in domains.items() for name in names.split()}


_DIVISOR = "a divisor"
_YARN = "YaRN divides by this number or takes its logarithm"
_TIMES = "the weight of a loss term, which a negative weight would increase"

MODEL: Mapping[str, Domain] = _rows(
    {
        # Widths and counts
        (
            "hidden_size ffn_hidden_size kv_channels moe_ffn_hidden_size moe_latent_size vocab_size "
            "moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
            "mamba_state_dim mamba_head_dim mamba_num_heads linear_conv_kernel_dim linear_key_head_dim "
            "linear_value_head_dim dsa_indexer_head_dim"
        ): _count("a dimension of a weight"),
        (
            "num_layers num_attention_heads num_query_groups num_moe_experts mtp_num_layers mamba_num_groups "
            "linear_num_key_heads linear_num_value_heads dsa_indexer_n_heads"
        ): _count("a number of parts of the model", most=100_000),
        "make_vocab_size_divisible_by mup_base_hidden_size": _count(_DIVISOR),
        "seq_length max_position_embeddings old_context_len attention_chunk_size": _count("a number of positions"),
        "mup_base_head_dim": _positive(_DIVISOR),
        "mup_width_mult": _positive("the standard deviation of the weights is divided by its square root"),
        "mup_embedding_mult embedding_multiplier": _positive("multiplies the embeddings"),
        "mup_output_mult logit_scale": _positive("multiplies the logits"),
        "residual_multiplier": _positive("multiplies the outputs of attention and feed-forward"),
        "logits_scaling": _positive("logits are divided by this number"),
        "mup_attn_scale_power": Domain("(-inf, inf)", "an exponent"),
        # Norms, activations, weights as they start
        "layernorm_epsilon": _weight("added to a variance before the square root, so that a negative value gives NaN"),
        "latent_layernorm_epsilon dsa_indexer_k_norm_epsilon": _weight("added to a variance before the square root"),
        "hidden_dropout attention_dropout": _decay("the share of values that dropout sets to 0"),
        "glu_linear_offset": Domain("(-inf, inf)", "added to the linear half of the gate"),
        "activation_func_clamp_value": _positive(
            "activations are clamped to the range from minus this value to this value"
        ),
        "init_method_std embedding_init_method_std": _weight("a standard deviation"),
        # Attention and positions
        "softmax_scale": _positive("multiplies the attention scores", unless="set None for 1 / sqrt(kv_channels)"),
        "query_pre_attn_scalar": _positive("attention scores are divided by its square root"),
        "attn_logit_softcapping": _positive(
            "attention scores are divided by this number", unless="set None to turn it off"
        ),
        "final_logit_softcapping": _positive("logits are divided by this number", unless="set None to turn it off"),
        "rotary_base": _positive("raised to a fractional power, so that a negative value gives NaN"),
        "rotary_percent": Domain(
            "(0, 1]", "a share of the channels of a head", unless="set position_embedding_type='none' to rotate nothing"
        ),
        "seq_len_interpolation_factor": _positive(
            "positions are divided by this number", unless=("set None to leave positions as they are")
        ),
        "rope_scaling_factor": _positive("positions are divided by this number"),
        "scale_factor": _positive("frequencies are divided by this number"),
        "low_freq_factor high_freq_factor": _positive("the old context length is divided by this number"),
        "floor_scale dsa_indexer_topk_freq": _count(_DIVISOR),
        "attn_scale query_growth mscale mscale_all_dim yarn_mscale yarn_mscale_all_dim": _weight(
            "multiplies a logarithm"
        ),
        "rotary_scaling_factor beta_fast beta_slow yarn_rotary_scaling_factor yarn_beta_fast yarn_beta_slow": _positive(
            _YARN
        ),
        "original_max_position_embeddings yarn_original_max_position_embeddings": _count(_YARN),
        "mrope_section": _natural("the number of channels of a section", length=3),
        "window_size": Domain("[-1, inf)", "the number of keys on each side; -1 means all keys", "whole", length=2),
        "interleaved_attn_pattern": _natural("numbers of layers with and without a window", length=2),
        "window_attn_skip_freq no_rope_freq linear_attention_freq moe_layer_freq": _pattern(
            "every n-th layer, or a list with one flag per layer"
        ),
        "qk_clip_alpha": _share("the share of the correction that the queries get"),
        "qk_clip_threshold": _positive("larger scores are scaled down to this value"),
        "dsa_indexer_topk": _count("a number of keys"),
        "dsa_indexer_skip_topk_offset": _natural("a number of layers"),
        "dsa_indexer_loss_coeff mtp_loss_scaling_factor": _weight(_TIMES),
        # Experts
        "moe_router_topk moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk": _count(
            "a number of experts, devices or groups"
        ),
        "moe_router_topk_scaling_factor": _weight("multiplies the scores of the experts; 0 means no scaling"),
        "moe_expert_capacity_factor": Domain(
            "(-inf, inf)",
            "multiplies the number of tokens of each expert; 0 would drop all tokens, and Megatron-Core treats a negative "
            "value as None",
            unless="set None to drop no tokens",
            but=(0,),
        ),
        "moe_router_bias_update_rate": _weight(
            "the size of a step towards balance; a negative step would increase the imbalance"
        ),
        "moe_aux_loss_coeff moe_z_loss_coeff": _weight(_TIMES),
        "moe_input_jitter_eps": _decay("inputs are multiplied by a random number from 1 - eps to 1 + eps"),
        "moe_router_quantile_balancing_ema": _decay("the share of the old mean that is kept"),
        # Recomputation, offloading, low precision, kernels
        "recompute_num_layers": _count("a number of layers; with 0, Megatron-Core loops forever"),
        "cpu_offloading_num_layers num_layers_at_start_in_bf16 num_layers_at_end_in_bf16": _natural(
            "a number of layers"
        ),
        "min_offloaded_tensor_size": _natural("a number of elements"),
        "activation_offload_fraction": _share("a share of the activations"),
        "delta_offload_bytes_across_pp_ranks": _natural("a number of bytes"),
        "fine_grained_offloading_max_inflight_offloads": _natural("a number of copies"),
        "wgrad_deferral_limit": _natural("a number of micro-batches; 0 means all of them"),
        "fp8_margin": Domain("(-inf, inf)", "an exponent of 2", "whole"),
        "fp8_interval fp8_amax_history_len": _count("a number of steps"),
        "cuda_graph_warmup_steps": _natural("a number of steps"),
        "mlp_chunks_for_prefill mlp_chunks_for_training": _count(_DIVISOR),
        # Hybrids
        "hybrid_attention_ratio hybrid_mlp_ratio": _share("a share of the layers"),
    }
)

MODEL_TEXTS: Mapping[str, Choice] = {
    "normalization": Choice(("LayerNorm", "RMSNorm"), "the norms of Megatron-Core's layers"),
    "rope_type": Choice(("rope", "yarn"), "the rotary positions of latent attention"),
    "moe_router_load_balancing_type": Choice(
        ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),
        "quantile_balancing if Megatron-Core has it; with any other text, it would balance nothing",
    ),
    "tp_comm_bootstrap_backend": Choice(
        ("nccl", "mpi", "gloo"), "the backend with which Transformer Engine starts its userbuffers"
    ),
}


def model_texts(cls: Any) -> Mapping[str, Choice]:
    """The texts of the fields of a model's configuration: `MODEL_TEXTS`, and those that the annotations of ``cls`` list."""
    listed = {}
    for name, hint in type_hints(cls).items():
        literals = [arg for arg in get_args(hint) if arg is not type(None)] if get_origin(hint) is Union else [hint]
        texts = [text for one in literals for text in get_args(one)]
        if all(get_origin(literal) is Literal for literal in literals) and all(isinstance(text, str) for text in texts):
            listed[name] = Choice(tuple(texts), f"the texts of {cls.__name__}")
    return {**listed, **MODEL_TEXTS}


_SHARDED = ("no_shard", "optim", "optim_grads", "optim_grads_params")

BUFFERS: Mapping[str, Union[Domain, Choice]] = {
    "bucket_size": _count(
        "a number of elements; a smaller number gives each parameter its own collective",
        unless="set None to let Megatron-Core choose",
    ),
    "data_parallel_sharding_strategy": Choice(_SHARDED, "what Megatron-FSDP shards"),
    "outer_dp_sharding_strategy": Choice(_SHARDED[:2], "what Megatron-FSDP shards between its inner groups"),
}

OPTIMIZER: Mapping[str, Domain] = _rows(
    {
        "lr": _positive("the peak learning rate"),
        "min_lr": _weight("the final learning rate"),
        "decoupled_lr": _weight("the peak learning rate of the embedding and the output layer"),
        "decoupled_min_lr": _weight("the final learning rate of the embedding and the output layer"),
        "weight_decay": _weight("with a negative value, the weights would grow"),
        "clip_grad": _weight(
            "gradients with a larger norm are scaled down to this norm", unless="set 0 to turn off clipping"
        ),
        "grad_norm_skip_threshold": Domain("(0, inf]", "steps with a larger gradient norm are skipped"),
        "loss_scale": _weight("multiplies the loss and divides the gradients; 0 means a dynamic scale"),
        "initial_loss_scale min_loss_scale": _positive("multiplies the loss and divides the gradients"),
        "loss_scale_window": _positive("a number of steps"),
        "hysteresis": _count("a number of overflows"),
        "adam_beta1 adam_beta2 lion_beta1 lion_beta2 soap_shampoo_beta adaptive_muon_beta2": _decay(
            "the share of the old moment that is kept"
        ),
        "adam_eps adaptive_muon_eps": _positive("added to a square root before a division"),
        "sgd_momentum muon_momentum": _share("the share of the old velocity that is kept"),
        "muon_num_ns_steps": _count("a number of Newton-Schulz iterations"),
        "muon_extra_scale_factor": _positive("multiplies the update"),
        "soap_precondition_frequency": _count(_DIVISOR),
        "optimizer_offload_fraction": _share("a share of the parameters"),
    }
)

TRAINER: Mapping[str, Domain] = {
    "max_steps": Domain(
        "[-1, inf)",
        "-1 means no limit on steps",
        "whole",
        but=(0,),
        unless="set -1 to limit the run by max_epochs or max_time",
    ),
    "max_epochs": Domain("[-1, inf)", "-1 means no limit on epochs", "whole"),
    "min_steps": _natural("a number of steps"),
    "min_epochs": _natural("a number of epochs"),
    "num_sanity_val_steps": Domain("[-1, inf)", "a number of batches; -1 means all", "whole"),
    "log_every_n_steps": _natural("a number of steps; 0 logs nothing"),
}

OVERLAP: Mapping[str, Union[Domain, Choice]] = {
    "bucket_size": BUFFERS["bucket_size"],
    "wgrad_deferral_limit": MODEL["wgrad_deferral_limit"],
    **MODEL_TEXTS,
}
"""Arguments of the overlap callback, which end in fields of the tables above."""

PRECISION: Mapping[str, Domain] = {
    **{
        f"fp16_{name}": OPTIMIZER[name]
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    },
    **{
        name: MODEL[name]
        for name in (
            "fp8_margin",
            "fp8_amax_history_len",
            "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16",
        )
    },
}
"""Arguments of the precision plugin, which end in fields of the tables above."""

OPTIMIZER_MODULE: Mapping[str, Domain] = {"lr_mult": _weight("multiplies the learning rate of some parameters")}


def precision_out_of_range(plugins: Any, path: str) -> Iterator[str]:
    """Arguments of the precision among these plugins, or of their nodes in a recipe, that are out of range."""
    for plugin in plugins if isinstance(plugins, list | tuple) else [plugins]:
        arguments = getattr(plugin, "__arguments__", None) or captured_arguments(plugin) or {}
        yield from out_of_range(SimpleNamespace(**arguments), path, PRECISION, others=False)
