# SPDX-License-Identifier: Apache-2.0
"""The form of a strategy's checkpoints: the interface that a strategy uses."""

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Optional, Protocol, Union

import lightning.pytorch as pl
from torch import Tensor

from nemo2.base import ranks
from nemo2.base.errors import CheckpointError
from nemo2.base.names import listed
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.directory import Manifest, read_manifest
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.paths import HUGGING_FACE, OF_RELEASE, digest_of
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.parallel.megatron_parallel import MegatronParallel
from nemo2.models.gpt import get_vocab_size

if TYPE_CHECKING:
    from nemo2.checkpoint.shards import Shard

_log = logging.getLogger(__name__)
_USUAL_SIZES = [2**power for power in range(7)]
digest_of_base = functools.cache(digest_of)
"""`digest_of`, computed once, because the base of a run doesn't change."""


Part = Union[Literal["trained"], Callable[[str], bool]]


class Owner(Protocol):
    """The attributes of a strategy that its form reads."""

    restore_config: Optional[RestoreConfig]
    trainer: pl.Trainer
    optimizers: list[Any]
    megatron_parallel: Optional[MegatronParallel]

    @property
    def layout(self) -> Layout: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def checkpoint_io(self) -> Any: ...
    @property
    def lightning_module(self) -> Optional[pl.LightningModule]: ...
    @property
    def is_global_zero(self) -> bool: ...
    def start_from_released(self, path: str) -> None: ...


SHARDING, RESHARDABLE = "distrib_optim_sharding_type", "fully_reshardable"
"""Megatron-Core's setting for how a distributed optimizer's state is stored, and the value that any layout can read."""
OWN_LAYOUT_ONLY = "was saved with strategy.ckpt_parallel_save_optim=False, which only its own layout can load"


@dataclass(eq=False)
class Form(ABC):
    """Base class of forms."""

    owner: Owner
    """The strategy."""
    _: KW_ONLY
    load_optimizer: bool
    """Whether the optimizer's state is loaded."""
    save_optimizer: bool
    """Whether the optimizer's state is saved."""
    load_main_params: bool = False
    """Whether only the fp32 parameters of the optimizer's state are loaded."""
    part: Optional[Part] = None
    """The saved part of the model: "trained" parameters, or those that a function selects by their full names as a transform
    sees them (``decoder.layers.3.mlp.linear_fc1.weight``). None: all of it."""

    _read_base: Optional[Union[Path, str]] = field(default=None, init=False)

    # ------------------------------------------------------------------------------------------------------ saving

    @abstractmethod
    def parameters(self) -> Iterable[Tensor]:
        """This rank's shards of the parameters in `state`."""

    @abstractmethod
    def state(self, *, optimizer: bool) -> dict[str, Any]:
        """The state that the checkpoint IO writes: the model's and, if requested, that of the optimizer and the
        random streams."""

    def storage_options(self) -> dict[str, Any]:
        """Further facts for the checkpoint IO."""
        return {}

    def layout_record(self) -> dict[str, Any]:
        """The manifest's facts about the ranks. "strategy" names the writer of a form that isn't Megatron-Core's."""
        return asdict(self.owner.layout) | {"world_size": self.owner.num_ranks}

    # ------------------------------------------------------------------------------------------------------ loading

    def refuse_state(self, path: Path, why: str) -> NoReturn:
        """Refuse the optimizer's state in ``path``, which ``why``.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"{path} {why}. {type(self.owner).__name__} can load its weights, but not its optimizer state. Set "
            "strategy.ckpt_load_optimizer=False, or start a new run from its weights with resume.restore_config."
        )

    def read(self, path: Path, *, optimizer: bool, model: bool = True, base: bool = False) -> dict[str, Any]:
        """The state for `take`, from a checkpoint: the model and the optimizer as requested, and plain data.

        If the checkpoint holds only a part of the model, the rest is loaded first, from the checkpoint that the run
        started from.

        Args:
            base: The checkpoint may be of the model before its transform.

        Raises:
            CheckpointError: the checkpoint can't be read into this model, or the source of the rest is unknown.
        """
        manifest = read_manifest(path)
        if manifest is None or manifest.part_of is None or not model:
            if base and model:
                self._read_base = path.resolve()
            return self.read_whole(path, optimizer=optimizer, model=model, base=base)
        rest = self._rest_of(path, manifest)
        released = rest.startswith(HUGGING_FACE)
        if not released and not Path(rest).is_dir():
            raise CheckpointError(
                f"{path} contains only a part of the model, and the checkpoint with the rest is not at {rest}. Move it "
                "or link it there. A training also takes its location as resume.restore_config.path."
            )
        self._refuse_another_base(path, manifest, rest)
        if released:
            self.owner.start_from_released(rest)
            self._read_base = rest
        else:
            self.take(self.read(Path(rest), optimizer=False, base=True), strict=True)
        return self.read_whole(path, optimizer=optimizer, part=True)

    def _rest_of(self, path: Path, manifest: Manifest) -> str:
        """The location of the rest of the model: the recipe's initial weights, or the run's. If those are themselves
        a part, such as the adapters that this run continued, the checkpoint that they belong to."""
        restore = self.owner.restore_config
        rest = None if restore is None else restore.checkpoint
        if restore is None or rest == path:
            return manifest.part_of or "?"
        if rest is None:
            return restore.path
        inner = read_manifest(rest)
        return str(rest) if inner is None or inner.part_of is None else inner.part_of

    def _refuse_another_base(self, path: Path, manifest: Manifest, rest: str) -> None:
        there, trained_on = digest_of_base(rest), manifest.part_of_digest
        if not there or not trained_on or there == trained_on:
            return
        if there.startswith(OF_RELEASE) != trained_on.startswith(OF_RELEASE):
            if self.owner.is_global_zero:
                _log.warning(
                    "%s started from %s and now continues from %s. nemo2 cannot compare a release with a checkpoint, "
                    "so it compared only shapes.",
                    path,
                    manifest.part_of,
                    rest,
                )
            return
        raise CheckpointError(
            f"{path} contains a part of a model that started from {manifest.part_of}, but {rest} holds other weights: "
            f"their digests differ ({_short(trained_on)} and {_short(there)}). Set resume.restore_config.path to the "
            "weights that it was trained on."
        )

    @abstractmethod
    def read_whole(
        self, path: Path, *, optimizer: bool, model: bool = True, base: bool = False, part: bool = False
    ) -> dict[str, Any]:
        """The part of the checkpoint that `read` returns.

        Args:
            part: The checkpoint holds a part of the model, layer by layer.
        """

    def take(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:  # noqa: B027  # shards are read in place
        """Load the model and the optimizer from the result of `read`, unless they were read in place."""

    @abstractmethod
    def model_shards(self) -> "list[Shard]":
        """This rank's part of the model as shards of stored tensors, to be filled in place."""

    @abstractmethod
    def finish_reading(self, *, model: bool, optimizer: bool) -> None:
        """Take over what has been read into shards, of the model or of the optimizer's state."""

    def report_loaded_keys(self, keys: set[str]) -> None:  # noqa: B027  # no module of a transform can ask for them
        """Pass the keys that were loaded to modules of a transform that ask for them (`nemo2.mcore.parallel.transform`), and
        may change parameters."""

    def warn_of_unused_state(self, path: Path, stored: Iterable[str], requested: Iterable[str]) -> None:
        """Report tensors of the optimizer's state that the checkpoint has and this run's optimizer hasn't. Every rank calls it.

        Args:
            stored: The keys in the checkpoint.
            requested: The keys that this rank reads of the optimizer's state.
        """
        from nemo2.checkpoint.optimizer_forms import moments

        unused = moments(stored) - set().union(*ranks.gather(moments(requested)))
        if unused and self.owner.is_global_zero:
            _log.warning(
                "%s has the optimizer's %s, which the optimizer of this run doesn't use and its checkpoints won't have. Compare "
                "optim.config with the run that saved it.",
                path,
                listed(sorted(unused), 3),
            )

    @property
    def lightning_loads_optimizer(self) -> bool:
        """Whether the optimizer's state is in Lightning's own part of the checkpoint."""
        return False

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's entries in Lightning's own part of the checkpoint."""
        return {}

    def load_optimizer_states(self, states: Iterable[dict[str, Any]]) -> None:  # noqa: B027  # mostly there are none
        """Load the result of `optimizer_state`."""

    @abstractmethod
    def added_keys(self) -> frozenset[str]:
        """The keys of the tensors that ``model_transform`` has added to this rank's part of the model."""

    def lacking(self, path: Path, stored: Collection[str]) -> frozenset[str]:
        """The keys of `added_keys`, of all ranks, if a checkpoint of the model before its transform has none of them.

        Raises:
            CheckpointError: on every rank, if the checkpoint has some of them.
        """
        added = frozenset().union(*ranks.gather(self.added_keys()))
        lacking = added - {name.partition("/shard_")[0] for name in stored}
        if lacking and lacking != added:
            raise CheckpointError(
                f"{path} has some of the parameters that model_transform adds to the model, but lacks "
                f"{listed(sorted(lacking), 3)}, so it was saved with another "
                "transform. Use that transform, or a checkpoint of the model without a transform."
            )
        if lacking and self.owner.is_global_zero:
            _log.info(
                "%s has none of the parameters that model_transform adds to the model. They start with the values "
                "that the transform gave them.",
                path,
            )
        return lacking

    # ------------------------------------------------------------------------------------------------------ a part

    @property
    def base(self) -> Optional[Union[Path, str]]:
        """The model's initial weights, a checkpoint or released ones, which hold the parameters outside `part`."""
        restore = self.owner.restore_config
        if self._read_base is not None or restore is None:
            return self._read_base
        return restore.path if restore.checkpoint is None else restore.checkpoint.resolve()

    def keeps(self, name: str, trained: bool) -> bool:
        """Whether a parameter of this full name is saved."""
        return bool(self.part(name)) if callable(self.part) else self.part is None or trained

    def part_in(self, path: Path, stored: Collection[str], here: Collection[str]) -> set[str]:
        """The keys in ``here``, this rank's keys, that a checkpoint with a part of the model contains.

        Raises:
            CheckpointError: on every rank, if the checkpoint has tensors that no rank has, or lacks tensors that
                ``model_transform`` has added.
        """
        parts = ranks.gather((set(here), self.added_keys()))
        known_keys = set().union(*(keys for keys, _ in parts))
        there = {name.partition("/shard_")[0] for name in stored if name.startswith("module.")}
        unknown = there - known_keys
        missing = set().union(*(added for _, added in parts)) - there
        for names, fault in (
            (unknown, "has {} that this model does not have"),
            (missing, "lacks {} that model_transform adds"),
        ):
            if names:
                raise CheckpointError(
                    f"{path}, a part of a model, {fault.format(f'{len(names)} parameters')}: "
                    f"{listed(sorted(names), 3)}. Use the same model_transform and configuration as the run that saved it."
                )
        return there & set(here)

    # ------------------------------------------------------------------------------------------------------ shared

    @property
    def io(self) -> MegatronCheckpointIO:
        return self.owner.checkpoint_io

    @property
    def parallel(self) -> MegatronParallel:
        assert self.owner.megatron_parallel is not None
        return self.owner.megatron_parallel


def _short(digest: str) -> str:
    return digest.removeprefix(OF_RELEASE)[:12]


def paddings(module: Any, manifest: Optional[Manifest]) -> set[int]:
    """The possible numbers of vocabulary rows of ``module`` in a checkpoint, padded for the tensor-parallel size. Empty:
    unknown. Without a manifest the usual sizes are assumed."""
    config, tokenizer = getattr(module, "config", None), getattr(module, "tokenizer", None)
    sizes = _USUAL_SIZES if manifest is None else [manifest.layout.get("tp", 1)]
    if (rows := getattr(config, "vocab_size", None)) is not None:
        return {-(-rows // tp) * tp for tp in sizes}
    unit = getattr(config, "make_vocab_size_divisible_by", None)
    if tokenizer is None or unit is None:
        return set()
    return {get_vocab_size(SimpleNamespace(tensor_model_parallel_size=tp), tokenizer.vocab_size, unit) for tp in sizes}
