# SPDX-License-Identifier: Apache-2.0
"""A Llama small enough for tests, its data, and the records of a run for comparison."""

import contextlib
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

SEQ, VOCAB, MBS, GBS = 16, 64, 2, 8
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": VOCAB,
    "seq_length": SEQ,
}
LATENT = {
    "num_query_groups": None,
    "kv_channels": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "make_vocab_size_divisible_by": 1,
}


class Tokens(Dataset):
    """Sample i is a function of i alone, and about a third of its tokens don't count."""

    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        text = torch.randint(VOCAB, (SEQ + 1,), generator=generator)
        return {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": (torch.rand(SEQ, generator=generator) > 0.3).float(),
            "position_ids": torch.arange(SEQ),
            "index": torch.tensor(index),
        }


def global_batch(step: int, size: int = GBS) -> dict[str, torch.Tensor]:
    """Step `step` of `Tokens` in order."""
    data = Tokens()
    return torch.utils.data.default_collate([data[step * size + index] for index in range(size)])


def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``batch`` for a model that is called by hand."""
    return {name: value.to(device()) for name, value in batch.items()}


def device() -> torch.device:
    """Where this rank's tensors live: its GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def devices(world: int) -> list[torch.device]:
    """One for each rank of a node."""
    gpus = torch.cuda.is_available()
    return [torch.device("cuda", rank) if gpus else torch.device("cpu") for rank in range(world)]


class TokenData(pl.LightningDataModule):
    """A data module that uses only nemo2's sampler."""

    def __init__(self, *, size: int = 64, micro_batch_size: int = MBS, global_batch_size: int = GBS) -> None:
        from nemo2.data.sampler import MegatronDataSampler

        super().__init__()
        self.seq_length = SEQ
        self.size = size
        self.data_sampler = MegatronDataSampler(
            seq_len=SEQ, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Tokens(self.size))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Tokens(16))


class Recorder(pl.Callback):
    """Records of each training step; numbers as they came, to be compared bit by bit."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.val_losses: list[float] = []
        self.grad_norms: list[float | None] = []
        self.rates: list[float] = []
        self.samples: list[list[int]] = []
        self.consumed: list[int] = []
        self.scales: list[float] = []
        self.updated: list[bool] = []

    def on_megatron_step_end(self, step: Any, reduced: torch.Tensor) -> None:
        (self.losses if step.stage == "training" else self.val_losses).append(float(reduced))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.strategy.optimizers[0]
        self.rates.append(float(optimizer.param_groups[0]["lr"]))
        if isinstance(batch, dict) and "index" in batch:
            self.samples.append(batch["index"].tolist())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.strategy.optimizers[0]
        norm = getattr(optimizer, "grad_norm", None)
        self.grad_norms.append(norm if norm is None else float(norm))  # a GPU's may be a tensor
        self.updated.append(getattr(optimizer, "update_successful", True))
        self.consumed.append(trainer.strategy.consumed_samples)
        if hasattr(optimizer, "mcore_optimizer"):
            self.scales.append(float(optimizer.mcore_optimizer.get_loss_scale()))

    def record(self) -> dict[str, list[Any]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, list)}


def build_llama(
    *,
    lr: float = 1e-2,
    distributed: bool = False,
    schedule: Any = None,
    latent: bool = False,
    optimizer: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """``latent``: with DeepSeek's attention in place of Llama's. ``optimizer``: further settings of its configuration."""
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.mcore.optim.megatron import MegatronOptimizerModule
    from nemo2.models.deepseek import DeepSeekConfig, DeepSeekModel
    from nemo2.models.llama import LlamaConfig, LlamaModel

    settings: dict[str, Any] = {"optimizer": "adam", "lr": lr, "weight_decay": 0.01, "clip_grad": 1.0}
    settings |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "use_distributed_optimizer": distributed}
    optim = MegatronOptimizerModule(OptimizerConfig(**settings | (optimizer or {})), lr_scheduler=schedule)
    if latent:
        return DeepSeekModel(DeepSeekConfig(**MODEL | LATENT | config), optim=optim)
    return LlamaModel(LlamaConfig(**MODEL | config), optim=optim)


def cosine(max_steps: int, warmup_steps: int = 1) -> Any:
    from nemo2.mcore.optim.lr_scheduler import CosineAnnealingScheduler

    return CosineAnnealingScheduler(max_steps=max_steps, warmup_steps=warmup_steps, constant_steps=0, min_lr=1e-3)


def build_trainer(
    *, max_steps: int, precision: Any = "32", callbacks: Any = (), trainer: dict | None = None, **strategy: Any
) -> Any:
    """A trainer for all the ranks there are. The precision may be a plugin; None: no plugin. ``strategy``: options of
    `MegatronStrategy`, or under the name "strategy" another one."""
    from nemo2.mcore.precision import MegatronMixedPrecision
    from nemo2.training.strategy import MegatronStrategy
    from nemo2.training.trainer import Trainer

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if isinstance(precision, str):
        precision = MegatronMixedPrecision(precision)
    return Trainer(
        devices=world,
        max_steps=max_steps,
        strategy=strategy.pop("strategy", None) or MegatronStrategy(**{"ckpt_async_save": False, **strategy}),
        plugins=precision,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        **{"limit_val_batches": 0, "log_every_n_steps": 1, **(trainer or {})},
    )


def keep(directory: str | Path | None = None, **options: Any) -> Any:
    """A `ModelCheckpoint` with names such as ``step=2``, and with all that a run needs to go on."""
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    given = {"filename": "{step}", "save_last": False, "save_optim_on_train_end": True, "verbose": False} | options
    return ModelCheckpoint(dirpath=None if directory is None else str(directory), **given)


def random_bytes(**options: Any) -> Any:
    """A `MockDataModule` with a tokenizer of bytes."""
    from nemo2.data.mock import MockDataModule
    from nemo2.data.tokenizer import ByteTokenizer

    sizes = {"seq_length": SEQ, "micro_batch_size": MBS, "global_batch_size": GBS}
    samples = {"num_train_samples": 64, "num_val_samples": 16, "num_workers": 0}
    return MockDataModule(**{"tokenizer": ByteTokenizer(), **sizes, **samples, **options})


def run_arguments(
    directory: str | Path,
    *,
    model: Any = None,
    data: Any = None,
    checkpoints: Any = None,
    resume: Any = None,
    base: str | None = None,
    name: str = "tiny",
    **trainer: Any,
) -> dict[str, Any]:
    """The arguments of `llm.pretrain` and `llm.finetune` for a run in ``directory``/``name``, which goes on from what is there.

    Args:
        model: None: a Llama of the data's tokenizer.
        data: None: `random_bytes`.
        checkpoints: None: `keep`.
        base: The weights to start from.
        trainer: Of `build_trainer`.
    """
    from nemo2 import AutoResume, NeMoLogger, RestoreConfig

    quiet()
    data = random_bytes() if data is None else data
    if model is None:
        model = build_llama(vocab_size=None)
        model.tokenizer = data.tokenizer
    restore = RestoreConfig(path=base) if base else None
    return {
        "model": model,
        "data": data,
        "trainer": build_trainer(**trainer),
        "log": NeMoLogger(name=name, log_dir=str(directory), ckpt=checkpoints or keep(), use_datetime_version=False),
        "resume": resume or AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True, restore_config=restore),
    }


def fit(
    model: Any,
    data: Any = None,
    *,
    max_steps: int,
    ckpt_path: str | Path | None = None,
    inspect: Callable[[Any], Any] | None = None,
    callbacks: Any = (),
    **options: Any,
) -> dict[str, Any]:
    """Train and return the `Recorder`'s lists, with what `inspect(trainer)` says under "inspected"."""
    quiet()
    recorder = Recorder()
    trainer = build_trainer(max_steps=max_steps, callbacks=[recorder, *callbacks], **options)
    trainer.fit(model, data if data is not None else TokenData(), ckpt_path=ckpt_path)
    return recorder.record() | {"inspected": inspect(trainer) if inspect is not None else None}


def quiet() -> None:
    """Ranks have no pytest to filter other libraries' warnings."""
    import logging

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "megatron"):
        logging.getLogger(name).setLevel(logging.ERROR)


def start_megatron(*, seed: int = 7, **layout: Any) -> None:
    """Groups of this ``layout`` and random streams, for models that are built by hand."""
    from megatron.core import parallel_state, tensor_parallel

    from nemo2.base.backend import get_backend
    from nemo2.mcore.parallel.groups import destroy_model_parallel

    get_backend().install()
    destroy_model_parallel()  # Megatron-Core's own leaves gloo's threads: thousands, where many models are built in a process
    parallel_state.initialize_model_parallel(**layout)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def release() -> None:
    """Destroy Megatron-Core's groups, so that the next run of this process can use another layout."""
    from nemo2.mcore.parallel.groups import destroy_model_parallel

    with contextlib.suppress(AssertionError):
        destroy_model_parallel()
    for _ in range(2):  # hooks of autograd's nodes are out of the collector's sight until the nodes are gone
        gc.collect()
    freeze_what_is_loaded()


def freeze_what_is_loaded() -> None:
    """Let the next garbage collection skip all present objects: about a million, mostly of modules.

    Nothing is frozen while a model is alive, because it would stay for good, and its groups with it: each set of them has 34
    threads that wake every 10 ms.
    """
    if not any(issubclass(type(thing), torch.nn.Module) for thing in gc.get_objects()):
        gc.freeze()


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's parameters by name, copied to the CPU."""
    return {
        f"{index}.{name}": parameter.detach().to("cpu", copy=True)
        for index, core in enumerate(trainer.strategy.megatron_parallel.unwrapped)
        for name, parameter in core.named_parameters()
    }
