# SPDX-License-Identifier: Apache-2.0
"""GPT: the decoder-only transformer that all text model families configure.

``GPTConfig`` is Megatron-Core's ``TransformerConfig`` plus the arguments of its ``GPTModel``, under NeMo 2.0's names.
``GPTModel`` is the LightningModule around it. Families (``llama.py``) only state their differences.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Optional, Union

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

from nemo2.base.backend import get_backend
from nemo2.base.backend.compilation import as_megatron_has_it
from nemo2.base.backend.extras import ANY_VERSION, has
from nemo2.base.backend.te_version import megatron_finds
from nemo2.base.errors import ConfigError
from nemo2.config.aliases import NOT_HERE, register_elsewhere, register_gone
from nemo2.config.capture import configurable, unknown_name
from nemo2.config.notices import announce_machine_settings, warn_about_unread, warn_without_effect
from nemo2.config.provenance import adjust, adjust_to
from nemo2.data.tokenizer import Tokenizer
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.mcore.parallel.cuda_graphs import spell_as_installed
from nemo2.mcore.parallel.forms import with_model
from nemo2.mcore.parallel.loss import MaskedTokenLossReduction
from nemo2.mcore.parallel.megatron_parallel import MegatronStep
from nemo2.mcore.parallel.module_functions import FNMixin
from nemo2.models.fused_gradients import fusing_where_possible
from nemo2.models.gpt_step import check_token_ids, gpt_data_step, gpt_forward_step
from nemo2.models.tracked_losses import forget_tracked_losses

_MODEL_ARGUMENTS = (
    "fp16_lm_cross_entropy", "parallel_output", "share_embeddings_and_output_weights", "position_embedding_type",
    "rotary_percent", "rotary_base", "seq_len_interpolation_factor", "scatter_embedding_sequence_parallel",
)  # fmt: skip
"""The fields that are arguments of Megatron-Core's models under the same name."""
_WITHOUT_EFFECT = {
    "Megatron-Core's own Transformer Engine layers are used.": ("use_transformer_engine_full_layer_spec",),
    "No layer of Megatron-Core reads it.": (
        "apply_residual_connection_post_layernorm", "moe_per_layer_logging", "moe_token_dropping", "mtp_hybrid_override_pattern",
        "use_inference_optimized_layers",
    ),
}  # fmt: skip
"""Why fields have no effect. Some exist in some versions of Megatron-Core only."""
_READ_ONLY_WITH = {
    "moe_": ("num_moe_experts", None),
    "mup_": ("use_mup", None),
    "mtp_": ("mtp_num_layers", None),
    "dsa_": ("experimental_attention_variant", "dsa"),
    "linear_": ("experimental_attention_variant", "gated_delta_net"),
}
"""The field that switches those of a prefix on, and its value. None: any but None, 0 and False."""


def default_layer_spec(config: "GPTConfig", vp_stage: Optional[int] = None) -> ModuleSpec:
    """The layers for this machine: Transformer Engine's on a GPU with Transformer Engine, plain PyTorch layers
    elsewhere."""
    from nemo2.models.layers.spec import layer_spec

    return layer_spec(config, vp_stage=vp_stage)


@configurable(bias_dropout_add_fusion="bias_dropout_fusion")
@dataclass
class GPTConfig(TransformerConfig):
    """The shape and the settings of a GPT.

    A config holds the requested values, whatever the machine. A setting that a machine doesn't support, such as a fused
    kernel without Transformer Engine, is adjusted when a strategy is connected to the model (`nemo2.mcore.settle`), or
    otherwise when the model is built.
    """

    deciding_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of a family's own that decide what the model computes (`nemo2.models.conversion.settings.meaning`)."""

    fp16_lm_cross_entropy: bool = False
    """Compute the loss in 16 bits, which uses less memory and is less exact."""
    parallel_output: bool = True
    """Leave the logits sharded over the vocabulary. False: gather them on every tensor-parallel rank."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output layer to the embedding."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this number times the tensor-parallel size."""
    mask_vocab_padding: bool = True
    """Exclude the rows that pad the vocabulary from the softmax, in training and in generation, so that the loss
    doesn't depend on their number. False: include them, as NeMo and Megatron-LM do."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    """The fraction of each head's channels that is rotated."""
    seq_len_interpolation_factor: Optional[float] = None
    """The factor of linear interpolation of rotary positions. None: no interpolation."""
    seq_length: int = 1024
    """Tokens per sample. ``llm.pretrain`` uses the data's value if the recipe does not set it."""
    attention_softmax_in_fp32: bool = False
    masked_softmax_fusion: bool = True
    cross_entropy_loss_fusion: bool = True
    gradient_accumulation_fusion: bool = True
    deallocate_pipeline_outputs: bool = True
    scatter_embedding_sequence_parallel: bool = True
    """With sequence parallelism, scatter right after the embedding. False: a wrapper scatters later."""
    tp_only_amax_red: bool = False
    use_transformer_engine_full_layer_spec: bool = False
    """Accepted for NeMo's configs, without effect. Megatron-Core's own Transformer Engine layers are used."""
    transformer_layer_spec: Union[ModuleSpec, Callable[..., ModuleSpec]] = default_layer_spec
    """The layers: a spec, or a function that returns a spec from this config (and from ``vp_stage`` if it has that
    parameter)."""
    forward_step_fn: Callable[..., Tensor] = gpt_forward_step
    data_step_fn: Callable[..., dict[str, Optional[Tensor]]] = gpt_data_step
    vocab_size: Optional[int] = None
    """The size of the embedding, padded only to a multiple of the tensor-parallel size. None: the tokenizer's size, padded
    for the matrix units too."""
    attn_logit_softcapping: Optional[float] = None
    """The cap of attention scores: s becomes cap * tanh(s / cap), as in Gemma 2. None: no cap."""
    final_logit_softcapping: Optional[float] = None
    """The same cap for the logits over the vocabulary. None: no cap."""
    post_sublayer_layernorm: bool = False
    """Add a norm after each attention and feed-forward layer, before the residual is added, as in Gemma 2 and 3."""
    pre_sublayer_layernorm: bool = True
    """Have a norm before each attention and feed-forward layer. False: none, as in OLMo 2."""
    qk_layernorm_over_heads: bool = False
    """With ``qk_layernorm``, normalize queries and keys over the channels of all heads, as in OLMo 2. False: each head."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    """The parts of a training step that CUDA graphs capture, and the implementation (`nemo2.mcore.parallel.cuda_graphs`)."""
    tp_comm_overlap_cfg: Optional[Union[str, dict[str, Any]]] = None
    """Userbuffer settings of tensor-parallel overlap, set by MegatronCommOverlapCallback."""

    def __init_subclass__(cls, **sizes: Any) -> None:
        """A family and its sizes are rows: ``class Qwen3Config8B(Qwen3Config, num_layers=36, hidden_size=4096, ...)`` is the
        dataclass with these defaults. A family with fields of its own is written as a dataclass.

        Raises:
            UnknownNameError: the family has no such field.
        """
        super().__init_subclass__()
        if not sizes:
            return
        fields: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            fields |= getattr(base, "__dataclass_fields__", {})
        for name, value in sizes.items():
            if name not in fields:
                raise unknown_name(cls, name)
            cls.__annotations__[name] = fields[name].type
            setattr(cls, name, field(default_factory=partial(list, value)) if isinstance(value, list) else value)
        # The family's own name the same fields: making them anew takes a third of the time that importing a family takes.
        of_family = len(cls.__bases__) == 1 and cls.__annotations__.keys() <= fields.keys()
        dataclass(cls, repr=not of_family, eq=not of_family)

    def __post_init__(self) -> None:
        own_sizes = type(self).__dataclass_fields__
        for why, names in _WITHOUT_EFFECT.items():
            unread = {name: (getattr(self, name), own_sizes[name].default) for name in names if name in own_sizes}
            warn_without_effect(why, **unread)
        if not (self.num_layers and (own_sizes["kv_channels"].default or own_sizes["num_attention_heads"].default)):
            self._refuse_missing_sizes()  # Megatron-Core divides by them below
        spell_as_installed(self)
        self.activation_func = as_megatron_has_it(self.activation_func)
        # Requested fused kernels that Megatron-Core would look up in this process and that are missing here.
        # The configuration can't know whether the machine that trains has them.
        names = () if has("transformer_engine") else ("apply_rope_fusion", "moe_permute_fusion")
        aside = {name: True for name in names if getattr(self, name, False)}
        # Settling runs this again with the run's fields and machine.
        again, self._made = getattr(self, "_made", False), True
        if not again:
            aside |= self._asked_early()
            for prefix, (switch, needed) in _READ_ONLY_WITH.items():
                value = getattr(self, switch, needed or True)
                if not (value if needed is None else value == needed):
                    warn_about_unread(
                        self, prefix, f"It requires {switch}{f'={needed!r}' if needed else ''}.", but=switch
                    )
        for name in aside:
            setattr(self, name, False)
        with nullcontext() if again else megatron_finds(ANY_VERSION):
            super().__post_init__()
        for name, value in aside.items():
            setattr(self, name, value)

    def _refuse_missing_sizes(self) -> None:
        missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if not getattr(self, name)]
        if missing:
            raise ConfigError(
                f"{type(self).__name__} has no default sizes: set {', '.join(missing)}, or use a class with sizes, such as "
                "Llama32Config1B."
            )

    def _asked_early(self) -> dict[str, Any]:
        """Settings that depend on values which the strategy and the precision plugin write later: expert and pipeline
        size, fp8, 16 bits.

        Megatron-Core would reject them now. It checks them when those values are written.
        """
        overlap = self.expert_model_parallel_size == 1 or not (self.bf16 or self.fp16)
        unquantised = not (self.fp8 or self.fp4)
        early = {
            "overlap_moe_expert_parallel_comm": overlap,
            "delay_wgrad_compute": overlap and self.overlap_moe_expert_parallel_comm,
            "ep_overlap_early_attn_memory_release": overlap and self.overlap_moe_expert_parallel_comm,
            "moe_router_padding_for_fp8": unquantised,
            "moe_router_padding_for_quantization": unquantised,
            "defer_embedding_wgrad_compute": self.pipeline_model_parallel_size == 1,
        }
        return {
            name: getattr(self, name) for name, too_early in early.items() if too_early and getattr(self, name, False)
        }

    def adjust_to_this_machine(self) -> None:
        """Turn off features that this machine doesn't support, and report it, if no strategy has done so. An activation that was
        configured before the backend came loses its compilation with Megatron-Core's functions.

        Raises:
            ConfigError: a size is missing.
        """
        self._refuse_missing_sizes()
        self.activation_func = as_megatron_has_it(self.activation_func)
        announce_machine_settings(adjust_to(self, get_backend().config_overrides()))

    def configure_model(
        self,
        tokenizer: Any,
        pre_process: Optional[bool] = None,
        post_process: Optional[bool] = None,
        vp_stage: Optional[int] = None,
    ) -> MegatronGPTModel:
        """Build this rank's chunk of the model. Megatron-Core's process groups must exist.

        A ``pre_process`` (the chunk holds the embedding) or ``post_process`` (it holds the output layer) of None
        follows from this rank's pipeline stage. ``vp_stage`` is the index of the chunk in a virtual pipeline.
        ``tokenizer`` supplies the vocabulary, and may be None if ``vocab_size`` is set.

        Raises:
            ConfigError: the vocabulary is unknown, or does not fit the tokenizer or the tensor-parallel size.
        """
        self.adjust_to_this_machine()
        from nemo2.models.layers.spec import mtp_block_spec

        stage = self._stage(pre_process, post_process, vp_stage)
        layers = self._resolve_layer_spec(stage["vp_stage"])
        build = partial(
            MegatronGPTModel,
            self,
            transformer_layer_spec=layers,
            mtp_block_spec=mtp_block_spec(self, layers, vp_stage=stage["vp_stage"]),
            **stage,
            **self._model_arguments(tokenizer),
        )
        with torch.device("meta") if self.init_model_with_meta_device else nullcontext():
            model = fusing_where_possible(build)
        self._finish_end(model, tokenizer)
        self.customize_model(model)
        return model

    def customize_model(self, model: Any) -> None:
        """Change a chunk that `configure_model` has built, where a family differs from Megatron-Core's ``GPTModel``. A family
        that overrides it calls its parent's first."""

    def _model_arguments(self, tokenizer: Any) -> dict[str, Any]:
        """The arguments that Megatron-Core's GPTs and hybrids share."""
        return {
            "vocab_size": self.padded_vocab_size(tokenizer),
            "max_sequence_length": self.seq_length,
            **{name: getattr(self, name) for name in _MODEL_ARGUMENTS},
        }

    def _finish_end(self, model: Any, tokenizer: Any) -> None:
        """Of a chunk with an output layer, cap and mask the logits before anything reads them, and finish the additional
        predictions."""
        from nemo2.models.layers.logits import cap_logits, mask_padding

        if not hasattr(model, "output_layer"):
            return
        if self.final_logit_softcapping is not None:
            cap_logits(model.output_layer, self.final_logit_softcapping)
        mask_padding(model.output_layer, self.num_token_ids(tokenizer), model.vocab_size)
        if self.mtp_num_layers and model.post_process:
            from nemo2.models.layers import mtp

            mtp.tie_output_layer(model)
            mtp.weigh_further_losses(model)
            mtp.leave_out_padding(model)
            mtp.answer_without_labels(model)

    def padded_vocab_size(self, tokenizer: Any) -> int:
        """The rows of the embedding over all tensor-parallel ranks.

        Raises:
            ConfigError: both the size and the tokenizer are missing, or the size does not fit.
        """
        tp = self.tensor_model_parallel_size
        if self.vocab_size is None:
            if tokenizer is None:
                raise ConfigError(
                    "No tokenizer defines the vocabulary, and model.config.vocab_size is not set. Set data.tokenizer to the "
                    "model's tokenizer, or model.config.vocab_size for data of token ids."
                )
            return get_vocab_size(self, tokenizer.vocab_size, self.make_vocab_size_divisible_by)
        if tokenizer is not None and tokenizer.vocab_size > self.vocab_size:
            raise ConfigError(
                f"model.config.vocab_size={self.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} "
                "tokens: raise it, or set None, with which the tokenizer decides."
            )
        return -(-self.vocab_size // tp) * tp

    def num_token_ids(self, tokenizer: Any) -> int:
        """The rows of the embedding that the data's ids may use: ``vocab_size`` if it is set, otherwise the tokenizer's
        tokens. Without ``mask_vocab_padding`` the padding of the tokenizer's tokens is included.

        Raises:
            ConfigError: as in `padded_vocab_size`.
        """
        padded = self.padded_vocab_size(tokenizer)
        if self.vocab_size is not None:
            return self.vocab_size
        return tokenizer.vocab_size if self.mask_vocab_padding else padded

    def _stage(
        self, pre_process: Optional[bool], post_process: Optional[bool], vp_stage: Optional[int]
    ) -> dict[str, Any]:
        """Megatron-Core's arguments about the part of the pipeline that a model holds."""
        if self.virtual_pipeline_model_parallel_size is not None and vp_stage is None:
            vp_stage = 0
        place: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        return {
            "pre_process": parallel_state.is_pipeline_first_stage(**place) if pre_process is None else pre_process,
            "post_process": parallel_state.is_pipeline_last_stage(**place) if post_process is None else post_process,
            "vp_stage": vp_stage,
        }

    def _resolve_layer_spec(self, vp_stage: Optional[int]) -> ModuleSpec:
        spec = self.transformer_layer_spec
        if not isinstance(spec, ModuleSpec):
            takes_stage = "vp_stage" in inspect.signature(spec).parameters
            spec = spec(self, vp_stage=vp_stage) if takes_stage else spec(self)
        if not self.num_moe_experts:
            return spec
        from nemo2.models.layers.moe import with_weighted_routers

        return with_weighted_routers(spec)


register_elsewhere("nemo2.models.gpt:GPTConfig", "data", seq_length=lambda data: getattr(data, "seq_length", NOT_HERE))
_MASTER_WEIGHTS = (
    "the precision keeps parameters in 16 bits and the optimizer's in fp32: set trainer.plugins=bf16_mixed(), or "
    "precision='bf16-mixed' of nl.MegatronMixedPrecision."
)
register_gone(
    "nemo2.models.gpt:GPTModel",
    megatron_amp_O2=_MASTER_WEIGHTS,
    model_context_managers="they patch Megatron-Core while NeMo builds the model; model_transform changes the built model.",
)
register_gone(
    "nemo2.models.gpt:GPTConfig",
    megatron_amp_O2=_MASTER_WEIGHTS,
    async_tensor_model_parallel_allreduce="Megatron-Core always overlaps this reduction. Leave it out.",
    generation_config="an export writes the release's own generation_config.json. Leave it out.",
    overlap_param_gather_with_optimizer_step="it is the optimizer's: optim.config.overlap_param_gather_with_optimizer_step.",
)


@configurable
class GPTModel(FNMixin, pl.LightningModule):
    """A GPT for Lightning and ``MegatronStrategy``.

    ``configure_model`` builds the Megatron model once the process groups exist. Until then the object is cheap.

    Args:
        config: The architecture, such as `Llama32Config1B()`. None: an object of `default_config`.
        optim: The optimizer and its learning-rate schedule. None: Adam at 1e-4.
        tokenizer: The tokenizer of the model. None: no tokenizer until training sets the data's.
        model_transform: A function that takes a module and returns a module. It is applied to each chunk before the
            chunk is wrapped (`nemo2.mcore.parallel.transform`; PEFT uses it). None: no transform.

    Raises:
        ConfigError: ``config`` is None, and the class has no default.
    """

    default_config: ClassVar[Optional[type[GPTConfig]]] = None
    """The class of the config if none is passed, as in NeMo. None: a config is required."""
    module: Any
    """Megatron-Core's model, once `configure_model` has built it."""

    def __init__(
        self,
        config: Optional[GPTConfig] = None,
        optim: Optional[OptimizerModule] = None,
        tokenizer: Optional[Tokenizer] = None,
        model_transform: Optional[Callable[..., torch.nn.Module]] = None,
    ):
        super().__init__()
        if config is None and self.default_config is not None:
            config = self.default_config()
        if config is None:
            raise ConfigError(
                f"{type(self).__name__} needs a config of its family: pass that of a size, as in "
                "`LlamaModel(config=Llama32Config1B())`."
            )
        self.config = config
        self.tokenizer = tokenizer
        self.model_transform = model_transform
        self.padded_vocab_size: Optional[int] = None
        """The rows of the embedding. None: the model isn't built yet."""
        self.optim = optim if optim is not None else _default_optimizer()
        self.optim.connect(self)

    def configure_model(self) -> None:
        """Build ``self.module``, the first chunk on this rank. A second call keeps the existing chunk.

        Raises:
            ConfigError: the strategy has not created Megatron-Core's process groups.
        """
        if not parallel_state.model_parallel_is_initialized():
            trainer = self._trainer
            place = "this process" if trainer is None else f"trainer.strategy={type(trainer.strategy).__name__}"
            raise ConfigError(without_groups(type(self).__name__, place))
        if not hasattr(self, "module"):
            self.module = self.build_chunk(None)

    def build_chunk(self, vp_stage: Optional[int]) -> MegatronGPTModel:
        """Build one chunk of the pipeline: that of virtual stage ``vp_stage``. None: this rank's first or only
        chunk."""
        self._part_experts()
        forget_tracked_losses()
        chunk = self.config.configure_model(self.tokenizer, vp_stage=vp_stage)
        self.padded_vocab_size = chunk.vocab_size
        return chunk

    def _part_experts(self) -> None:
        """Build routed experts separately if their layers get adapters, because a layer that holds all experts of a
        rank has no place for an adapter per expert.

        Raises:
            ConfigError: the recomputation settings need the combined layer.
        """
        beside = getattr(self.model_transform, "is_beside_experts", None)
        config: Any = self.config
        if beside is None or not config.moe_grouped_gemm:
            return
        from nemo2.models.walker import linear_layers

        if not beside(linear_layers(config) or ()):
            return
        if config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ()):
            raise ConfigError(
                "model.config.recompute_modules has 'moe_act', which needs grouped experts, but experts with adapters (peft) "
                "are not grouped. Remove 'moe_act', or exclude the experts: "
                "peft.exclude_modules=[*.experts.linear_fc1,*.experts.linear_fc2]."
            )
        adjust(config, "moe_grouped_gemm", False, why="each expert has its own adapter (peft)")

    def forward(
        self,
        input_ids: Optional[Tensor],
        position_ids: Optional[Tensor],
        attention_mask: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        decoder_input: Optional[Tensor] = None,
        packed_seq_params: Any = None,
        loss_mask: Optional[Tensor] = None,
        padding_mask: Optional[Tensor] = None,
    ) -> Tensor:
        """Return the loss per token ``[batch, sequence]`` with labels, or the logits ``[batch, sequence, vocabulary /
        tp]`` without.

        Pipeline stages before the last return hidden states ``[sequence, batch, hidden]``. ``loss_mask`` is for
        multi-token prediction, whose additional losses leave out the same tokens. None: every token counts.
        ``padding_mask`` is for routers of experts, whose losses leave out the tokens where it is True. None: no padding.
        """
        masks = {"loss_mask": loss_mask, "padding_mask": padding_mask}
        further = {name: mask for name, mask in masks.items() if mask is not None}
        return self.module(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=decoder_input,
            labels=labels,
            packed_seq_params=packed_seq_params,
            **further,
        )

    def on_megatron_step_start(self, step: MegatronStep) -> None:
        """Count the step's tokens for the losses of routers and of multi-token prediction (`nemo2.models.step_tokens`)."""
        config = self.config
        has_extra_losses = config.num_moe_experts or config.mtp_num_layers
        if step.stage == "training" and config.calculate_per_token_loss and has_extra_losses:
            from nemo2.models.step_tokens import count_step_tokens

            count_step_tokens(step.microbatches(), mtp_num_layers=config.mtp_num_layers or 0)

    def data_step(self, dataloader_iter: Iterator[Any]) -> dict[str, Optional[Tensor]]:
        """Fetch the next micro-batch for this rank and check its token ids; see `gpt_data_step`."""
        if self.padded_vocab_size is not None:
            token_ids = self.config.num_token_ids(self.tokenizer)
            dataloader_iter = (check_token_ids(batch, token_ids) for batch in dataloader_iter)
        if self.config.mtp_num_layers and self.config.data_step_fn is gpt_data_step:
            # Multi-token prediction embeds the tokens again on the last stage.
            return gpt_data_step(dataloader_iter, use_mtp=True)
        return self.config.data_step_fn(dataloader_iter)

    def forward_step(self, *inputs: Any) -> Tensor:
        """Run this chunk on a batch of `data_step`: ``forward_step(batch)``, or ``forward_step(model, batch)``.

        A subclass may define either form.
        """
        *model, batch = inputs
        return self.config.forward_step_fn(model[0] if model else self, batch)

    def training_step(self, batch: dict[str, Optional[Tensor]], batch_idx: Optional[int] = None) -> Tensor:
        return with_model(self.forward_step, self)(batch)

    validation_step = test_step = training_step

    @cached_property
    def training_loss_reduction(self) -> MaskedTokenLossReduction:
        """The reduction of per-token losses to the loss that is optimized and logged: the mean over unmasked tokens."""
        return MaskedTokenLossReduction(per_token=self.config.calculate_per_token_loss)

    @cached_property
    def validation_loss_reduction(self) -> MaskedTokenLossReduction:
        """The loss reduction of validation, as in `training_loss_reduction`."""
        return MaskedTokenLossReduction(validation_step=True, per_token=self.config.calculate_per_token_loss)

    @property
    def test_loss_reduction(self) -> Any:
        """The loss reduction of testing: that of validation."""
        return self.validation_loss_reduction


def without_groups(model: str, strategy: str) -> str:
    """The error that ``strategy`` has no process groups for a ``model`` of Megatron-Core's layers."""
    return (
        f"{model} consists of Megatron-Core layers, which need Megatron-Core's process groups, and {strategy} doesn't create "
        "them. Use strategy=MegatronStrategy(), which replicates the model like DDP if no parallel size is set, or "
        "FSDP2Strategy() or FSDPStrategy() for torch's sharding."
    )


def _default_optimizer() -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.mcore.optim.megatron import MegatronOptimizerModule

    return MegatronOptimizerModule(OptimizerConfig(lr=1e-4, use_distributed_optimizer=True))


def get_vocab_size(config: Any, vocab_size: int, make_vocab_size_divisible_by: int = 128) -> int:
    """`vocab_size` padded for a model's embedding and output layer.

    The next multiple of `make_vocab_size_divisible_by` * ``config.tensor_model_parallel_size``. Every tensor-parallel
    rank then holds the same number of rows, and that number suits the matrix units.

    Args:
        config: The model's configuration.
        vocab_size: The number of the tokenizer's ids.
        make_vocab_size_divisible_by: The number of rows per rank is a multiple of this number.
    """
    multiple = make_vocab_size_divisible_by * config.tensor_model_parallel_size
    if multiple < 1:
        raise ConfigError(
            f"make_vocab_size_divisible_by={make_vocab_size_divisible_by} * tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size}: both must be 1 or more."
        )
    return -(-vocab_size // multiple) * multiple
