# SPDX-License-Identifier: Apache-2.0
"""Factories that fine-tuning recipes share, under NeMo 2.0's names and with its defaults."""

from collections.abc import Mapping
from typing import Any, Optional, Union

import lightning.pytorch as pl

from nemo2.config import Config, Partial
from nemo2.recipes import _assembler

TRAINER_SETTINGS: Mapping[str, Any] = {
    **_assembler.TRAINER_SETTINGS,
    "limit_test_batches": None,
    "limit_val_batches": None,
    "log_every_n_steps": 1,
    "val_check_interval": 30,
}
"""Trainer settings of all fine-tuning recipes: the whole validation set every 30 steps. Source: NeMo 2.0."""


def default_finetune_recipe(
    model: Union[Config[pl.LightningModule], pl.LightningModule],
    resume_path: Optional[str],
    dir: Optional[str] = None,
    name: str = "default",
    num_nodes: int = 1,
    num_gpus_per_node: int = 8,
    packed_sequence: bool = False,
    tokenizer: Optional[Any] = "model",
) -> "Partial[Any]":
    """Fine-tune all of ``model`` on SQuAD at 2,048 tokens: ``model, data, trainer, log, optim, resume, tokenizer`` of
    ``llm.finetune``, with one GPU per model.

    Args:
        resume_path: The weights, as in `nemo_resume`. None: set them in ``resume.restore_config``.
        dir, name: The folder of all runs (None: the logger's default), and this run's folder in it.
        packed_sequence: Whether several samples share a row. 8 rows hold as many tokens as 128 samples.
        tokenizer: "model", "data", or a tokenizer: see `nemo2.llm.finetune`.
    """
    from nemo2.data.finetuning.packing import PackedSequenceSpecs
    from nemo2.data.finetuning.published import SquadDataModule
    from nemo2.llm.api import finetune
    from nemo2.recipes.log.default import tensorboard_logger
    from nemo2.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing

    data: Any = Config(SquadDataModule, seq_length=2048, global_batch_size=128, micro_batch_size=1)
    if packed_sequence:
        data.global_batch_size = 8
        data.packed_sequence_specs = Config(PackedSequenceSpecs, packed_sequence_size=2048)
    return Partial(
        finetune,
        model=model,
        trainer=default_finetune_trainer(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node),
        data=data,
        log=default_finetune_log(dir=dir, name=name, tensorboard_logger=tensorboard_logger(name=name)),
        optim=distributed_fused_adam_with_cosine_annealing(max_lr=1e-4, min_lr=0, warmup_steps=50, adam_beta2=0.98),
        resume=nemo_resume(resume_path),
        tokenizer=tokenizer,
    )


def default_finetune_trainer(
    tensor_parallelism: int = 1,
    pipeline_parallelism: int = 1,
    pipeline_parallelism_type: Optional[Any] = None,
    virtual_pipeline_parallelism: Optional[int] = None,
    context_parallelism: int = 1,
    sequence_parallelism: bool = False,
    num_nodes: int = 1,
    num_gpus_per_node: int = 8,
    max_steps: int = 1000,
    limit_test_batches: Optional[int] = None,
    limit_val_batches: Optional[int] = None,
    val_check_interval: int = 30,
) -> Config[Any]:
    """The trainer with its strategy, in bf16.

    ``pipeline_parallelism_type`` is the dtype between pipeline stages; None selects the precision's. A limit of None
    means all batches.
    """
    from nemo2 import MegatronStrategy, Trainer
    from nemo2.callbacks.timing import TimingCallback
    from nemo2.recipes.precision.mixed_precision import bf16_mixed

    strategy = Config(
        MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        pipeline_model_parallel_size=pipeline_parallelism,
        pipeline_dtype=pipeline_parallelism_type,
        virtual_pipeline_model_parallel_size=virtual_pipeline_parallelism,
        context_parallel_size=context_parallelism,
        sequence_parallel=sequence_parallelism,
        gradient_as_bucket_view=True,
        ckpt_load_strictness="log_all",
    )
    settings = {
        **TRAINER_SETTINGS,
        "limit_test_batches": limit_test_batches,
        "limit_val_batches": limit_val_batches,
        "val_check_interval": val_check_interval,
    }
    return Config(
        Trainer,
        devices=num_gpus_per_node,
        num_nodes=num_nodes,
        max_steps=max_steps,
        strategy=strategy,
        plugins=bf16_mixed(),
        callbacks=[Config(TimingCallback)],
        **settings,
    )


def default_finetune_log(
    dir: Optional[str] = None,
    name: str = "default",
    tensorboard_logger: Optional[Config[Any]] = None,
    wandb_logger: Optional[Config[Any]] = None,
) -> Config[Any]:
    """Save a checkpoint every 50 steps, and keep two and the last one: those of validated steps by their loss, then the newest.

    ``dir`` and ``name`` as in `nemo2.recipes.log.default.default_log`.
    """
    from nemo2.recipes.log.default import default_log

    log: Any = default_log(dir=dir, name=name, tensorboard_logger=tensorboard_logger, wandb_logger=wandb_logger)
    log.ckpt.save_last, log.ckpt.save_top_k, log.ckpt.every_n_train_steps = "link", 2, 50
    del log.ckpt.train_time_interval
    return log


def nemo_resume(model_id: Optional[str]) -> Config[Any]:
    """Resume from the newest checkpoint of a run of the same name, or start from the weights of ``model_id``.

    Args:
        model_id: The name of an imported model on the hub (``meta-llama/Meta-Llama-3-8B``, short for ``nemo://`` and
            this name), a checkpoint's path, or ``hf://`` and a release. None: no weights, so `check` asks for them.
    """
    from nemo2 import RestoreConfig
    from nemo2.recipes.log.default import default_resume

    resume: Any = default_resume()
    if model_id is not None:
        is_path = "://" in model_id or model_id.startswith(("/", ".", "~"))
        resume.restore_config = Config(RestoreConfig, path=model_id if is_path else f"nemo://{model_id}")
    return resume


def lora() -> Config[Any]:
    """LoRA with its defaults."""
    from nemo2.models.peft import LoRA

    return Config(LoRA)


def dora() -> Config[Any]:
    """DoRA with its defaults."""
    from nemo2.models.peft import DoRA

    return Config(DoRA)
