# SPDX-License-Identifier: Apache-2.0
"""The base of strategies: the world of ranks, Megatron-Core's groups, random streams, and each rank's data."""

import atexit
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from nemo2.advice import advice
from nemo2.backend import get_backend
from nemo2.backend.attention_variables import attention_chosen_anew
from nemo2.backend.base import Backend
from nemo2.config.notices import announce_machine_settings
from nemo2.errors import ConfigError
from nemo2.parallel.forms import reduction_of
from nemo2.parallel.groups import initialize_model_parallel, seed_random_streams, use_given_groups
from nemo2.parallel.layout import Layout
from nemo2.place import here
from nemo2.precision import MegatronMixedPrecision
from nemo2.settle.world import World

_log = logging.getLogger(__name__)
DEFAULT_SEED = 1234
"""Megatron-LM's default. ``lightning.seed_everything`` sets another."""


class WorldStrategy(DDPStrategy):
    """Lightning's hooks before a model exists: processes, process groups, loaders. To be subclassed."""

    trainer: pl.Trainer
    layout: Layout
    data_sampler: Optional[Any]
    """The sampler that splits batches by data-parallel rank. None: the data module's, or none."""
    use_te_rng_tracker: bool = False
    _captures: bool = False
    """Whether CUDA graphs capture steps."""
    _init_model_parallel: bool = True
    _groups: dict[str, Any]
    """Further arguments of Megatron-Core's ``initialize_model_parallel``."""

    def _configure_launcher(self) -> None:
        """Skip Lightning's launcher for a single process and for one rank of an existing world, such as a rehearsal's.

        Lightning's launcher starts the script again, so neither could run in a notebook with it.
        """
        if self.num_ranks > 1 and not torch.distributed.is_initialized():
            super()._configure_launcher()

    @property
    def num_ranks(self) -> int:
        """The ranks that the trainer asks for."""
        return World(self.num_nodes, self.num_processes).size

    def setup_environment(self) -> None:
        """Set up the device, the world, Megatron-Core's groups, random streams and the batch calculator."""
        self._check_world(self.num_ranks)
        if isinstance(self.precision_plugin, MegatronMixedPrecision):
            self.precision_plugin.check_hardware()
        backend = get_backend()
        backend.install()
        backend.set_device(self.local_rank)
        super().setup_environment()
        if self._init_model_parallel:
            initialize_model_parallel(self.layout, timeout=self._timeout, **self._options_of_groups(backend))
        else:
            use_given_groups(self.layout)
        self._connect_data_sampler()
        seed_random_streams(_seed(), te_rng_tracker=self.use_te_rng_tracker, for_graphs=self._captures)

    def _options_of_groups(self, backend: Backend) -> dict[str, Any]:
        """`_groups` without the options that this machine's process groups lack, which are reported once."""
        without = {name: one for name, one in backend.group_overrides().items() if self._groups.get(name)}
        announce_machine_settings({f"strategy.{name}": one for name, one in without.items()})
        return self._groups | {name: value for name, (value, _) in without.items()}

    def setup_distributed(self) -> None:
        """Create the process group.

        A single process uses no port: a port that was free may be in use by now, and an inherited port may be its
        parent's.
        """
        if self.num_ranks == 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                self._get_process_group_backend(),
                store=HashStore(),
                rank=0,
                world_size=1,
                timeout=self._timeout,
                device_id=None if self.root_device.type == "cpu" else self.root_device,
            )
            if self.root_device.type != "cpu":
                atexit.register(_destroy_dist_connection)
        super().setup_distributed()

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """The context in which every call of ``configure_model`` runs."""
        with super().model_sharded_context(), attention_chosen_anew():
            yield

    def _check_world(self, world_size: int) -> None:
        """Check, before any process group exists, that the world was launched and fits the layout."""
        place = here()
        launched = place.world_size if place.launched else world_size
        environment = self.cluster_environment
        if environment is not None and environment.creates_processes_externally and launched != world_size:
            raise ConfigError(
                f"trainer.num_nodes * trainer.devices = {self.num_nodes} * {self.num_processes} = {world_size}, but "
                f"the launcher started {launched} process{'es' if launched > 1 else ''}. Set trainer.num_nodes and "
                f"trainer.devices to the launched nodes and processes per node, or launch {world_size} "
                f"process{'es' if world_size > 1 else ''} ({advice('--devices', 'ntasks_per_node')})."
            )
        self.layout.data_parallel_size(world_size)

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or get_backend().process_group_backend

    def _connect_data_sampler(self) -> None:
        if self.lightning_module is None:
            return  # a script that needs only the process groups
        trainer = self._trainer_of_module()
        datamodule = getattr(trainer, "datamodule", None)
        self.data_sampler = self.data_sampler or getattr(datamodule, "data_sampler", None)
        if self.data_sampler is None:
            return
        self.data_sampler.connect(trainer)
        self.data_sampler.setup(self.cluster_environment.global_rank())  # pyright: ignore[reportOptionalMemberAccess]
        # Our sampler knows the data-parallel ranks, whereas Lightning's would split by global rank.
        trainer._accelerator_connector.use_distributed_sampler = False

    def _trainer_of_module(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler that Lightning gives plain loaders, whose replicas are the data-parallel ranks."""
        from megatron.core import parallel_state

        return {
            "num_replicas": parallel_state.get_data_parallel_world_size(),
            "rank": parallel_state.get_data_parallel_rank(),
        }

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.data_sampler is None:
            _warn_of_equal_data(dataloader, self.trainer)
            return _with_own_generator(dataloader)
        stage = str(getattr(self.trainer.state.stage, "value", "") or "")
        mode = {
            "train": "train",
            "validate": "validation",
            "sanity_check": "validation",
            "test": "test",
            "predict": "predict",
        }.get(stage, "train")
        mode = getattr(dataloader, "mode", mode)
        # Passed only if the loss reduction keeps the last samples, because the user's own samplers may lack the option.
        kept = {} if self._drops_last(mode) else {"drop_last": False}
        loader = self.data_sampler.transform_dataloader(
            dataloader, consumed_samples=self.consumed_samples, mode=mode, **kept
        )
        return _with_own_generator(loader)

    def _drops_last(self, mode: str) -> bool:
        if mode not in ("validation", "test"):
            return True
        return getattr(reduction_of(self.lightning_module, mode), "val_drop_last", True)

    @property
    def consumed_samples(self) -> int:
        """The samples that training has consumed, including those before a resume. 0 without a Megatron data
        sampler."""
        return self.data_sampler.consumed_samples if self.data_sampler is not None else 0


def collective_timeout() -> timedelta:
    """The longest time of a collective: the variable TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, as in NeMo, else torch's 30
    minutes."""
    seconds = os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    return timedelta(seconds=int(seconds)) if seconds else timedelta(minutes=30)


def data_parallel_size() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_world_size()


def _with_own_generator(dataloader: Any) -> Any:
    """The loader with its own random generator.

    A loader draws a number each time it is iterated. On a CPU torch's default generator also feeds dropout, and a
    resumed run iterates at other steps than an uninterrupted one.
    """
    if isinstance(dataloader, DataLoader) and dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(_seed())
    return dataloader


def _warn_of_equal_data(dataloader: Any, trainer: pl.Trainer) -> None:
    """Warn about a plain loader without a data sampler and with Lightning's sampler switched off, because nothing
    splits its data."""
    plain = isinstance(dataloader, DataLoader) and isinstance(dataloader.sampler, (SequentialSampler, RandomSampler))
    if plain and not trainer._accelerator_connector.use_distributed_sampler and data_parallel_size() > 1:
        _log.warning(
            "trainer.use_distributed_sampler=False, and the data has neither a data_sampler nor a distributed sampler: all %d "
            "data-parallel replicas train on the same samples. Set trainer.use_distributed_sampler=True, or give the data "
            "module a MegatronDataSampler.",
            data_parallel_size(),
        )


def _seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", DEFAULT_SEED))
