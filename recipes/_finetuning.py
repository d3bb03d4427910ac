# SPDX-License-Identifier: Apache-2.0
"""Turns the facts of fine-tuning into the configured call of ``llm.finetune``, as `_assembler` does for pre-training.

A recipe module states a `FinetuneRecipe` for its ``RECIPE``: the initial weights, and layout and nodes of LoRA and of
full fine-tuning. `nemo2.recipes.finetune_default` has the settings that all recipes share.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Optional, Self

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable
from nemo2.mcore.parallel.layout import Layout
from nemo2.recipes._assembler import PretrainRecipe, as_stated, caller, load, refuse_what_does_not_divide, set_fields

if TYPE_CHECKING:
    import nemo2.recipes._typed as _typed
    from nemo2.config import Config

SCHEMES = ("lora", "dora", "none")
"""Values of ``peft_scheme``. "none" trains all parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class On(Layout):
    """A layout, and the settings that go with it in one fine-tuning scheme."""

    nodes: int = 1
    gpus_per_node: int = 8
    micro_batch_size: int = 1
    packed_batch_size: int = 8
    """The rows of the global batch with packed samples."""
    strategy: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the strategy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """The facts of fine-tuning a model: with LoRA or DoRA, and of all parameters.

    Raises:
        ConfigError: the facts contradict each other: a layout does not divide its machines, or the global batch can't
            be split into micro-batches.
    """

    of: PretrainRecipe
    """The pre-training recipe of the model."""
    weights: Optional[str]
    """The name of the released weights on Hugging Face's hub. None: no release can be imported by name."""
    lora: On = On()
    """The layout of LoRA and DoRA."""
    full: Optional[On] = None
    """The layout for all parameters. None: as `lora`."""
    peft: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the method."""
    frozen_model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the model config for LoRA and DoRA."""
    frozen_optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Megatron-Core's ``OptimizerConfig`` for LoRA and DoRA."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the model config in which the release differs from `of`."""
    vocabulary: Optional[int] = None
    """The rows of the release's embedding. None: as in `of`."""
    data_class: str = "nemo2.data.finetuning.published:SquadDataModule"
    """A `FineTuningDataModule`."""
    global_batch_size: int = 128
    packed_length: int = 2048
    """Tokens per row with packed samples."""
    seq_length: int = 2048
    """Tokens per sample without packing."""
    dataset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """``dataset_kwargs`` of the data module."""
    packed_dataset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further ``dataset_kwargs`` with packed samples."""
    fast_lora: Optional[On] = None
    fast_full: Optional[On] = None
    """The layout for all parameters with ``performance_mode=True``. None: the same as without it."""
    performance: Optional[Callable[[Any, str], Any]] = None
    """The function that edits the built recipe for ``performance_mode=True``, with the scheme as its second
    argument. None: there is no such mode."""
    packed_when_fast: bool = True
    """Whether ``performance_mode=True`` packs samples."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_stated_at", caller())
        for scheme, fast, packed in itertools.product(("lora", "none"), (False, True), (False, True)):
            on = self.on(scheme, performance_mode=fast)
            refuse_what_does_not_divide(
                f"{self.of.name}, fine-tuned,",
                layout=on,
                world=on.nodes * on.gpus_per_node,
                global_batch_size=on.packed_batch_size if packed else self.global_batch_size,
                micro_batch_size=1 if packed else on.micro_batch_size,
                seq_length=self.packed_length if packed else self.seq_length,
            )

    def but(self, **changes: Any) -> Self:
        """These facts with some replaced. A mapping is replaced as a whole.

        Raises:
            ConfigError: facts that contradict each other.
        """
        return dataclasses.replace(self, **changes)

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def factories(self) -> tuple[Callable[..., Any], ...]:
        """``model, trainer, pretrain_recipe, finetune_recipe``, the functions of a recipe's module."""
        return self.of.model, self.of.trainer, self.of.pretrain_recipe, self.finetune_recipe

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes, with the default first."""
        return SCHEMES

    @property
    def precision(self) -> str:
        """The factory of the precision plugin."""
        return "nemo2.recipes.precision.mixed_precision:bf16_mixed"

    def on(self, scheme: str, *, performance_mode: bool = False) -> On:
        """The layout and the nodes of a scheme."""
        full = scheme == "none"
        fast = (self.fast_full if full else self.fast_lora) if performance_mode else None
        return fast or (self.full or self.lora if full else self.lora)

    def model(self) -> "Config[Any]":
        """The model as a config, with the rows of the release's embedding. Its sequence length follows the data's."""
        model: Any = self.of.model()
        with self._as_stated():
            if rows := self.vocabulary or self.of.vocabulary:
                model.config.vocab_size = rows
            set_fields(model.config, copy.deepcopy(dict(self.config)))
        return model

    @configurable
    def finetune_recipe(
        self,
        dir: Optional[str] = None,
        name: str = "default",
        num_nodes: Optional[int] = None,
        num_gpus_per_node: Optional[int] = None,
        peft_scheme: Optional[str] = "lora",
        seq_length: Optional[int] = None,
        packed_sequence: Optional[bool] = None,
        performance_mode: bool = False,
        resume_path: Optional[str] = None,
        fn: Optional[Callable[..., Any]] = None,
    ) -> "_typed.Finetuning[Any, Any]":
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
        from nemo2.recipes.finetune_default import default_finetune_recipe

        scheme = known_scheme(peft_scheme, self.schemes)
        if performance_mode and self.performance is None:
            raise ConfigError(
                f"{self.name} has no performance mode of fine-tuning: leave performance_mode out, and set packed_sequence=True "
                "to pack samples."
            )
        on = self.on(scheme, performance_mode=performance_mode)
        packed = performance_mode and self.packed_when_fast if packed_sequence is None else packed_sequence
        recipe: Any = default_finetune_recipe(
            self.model(),
            resume_path or self.weights,
            dir=dir,
            name=name,
            num_nodes=num_nodes or on.nodes,
            num_gpus_per_node=num_gpus_per_node or on.gpus_per_node,
            packed_sequence=packed,
        )
        with self._as_stated():
            _lay_out(recipe.trainer.strategy, on)
            self._set_data(recipe.data, on, packed=packed)
            self._set_method(recipe, scheme)
        if seq_length is not None:
            recipe.data.seq_length = seq_length
            if packed:
                recipe.data.packed_sequence_specs.packed_sequence_size = seq_length
        if performance_mode and self.performance is not None:
            recipe = self.performance(recipe, scheme)
        return recipe if fn is None else _called(fn, recipe)

    def _set_data(self, data: Any, on: On, *, packed: bool) -> None:
        import fiddle as fdl

        fdl.update_callable(data, load(self.data_class))
        data.seq_length = self.seq_length
        data.global_batch_size, data.micro_batch_size = self.global_batch_size, on.micro_batch_size
        if packed:
            data.seq_length = data.packed_sequence_specs.packed_sequence_size = self.packed_length
            # A packed row is a micro-batch.
            data.global_batch_size, data.micro_batch_size = on.packed_batch_size, 1
        if dataset := {**self.dataset, **(self.packed_dataset if packed else {})}:
            data.dataset_kwargs = dataset

    def _set_method(self, recipe: Any, scheme: str) -> None:
        from nemo2.recipes.finetune_default import dora, lora

        if scheme == "none":
            recipe.optim.config.lr = 5e-6
            return
        recipe.peft = (lora if scheme == "lora" else dora)()
        set_fields(recipe.peft, copy.deepcopy(dict(self.peft)))
        set_fields(recipe.model.config, self.frozen_model)
        set_fields(recipe.optim.config, self.frozen_optimizer)

    def _as_stated(self) -> AbstractContextManager[None]:
        return as_stated(self._stated_at, self.name)  # pyright: ignore[reportAttributeAccessIssue]


def known_scheme(peft_scheme: Optional[str], known: tuple[str, ...] = SCHEMES) -> str:
    """A scheme by its own name. None becomes "none".

    Raises:
        ConfigError: there is no such scheme.
    """
    scheme = "none" if peft_scheme is None else str(peft_scheme).lower()
    if scheme not in known:
        raise ConfigError(
            f"Unrecognized peft scheme: {peft_scheme}: must be one of "
            f"{', '.join(known)}{did_you_mean(scheme, known, listed=True)} For any other method, set recipe.peft."
        )
    return scheme


def _lay_out(strategy: Any, on: On) -> None:
    strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size = on.tp, on.pp
    strategy.virtual_pipeline_model_parallel_size, strategy.context_parallel_size = on.vp, on.cp
    strategy.sequence_parallel = on.sp
    if (on.ep, on.etp) != (1, None):
        strategy.expert_model_parallel_size, strategy.expert_tensor_parallel_size = on.ep, on.etp
    set_fields(strategy, on.strategy)


def _called(fn: Callable[..., Any], recipe: Any) -> Any:
    from nemo2.config import Partial

    return Partial(fn, **{name: getattr(recipe, name) for name in recipe.__arguments__})
