# SPDX-License-Identifier: Apache-2.0
"""Mamba 2, its hybrid with attention, Nemotron-H, Nemotron Nano v2 and Nemotron 3.

A pattern has one letter per layer: ``M`` for a Mamba 2 mixer, ``-`` for a feed-forward block, ``*`` for attention,
``E`` for experts, whose settings are those of a GPT (`nemo2.models.walker` handles the other letters). Sources:
arXiv:2405.21060 and the config.json of state-spaces/mamba2-* (130M to 2.7B); arXiv:2406.07887, table 1 (8B and its
hybrid); arXiv:2504.03624, table 1 (Nemotron-H); arXiv:2508.14444, section 2 (Nano v2).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Optional, Union

from megatron.core.activations import squared_relu
from megatron.core.transformer import ModuleSpec

from nemo2.base.backend.extras import has, have_te
from nemo2.base.errors import ConfigError
from nemo2.config.aliases import register_gone
from nemo2.config.capture import configurable
from nemo2.models.fused_gradients import fusing_where_possible
from nemo2.models.gpt import GPTConfig, GPTModel
from nemo2.models.gpt_step import gpt_forward_step
from nemo2.models.hybrid_pattern import left_out_layers, pattern_problems, uncut_hybrid_problems

ssm_forward_step = gpt_forward_step
"""NeMo's name for the forward step. A hybrid takes the arguments of a GPT model, and its mask is None too."""
_TOKENIZER = (
    "NeMo 2.0's converter of weights reads it; here a tokenizer is the model's and the data's (data.tokenizer)."
)
register_gone(
    "nemo2.models.ssm:SSMConfig",
    tokenizer_library=_TOKENIZER,
    tokenizer_name=_TOKENIZER,
    tokenizer_model_path=_TOKENIZER,
    vocab_file=_TOKENIZER,
    mapping_type="NeMo 2.0's converter of weights reads it; nemo2 import reads the layers from hybrid_override_pattern.",
    fp32_residual_connections="NeMo 2.0 takes it and does nothing with it. Leave it out.",
    get_attention_mask_from_fusion="NeMo 2.0 takes it and does nothing with it; hybrids are always causal. Leave it out.",
    pre_process="the pipeline stage decides; give it to configure_model(pre_process=...).",
    post_process="the pipeline stage decides; give it to configure_model(post_process=...).",
)


def default_stack_spec(config: "SSMConfig") -> ModuleSpec:
    """Megatron-Core's layers on a GPU with Transformer Engine and Mamba's kernels, plain PyTorch layers elsewhere."""
    if have_te() and has("mamba_ssm") and has("causal_conv1d"):
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

        from nemo2.models.layers.spec import completed

        return completed(mamba_stack_spec, config)
    from nemo2.models.layers.mamba import torch_stack_spec

    return torch_stack_spec(config)


@configurable(mamba_ssm_ngroups="mamba_num_groups")
@dataclass
class SSMConfig(GPTConfig):
    """A stack of Mamba 2 mixers, feed-forward blocks and attention.

    It is fast on a GPU with Transformer Engine, mamba-ssm and causal-conv1d. Elsewhere it is correct but slow.
    """

    share_embeddings_and_output_weights: bool = False
    num_layers: int = 2
    mamba_num_groups: int = 8
    num_attention_heads: int = 1
    hybrid_attention_ratio: float = 0.0
    """The fraction of attention layers if there is no pattern."""
    hybrid_mlp_ratio: float = 0.0
    """The fraction of feed-forward layers if there is no pattern."""
    hybrid_override_pattern: Optional[str] = None
    """The kind of each layer, one letter each. From Megatron-Core 0.19 on, ``|`` separates pipeline stages, and
    ``/`` starts the layers of an additional prediction. None: the two ratios distribute the kinds."""
    seq_length: int = 8192
    # Mixers need no position embedding.
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "none"
    normalization: str = "RMSNorm"
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    bias_dropout_fusion: bool = True
    mamba_stack_spec: Union[ModuleSpec, Callable[..., ModuleSpec]] = default_stack_spec
    """The layers: a spec, or a function that returns one. The function receives this config if it takes an argument."""

    def configure_model(
        self,
        tokenizer: Any,
        pre_process: Optional[bool] = None,
        post_process: Optional[bool] = None,
        vp_stage: Optional[int] = None,
    ) -> Any:
        """Build this rank's part of the model. Megatron-Core's process groups must exist.

        Raises:
            ConfigError: the pattern does not fit the number of layers; the layers do not fit the pipeline stages; there
                are virtual pipeline stages that the pattern does not write out; or the vocabulary does not fit.
        """
        self.adjust_to_this_machine()
        for problem in pattern_problems(self):
            raise ConfigError(problem)
        stages = self.pipeline_model_parallel_size
        for problem in (
            *uncut_hybrid_problems(self.hybrid_override_pattern, stages, partial(getattr, self)),
            left_out_layers(self),
        ):
            if problem is not None:
                raise ConfigError(problem)
        spec = self.mamba_stack_spec
        if not isinstance(spec, ModuleSpec):
            spec = spec(self) if inspect.signature(spec).parameters else spec()
        if self.num_moe_experts:
            from nemo2.models.layers.moe import with_weighted_routers

            spec = with_weighted_routers(spec)
        build = partial(
            _hybrid_model,
            self,
            spec,
            **self._stage(pre_process, post_process, vp_stage),
            **self._model_arguments(tokenizer),
        )
        model = fusing_where_possible(build)
        self._finish_end(model, tokenizer)
        return model


def _hybrid_model(config: SSMConfig, spec: ModuleSpec, **arguments: Any) -> Any:
    """Megatron-Core's hybrid model, under the name and with the arguments of the installed version."""
    ratios: dict[str, Any] = {}
    if config.hybrid_override_pattern is None:
        ratios = {
            "hybrid_attention_ratio": config.hybrid_attention_ratio,
            "hybrid_mlp_ratio": config.hybrid_mlp_ratio,
        }
    pattern: dict[str, Any] = {"hybrid_override_pattern": config.hybrid_override_pattern}
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel  # 0.19
    except ImportError:
        from megatron.core.models.mamba import MambaModel as MegatronMambaModel

        del arguments["vp_stage"]  # None: earlier versions have no virtual stages of hybrids
        return MegatronMambaModel(config, spec, **pattern, **ratios, **arguments)
    return HybridModel(config, spec, hybrid_layer_pattern=config.hybrid_override_pattern, **ratios, **arguments)


class BaseMambaConfig130M(
    SSMConfig,
    hybrid_override_pattern="M" * 24,
    num_layers=24,
    seq_length=2048,
    hidden_size=768,
    mamba_num_groups=1,
    ffn_hidden_size=768,
    make_vocab_size_divisible_by=16,
    # NeMo 2.0 unties the embedding in all five sizes, unlike the released weights.
    share_embeddings_and_output_weights=True,
):
    """0.13 B parameters with the 50,288-token vocabulary, the embedding counted once (tied)."""

    tokenizer_library, tokenizer_name, mapping_type = "huggingface", "EleutherAI/gpt-neox-20b", "base"


class BaseMambaConfig370M(
    BaseMambaConfig130M, hybrid_override_pattern="M" * 48, num_layers=48, hidden_size=1024, ffn_hidden_size=1024
):
    """0.37 B parameters with the 50,288-token vocabulary, the embedding counted once (tied)."""


class BaseMambaConfig780M(BaseMambaConfig370M, hidden_size=1536, ffn_hidden_size=1536):
    """0.78 B parameters with the 50,288-token vocabulary, the embedding counted once (tied)."""


class BaseMambaConfig1_3B(BaseMambaConfig370M, hidden_size=2048, ffn_hidden_size=2048):
    """1.34 B parameters with the 50,288-token vocabulary, the embedding counted once (tied)."""


class BaseMambaConfig2_7B(
    BaseMambaConfig130M, hybrid_override_pattern="M" * 64, num_layers=64, hidden_size=2560, ffn_hidden_size=2560
):
    """2.70 B parameters with the 50,288-token vocabulary, the embedding counted once (tied)."""


class NVIDIAMambaConfig8B(
    SSMConfig,
    hybrid_override_pattern="M" * 56,
    num_attention_heads=32,
    num_layers=56,
    seq_length=4096,
    hidden_size=4096,
    ffn_hidden_size=4096,
):
    """8.2 B parameters with the 256,000-token vocabulary; NVIDIA's pure Mamba 2."""

    tokenizer_library, tokenizer_name, mapping_type = "megatron", "GPTSentencePieceTokenizer", "nvidia-pure"


class NVIDIAMambaHybridConfig8B(
    NVIDIAMambaConfig8B,
    hybrid_override_pattern="M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-",
    ffn_hidden_size=16384,
    num_query_groups=8,
):
    """8.7 B parameters with the 256,000-token vocabulary; Mamba 2 with 4 attention and 28 feed-forward layers."""

    mapping_type = "nvidia-hybrid"


class NemotronHConfigBase(
    SSMConfig,
    num_query_groups=8,
    activation_func=squared_relu,
    persist_layer_norm=True,
    vocab_size=131072,
    first_last_layers_bf16=True,
    is_hybrid_model=True,
):
    """Settings that Nemotron-H and Nano v2 share: squared ReLU, mixer heads of 64 channels."""

    tokenizer_library, tokenizer_name = "tiktoken", "TiktokenTokenizer"
    mapping_type = "nvidia-hybrid-nemotronh"


class NemotronHConfig8B(
    NemotronHConfigBase,
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    num_layers=52,
    hidden_size=4096,
    ffn_hidden_size=21504,
    num_attention_heads=32,
):
    """8.1 B parameters."""


class NemotronHConfig4B(
    NemotronHConfig8B,
    hidden_size=3072,
    mamba_num_heads=112,
    kv_channels=128,
    ffn_hidden_size=12288,
    use_mamba_mem_eff_path=False,
):
    """4.5 B parameters: 8B pruned in width."""


class NemotronHConfig47B(
    NemotronHConfigBase,
    hybrid_override_pattern="M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
    num_layers=98,
    hidden_size=8192,
    mamba_state_dim=256,
    ffn_hidden_size=30720,
    num_attention_heads=64,
):
    """46.8 B parameters: 56B pruned in depth and width."""


class NemotronHConfig56B(
    NemotronHConfig47B,
    hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
    num_layers=118,
    ffn_hidden_size=32768,
):
    """56.3 B parameters."""


class NemotronNano12Bv2(
    NemotronHConfigBase,
    hybrid_override_pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    num_layers=62,
    hidden_size=5120,
    mamba_num_heads=128,
    kv_channels=128,
    ffn_hidden_size=20480,
    num_attention_heads=40,
    mamba_head_dim=80,
):
    """12.3 B parameters."""


class NemotronNano9Bv2(
    NemotronNano12Bv2,
    hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    num_layers=56,
    hidden_size=4480,
    ffn_hidden_size=15680,
):
    """8.9 B parameters: 12B pruned in depth and width."""


class Nemotron3Nano30B_A3B(
    NemotronHConfigBase,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    num_layers=52,
    hidden_size=2688,
    mamba_num_heads=64,
    kv_channels=128,
    ffn_hidden_size=1856,
    num_attention_heads=32,
    num_query_groups=2,
    num_moe_experts=128,
    moe_ffn_hidden_size=1856,
    moe_shared_expert_intermediate_size=3712,
    moe_router_topk=6,
    moe_router_topk_scaling_factor=2.5,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_dtype="fp32",
    moe_grouped_gemm=True,
    moe_token_dispatcher_type="alltoall",
):
    """Nemotron 3 Nano: 31.6 B parameters, 3.6 B of them used per token; experts in place of feed-forward layers. Source:
    config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16."""


class MambaModel(GPTModel):
    """The LightningModule of Mamba and hybrid models; see `GPTModel`.

    ``build_chunk`` is the GPT's, because the configuration builds the model.
    """

    default_config = SSMConfig
