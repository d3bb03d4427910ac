# SPDX-License-Identifier: Apache-2.0
# Written by `make fmt` (tools/recipe_types.py) from signatures and recipes.
import collections.abc
import datetime
import pathlib
import typing

import fiddle
import lightning.fabric.plugins.environments.cluster_environment
import lightning.fabric.plugins.io.checkpoint_io
import lightning.pytorch.accelerators.accelerator
import lightning.pytorch.callbacks.callback
import lightning.pytorch.callbacks.checkpoint
import lightning.pytorch.core.datamodule
import lightning.pytorch.core.module
import lightning.pytorch.loggers.logger
import lightning.pytorch.loggers.tensorboard
import lightning.pytorch.plugins.layer_sync
import lightning.pytorch.plugins.precision.precision
import lightning.pytorch.profilers.profiler
import lightning.pytorch.strategies.strategy
import lightning.pytorch.trainer.trainer
import megatron.core.distributed.distributed_data_parallel_config
import megatron.core.optimizer.optimizer_config
import torch
import torch.nn.modules.module
import torch.nn.parameter

import nemo2.checkpoint.auto_resume
import nemo2.checkpoint.model_checkpoint
import nemo2.config
import nemo2.data.demo
import nemo2.data.finetuning.docstrings
import nemo2.data.finetuning.packing
import nemo2.data.finetuning.published
import nemo2.data.mock
import nemo2.data.sampler
import nemo2.data.tokenizer
import nemo2.mcore.optim.base
import nemo2.mcore.optim.lr_scheduler
import nemo2.mcore.optim.megatron
import nemo2.mcore.precision
import nemo2.models.baichuan
import nemo2.models.chatglm
import nemo2.models.cohere
import nemo2.models.cohere2
import nemo2.models.deepseek
import nemo2.models.ernie45
import nemo2.models.ernie45_moe
import nemo2.models.gemma
import nemo2.models.gemma2
import nemo2.models.gemma3
import nemo2.models.glm4_moe
import nemo2.models.gpt
import nemo2.models.gpt3
import nemo2.models.gpt_oss
import nemo2.models.granite
import nemo2.models.granite_moe
import nemo2.models.hunyuan
import nemo2.models.hunyuan_moe
import nemo2.models.llama
import nemo2.models.llama4
import nemo2.models.llama_nemotron
import nemo2.models.minimax_m2
import nemo2.models.ministral3
import nemo2.models.mistral
import nemo2.models.mixtral
import nemo2.models.nemotron
import nemo2.models.olmo2
import nemo2.models.olmo3
import nemo2.models.olmoe
import nemo2.models.peft.base
import nemo2.models.peft.dora
import nemo2.models.peft.lora
import nemo2.models.phi3
import nemo2.models.qwen2
import nemo2.models.qwen2_moe
import nemo2.models.qwen3
import nemo2.models.qwen3_next
import nemo2.models.seed_oss
import nemo2.models.smollm3
import nemo2.models.ssm
import nemo2.models.starcoder
import nemo2.models.starcoder2
import nemo2.recipes._assembler
import nemo2.recipes._finetuning
import nemo2.recipes._signatures
import nemo2.training.run_dir.logger
import nemo2.training.run_dir.run_folder
import nemo2.training.strategy
import nemo2.training.trainer

_Read = typing.TypeVar("_Read")
_Write = typing.TypeVar("_Write")
_Model = typing.TypeVar("_Model")
_ModelConfig = typing.TypeVar("_ModelConfig")
_Data = typing.TypeVar("_Data")
_FinetuningData = typing.TypeVar("_FinetuningData")
AnyConfig = fiddle.Buildable[typing.Any]

class _Closed:
    # A field that a class doesn't have is an error, though a config's `__getattr__` takes any name.
    __getattr__: None
    __setattr__: None

class Part(typing.Generic[_Read, _Write]):
    """A field that recipes set to a config, which can be replaced by a config of another class."""

    def __get__(self, obj: object, owner: type | None = None) -> _Read: ...
    def __set__(self, obj: object, value: _Write) -> None: ...

class AnyRecipe:
    """A recipe whose name is known at run time only."""

    RECIPE: nemo2.recipes._assembler.PretrainRecipe
    FINETUNE: nemo2.recipes._finetuning.FinetuneRecipe
    def model(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any: ...
    def trainer(self, *args: typing.Any, **kwargs: typing.Any) -> Trainer: ...
    def pretrain_recipe(self, *args: typing.Any, **kwargs: typing.Any) -> Pretraining[typing.Any, typing.Any]: ...
    def finetune_recipe(self, *args: typing.Any, **kwargs: typing.Any) -> Finetuning[typing.Any, typing.Any]: ...

class _GPTConfigFields:
    bias_dropout_add_fusion: bool
    """The same as `bias_dropout_fusion`."""

class _GPTModelFields(typing.Generic[_ModelConfig]):
    config: Part[_ModelConfig, _ModelConfig | nemo2.models.gpt.GPTConfig | None | AnyConfig]
    """Default: `None`."""
    optim: nemo2.mcore.optim.base.OptimizerModule | None | AnyConfig
    """Default: `None`."""
    tokenizer: nemo2.data.tokenizer.Tokenizer | None | AnyConfig
    """Default: `None`."""
    model_transform: collections.abc.Callable[..., torch.nn.modules.module.Module] | None
    """Default: `None`."""

class _SSMConfigFields:
    bias_dropout_add_fusion: bool
    """The same as `bias_dropout_fusion`."""
    mamba_ssm_ngroups: int
    """The same as `mamba_num_groups`."""

class _DeepSeekConfigFields:
    bias_dropout_add_fusion: bool
    """The same as `bias_dropout_fusion`."""
    max_position_embeddings: int
    """The same as `original_max_position_embeddings`."""

class _GPTOSSConfigFields:
    bias_dropout_add_fusion: bool
    """The same as `bias_dropout_fusion`."""
    rotary_scaling_factor: float
    """The same as `yarn_rotary_scaling_factor`."""

class _Llama4ConfigFields:
    bias_dropout_add_fusion: bool
    """The same as `bias_dropout_fusion`."""
    nope_layer_interval: int | list[int] | None
    """The same as `no_rope_freq`."""

class AutoResume(_Closed, nemo2.config.Config[nemo2.checkpoint.auto_resume.AutoResume]):
    restore_config: Part[RestoreConfig, nemo2.checkpoint.auto_resume.RestoreConfig | None | AnyConfig]
    """Default: `None`."""
    resume_from_directory: str | None
    """Default: `None`."""
    resume_from_path: str | None
    """Default: `None`."""
    resume_if_exists: bool
    """Default: `False`."""
    resume_past_end: bool
    """Default: `False`."""
    resume_ignore_no_checkpoint: bool
    """Default: `False`."""
    accept_changes: bool
    """Default: `False`."""

class AyaConfig8B(
    _GPTConfigFields, _Closed, nemo2.models.cohere.AyaConfig8B, nemo2.config.Config[nemo2.models.cohere.AyaConfig8B]
): ...
class Baichuan2Config7B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.baichuan.Baichuan2Config7B,
    nemo2.config.Config[nemo2.models.baichuan.Baichuan2Config7B],
): ...
class Baichuan2Model(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.baichuan.Baichuan2Model]
): ...
class BaseMambaConfig130M(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.BaseMambaConfig130M,
    nemo2.config.Config[nemo2.models.ssm.BaseMambaConfig130M],
): ...
class BaseMambaConfig1_3B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.BaseMambaConfig1_3B,
    nemo2.config.Config[nemo2.models.ssm.BaseMambaConfig1_3B],
): ...
class BaseMambaConfig2_7B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.BaseMambaConfig2_7B,
    nemo2.config.Config[nemo2.models.ssm.BaseMambaConfig2_7B],
): ...
class BaseMambaConfig370M(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.BaseMambaConfig370M,
    nemo2.config.Config[nemo2.models.ssm.BaseMambaConfig370M],
): ...
class BaseMambaConfig780M(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.BaseMambaConfig780M,
    nemo2.config.Config[nemo2.models.ssm.BaseMambaConfig780M],
): ...
class ChatGLM3Config6B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.chatglm.ChatGLM3Config6B,
    nemo2.config.Config[nemo2.models.chatglm.ChatGLM3Config6B],
): ...
class ChatGLMModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.chatglm.ChatGLMModel]): ...
class Cohere2Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.cohere2.Cohere2Model]): ...
class CohereModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.cohere.CohereModel]): ...
class CommandAConfig111B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.cohere2.CommandAConfig111B,
    nemo2.config.Config[nemo2.models.cohere2.CommandAConfig111B],
): ...
class CommandR7BConfig(
    _GPTConfigFields,
    _Closed,
    nemo2.models.cohere2.CommandR7BConfig,
    nemo2.config.Config[nemo2.models.cohere2.CommandR7BConfig],
): ...
class CommandRConfig32B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.cohere.CommandRConfig32B,
    nemo2.config.Config[nemo2.models.cohere.CommandRConfig32B],
): ...
class CommandRConfig35B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.cohere.CommandRConfig35B,
    nemo2.config.Config[nemo2.models.cohere.CommandRConfig35B],
): ...

class CosineAnnealingScheduler(_Closed, nemo2.config.Config[nemo2.mcore.optim.lr_scheduler.CosineAnnealingScheduler]):
    max_steps: int | None
    """Default: `None`."""
    warmup_steps: int
    """Default: `750`."""
    constant_steps: int
    """Default: `80000`."""
    min_lr: float
    """Default: `6e-05`."""
    interval: str
    """Default: `'step'`."""
    frequency: int
    """Default: `1`."""
    monitor: str
    """Default: `'val_loss'`."""

class DeepSeekModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.deepseek.DeepSeekModel]
): ...
class DeepSeekV2Config(
    _DeepSeekConfigFields,
    _Closed,
    nemo2.models.deepseek.DeepSeekV2Config,
    nemo2.config.Config[nemo2.models.deepseek.DeepSeekV2Config],
): ...
class DeepSeekV2LiteConfig(
    _DeepSeekConfigFields,
    _Closed,
    nemo2.models.deepseek.DeepSeekV2LiteConfig,
    nemo2.config.Config[nemo2.models.deepseek.DeepSeekV2LiteConfig],
): ...
class DeepSeekV3Config(
    _DeepSeekConfigFields,
    _Closed,
    nemo2.models.deepseek.DeepSeekV3Config,
    nemo2.config.Config[nemo2.models.deepseek.DeepSeekV3Config],
): ...

class DistributedDataParallelConfig(
    _Closed,
    megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig,
    nemo2.config.Config[megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig],
):
    overlap_grad_sync: bool
    """The same as `overlap_grad_reduce`."""
    overlap_param_sync: bool
    """The same as `overlap_param_gather`."""

class DoRA(_Closed, nemo2.config.Config[nemo2.models.peft.dora.DoRA]):
    target_modules: list[str] | None
    """Default: `None`."""
    exclude_modules: list[str] | None
    """Default: `None`."""
    dim: int
    """Default: `32`."""
    alpha: float
    """Default: `64`."""
    dropout: float
    """Default: `0.0`."""
    dropout_position: typing.Literal["post", "pre"]
    """Default: `'pre'`."""
    lora_A_init_method: typing.Literal["kaiming", "normal", "uniform", "xavier", "zero"]
    """Default: `'xavier'`."""
    lora_B_init_method: typing.Literal["kaiming", "normal", "uniform", "xavier", "zero"]
    """Default: `'zero'`."""
    lora_dtype: torch.dtype | None | str
    """Default: `None`."""
    modules_to_save: list[str] | None
    """Default: `None`."""

class ERNIE45Config21B_A3B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.ernie45_moe.ERNIE45Config21B_A3B,
    nemo2.config.Config[nemo2.models.ernie45_moe.ERNIE45Config21B_A3B],
): ...
class ERNIE45Config300B_A47B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.ernie45_moe.ERNIE45Config300B_A47B,
    nemo2.config.Config[nemo2.models.ernie45_moe.ERNIE45Config300B_A47B],
): ...
class ERNIE45Config300M(
    _GPTConfigFields,
    _Closed,
    nemo2.models.ernie45.ERNIE45Config300M,
    nemo2.config.Config[nemo2.models.ernie45.ERNIE45Config300M],
): ...
class ERNIE45MoEModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.ernie45_moe.ERNIE45MoEModel]
): ...
class ERNIE45Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.ernie45.ERNIE45Model]): ...
class GLM45AirConfig106B_A12B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.glm4_moe.GLM45AirConfig106B_A12B,
    nemo2.config.Config[nemo2.models.glm4_moe.GLM45AirConfig106B_A12B],
): ...
class GLM45Config355B_A32B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.glm4_moe.GLM45Config355B_A32B,
    nemo2.config.Config[nemo2.models.glm4_moe.GLM45Config355B_A32B],
): ...
class GLM46Config355B_A32B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.glm4_moe.GLM46Config355B_A32B,
    nemo2.config.Config[nemo2.models.glm4_moe.GLM46Config355B_A32B],
): ...
class GLM4MoEModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.glm4_moe.GLM4MoEModel]): ...
class GPTConfig175B(
    _GPTConfigFields, _Closed, nemo2.models.gpt3.GPTConfig175B, nemo2.config.Config[nemo2.models.gpt3.GPTConfig175B]
): ...
class GPTModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.gpt.GPTModel]): ...
class GPTOSSConfig120B(
    _GPTOSSConfigFields,
    _Closed,
    nemo2.models.gpt_oss.GPTOSSConfig120B,
    nemo2.config.Config[nemo2.models.gpt_oss.GPTOSSConfig120B],
): ...
class GPTOSSConfig20B(
    _GPTOSSConfigFields,
    _Closed,
    nemo2.models.gpt_oss.GPTOSSConfig20B,
    nemo2.config.Config[nemo2.models.gpt_oss.GPTOSSConfig20B],
): ...
class GPTOSSModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.gpt_oss.GPTOSSModel]): ...
class Gemma2Config27B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.gemma2.Gemma2Config27B,
    nemo2.config.Config[nemo2.models.gemma2.Gemma2Config27B],
): ...
class Gemma2Config2B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.gemma2.Gemma2Config2B,
    nemo2.config.Config[nemo2.models.gemma2.Gemma2Config2B],
): ...
class Gemma2Config9B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.gemma2.Gemma2Config9B,
    nemo2.config.Config[nemo2.models.gemma2.Gemma2Config9B],
): ...
class Gemma2Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.gemma2.Gemma2Model]): ...
class Gemma3Config12B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.gemma3.Gemma3Config12B,
    nemo2.config.Config[nemo2.models.gemma3.Gemma3Config12B],
): ...
class Gemma3Config1B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.gemma3.Gemma3Config1B,
    nemo2.config.Config[nemo2.models.gemma3.Gemma3Config1B],
): ...
class Gemma3Config27B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.gemma3.Gemma3Config27B,
    nemo2.config.Config[nemo2.models.gemma3.Gemma3Config27B],
): ...
class Gemma3Config4B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.gemma3.Gemma3Config4B,
    nemo2.config.Config[nemo2.models.gemma3.Gemma3Config4B],
): ...
class Gemma3Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.gemma3.Gemma3Model]): ...
class GemmaConfig2B(
    _GPTConfigFields, _Closed, nemo2.models.gemma.GemmaConfig2B, nemo2.config.Config[nemo2.models.gemma.GemmaConfig2B]
): ...
class GemmaConfig7B(
    _GPTConfigFields, _Closed, nemo2.models.gemma.GemmaConfig7B, nemo2.config.Config[nemo2.models.gemma.GemmaConfig7B]
): ...
class GemmaModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.gemma.GemmaModel]): ...
class Granite3Config1B_A400M(
    _GPTConfigFields,
    _Closed,
    nemo2.models.granite_moe.Granite3Config1B_A400M,
    nemo2.config.Config[nemo2.models.granite_moe.Granite3Config1B_A400M],
): ...
class Granite3Config2B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.granite.Granite3Config2B,
    nemo2.config.Config[nemo2.models.granite.Granite3Config2B],
): ...
class Granite3Config3B_A800M(
    _GPTConfigFields,
    _Closed,
    nemo2.models.granite_moe.Granite3Config3B_A800M,
    nemo2.config.Config[nemo2.models.granite_moe.Granite3Config3B_A800M],
): ...
class Granite3Config8B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.granite.Granite3Config8B,
    nemo2.config.Config[nemo2.models.granite.Granite3Config8B],
): ...
class GraniteMoEModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.granite_moe.GraniteMoEModel]
): ...
class GraniteModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.granite.GraniteModel]): ...
class HunyuanConfig1P8B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.hunyuan.HunyuanConfig1P8B,
    nemo2.config.Config[nemo2.models.hunyuan.HunyuanConfig1P8B],
): ...
class HunyuanConfig4B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.hunyuan.HunyuanConfig4B,
    nemo2.config.Config[nemo2.models.hunyuan.HunyuanConfig4B],
): ...
class HunyuanConfig500M(
    _GPTConfigFields,
    _Closed,
    nemo2.models.hunyuan.HunyuanConfig500M,
    nemo2.config.Config[nemo2.models.hunyuan.HunyuanConfig500M],
): ...
class HunyuanConfig7B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.hunyuan.HunyuanConfig7B,
    nemo2.config.Config[nemo2.models.hunyuan.HunyuanConfig7B],
): ...
class HunyuanConfig80B_A13B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.hunyuan_moe.HunyuanConfig80B_A13B,
    nemo2.config.Config[nemo2.models.hunyuan_moe.HunyuanConfig80B_A13B],
): ...
class HunyuanMoEModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.hunyuan_moe.HunyuanMoEModel]
): ...
class HunyuanModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.hunyuan.HunyuanModel]): ...
class KimiK2Config1T_A32B(
    _DeepSeekConfigFields,
    _Closed,
    nemo2.models.deepseek.KimiK2Config1T_A32B,
    nemo2.config.Config[nemo2.models.deepseek.KimiK2Config1T_A32B],
): ...
class Llama2Config7B(
    _GPTConfigFields, _Closed, nemo2.models.llama.Llama2Config7B, nemo2.config.Config[nemo2.models.llama.Llama2Config7B]
): ...
class Llama31Config405B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama.Llama31Config405B,
    nemo2.config.Config[nemo2.models.llama.Llama31Config405B],
): ...
class Llama31Config70B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama.Llama31Config70B,
    nemo2.config.Config[nemo2.models.llama.Llama31Config70B],
): ...
class Llama31Config8B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama.Llama31Config8B,
    nemo2.config.Config[nemo2.models.llama.Llama31Config8B],
): ...
class Llama31Nemotron70BConfig(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama_nemotron.Llama31Nemotron70BConfig,
    nemo2.config.Config[nemo2.models.llama_nemotron.Llama31Nemotron70BConfig],
): ...
class Llama31NemotronNano8BConfig(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama_nemotron.Llama31NemotronNano8BConfig,
    nemo2.config.Config[nemo2.models.llama_nemotron.Llama31NemotronNano8BConfig],
): ...
class Llama31NemotronUltra253BConfig(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama_nemotron.Llama31NemotronUltra253BConfig,
    nemo2.config.Config[nemo2.models.llama_nemotron.Llama31NemotronUltra253BConfig],
): ...
class Llama32Config1B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama.Llama32Config1B,
    nemo2.config.Config[nemo2.models.llama.Llama32Config1B],
): ...
class Llama32Config3B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama.Llama32Config3B,
    nemo2.config.Config[nemo2.models.llama.Llama32Config3B],
): ...
class Llama33NemotronSuper49BConfig(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama_nemotron.Llama33NemotronSuper49BConfig,
    nemo2.config.Config[nemo2.models.llama_nemotron.Llama33NemotronSuper49BConfig],
): ...
class Llama3Config70B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.llama.Llama3Config70B,
    nemo2.config.Config[nemo2.models.llama.Llama3Config70B],
): ...
class Llama3Config8B(
    _GPTConfigFields, _Closed, nemo2.models.llama.Llama3Config8B, nemo2.config.Config[nemo2.models.llama.Llama3Config8B]
): ...
class Llama4Experts128Config(
    _Llama4ConfigFields,
    _Closed,
    nemo2.models.llama4.Llama4Experts128Config,
    nemo2.config.Config[nemo2.models.llama4.Llama4Experts128Config],
): ...
class Llama4Experts16Config(
    _Llama4ConfigFields,
    _Closed,
    nemo2.models.llama4.Llama4Experts16Config,
    nemo2.config.Config[nemo2.models.llama4.Llama4Experts16Config],
): ...
class LlamaConfig(
    _GPTConfigFields, _Closed, nemo2.models.llama.LlamaConfig, nemo2.config.Config[nemo2.models.llama.LlamaConfig]
): ...
class LlamaModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.llama.LlamaModel]): ...
class LlamaNemotronModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.llama_nemotron.LlamaNemotronModel]
): ...

class LoRA(_Closed, nemo2.config.Config[nemo2.models.peft.lora.LoRA]):
    target_modules: list[str] | None
    """Default: `None`."""
    exclude_modules: list[str] | None
    """Default: `None`."""
    dim: int
    """Default: `32`."""
    alpha: float
    """Default: `32`."""
    dropout: float
    """Default: `0.0`."""
    dropout_position: typing.Literal["post", "pre"]
    """Default: `'pre'`."""
    lora_A_init_method: typing.Literal["kaiming", "normal", "uniform", "xavier", "zero"]
    """Default: `'xavier'`."""
    lora_B_init_method: typing.Literal["kaiming", "normal", "uniform", "xavier", "zero"]
    """Default: `'zero'`."""
    lora_dtype: torch.dtype | None | str
    """Default: `None`."""
    modules_to_save: list[str] | None
    """Default: `None`."""

class MambaModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.ssm.MambaModel]): ...

class MegatronMixedPrecision(_Closed, nemo2.config.Config[nemo2.mcore.precision.MegatronMixedPrecision]):
    precision: int | str
    """Default: `'bf16-mixed'`."""
    params_dtype: torch.dtype | None | str
    """Default: `None`."""
    pipeline_dtype: torch.dtype | None | str
    """Default: `None`."""
    autocast_dtype: torch.dtype | None | str
    """Default: `None`."""
    autocast_enabled: bool
    """Default: `False`."""
    grad_reduce_in_fp32: bool
    """Default: `True`."""
    fp8: typing.Literal["e4m3", "hybrid"] | None
    """Default: `None`."""
    fp8_recipe: typing.Literal["blockwise", "delayed", "mxfp8", "tensorwise"] | None
    """Default: `'delayed'`."""
    first_last_layers_bf16: bool
    """Default: `False`."""
    fp8_margin: int
    """Default: `0`."""
    fp8_amax_history_len: int
    """Default: `1`."""
    fp8_amax_compute_algo: str
    """Default: `'most_recent'`."""
    fp8_wgrad: bool
    """Default: `True`."""
    fp8_dot_product_attention: bool
    """Default: `False`."""
    fp8_multi_head_attention: bool
    """Default: `False`."""
    fp8_params: bool | None
    """Default: `None`."""
    fp8_param_gather: bool | None
    """Default: `None`."""
    fp4: str | None
    """Default: `None`."""
    fp4_recipe: str
    """Default: `'nvfp4'`."""
    fp16_loss_scale: float | None
    """Default: `None`."""
    fp16_initial_loss_scale: float
    """Default: `4294967296.0`."""
    fp16_min_loss_scale: float
    """Default: `1.0`."""
    fp16_loss_scale_window: int
    """Default: `1000`."""
    fp16_hysteresis: int
    """Default: `2`."""
    num_layers_at_start_in_bf16: int
    """Default: `0`."""
    num_layers_at_end_in_bf16: int
    """Default: `0`."""
    reuse_grad_buf_for_mxfp8_param_ag: bool
    """Default: `False`."""

class MegatronOptimizerModule(_Closed, nemo2.config.Config[nemo2.mcore.optim.megatron.MegatronOptimizerModule]):
    config: Part[OptimizerConfig, megatron.core.optimizer.optimizer_config.OptimizerConfig | AnyConfig]
    """Required."""
    lr_scheduler: Part[CosineAnnealingScheduler, nemo2.mcore.optim.lr_scheduler.LRSchedulerModule | None | AnyConfig]
    """Default: `None`."""
    no_weight_decay_cond: collections.abc.Callable[[str, torch.nn.parameter.Parameter], bool] | None
    """Default: `None`."""
    scale_lr_cond: collections.abc.Callable[[str, torch.nn.parameter.Parameter], bool] | None
    """Default: `None`."""
    lr_mult: float
    """Default: `1.0`."""

class MegatronStrategy(_Closed, nemo2.config.Config[nemo2.training.strategy.MegatronStrategy]):
    tensor_model_parallel_size: int
    """Default: `1`."""
    pipeline_model_parallel_size: int
    """Default: `1`."""
    pipeline_model_parallel_comm_backend: str | None
    """Default: `None`."""
    num_layers_in_first_pipeline_stage: int | None
    """Default: `None`."""
    num_layers_in_last_pipeline_stage: int | None
    """Default: `None`."""
    virtual_pipeline_model_parallel_size: int | None
    """Default: `None`."""
    microbatch_group_size_per_vp_stage: int | None
    """Default: `None`."""
    context_parallel_size: int
    """Default: `1`."""
    sequence_parallel: bool
    """Default: `False`."""
    expert_model_parallel_size: int
    """Default: `1`."""
    moe_extended_tp: bool
    """Default: `False`."""
    expert_tensor_parallel_size: int | None
    """Default: `None`."""
    encoder_tensor_model_parallel_size: int | None
    """Default: `0`."""
    encoder_pipeline_model_parallel_size: int | None
    """Default: `0`."""
    account_for_embedding_in_pipeline_split: bool
    """Default: `False`."""
    account_for_loss_in_pipeline_split: bool
    """Default: `False`."""
    data_sampler: nemo2.data.sampler.DataSampler | None | AnyConfig
    """Default: `None`."""
    parallel_devices: list[torch.device] | None
    """Default: `None`."""
    cluster_environment: lightning.fabric.plugins.environments.cluster_environment.ClusterEnvironment | None | AnyConfig
    """Default: `None`."""
    checkpoint_io: lightning.fabric.plugins.io.checkpoint_io.CheckpointIO | None | AnyConfig
    """Default: `None`."""
    find_unused_parameters: bool
    """Default: `False`."""
    ckpt_load_optimizer: bool
    """Default: `True`."""
    ckpt_save_optimizer: bool
    """Default: `True`."""
    ckpt_load_main_params: bool
    """Default: `False`."""
    ddp: Part[
        DistributedDataParallelConfig,
        megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig
        | typing.Literal["megatron"]
        | AnyConfig,
    ]
    """Default: `'megatron'`."""
    fsdp: typing.Literal["megatron"] | None
    """Default: `None`."""
    lazy_init: bool
    """Default: `False`."""
    pipeline_dtype: torch.dtype | None | str
    """Default: `None`."""
    use_te_rng_tracker: bool
    """Default: `False`."""
    use_sharp: bool
    """Default: `False`."""
    save_ckpt_format: str
    """Default: `'torch_dist'`."""
    ckpt_async_save: bool
    """Default: `True`."""
    ckpt_torch_dist_multiproc: int | None
    """Default: `None`."""
    ckpt_assume_constant_structure: bool
    """Default: `False`."""
    ckpt_parallel_save: bool
    """Default: `True`."""
    ckpt_parallel_save_within_dp: bool
    """Default: `False`."""
    ckpt_parallel_load: bool
    """Default: `True`."""
    ckpt_parallel_save_optim: bool
    """Default: `True`."""
    ckpt_load_directly_on_device: bool
    """Default: `True`."""
    ckpt_load_strictness: bool | str | None
    """Default: `None`."""
    setup_optimizers: bool
    """Default: `True`."""
    init_model_parallel: bool
    """Default: `True`."""
    replace_progress_bar: bool
    """Default: `True`."""
    progress_interval: int
    """Default: `1`."""
    restore_config: nemo2.checkpoint.auto_resume.RestoreConfig | None | AnyConfig
    """Default: `None`."""
    megatron_log_level: int
    """Default: `0`."""
    use_tp_pp_dp_mapping: bool
    """Default: `False`."""
    num_distributed_optimizer_instances: int
    """Default: `1`."""
    nccl_communicator_config_path: str | None
    """Default: `None`."""
    pipeline_model_parallel_layout: list[typing.Any] | str | None
    """Default: `None`."""
    use_gloo_process_groups: bool
    """Default: `True`."""
    gradient_as_bucket_view: bool
    """Default: `True`."""
    ckpt_save_part: collections.abc.Callable[[str], bool] | typing.Literal["trained"] | None
    """Default: `None`."""
    ddp_config: Part[
        DistributedDataParallelConfig,
        megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig
        | typing.Literal["megatron"]
        | AnyConfig,
    ]
    """The same as `ddp`."""

class MiniMaxM2Config230B_A10B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.minimax_m2.MiniMaxM2Config230B_A10B,
    nemo2.config.Config[nemo2.models.minimax_m2.MiniMaxM2Config230B_A10B],
): ...
class MiniMaxM2Model(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.minimax_m2.MiniMaxM2Model]
): ...
class Ministral3Config14B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.ministral3.Ministral3Config14B,
    nemo2.config.Config[nemo2.models.ministral3.Ministral3Config14B],
): ...
class Ministral3Config3B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.ministral3.Ministral3Config3B,
    nemo2.config.Config[nemo2.models.ministral3.Ministral3Config3B],
): ...
class Ministral3Config8B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.ministral3.Ministral3Config8B,
    nemo2.config.Config[nemo2.models.ministral3.Ministral3Config8B],
): ...
class Ministral3Model(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.ministral3.Ministral3Model]
): ...
class MistralConfig7B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.mistral.MistralConfig7B,
    nemo2.config.Config[nemo2.models.mistral.MistralConfig7B],
): ...
class MistralModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.mistral.MistralModel]): ...
class MistralNeMoConfig12B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.mistral.MistralNeMoConfig12B,
    nemo2.config.Config[nemo2.models.mistral.MistralNeMoConfig12B],
): ...
class MixtralConfig8x22B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.mixtral.MixtralConfig8x22B,
    nemo2.config.Config[nemo2.models.mixtral.MixtralConfig8x22B],
): ...
class MixtralConfig8x7B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.mixtral.MixtralConfig8x7B,
    nemo2.config.Config[nemo2.models.mixtral.MixtralConfig8x7B],
): ...
class MixtralModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.mixtral.MixtralModel]): ...

class MockDataModule(_Closed, nemo2.config.Config[nemo2.data.mock.MockDataModule]):
    seq_length: int
    """Default: `2048`."""
    tokenizer: nemo2.data.tokenizer.Tokenizer | None | AnyConfig
    """Default: `None`."""
    micro_batch_size: int
    """Default: `4`."""
    global_batch_size: int
    """Default: `8`."""
    rampup_batch_size: list[int] | None
    """Default: `None`."""
    num_train_samples: int
    """Default: `10000000`."""
    num_val_samples: int
    """Default: `10000`."""
    num_test_samples: int
    """Default: `10000`."""
    num_workers: int
    """Default: `8`."""
    pin_memory: bool
    """Default: `True`."""
    persistent_workers: bool
    """Default: `False`."""
    create_attention_mask: bool
    """Default: `False`."""
    vocab_file: str | None
    """Default: `None`."""
    merges_file: str | None
    """Default: `None`."""
    seed: int
    """Default: `1234`."""

class ModelCheckpoint(_Closed, nemo2.config.Config[nemo2.checkpoint.model_checkpoint.ModelCheckpoint]):
    monitor: str | None
    """Default: `'val_loss'`."""
    verbose: bool
    """Default: `True`."""
    save_last: bool | typing.Literal["link"] | None
    """Default: `True`."""
    save_top_k: int
    """Default: `3`."""
    save_weights_only: bool
    """Default: `False`."""
    mode: typing.Literal["max", "min"]
    """Default: `'min'`."""
    every_n_epochs: int | None
    """Default: `None`."""
    every_n_train_steps: int | None
    """Default: `None`."""
    train_time_interval: datetime.timedelta | None
    """Default: `None`."""
    save_on_train_epoch_end: bool | None
    """Default: `False`."""
    save_optim_on_train_end: bool | None
    """Default: `False`."""
    always_save_context: bool
    """Default: `True`."""
    save_context_on_train_end: bool
    """Default: `True`."""
    dirpath: str | None
    """Default: `None`."""
    filename: str | None
    """Default: `None`."""
    auto_insert_metric_name: bool
    """Default: `True`."""
    enable_version_counter: bool
    """Default: `False`."""

class MoonlightConfig16B_A3B(
    _DeepSeekConfigFields,
    _Closed,
    nemo2.models.deepseek.MoonlightConfig16B_A3B,
    nemo2.config.Config[nemo2.models.deepseek.MoonlightConfig16B_A3B],
): ...
class NVIDIAMambaConfig8B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.NVIDIAMambaConfig8B,
    nemo2.config.Config[nemo2.models.ssm.NVIDIAMambaConfig8B],
): ...
class NVIDIAMambaHybridConfig8B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.NVIDIAMambaHybridConfig8B,
    nemo2.config.Config[nemo2.models.ssm.NVIDIAMambaHybridConfig8B],
): ...

class NeMoLogger(_Closed, nemo2.config.Config[nemo2.training.run_dir.logger.NeMoLogger]):
    name: str
    """Default: `'default'`."""
    log_dir: str | None
    """Default: `None`."""
    explicit_log_dir: str | None
    """Default: `None`."""
    version: str | None
    """Default: `None`."""
    use_datetime_version: bool
    """Default: `True`."""
    log_local_rank_0_only: bool
    """Default: `False`."""
    log_global_rank_0_only: bool
    """Default: `False`."""
    files_to_copy: list[str] | None
    """Default: `None`."""
    update_logger_directory: bool
    """Default: `True`."""
    ckpt: Part[ModelCheckpoint, lightning.pytorch.callbacks.checkpoint.Checkpoint | None | AnyConfig]
    """Default: `None`."""
    tensorboard: Part[
        nemo2.config.Config[lightning.pytorch.loggers.tensorboard.TensorBoardLogger],
        lightning.pytorch.loggers.tensorboard.TensorBoardLogger | None | AnyConfig,
    ]
    """Default: `None`."""
    wandb: lightning.pytorch.loggers.logger.Logger | None | AnyConfig
    """Default: `None`."""
    extra_loggers: list[typing.Any] | None | AnyConfig
    """Default: `None`."""

class Nemotron3Config22B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.nemotron.Nemotron3Config22B,
    nemo2.config.Config[nemo2.models.nemotron.Nemotron3Config22B],
): ...
class Nemotron3Config4B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.nemotron.Nemotron3Config4B,
    nemo2.config.Config[nemo2.models.nemotron.Nemotron3Config4B],
): ...
class Nemotron3Config8B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.nemotron.Nemotron3Config8B,
    nemo2.config.Config[nemo2.models.nemotron.Nemotron3Config8B],
): ...
class Nemotron3Nano30B_A3B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.Nemotron3Nano30B_A3B,
    nemo2.config.Config[nemo2.models.ssm.Nemotron3Nano30B_A3B],
): ...
class Nemotron4Config15B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.nemotron.Nemotron4Config15B,
    nemo2.config.Config[nemo2.models.nemotron.Nemotron4Config15B],
): ...
class Nemotron4Config340B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.nemotron.Nemotron4Config340B,
    nemo2.config.Config[nemo2.models.nemotron.Nemotron4Config340B],
): ...
class NemotronHConfig47B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.NemotronHConfig47B,
    nemo2.config.Config[nemo2.models.ssm.NemotronHConfig47B],
): ...
class NemotronHConfig4B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.NemotronHConfig4B,
    nemo2.config.Config[nemo2.models.ssm.NemotronHConfig4B],
): ...
class NemotronHConfig56B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.NemotronHConfig56B,
    nemo2.config.Config[nemo2.models.ssm.NemotronHConfig56B],
): ...
class NemotronHConfig8B(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.NemotronHConfig8B,
    nemo2.config.Config[nemo2.models.ssm.NemotronHConfig8B],
): ...
class NemotronModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.nemotron.NemotronModel]
): ...
class NemotronNano12Bv2(
    _SSMConfigFields,
    _Closed,
    nemo2.models.ssm.NemotronNano12Bv2,
    nemo2.config.Config[nemo2.models.ssm.NemotronNano12Bv2],
): ...
class NemotronNano9Bv2(
    _SSMConfigFields, _Closed, nemo2.models.ssm.NemotronNano9Bv2, nemo2.config.Config[nemo2.models.ssm.NemotronNano9Bv2]
): ...
class OLMo2Config13B(
    _GPTConfigFields, _Closed, nemo2.models.olmo2.OLMo2Config13B, nemo2.config.Config[nemo2.models.olmo2.OLMo2Config13B]
): ...
class OLMo2Config32B(
    _GPTConfigFields, _Closed, nemo2.models.olmo2.OLMo2Config32B, nemo2.config.Config[nemo2.models.olmo2.OLMo2Config32B]
): ...
class OLMo2Config7B(
    _GPTConfigFields, _Closed, nemo2.models.olmo2.OLMo2Config7B, nemo2.config.Config[nemo2.models.olmo2.OLMo2Config7B]
): ...
class OLMo2Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.olmo2.OLMo2Model]): ...
class OLMo3Config32B(
    _GPTConfigFields, _Closed, nemo2.models.olmo3.OLMo3Config32B, nemo2.config.Config[nemo2.models.olmo3.OLMo3Config32B]
): ...
class OLMo3Config7B(
    _GPTConfigFields, _Closed, nemo2.models.olmo3.OLMo3Config7B, nemo2.config.Config[nemo2.models.olmo3.OLMo3Config7B]
): ...
class OLMo3Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.olmo3.OLMo3Model]): ...
class OLMoEConfig7B_A1B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.olmoe.OLMoEConfig7B_A1B,
    nemo2.config.Config[nemo2.models.olmoe.OLMoEConfig7B_A1B],
): ...
class OLMoEModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.olmoe.OLMoEModel]): ...
class OptimizerConfig(
    _Closed,
    megatron.core.optimizer.optimizer_config.OptimizerConfig,
    nemo2.config.Config[megatron.core.optimizer.optimizer_config.OptimizerConfig],
): ...
class Phi3ConfigMini(
    _GPTConfigFields, _Closed, nemo2.models.phi3.Phi3ConfigMini, nemo2.config.Config[nemo2.models.phi3.Phi3ConfigMini]
): ...
class Phi3Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.phi3.Phi3Model]): ...
class Phi4Config14B(
    _GPTConfigFields, _Closed, nemo2.models.phi3.Phi4Config14B, nemo2.config.Config[nemo2.models.phi3.Phi4Config14B]
): ...
class Phi4MiniConfig3P8B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.phi3.Phi4MiniConfig3P8B,
    nemo2.config.Config[nemo2.models.phi3.Phi4MiniConfig3P8B],
): ...
class Qwen15MoEConfigA2P7B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2_moe.Qwen15MoEConfigA2P7B,
    nemo2.config.Config[nemo2.models.qwen2_moe.Qwen15MoEConfigA2P7B],
): ...
class Qwen25Config14B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2.Qwen25Config14B,
    nemo2.config.Config[nemo2.models.qwen2.Qwen25Config14B],
): ...
class Qwen25Config1P5B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2.Qwen25Config1P5B,
    nemo2.config.Config[nemo2.models.qwen2.Qwen25Config1P5B],
): ...
class Qwen25Config32B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2.Qwen25Config32B,
    nemo2.config.Config[nemo2.models.qwen2.Qwen25Config32B],
): ...
class Qwen25Config500M(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2.Qwen25Config500M,
    nemo2.config.Config[nemo2.models.qwen2.Qwen25Config500M],
): ...
class Qwen25Config72B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2.Qwen25Config72B,
    nemo2.config.Config[nemo2.models.qwen2.Qwen25Config72B],
): ...
class Qwen25Config7B(
    _GPTConfigFields, _Closed, nemo2.models.qwen2.Qwen25Config7B, nemo2.config.Config[nemo2.models.qwen2.Qwen25Config7B]
): ...
class Qwen2Config1P5B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2.Qwen2Config1P5B,
    nemo2.config.Config[nemo2.models.qwen2.Qwen2Config1P5B],
): ...
class Qwen2Config500M(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2.Qwen2Config500M,
    nemo2.config.Config[nemo2.models.qwen2.Qwen2Config500M],
): ...
class Qwen2Config57B_A14B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen2_moe.Qwen2Config57B_A14B,
    nemo2.config.Config[nemo2.models.qwen2_moe.Qwen2Config57B_A14B],
): ...
class Qwen2Config72B(
    _GPTConfigFields, _Closed, nemo2.models.qwen2.Qwen2Config72B, nemo2.config.Config[nemo2.models.qwen2.Qwen2Config72B]
): ...
class Qwen2Config7B(
    _GPTConfigFields, _Closed, nemo2.models.qwen2.Qwen2Config7B, nemo2.config.Config[nemo2.models.qwen2.Qwen2Config7B]
): ...
class Qwen2MoEModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.qwen2_moe.Qwen2MoEModel]
): ...
class Qwen2Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.qwen2.Qwen2Model]): ...
class Qwen35Config35B_A3B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen3_next.Qwen35Config35B_A3B,
    nemo2.config.Config[nemo2.models.qwen3_next.Qwen35Config35B_A3B],
): ...
class Qwen35Config9B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen3_next.Qwen35Config9B,
    nemo2.config.Config[nemo2.models.qwen3_next.Qwen35Config9B],
): ...
class Qwen3Config14B(
    _GPTConfigFields, _Closed, nemo2.models.qwen3.Qwen3Config14B, nemo2.config.Config[nemo2.models.qwen3.Qwen3Config14B]
): ...
class Qwen3Config1P7B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen3.Qwen3Config1P7B,
    nemo2.config.Config[nemo2.models.qwen3.Qwen3Config1P7B],
): ...
class Qwen3Config235B_A22B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen3.Qwen3Config235B_A22B,
    nemo2.config.Config[nemo2.models.qwen3.Qwen3Config235B_A22B],
): ...
class Qwen3Config30B_A3B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen3.Qwen3Config30B_A3B,
    nemo2.config.Config[nemo2.models.qwen3.Qwen3Config30B_A3B],
): ...
class Qwen3Config32B(
    _GPTConfigFields, _Closed, nemo2.models.qwen3.Qwen3Config32B, nemo2.config.Config[nemo2.models.qwen3.Qwen3Config32B]
): ...
class Qwen3Config4B(
    _GPTConfigFields, _Closed, nemo2.models.qwen3.Qwen3Config4B, nemo2.config.Config[nemo2.models.qwen3.Qwen3Config4B]
): ...
class Qwen3Config600M(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen3.Qwen3Config600M,
    nemo2.config.Config[nemo2.models.qwen3.Qwen3Config600M],
): ...
class Qwen3Config8B(
    _GPTConfigFields, _Closed, nemo2.models.qwen3.Qwen3Config8B, nemo2.config.Config[nemo2.models.qwen3.Qwen3Config8B]
): ...
class Qwen3Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.qwen3.Qwen3Model]): ...
class Qwen3NextConfig80B_A3B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.qwen3_next.Qwen3NextConfig80B_A3B,
    nemo2.config.Config[nemo2.models.qwen3_next.Qwen3NextConfig80B_A3B],
): ...
class Qwen3NextModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.qwen3_next.Qwen3NextModel]
): ...

class RestoreConfig(_Closed, nemo2.config.Config[nemo2.checkpoint.auto_resume.RestoreConfig]):
    path: str
    """Required."""
    load_model_state: bool
    """Default: `True`."""
    load_optim_state: bool
    """Default: `False`."""
    load_artifacts: bool
    """Default: `True`."""

class SeedOSSConfig36B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.seed_oss.SeedOSSConfig36B,
    nemo2.config.Config[nemo2.models.seed_oss.SeedOSSConfig36B],
): ...
class SeedOSSModel(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.seed_oss.SeedOSSModel]): ...
class SmolLM3Config3B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.smollm3.SmolLM3Config3B,
    nemo2.config.Config[nemo2.models.smollm3.SmolLM3Config3B],
): ...
class SmolLM3Model(_GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.smollm3.SmolLM3Model]): ...

class SquadDataModule(_Closed, nemo2.config.Config[nemo2.data.finetuning.published.SquadDataModule]):
    dataset_root: pathlib.Path | str | None
    """Default: `None`."""
    seq_length: int
    """Default: `2048`."""
    tokenizer: nemo2.data.tokenizer.Tokenizer | None | AnyConfig
    """Default: `None`."""
    micro_batch_size: int
    """Default: `4`."""
    global_batch_size: int
    """Default: `8`."""
    rampup_batch_size: list[int] | None
    """Default: `None`."""
    force_redownload: bool
    """Default: `False`."""
    delete_raw: bool
    """Default: `True`."""
    seed: int
    """Default: `1234`."""
    memmap_workers: int
    """Default: `1`."""
    num_workers: int
    """Default: `8`."""
    pin_memory: bool
    """Default: `True`."""
    persistent_workers: bool
    """Default: `False`."""
    packed_sequence_specs: nemo2.data.finetuning.packing.PackedSequenceSpecs | None | AnyConfig
    """Default: `None`."""
    dataset_kwargs: dict[str, typing.Any] | None | AnyConfig
    """Default: `None`."""

class Starcoder2Config15B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.starcoder2.Starcoder2Config15B,
    nemo2.config.Config[nemo2.models.starcoder2.Starcoder2Config15B],
): ...
class Starcoder2Config3B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.starcoder2.Starcoder2Config3B,
    nemo2.config.Config[nemo2.models.starcoder2.Starcoder2Config3B],
): ...
class Starcoder2Config7B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.starcoder2.Starcoder2Config7B,
    nemo2.config.Config[nemo2.models.starcoder2.Starcoder2Config7B],
): ...
class Starcoder2Model(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.starcoder2.Starcoder2Model]
): ...
class StarcoderConfig15B(
    _GPTConfigFields,
    _Closed,
    nemo2.models.starcoder.StarcoderConfig15B,
    nemo2.config.Config[nemo2.models.starcoder.StarcoderConfig15B],
): ...
class StarcoderModel(
    _GPTModelFields[_ModelConfig], _Closed, nemo2.config.Config[nemo2.models.starcoder.StarcoderModel]
): ...

class StdlibDataModule(_Closed, nemo2.config.Config[nemo2.data.demo.StdlibDataModule]):
    directory: str | None
    """Default: `None`."""
    vocab_size: int
    """Default: `4096`."""
    max_bytes: int
    """Default: `12000000`."""
    seq_length: int
    """Default: `256`."""
    micro_batch_size: int
    """Default: `4`."""
    global_batch_size: int
    """Default: `8`."""
    num_workers: int
    """Default: `0`."""
    seed: int
    """Default: `1234`."""

class StdlibDocstringDataModule(
    _Closed, nemo2.config.Config[nemo2.data.finetuning.docstrings.StdlibDocstringDataModule]
):
    dataset_root: pathlib.Path | str | None
    """Default: `None`."""
    seq_length: int
    """Default: `2048`."""
    tokenizer: nemo2.data.tokenizer.Tokenizer | None | AnyConfig
    """Default: `None`."""
    micro_batch_size: int
    """Default: `4`."""
    global_batch_size: int
    """Default: `8`."""
    rampup_batch_size: list[int] | None
    """Default: `None`."""
    force_redownload: bool
    """Default: `False`."""
    seed: int
    """Default: `1234`."""
    memmap_workers: int
    """Default: `1`."""
    num_workers: int
    """Default: `0`."""
    pin_memory: bool
    """Default: `True`."""
    persistent_workers: bool
    """Default: `False`."""
    packed_sequence_specs: nemo2.data.finetuning.packing.PackedSequenceSpecs | None | AnyConfig
    """Default: `None`."""
    dataset_kwargs: dict[str, typing.Any] | None | AnyConfig
    """Default: `None`."""

class Trainer(_Closed, nemo2.config.Config[nemo2.training.trainer.Trainer]):
    accelerator: lightning.pytorch.accelerators.accelerator.Accelerator | str | AnyConfig
    """Default: `'auto'`."""
    strategy: Part[MegatronStrategy, lightning.pytorch.strategies.strategy.Strategy | str | AnyConfig]
    """Default: `'auto'`."""
    devices: int | list[int] | str
    """Default: `'auto'`."""
    num_nodes: int
    """Default: `1`."""
    precision: int | str | None
    """Default: `None`."""
    logger: bool | collections.abc.Iterable[typing.Any] | lightning.pytorch.loggers.logger.Logger | None | AnyConfig
    """Default: `None`."""
    callbacks: list[typing.Any]
    """Default: `None`."""
    fast_dev_run: bool | int
    """Default: `False`."""
    max_epochs: int | None
    """Default: `None`."""
    min_epochs: int | None
    """Default: `None`."""
    max_steps: int
    """Default: `-1`."""
    min_steps: int | None
    """Default: `None`."""
    max_time: datetime.timedelta | dict[str, int] | str | None
    """Default: `None`."""
    limit_train_batches: float | int | None
    """Default: `None`."""
    limit_val_batches: float | int | None
    """Default: `None`."""
    limit_test_batches: float | int | None
    """Default: `None`."""
    limit_predict_batches: float | int | None
    """Default: `None`."""
    overfit_batches: float | int
    """Default: `0.0`."""
    val_check_interval: datetime.timedelta | dict[str, int] | float | int | str | None
    """Default: `None`."""
    check_val_every_n_epoch: int | None
    """Default: `None`."""
    num_sanity_val_steps: int | None
    """Default: `None`."""
    log_every_n_steps: int | None
    """Default: `None`."""
    enable_checkpointing: bool | None
    """Default: `None`."""
    enable_progress_bar: bool | None
    """Default: `None`."""
    enable_model_summary: bool | None
    """Default: `None`."""
    accumulate_grad_batches: int
    """Default: `1`."""
    gradient_clip_val: float | int | None
    """Default: `None`."""
    gradient_clip_algorithm: str | None
    """Default: `None`."""
    deterministic: bool | typing.Literal["warn"] | None
    """Default: `None`."""
    benchmark: bool | None
    """Default: `None`."""
    inference_mode: bool
    """Default: `True`."""
    use_distributed_sampler: bool
    """Default: `True`."""
    profiler: lightning.pytorch.profilers.profiler.Profiler | str | None | AnyConfig
    """Default: `None`."""
    detect_anomaly: bool
    """Default: `False`."""
    barebones: bool
    """Default: `False`."""
    plugins: Part[
        MegatronMixedPrecision,
        lightning.fabric.plugins.environments.cluster_environment.ClusterEnvironment
        | lightning.fabric.plugins.io.checkpoint_io.CheckpointIO
        | lightning.pytorch.plugins.layer_sync.LayerSync
        | lightning.pytorch.plugins.precision.precision.Precision
        | list[typing.Any]
        | None
        | AnyConfig,
    ]
    """Default: `None`."""
    sync_batchnorm: bool
    """Default: `False`."""
    reload_dataloaders_every_n_epochs: int
    """Default: `0`."""
    default_root_dir: str | None
    """Default: `None`."""
    enable_autolog_hparams: bool
    """Default: `True`."""

class Pretraining(
    _Closed, nemo2.config.Partial[nemo2.training.run_dir.run_folder.RunFolder], typing.Generic[_Model, _Data]
):
    model: Part[_Model, _Model | lightning.pytorch.core.module.LightningModule | AnyConfig]
    """Required."""
    data: Part[_Data, _Data | lightning.pytorch.core.datamodule.LightningDataModule | AnyConfig]
    """Required."""
    trainer: Part[Trainer, lightning.pytorch.trainer.trainer.Trainer | AnyConfig]
    """Required."""
    log: Part[NeMoLogger, nemo2.training.run_dir.logger.NeMoLogger | None | AnyConfig]
    """Default: `None`."""
    resume: Part[AutoResume, nemo2.checkpoint.auto_resume.AutoResume | None | AnyConfig]
    """Default: `None`."""
    optim: Part[MegatronOptimizerModule, nemo2.mcore.optim.base.OptimizerModule | None | AnyConfig]
    """Default: `None`."""
    strategy: Part[MegatronStrategy, lightning.pytorch.strategies.strategy.Strategy | str | AnyConfig]
    """The same as `trainer.strategy`."""

class Finetuning(
    _Closed, nemo2.config.Partial[nemo2.training.run_dir.run_folder.RunFolder], typing.Generic[_Model, _FinetuningData]
):
    model: Part[_Model, _Model | lightning.pytorch.core.module.LightningModule | AnyConfig]
    """Required."""
    data: Part[_FinetuningData, _FinetuningData | lightning.pytorch.core.datamodule.LightningDataModule | AnyConfig]
    """Required."""
    trainer: Part[Trainer, lightning.pytorch.trainer.trainer.Trainer | AnyConfig]
    """Required."""
    log: Part[NeMoLogger, nemo2.training.run_dir.logger.NeMoLogger | None | AnyConfig]
    """Default: `None`."""
    resume: Part[AutoResume, nemo2.checkpoint.auto_resume.AutoResume | None | AnyConfig]
    """Default: `None`."""
    optim: Part[MegatronOptimizerModule, nemo2.mcore.optim.base.OptimizerModule | None | AnyConfig]
    """Default: `None`."""
    peft: Part[DoRA | LoRA, nemo2.models.peft.base.PEFT | None | AnyConfig]
    """Default: `None`."""
    tokenizer: typing.Any
    """Default: `'model'`."""
    strategy: Part[MegatronStrategy, lightning.pytorch.strategies.strategy.Strategy | str | AnyConfig]
    """The same as `trainer.strategy`."""

class _Module:
    def trainer(
        self,
        tensor_parallelism: int = ...,
        pipeline_parallelism: int = ...,
        pipeline_parallelism_type: typing.Any = None,
        virtual_pipeline_parallelism: int | None = ...,
        context_parallelism: int = ...,
        sequence_parallelism: bool = ...,
        expert_model_parallelism: int = ...,
        expert_tensor_parallelism: int | None = ...,
        account_for_embedding_in_pipeline_split: bool = ...,
        account_for_loss_in_pipeline_split: bool = ...,
        num_nodes: int = ...,
        num_gpus_per_node: int = ...,
        max_steps: int = ...,
        accumulate_grad_batches: int = ...,
        limit_test_batches: int = ...,
        limit_val_batches: int = ...,
        log_every_n_steps: int = ...,
        val_check_interval: int = ...,
        callbacks: list[typing.Any] | None = None,
        expert_parallelism: int = ...,
        precision: str = ...,
        dir: str | None = None,
        save_top_k: int = ...,
        ckpt_async_save: bool = ...,
    ) -> Trainer:
        """The trainer with its strategy as a config, under NeMo 2.0's argument names.

        ``AS_STATED`` selects the recipe's fact. ``pipeline_parallelism_type`` is the dtype between pipeline stages;
        None selects the precision's. ``expert_parallelism`` is the name in some of NeMo's recipes for
        ``expert_model_parallelism``. ``precision`` is ``"bf16-mixed"``, ``"16-mixed"`` or ``"32"``. With ``dir`` or
        ``save_top_k`` the trainer has a checkpoint callback, which saves there at each validation. Otherwise the log's
        callback saves. The sizes are returned as given; ``check`` judges the layout.

        Raises:
            ConfigError: another precision, or both names of the expert-parallel size.
        """

class Pretrain(_Module, typing.Generic[_Model, _Data]):
    RECIPE: nemo2.recipes._assembler.PretrainRecipe
    def model(self, seq_length: int | None = None) -> _Model:
        """The model as a config. With a ``seq_length`` of None the field stays unset and follows the data's."""
    def pretrain_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        num_nodes: int = ...,
        num_gpus_per_node: int = ...,
        performance_mode: bool = False,
        fn: collections.abc.Callable[..., typing.Any] | None = None,
    ) -> Pretraining[_Model, _Data]:
        """The whole run as an editable tree: ``model, data, trainer, log, optim, resume`` of ``llm.pretrain``.

        Runs are stored under ``dir`` (None: the logger's default) in a folder ``name``. ``fn`` replaces
        ``llm.pretrain`` by a function with the same parameters.

        Raises:
            ConfigError: ``performance_mode`` of a recipe that has none.
        """

class Keyword(_Module, typing.Generic[_Model, _Data]):
    RECIPE: nemo2.recipes._signatures.KeywordRecipe
    def model(self, seq_length: int | None = None) -> _Model:
        """The model as a config. With a ``seq_length`` of None the field stays unset and follows the data's."""
    def pretrain_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        tensor_parallelism: int = ...,
        pipeline_parallelism: int = ...,
        pipeline_parallelism_type: typing.Any = None,
        virtual_pipeline_parallelism: int | None = ...,
        context_parallelism: int = ...,
        sequence_parallelism: bool = ...,
        expert_parallelism: int = ...,
        num_nodes: int = ...,
        num_gpus_per_node: int = ...,
        max_steps: int = ...,
        precision: str = ...,
        accumulate_grad_batches: int = ...,
        gradient_clip_val: float = ...,
        limit_test_batches: int = ...,
        limit_val_batches: int = ...,
        log_every_n_steps: int = ...,
        val_check_interval: int = ...,
        global_batch_size: int = ...,
        micro_batch_size: int = ...,
        seq_length: int = ...,
        warmup_steps: int = ...,
        constant_steps: int = ...,
        min_lr: float | None = ...,
        max_lr: float = ...,
        performance_mode: bool = False,
        fn: collections.abc.Callable[..., typing.Any] | None = None,
    ) -> Pretraining[_Model, _Data]:
        """The whole run as an editable tree. The arguments are those of `PretrainRecipe.pretrain_recipe`; ``AS_STATED``
        selects the recipe's fact.

        Batch sizes are in samples, and ``seq_length`` is in tokens. ``min_lr=None`` is a tenth of ``max_lr``.
        ``precision`` is ``"bf16-mixed"``, ``"16-mixed"`` or ``"32"``.

        Raises:
            ConfigError: another precision, or ``performance_mode`` of a recipe that has none.
        """

class PretrainAndFinetune(Pretrain[_Model, _Data], typing.Generic[_Model, _Data, _FinetuningData]):
    RECIPE: nemo2.recipes._assembler.PretrainRecipe
    FINETUNE: nemo2.recipes._finetuning.FinetuneRecipe
    def pretrain_recipe_performance(
        self,
        dir: str | None = None,
        name: str = "default",
        num_nodes: int = ...,
        num_gpus_per_node: int = ...,
        fn: collections.abc.Callable[..., typing.Any] | None = None,
    ) -> Pretraining[_Model, _Data]:
        """`pretrain_recipe` in performance mode, under the name of some of NeMo 2.0's recipes."""
    def finetune_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        num_nodes: int | None = None,
        num_gpus_per_node: int | None = None,
        peft_scheme: str | None = "lora",
        seq_length: int | None = None,
        packed_sequence: bool | None = None,
        performance_mode: bool = False,
        resume_path: str | None = None,
        fn: collections.abc.Callable[..., typing.Any] | None = None,
    ) -> Finetuning[_Model, _FinetuningData]:
        """The whole run as an editable tree: ``model, data, trainer, log, optim, resume, peft, tokenizer`` of
        ``llm.finetune``.

        The sizes are returned as given; ``check`` judges the layout.

        Args:
            dir, name: Runs are stored under ``dir`` (None: the logger's default) in a folder ``name``.
            num_nodes, num_gpus_per_node: The numbers of nodes and of GPUs per node. None: the numbers in the facts for
                the scheme.
            peft_scheme: "lora" or "dora". "none" or None trains all parameters.
            seq_length: Tokens of a sample or a packed row. None: as in the facts.
            packed_sequence: Whether several samples share a row. None: only in performance mode.
            resume_path: The weights, as in `nemo2.recipes.finetune_default.nemo_resume`. None: the release's.
            fn: Replaces ``llm.finetune`` by a function with the same parameters.

        Raises:
            ConfigError: another scheme, or ``performance_mode`` of a recipe that has none.
        """

class DeepseekV3AndFinetune(_Module, typing.Generic[_Model, _Data, _FinetuningData]):
    RECIPE: nemo2.recipes._assembler.PretrainRecipe
    FINETUNE: nemo2.recipes._finetuning.FinetuneRecipe
    pretrain_performance_optimizations: collections.abc.Callable[..., typing.Any]
    def model(self, use_mtp: bool = False) -> _Model:
        """The model as a config; ``use_mtp`` also predicts the token after the next."""
    def pretrain_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        num_nodes: int = ...,
        num_gpus_per_node: int = ...,
        fn: collections.abc.Callable[..., typing.Any] | None = None,
        use_mtp: bool = True,
        performance_mode: bool = False,
    ) -> Pretraining[_Model, _Data]:
        """The recipe of `PretrainRecipe.pretrain_recipe`; without ``use_mtp`` only the next token is predicted."""
    def finetune_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        num_nodes: int | None = None,
        num_gpus_per_node: int | None = None,
        peft_scheme: str | None = "lora",
        seq_length: int | None = None,
        packed_sequence: bool | None = None,
        performance_mode: bool = False,
        resume_path: str | None = None,
        fn: collections.abc.Callable[..., typing.Any] | None = None,
    ) -> Finetuning[_Model, _FinetuningData]:
        """The whole run as an editable tree: ``model, data, trainer, log, optim, resume, peft, tokenizer`` of
        ``llm.finetune``.

        The sizes are returned as given; ``check`` judges the layout.

        Args:
            dir, name: Runs are stored under ``dir`` (None: the logger's default) in a folder ``name``.
            num_nodes, num_gpus_per_node: The numbers of nodes and of GPUs per node. None: the numbers in the facts for
                the scheme.
            peft_scheme: "lora" or "dora". "none" or None trains all parameters.
            seq_length: Tokens of a sample or a packed row. None: as in the facts.
            packed_sequence: Whether several samples share a row. None: only in performance mode.
            resume_path: The weights, as in `nemo2.recipes.finetune_default.nemo_resume`. None: the release's.
            fn: Replaces ``llm.finetune`` by a function with the same parameters.

        Raises:
            ConfigError: another scheme, or ``performance_mode`` of a recipe that has none.
        """

class KeywordAndFinetune(Keyword[_Model, _Data], typing.Generic[_Model, _Data, _FinetuningData]):
    RECIPE: nemo2.recipes._signatures.KeywordRecipe
    FINETUNE: nemo2.recipes._finetuning.FinetuneRecipe
    gemma3_trainer: collections.abc.Callable[..., typing.Any]
    starcoder_trainer: collections.abc.Callable[..., typing.Any]
    def finetune_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        num_nodes: int | None = None,
        num_gpus_per_node: int | None = None,
        peft_scheme: str | None = "lora",
        seq_length: int | None = None,
        packed_sequence: bool | None = None,
        performance_mode: bool = False,
        resume_path: str | None = None,
        fn: collections.abc.Callable[..., typing.Any] | None = None,
    ) -> Finetuning[_Model, _FinetuningData]:
        """The whole run as an editable tree: ``model, data, trainer, log, optim, resume, peft, tokenizer`` of
        ``llm.finetune``.

        The sizes are returned as given; ``check`` judges the layout.

        Args:
            dir, name: Runs are stored under ``dir`` (None: the logger's default) in a folder ``name``.
            num_nodes, num_gpus_per_node: The numbers of nodes and of GPUs per node. None: the numbers in the facts for
                the scheme.
            peft_scheme: "lora" or "dora". "none" or None trains all parameters.
            seq_length: Tokens of a sample or a packed row. None: as in the facts.
            packed_sequence: Whether several samples share a row. None: only in performance mode.
            resume_path: The weights, as in `nemo2.recipes.finetune_default.nemo_resume`. None: the release's.
            fn: Replaces ``llm.finetune`` by a function with the same parameters.

        Raises:
            ConfigError: another scheme, or ``performance_mode`` of a recipe that has none.
        """

class HybridAndFinetune(_Module, typing.Generic[_Model, _Data, _FinetuningData]):
    RECIPE: nemo2.recipes._signatures.HybridRecipe
    FINETUNE: nemo2.recipes._signatures.HybridFinetune
    def model(self, tokenizer_model: str | None = None, vocab_file: str | None = None) -> _Model:
        """`PretrainRecipe.model` with the tokenizer if the facts name one."""
    def pretrain_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        tokenizer_model: str | None = None,
        vocab_file: str | None = None,
        num_nodes: int = ...,
        num_gpus_per_node: int = ...,
        tensor_parallelism: int = ...,
        sequence_parallelism: bool = ...,
        pipeline_parallelism: int = ...,
        max_steps: int = ...,
        val_check_interval: int = ...,
        limit_test_batches: int = ...,
        limit_val_batches: int = ...,
        log_every_n_steps: int = ...,
        save_top_k: int = ...,
        ckpt_async_save: bool = ...,
        seq_length: int = ...,
        gbs: int = ...,
        mbs: int = ...,
        performance_mode: bool = False,
        fn: collections.abc.Callable[..., typing.Any] | None = None,
    ) -> Pretraining[_Model, _Data]:
        """`PretrainRecipe.pretrain_recipe` with the global and the micro-batch size (``gbs``, ``mbs``, in samples).

        Without ``tokenizer_model`` or ``vocab_file`` the mock data keep their own vocabulary, and nothing is downloaded.

        Raises:
            ConfigError: both tokenizers are given, or ``performance_mode`` of a recipe that has none.
        """
    def finetune_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        resume_path: str | None = None,
        tokenizer_model: str | None = None,
        vocab_file: str | None = None,
        num_nodes: int = ...,
        num_gpus_per_node: int = ...,
        tensor_parallelism: int = ...,
        sequence_parallelism: bool = ...,
        pipeline_parallelism: int = ...,
        seq_length: int = ...,
        max_steps: int = ...,
        val_check_interval: int = ...,
        limit_test_batches: int = ...,
        limit_val_batches: int = ...,
        log_every_n_steps: int = ...,
        save_top_k: int = ...,
        ckpt_async_save: bool = ...,
        gbs: int = ...,
        mbs: int = ...,
        tensor_model_parallel_size: int = ...,
        pipeline_model_parallel_size: int = ...,
        performance_mode: bool = False,
        peft_scheme: str | None = "none",
        fn: collections.abc.Callable[..., typing.Any] | None = None,
        packed_sequence: bool = False,
    ) -> Finetuning[_Model, _FinetuningData]:
        """`HybridRecipe.pretrain_recipe` on SQuAD, from the weights of ``resume_path`` (None: the release's).

        Args:
            peft_scheme, packed_sequence: As in `FinetuneRecipe.finetune_recipe`.
            tensor_model_parallel_size, pipeline_model_parallel_size: Second names of ``tensor_parallelism`` and
                ``pipeline_parallelism``.

        Without ``tokenizer_model`` or ``vocab_file`` the tokenizer is that of the weights.

        Raises:
            ConfigError: another scheme, both tokenizers are given, the two names of a size have different values, or
                ``performance_mode`` of a recipe that has none.
        """
    def tokenizer(self, tokenizer_model: str | None = None, vocab_file: str | None = None) -> typing.Any:
        """A tokenizer as a config, from a folder or a name on Hugging Face. None: the released model's.

        Raises:
            ConfigError: both names are given; or neither is, and the released model's tokenizer has no name on the hub.
        """

aya_8b: PretrainAndFinetune[CohereModel[AyaConfig8B], MockDataModule, SquadDataModule]
baichuan2_7b: PretrainAndFinetune[Baichuan2Model[Baichuan2Config7B], MockDataModule, SquadDataModule]
chatglm3_6b: PretrainAndFinetune[ChatGLMModel[ChatGLM3Config6B], MockDataModule, SquadDataModule]
command_a_111b: PretrainAndFinetune[Cohere2Model[CommandAConfig111B], MockDataModule, SquadDataModule]
command_r7b: PretrainAndFinetune[Cohere2Model[CommandR7BConfig], MockDataModule, SquadDataModule]
command_r_32b: PretrainAndFinetune[CohereModel[CommandRConfig32B], MockDataModule, SquadDataModule]
command_r_35b: PretrainAndFinetune[CohereModel[CommandRConfig35B], MockDataModule, SquadDataModule]
deepseek_v2: PretrainAndFinetune[DeepSeekModel[DeepSeekV2Config], MockDataModule, SquadDataModule]
deepseek_v2_lite: PretrainAndFinetune[DeepSeekModel[DeepSeekV2LiteConfig], MockDataModule, SquadDataModule]
deepseek_v3: DeepseekV3AndFinetune[DeepSeekModel[DeepSeekV3Config], MockDataModule, SquadDataModule]
ernie45_21b_a3b: PretrainAndFinetune[ERNIE45MoEModel[ERNIE45Config21B_A3B], MockDataModule, SquadDataModule]
ernie45_300b_a47b: PretrainAndFinetune[ERNIE45MoEModel[ERNIE45Config300B_A47B], MockDataModule, SquadDataModule]
ernie45_300m: PretrainAndFinetune[ERNIE45Model[ERNIE45Config300M], MockDataModule, SquadDataModule]
gemma2_27b: KeywordAndFinetune[Gemma2Model[Gemma2Config27B], MockDataModule, SquadDataModule]
gemma2_2b: KeywordAndFinetune[Gemma2Model[Gemma2Config2B], MockDataModule, SquadDataModule]
gemma2_9b: KeywordAndFinetune[Gemma2Model[Gemma2Config9B], MockDataModule, SquadDataModule]
gemma3_12b: KeywordAndFinetune[Gemma3Model[Gemma3Config12B], MockDataModule, SquadDataModule]
gemma3_1b: KeywordAndFinetune[Gemma3Model[Gemma3Config1B], MockDataModule, SquadDataModule]
gemma3_27b: KeywordAndFinetune[Gemma3Model[Gemma3Config27B], MockDataModule, SquadDataModule]
gemma3_4b: KeywordAndFinetune[Gemma3Model[Gemma3Config4B], MockDataModule, SquadDataModule]
gemma_2b: PretrainAndFinetune[GemmaModel[GemmaConfig2B], MockDataModule, SquadDataModule]
gemma_7b: PretrainAndFinetune[GemmaModel[GemmaConfig7B], MockDataModule, SquadDataModule]
glm45: PretrainAndFinetune[GLM4MoEModel[GLM45Config355B_A32B], MockDataModule, SquadDataModule]
glm45_air: PretrainAndFinetune[GLM4MoEModel[GLM45AirConfig106B_A12B], MockDataModule, SquadDataModule]
glm46: PretrainAndFinetune[GLM4MoEModel[GLM46Config355B_A32B], MockDataModule, SquadDataModule]
gpt3_175b: Pretrain[GPTModel[GPTConfig175B], MockDataModule]
gpt_oss_120b: PretrainAndFinetune[GPTOSSModel[GPTOSSConfig120B], MockDataModule, SquadDataModule]
gpt_oss_20b: PretrainAndFinetune[GPTOSSModel[GPTOSSConfig20B], MockDataModule, SquadDataModule]
granite3_1b_a400m: PretrainAndFinetune[GraniteMoEModel[Granite3Config1B_A400M], MockDataModule, SquadDataModule]
granite3_2b: PretrainAndFinetune[GraniteModel[Granite3Config2B], MockDataModule, SquadDataModule]
granite3_3b_a800m: PretrainAndFinetune[GraniteMoEModel[Granite3Config3B_A800M], MockDataModule, SquadDataModule]
granite3_8b: PretrainAndFinetune[GraniteModel[Granite3Config8B], MockDataModule, SquadDataModule]
hunyuan_1p8b: PretrainAndFinetune[HunyuanModel[HunyuanConfig1P8B], MockDataModule, SquadDataModule]
hunyuan_4b: PretrainAndFinetune[HunyuanModel[HunyuanConfig4B], MockDataModule, SquadDataModule]
hunyuan_500m: PretrainAndFinetune[HunyuanModel[HunyuanConfig500M], MockDataModule, SquadDataModule]
hunyuan_7b: PretrainAndFinetune[HunyuanModel[HunyuanConfig7B], MockDataModule, SquadDataModule]
hunyuan_80b_a13b: PretrainAndFinetune[HunyuanMoEModel[HunyuanConfig80B_A13B], MockDataModule, SquadDataModule]
kimi_k2: PretrainAndFinetune[DeepSeekModel[KimiK2Config1T_A32B], MockDataModule, SquadDataModule]
llama2_7b: PretrainAndFinetune[LlamaModel[Llama2Config7B], MockDataModule, SquadDataModule]
llama31_405b: PretrainAndFinetune[LlamaModel[Llama31Config405B], MockDataModule, SquadDataModule]
llama31_70b: PretrainAndFinetune[LlamaModel[Llama31Config70B], MockDataModule, SquadDataModule]
llama31_8b: PretrainAndFinetune[LlamaModel[Llama31Config8B], MockDataModule, SquadDataModule]
llama31_8b_24gb: PretrainAndFinetune[LlamaModel[Llama31Config8B], MockDataModule, SquadDataModule]
llama31_nemotron_70b: PretrainAndFinetune[LlamaNemotronModel[Llama31Nemotron70BConfig], MockDataModule, SquadDataModule]
llama31_nemotron_nano_8b: PretrainAndFinetune[
    LlamaNemotronModel[Llama31NemotronNano8BConfig], MockDataModule, SquadDataModule
]
llama31_nemotron_ultra_253b: PretrainAndFinetune[
    LlamaNemotronModel[Llama31NemotronUltra253BConfig], MockDataModule, SquadDataModule
]
llama32_1b: PretrainAndFinetune[LlamaModel[Llama32Config1B], MockDataModule, SquadDataModule]
llama32_1b_80gb: PretrainAndFinetune[LlamaModel[Llama32Config1B], MockDataModule, SquadDataModule]
llama32_3b: PretrainAndFinetune[LlamaModel[Llama32Config3B], MockDataModule, SquadDataModule]
llama33_nemotron_super_49b: PretrainAndFinetune[
    LlamaNemotronModel[Llama33NemotronSuper49BConfig], MockDataModule, SquadDataModule
]
llama3_70b: PretrainAndFinetune[LlamaModel[Llama3Config70B], MockDataModule, SquadDataModule]
llama3_70b_16k: Pretrain[LlamaModel[Llama3Config70B], MockDataModule]
llama3_70b_64k: Pretrain[LlamaModel[Llama3Config70B], MockDataModule]
llama3_8b: PretrainAndFinetune[LlamaModel[Llama3Config8B], MockDataModule, SquadDataModule]
llama3_8b_128k: Pretrain[LlamaModel[Llama3Config8B], MockDataModule]
llama3_8b_16k: Pretrain[LlamaModel[Llama3Config8B], MockDataModule]
llama3_8b_64k: Pretrain[LlamaModel[Llama3Config8B], MockDataModule]
llama4_e128: PretrainAndFinetune[LlamaModel[Llama4Experts128Config], MockDataModule, SquadDataModule]
llama4_e16: PretrainAndFinetune[LlamaModel[Llama4Experts16Config], MockDataModule, SquadDataModule]
llama_tiny: PretrainAndFinetune[LlamaModel[LlamaConfig], StdlibDataModule, StdlibDocstringDataModule]
mamba2_130m: HybridAndFinetune[MambaModel[BaseMambaConfig130M], MockDataModule, SquadDataModule]
mamba2_1_3b: HybridAndFinetune[MambaModel[BaseMambaConfig1_3B], MockDataModule, SquadDataModule]
mamba2_2_7b: HybridAndFinetune[MambaModel[BaseMambaConfig2_7B], MockDataModule, SquadDataModule]
mamba2_370m: HybridAndFinetune[MambaModel[BaseMambaConfig370M], MockDataModule, SquadDataModule]
mamba2_780m: HybridAndFinetune[MambaModel[BaseMambaConfig780M], MockDataModule, SquadDataModule]
mamba2_8b: HybridAndFinetune[MambaModel[NVIDIAMambaConfig8B], MockDataModule, SquadDataModule]
mamba2_hybrid_8b: HybridAndFinetune[MambaModel[NVIDIAMambaHybridConfig8B], MockDataModule, SquadDataModule]
minimax_m2: PretrainAndFinetune[MiniMaxM2Model[MiniMaxM2Config230B_A10B], MockDataModule, SquadDataModule]
ministral3_14b: PretrainAndFinetune[Ministral3Model[Ministral3Config14B], MockDataModule, SquadDataModule]
ministral3_3b: PretrainAndFinetune[Ministral3Model[Ministral3Config3B], MockDataModule, SquadDataModule]
ministral3_8b: PretrainAndFinetune[Ministral3Model[Ministral3Config8B], MockDataModule, SquadDataModule]
mistral_7b: PretrainAndFinetune[MistralModel[MistralConfig7B], MockDataModule, SquadDataModule]
mistral_nemo_12b: PretrainAndFinetune[MistralModel[MistralNeMoConfig12B], MockDataModule, SquadDataModule]
mixtral_8x22b: PretrainAndFinetune[MixtralModel[MixtralConfig8x22B], MockDataModule, SquadDataModule]
mixtral_8x22b_64k: Pretrain[MixtralModel[MixtralConfig8x22B], MockDataModule]
mixtral_8x7b: PretrainAndFinetune[MixtralModel[MixtralConfig8x7B], MockDataModule, SquadDataModule]
mixtral_8x7b_16k: Pretrain[MixtralModel[MixtralConfig8x7B], MockDataModule]
mixtral_8x7b_64k: Pretrain[MixtralModel[MixtralConfig8x7B], MockDataModule]
moonlight_16b_a3b: PretrainAndFinetune[DeepSeekModel[MoonlightConfig16B_A3B], MockDataModule, SquadDataModule]
nemotron3_22b: KeywordAndFinetune[NemotronModel[Nemotron3Config22B], MockDataModule, SquadDataModule]
nemotron3_22b_16k: Keyword[NemotronModel[Nemotron3Config22B], MockDataModule]
nemotron3_22b_64k: Keyword[NemotronModel[Nemotron3Config22B], MockDataModule]
nemotron3_4b: KeywordAndFinetune[NemotronModel[Nemotron3Config4B], MockDataModule, SquadDataModule]
nemotron3_8b: KeywordAndFinetune[NemotronModel[Nemotron3Config8B], MockDataModule, SquadDataModule]
nemotron3_nano_30b_a3b: HybridAndFinetune[MambaModel[Nemotron3Nano30B_A3B], MockDataModule, SquadDataModule]
nemotron4_15b: KeywordAndFinetune[NemotronModel[Nemotron4Config15B], MockDataModule, SquadDataModule]
nemotron4_15b_16k: Keyword[NemotronModel[Nemotron4Config15B], MockDataModule]
nemotron4_15b_64k: Keyword[NemotronModel[Nemotron4Config15B], MockDataModule]
nemotron4_340b: KeywordAndFinetune[NemotronModel[Nemotron4Config340B], MockDataModule, SquadDataModule]
nemotron_nano_12b_v2: HybridAndFinetune[MambaModel[NemotronNano12Bv2], MockDataModule, SquadDataModule]
nemotron_nano_9b_v2: HybridAndFinetune[MambaModel[NemotronNano9Bv2], MockDataModule, SquadDataModule]
nemotronh_47b: HybridAndFinetune[MambaModel[NemotronHConfig47B], MockDataModule, SquadDataModule]
nemotronh_4b: HybridAndFinetune[MambaModel[NemotronHConfig4B], MockDataModule, SquadDataModule]
nemotronh_56b: HybridAndFinetune[MambaModel[NemotronHConfig56B], MockDataModule, SquadDataModule]
nemotronh_8b: HybridAndFinetune[MambaModel[NemotronHConfig8B], MockDataModule, SquadDataModule]
olmo2_13b: PretrainAndFinetune[OLMo2Model[OLMo2Config13B], MockDataModule, SquadDataModule]
olmo2_32b: PretrainAndFinetune[OLMo2Model[OLMo2Config32B], MockDataModule, SquadDataModule]
olmo2_7b: PretrainAndFinetune[OLMo2Model[OLMo2Config7B], MockDataModule, SquadDataModule]
olmo3_32b: PretrainAndFinetune[OLMo3Model[OLMo3Config32B], MockDataModule, SquadDataModule]
olmo3_7b: PretrainAndFinetune[OLMo3Model[OLMo3Config7B], MockDataModule, SquadDataModule]
olmoe_7b_a1b: PretrainAndFinetune[OLMoEModel[OLMoEConfig7B_A1B], MockDataModule, SquadDataModule]
phi3_mini_4k_instruct: KeywordAndFinetune[Phi3Model[Phi3ConfigMini], MockDataModule, SquadDataModule]
phi4_14b: PretrainAndFinetune[Phi3Model[Phi4Config14B], MockDataModule, SquadDataModule]
phi4_mini: PretrainAndFinetune[Phi3Model[Phi4MiniConfig3P8B], MockDataModule, SquadDataModule]
qwen15_moe_a2p7b: PretrainAndFinetune[Qwen2MoEModel[Qwen15MoEConfigA2P7B], MockDataModule, SquadDataModule]
qwen25_14b: KeywordAndFinetune[Qwen2Model[Qwen25Config14B], MockDataModule, SquadDataModule]
qwen25_1p5b: KeywordAndFinetune[Qwen2Model[Qwen25Config1P5B], MockDataModule, SquadDataModule]
qwen25_32b: KeywordAndFinetune[Qwen2Model[Qwen25Config32B], MockDataModule, SquadDataModule]
qwen25_500m: KeywordAndFinetune[Qwen2Model[Qwen25Config500M], MockDataModule, SquadDataModule]
qwen25_72b: KeywordAndFinetune[Qwen2Model[Qwen25Config72B], MockDataModule, SquadDataModule]
qwen25_7b: KeywordAndFinetune[Qwen2Model[Qwen25Config7B], MockDataModule, SquadDataModule]
qwen2_1p5b: KeywordAndFinetune[Qwen2Model[Qwen2Config1P5B], MockDataModule, SquadDataModule]
qwen2_500m: KeywordAndFinetune[Qwen2Model[Qwen2Config500M], MockDataModule, SquadDataModule]
qwen2_57b_a14b: PretrainAndFinetune[Qwen2MoEModel[Qwen2Config57B_A14B], MockDataModule, SquadDataModule]
qwen2_72b: KeywordAndFinetune[Qwen2Model[Qwen2Config72B], MockDataModule, SquadDataModule]
qwen2_7b: KeywordAndFinetune[Qwen2Model[Qwen2Config7B], MockDataModule, SquadDataModule]
qwen35_35b_a3b: PretrainAndFinetune[Qwen3NextModel[Qwen35Config35B_A3B], MockDataModule, SquadDataModule]
qwen35_9b: PretrainAndFinetune[Qwen3NextModel[Qwen35Config9B], MockDataModule, SquadDataModule]
qwen3_14b: KeywordAndFinetune[Qwen3Model[Qwen3Config14B], MockDataModule, SquadDataModule]
qwen3_1p7b: KeywordAndFinetune[Qwen3Model[Qwen3Config1P7B], MockDataModule, SquadDataModule]
qwen3_235b_a22b: KeywordAndFinetune[Qwen3Model[Qwen3Config235B_A22B], MockDataModule, SquadDataModule]
qwen3_30b_a3b: KeywordAndFinetune[Qwen3Model[Qwen3Config30B_A3B], MockDataModule, SquadDataModule]
qwen3_32b: KeywordAndFinetune[Qwen3Model[Qwen3Config32B], MockDataModule, SquadDataModule]
qwen3_4b: KeywordAndFinetune[Qwen3Model[Qwen3Config4B], MockDataModule, SquadDataModule]
qwen3_600m: KeywordAndFinetune[Qwen3Model[Qwen3Config600M], MockDataModule, SquadDataModule]
qwen3_600m_24gb: KeywordAndFinetune[Qwen3Model[Qwen3Config600M], MockDataModule, SquadDataModule]
qwen3_8b: KeywordAndFinetune[Qwen3Model[Qwen3Config8B], MockDataModule, SquadDataModule]
qwen3_next_80b_a3b: PretrainAndFinetune[Qwen3NextModel[Qwen3NextConfig80B_A3B], MockDataModule, SquadDataModule]
seed_oss_36b: PretrainAndFinetune[SeedOSSModel[SeedOSSConfig36B], MockDataModule, SquadDataModule]
smollm3_3b: PretrainAndFinetune[SmolLM3Model[SmolLM3Config3B], MockDataModule, SquadDataModule]
starcoder2_15b: KeywordAndFinetune[Starcoder2Model[Starcoder2Config15B], MockDataModule, SquadDataModule]
starcoder2_3b: KeywordAndFinetune[Starcoder2Model[Starcoder2Config3B], MockDataModule, SquadDataModule]
starcoder2_7b: KeywordAndFinetune[Starcoder2Model[Starcoder2Config7B], MockDataModule, SquadDataModule]
starcoder_15b: KeywordAndFinetune[StarcoderModel[StarcoderConfig15B], MockDataModule, SquadDataModule]
