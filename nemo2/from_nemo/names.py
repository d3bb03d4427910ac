# SPDX-License-Identifier: Apache-2.0
"""NeMo 2.0's names and their counterparts in nemo2, for ``nemo2 translate`` and docs/from_nemo.md.

`DOORS` lists the packages that hold nemo2's public names. This file lists NeMo's names that nemo2 renamed or lacks,
with the reason.
"""

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, Optional

DOORS = (
    "nemo2",
    "nemo2.llm",
    "nemo2.callbacks",
    "nemo2.mcore.optim.lr_scheduler",
    "nemo2.data",
    "nemo2.llm.peft",
    "nemo2.llm.fn",
    "nemo2.llm.io",
    "nemo2.plugins",
    "nemo2.recipes.log.default",
    "nemo2.recipes.optim.adam",
    "nemo2.recipes.optim.sgd",
    "nemo2.recipes.precision.mixed_precision",
    "nemo2.recipes.callbacks.common",
    "nemo2.recipes.finetune_default",
    "nemo2.recipes.run.executor",
    "nemo2.recipes.tp_overlap_configs.userbuffers",
    "nemo2.mcore.overlap",
    "nemo2.mcore.parallel.megatron_parallel",
    "nemo2.mcore.parallel.loss",
    "nemo2.mcore.parallel.hooks",
    "nemo2.mcore.parallel.layout",
    "nemo2.models.gpt_step",
    "nemo2.models.ssm",
    "nemo2.checkpoint.io",
    "nemo2.checkpoint.directory",
    "nemo2.data.finetuning.published",
    "nemo2.data.home",
    "nemo2.training.fabric",
    "nemo2.mcore.precision",
)
"""The packages in which a name is looked up, in this order."""

MODULES = {
    "nemo.lightning": "nemo2",
    "nemo.lightning.base": "nemo2.data.home",
    "nemo.lightning.fabric.conversion": "nemo2.training.fabric",
    "nemo.lightning.fabric.fabric": "nemo2.training.fabric",
    "nemo.lightning.fabric.strategies": "nemo2.training.fabric",
    "nemo.lightning.megatron_parallel": "nemo2.mcore.parallel.megatron_parallel",
    "nemo.lightning.pytorch.plugins": "nemo2",
    "nemo.lightning.pytorch.plugins.data_sampler": "nemo2.data",
    "nemo.lightning.pytorch.plugins.mixed_precision": "nemo2.mcore.precision",
    "nemo.lightning.pytorch.strategies": "nemo2",
    "nemo.lightning.pytorch.trainer": "nemo2.training.trainer",
    "nemo.lightning.nemo_logger": "nemo2.training.run_dir.logger",
    "nemo.lightning.ckpt_utils": "nemo2.checkpoint.directory",
    "nemo.lightning.resume": "nemo2.checkpoint.auto_resume",
    "nemo.collections.llm": "nemo2.llm",
    "nemo.collections.llm.api": "nemo2.llm",
    "nemo.collections.llm.distillation": "nemo2.llm.distillation",
    "nemo.collections.llm.gpt.data": "nemo2.llm",
    "nemo.collections.llm.gpt.data.alpaca": "nemo2.data.finetuning.published",
    "nemo.collections.llm.gpt.data.chat": "nemo2.data.finetuning.module",
    "nemo.collections.llm.gpt.data.dolly": "nemo2.data.finetuning.published",
    "nemo.collections.llm.gpt.data.fine_tuning": "nemo2.data.finetuning.module",
    "nemo.collections.llm.gpt.data.hf_dataset": "nemo2.data.finetuning.hf_dataset",
    "nemo.collections.llm.gpt.data.mock": "nemo2.data.mock",
    "nemo.collections.llm.gpt.data.packed_sequence": "nemo2.data.finetuning.packed_files",
    "nemo.collections.llm.gpt.data.pre_training": "nemo2.data.pretraining",
    "nemo.collections.llm.gpt.data.squad": "nemo2.data.finetuning.published",
    "nemo.collections.llm.modelopt.distill": "nemo2.llm.distillation",
    "nemo.collections.llm.modelopt.prune": "nemo2.llm.pruning",
    "nemo.collections.llm.modelopt.quantization": "nemo2.llm.quantization",
    "nemo.collections.llm.peft": "nemo2.llm.peft",
    "nemo.lightning.io": "nemo2.llm.io",
    "nemo.lightning.run.plugins": "nemo2.plugins",
    "nemo.collections.llm.fn": "nemo2.llm.fn",
    "nemo.collections.llm.fn.activation": "nemo2.llm.fn",
}
"""Modules that scripts import as modules."""
_CALLBACKS = """
debugging flops_callback megatron_enable_experimental_callback memory_callback memory_profiler model_checkpoint peft
preemption progress_bar progress_printer pytorch_profiler
"""
MODULES |= {f"nemo.lightning.pytorch.callbacks.{name}": "nemo2.callbacks" for name in _CALLBACKS.split()}

PACKAGES = {
    "nemo.collections.llm.gpt.model": "nemo2.models",
    "nemo.collections.llm.peft": "nemo2.models.peft",
    "nemo.collections.llm.recipes": "nemo2.recipes",
    "nemo.lightning.pytorch.callbacks": "nemo2.callbacks",
    "nemo.lightning.pytorch.optim": "nemo2.mcore.optim",
}
"""Packages whose modules have NeMo's names, also in packages inside them."""

RENAMED = {
    "MegatronOptim": "nemo2:MegatronOptimizerModule",
    "Nemotron4Config22B": "nemo2.llm:Nemotron3Config22B",
    **{f"nemotron4_22b{length}": f"nemo2.recipes:nemotron3_22b{length}" for length in ("", "_16k", "_64k")},
    "TokenizerSpec": "nemo2.data:Tokenizer",
    "OptimizerConfig": "megatron.core.optimizer:OptimizerConfig",
    "DistributedDataParallelConfig": "megatron.core.distributed:DistributedDataParallelConfig",
    "CPUOffloadPolicy": "torch.distributed.fsdp:CPUOffloadPolicy",
    "ModelCallback": "lightning.pytorch.callbacks:LambdaCallback",
    "logging": "logging:",
    "WEIGHTS_PATH": "nemo2.checkpoint.directory:WEIGHTS_PATH",
    "CONTEXT_PATH": "nemo2.checkpoint.directory:CONTEXT_PATH",
}
"""Names with another name or module in nemo2: "module:name"."""

_REASONS = {
    "the strategy shows progress itself: MegatronStrategy(replace_progress_bar, progress_interval)": """
        MegatronProgressBar ProgressPrinter
    """,
    "the strategy finalizes asynchronous saves itself": "AsyncFinalizerCallback",
    "fine-tuning data modules take a path: dataset_root=...": "get_dataset_root",
    "NVIDIA-NeMo's Eval evaluates models behind an API": """
        evaluation EvaluationConfig EvaluationTarget ApiEndpoint ConfigParams AdapterConfig
        TensorRTLLM
    """,
    "nemo2 doesn't expose ModelOpt's classes": "apply_speculative_decoding",
    "nemo2 doesn't expose ModelOpt's classes: use llm.distill": """
        DistillationGPTModel LogitsKLLoss MSELoss HiddenStateCosineLoss
    """,
    "nemo2 doesn't expose ModelOpt's classes: use llm.prune": "prune_language_model save_pruned_model",
    "nemo2 doesn't expose ModelOpt's classes: use llm.ptq": """
        Quantizer get_calib_data_iter load_with_modelopt_layer_spec
    """,
    "use `nemo2 plan NAME`, which searches layouts and batch sizes": "AutoConfigurator generate_configs get_results",
    "not a decoder-only text model: nemo2 leaves out BERT, T5, Hyena, embedding and re-ranker models": """
        BertModel HuggingFaceBertModel BertEmbeddingModel T5Model HyenaModel LlamaEmbeddingModel ReRankerModel
        BERTMockDataModule BERTPreTrainingDataModule CustomRetrievalDataModule CustomReRankerDataModule
        SpecterDataModule SpecterReRankerDataModule Llama32EmbeddingConfig1B Llama32EmbeddingConfig3B
        Llama32Reranker1B Llama32Reranker500M T5Config220M T5Config3B T5Config11B HyenaConfig
    """,
    "use llm.import_ckpt and llm.export_ckpt; each model family has a table of tensor names instead of connectors": """
        Connector ModelConnector ConnectorMixin model_importer model_exporter state_transform apply_transforms
        TransformCTX TransformFns HFCheckpointIO import_from importer exporter
    """,
    "nemo2's classes record their arguments with @nemo2.config.capture.configurable": """
        drop_unexpected_params
    """,
    "a checkpoint's context/ holds text only: tokenizers as file names and hashes, no pickles": """
        FileArtifact DirArtifact DirOrStringArtifact PathArtifact PickleArtifact HFAutoArtifact
    """,
    "internal to the strategy; no public interface in nemo2": """
        setup_parallel_ranks init_model_parallel setup_data_sampler fix_progress_bar create_checkpoint_io
        mcore_to_pyt_sharded_state_dict pyt_to_mcore_state_dict fsdp2_strategy_parallelize get_hf_tp_shard_plan
        translate_to_torch_parallel_style to_cpu create_context_parallel_ctx get_train_context teardown
        init_parallel_ranks set_model_parallel_attributes megatron_lazy_init_context megatron_cpu_init_context
        GradScaler enable_nvidia_optimizations optimizer_sharded_state_dict load_model_state_dict
        setup_megatron_optimizer configure_no_restart_validation_training_loop extract_ddp_funcs getattr_proxy
        setup_microbatch_calculator create_dataloader DDP moe_loss_tracker_ctx aggregate_moe_loss_stats
        is_list_of_iterators ckpt_to_weights_subdir idempotent_path_append
        ADAPTER_META_FILENAME HF_WEIGHTS_PATH HF_ADAPTER_PATH HF_ADAPTER_CONFIG_FILENAME is_distributed_ckpt
        update_config_with_dtype_overrides default_forward_step ParallelLinearAdapter AdapterWrapper LoRAMerge
        add_megatron_sampler MegatronPretrainingSampler MegatronPretrainingRandomSampler
        setup_model_and_tokenizer setup_mcore_engine MCoreTokenizerWrappper build_pretraining_datamodule
    """,
    "nemo2 has no multimodal models; FLOPsMeasurementCallback counts FLOPs from a text model's config": """
        MM_FLOPsMeasurementCallback
    """,
    "nemo2 has no node-local checkpoints; it saves asynchronously to the run directory": """
        update_trainer_local_checkpoint_io
    """,
    "import transformers models with llm.import_ckpt": "HFAutoModelForCausalLM hf_auto_model_for_causal_lm",
    "use HFDatasetDataModule(packed_sequence_specs=...)": "HFDatasetDataModulePacked",
    "every torch that nemo2 supports has CPUOffloadPolicy": "HAS_CPU_OFFLOAD_POLICY",
    "use MockDataModule": "HFMockDataModule",
    "use SquadDataModule": "SquadHFDataModule",
    "use ChatDataModule or FineTuningDataModule on the data set's files": "MLPerfGovReportDataModule",
    "use model() and trainer() of a recipe of this family": "deepseek gemma2 nemotron qwen2 qwen3 starcoder2",
    "nemo2 uses Transformer Engine's layers if installed; set config.transformer_layer_spec to override": """
        local_layer_spec transformer_engine_layer_spec transformer_engine_full_layer_spec
    """,
    "llm.peft's methods are identified by their settings, and an adapter checkpoint by its directory": "AdapterPath",
    "use run.Partial(llm.distill, ...) or run.Partial(llm.prune, ...) with a recipe's parts": "distillation_recipe prune_recipe",
    "use nemo2.recipes.finetune_default.nemo_resume(model_id)": "nemotron3_8b.nemo_resume",
    "use finetune_recipe(performance_mode=True)": "finetune_performance_optimizations",
    "use weights/ in the directory that get_trainer_ckpt_path returns": "AutoResume.get_weights_path",
    "read the fields of the step: it is created with its sizes, micro-batches and data": """
        MegatronStep.infer MegatronStep.infer_micro_batch_size MegatronStep.infer_seq_length
        MegatronStep.infer_num_microbatches MegatronStep.to_data_iterator_list
        MegatronStep.get_data_iterator_and_seq_length MegatronStep.forward_backward_func
        MegatronStep.adjust_tensor_shapes_fn MegatronStep.has_global_batch_sampler
    """,
    "the strategy wraps model chunks during setup; Megatron-Core's wrapper has the hooks": """
        MegatronParallel.wrapped_forward_step MegatronParallel.init_model_parallel MegatronParallel.init_ddp
        MegatronParallel.teardown_ddp MegatronParallel.apply_convert_module_fn
        MegatronParallel.enable_forward_pre_hook MegatronParallel.disable_forward_pre_hook
    """,
    "the strategy does this in its setup, load and save": """
        MegatronStrategy.init_model_parallel MegatronStrategy.optimizer_sharded_state_dict
        MegatronStrategy.should_restore_optimizer_states MegatronStrategy.unwrapped_checkpoint_io
        MegatronStrategy.sharded_state_dict_metadata MegatronMixedPrecision.convert_optimizer
        MegatronCheckpointIO.adjust_non_strict_load OptimizerModule.configure_optimizers
        PEFT.setup PEFT.apply_transform PEFT.adapter_key_filter PEFT.set_params_to_save PEFT.get_wrappped_io
        GPTModel.get_inference_wrapper
    """,
    "objects record their arguments automatically: nl.io.reinit rebuilds an object, and a run saves its recipe": """
        Trainer.add_io Trainer.io_init IOMixin.io_init IOMixin.io_transform_args IOMixin.io_artifacts IOMixin.io_dump
        TrainerContext.from_trainer TrainerContext.construct_extra
    """,
}
"""The names that nemo2 lacks, each with the replacement or the reason."""
GONE = {name: reason for reason, names in _REASONS.items() for name in names.split()}


_NO_TEXT_MODEL = "nemo2 has decoder-only text models only"
_SAMPLES = "FineTuningDataModule and ChatDataModule make the samples; see packed_sequence.tokenize_dataset"
_AS_THEY_ARE = "nemo2 runs transformers models after llm.import_ckpt, not as they are"
REASONS_OF_MODULES = {
    "nemo.collections.llm.bert": GONE["T5Model"],
    "nemo.collections.llm.t5": GONE["T5Model"],
    "nemo.collections.llm.gpt.model.hf_llama_embedding": GONE["T5Model"],
    "nemo.collections.llm.evaluation": GONE["EvaluationConfig"],
    "nemo.collections.llm.modelopt": GONE["Quantizer"],
    "nemo.collections.llm.gpt.data.core": _SAMPLES,
    "nemo.collections.llm.gpt.data.utils": _SAMPLES,
    "nemo.collections.llm": "internal to NeMo; no public interface in nemo2",
    "nemo.collections.common": "internal to NeMo; no public interface in nemo2",
    "nemo.collections": _NO_TEXT_MODEL,
    "nemo.automodel": _AS_THEY_ARE,
    "nemo.lightning.pytorch.accelerate": _AS_THEY_ARE,
    "nemo.core": "part of NeMo 1.0; nemo2 has no counterpart of its base classes",
    "nemo.deploy": "use llm.deploy or `nemo2 serve`",
    "nemo.export": "use llm.export_ckpt, and vLLM or TensorRT-LLM on the exported folder",
    "nemo.utils.get_rank": "use torch.distributed, or lightning.pytorch.utilities.rank_zero_only",
}
"""Why nemo2 lacks a name of these modules that `GONE` doesn't list. The longest path that fits decides."""

_NO_DECODER = re.compile(
    "(Bert|HuggingFaceBert|MegatronBert|T5|Hyena|ReRanker|Llama32Reranker|LlamaBidirectional)[A-Z0-9]"
    "|(bert|t5|hyena|e5|llama_embedding|llama_reranker)_|(bert|t5)$"
)
"""Names of model families that nemo2 lacks."""


class Counterpart(NamedTuple):
    """The counterpart of one of NeMo's names in nemo2."""

    status: str
    """"works", "renamed", "gone" or "unknown"."""
    home: str = ""
    """The module to import from."""
    name: str = ""
    """The name in that module; "" for a module."""
    reason: str = ""


@cache
def find(name: str) -> Counterpart:
    """The counterpart of NeMo's ``name``, which is the last part of a path, or a member of a class or recipe such as
    "AutoResume.setup"."""
    owner, _, member = name.rpartition(".")
    if owner:
        return _member(find(owner), name, member)
    if name in RENAMED:
        home, _, own = RENAMED[name].partition(":")
        same = own == name
        return Counterpart("works" if same else "renamed", home, own)
    if (home := _home(name)) is not None:
        return Counterpart("works", home, name)
    if name in GONE:
        return Counterpart("gone", reason=GONE[name])
    if _NO_DECODER.match(name):
        return Counterpart("gone", reason=GONE["T5Model"])
    return Counterpart("unknown", reason="nemo2 has no such name")


def _member(owner: Counterpart, name: str, member: str) -> Counterpart:
    if owner.status not in ("works", "renamed"):
        return owner
    if name in GONE:
        return Counterpart("gone", reason=GONE[name])
    value = getattr(import_module(owner.home), owner.name)
    annotated = {one for base in getattr(value, "__mro__", ()) for one in vars(base).get("__annotations__", ())}
    if hasattr(value, member) or (isinstance(value, type) and member in {*signature(value).parameters, *annotated}):
        return Counterpart("works", owner.home, f"{owner.name}.{member}")
    return (
        Counterpart("gone", reason=GONE[member])
        if member in GONE
        else Counterpart("unknown", reason=f"nemo2's {owner.name} has no such name")
    )


def reason_of(module: str) -> Optional[str]:
    """Why nemo2 lacks a name of NeMo's ``module``. None: unknown."""
    fitting = [path for path in REASONS_OF_MODULES if f"{module}.".startswith(f"{path}.")]
    return REASONS_OF_MODULES[max(fitting, key=len)] if fitting else None


def module_of(path: str) -> Optional[str]:
    """nemo2's counterpart of NeMo's module ``path``. None: there is none."""
    if path in MODULES:
        return MODULES[path]
    package = next((one for one in PACKAGES if f"{path}.".startswith(f"{one}.")), None)
    if package is None or "._" in path:
        return None
    own = PACKAGES[package] + path.removeprefix(package)
    try:
        return own if find_spec(own) else None
    except ModuleNotFoundError:  # what stands before its last dot is no package
        return None


def _home(name: str) -> Optional[str]:
    for door in DOORS:
        module = import_module(door)
        if name in getattr(module, "__all__", ()) or _is_ours(getattr(module, name, None)):
            return door
    from nemo2 import recipes

    return "nemo2.recipes" if name in recipes.names() else None


def _is_ours(value: Any) -> bool:
    """Whether nemo2 defines this function or class, or the class of this object."""
    return (getattr(value, "__module__", None) or type(value).__module__).startswith("nemo2.")
