# SPDX-License-Identifier: Apache-2.0
"""Turns a run's facts into the configured call of ``llm.pretrain``.

A recipe module states a `PretrainRecipe`, whose methods are the factories that users call. Stating and listing facts
imports neither torch nor nemo-run, but calling a factory does. A factory builds nothing and touches neither files nor
the network.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Self

from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable
from nemo2.config.provenance import line_of_caller
from nemo2.mcore.parallel.layout import Layout

if TYPE_CHECKING:
    import nemo2.recipes._typed as _typed
    from nemo2.config import Config

__all__ = ["AS_STATED", "Layout", "PretrainRecipe"]


class _AsStated:
    """The default of an argument that the recipe's facts decide, so that None keeps its own meaning."""

    def __repr__(self) -> str:
        return "AS_STATED"


AS_STATED: Any = _AsStated()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRecipe:
    """The facts of a pre-training run. Classes are named as ``"module:name"``, so that naming a class imports nothing.

    Raises:
        ConfigError: a size is no count, or the facts contradict each other: the layout does not divide the machines, the
            global batch can't be split into micro-batches, or context parallelism can't split the sequence.
    """

    name: str
    family: str
    parameters: float
    """The parameters of the model with its own vocabulary, for lists and estimates."""
    vocabulary: Optional[int] = None
    """The rows of the embedding that ``parameters`` counts. The built model follows the tokenizer or the model
    config."""
    model_class: str
    config_class: str
    """The class of the model config. A name without a module is looked up beside the model class."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the model config that differ from its class."""
    seq_length: int
    """Tokens per sample. Set on the data; the model follows."""
    global_batch_size: int
    micro_batch_size: int
    data_class: str = "nemo2.data.mock:MockDataModule"
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the data module."""
    nodes: int = 1
    gpus_per_node: int = 8
    """Processes per node, which are CPU processes on a machine without GPUs."""
    layout: Layout = Layout()
    strategy: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the strategy, and those that differ from `STRATEGY_SETTINGS`."""
    ddp: Optional[Mapping[str, Any]] = None
    """Fields of the DDP config. None: the strategy's default."""
    precision: str = "nemo2.recipes.precision.mixed_precision:bf16_mixed"
    """The factory of the precision plugin."""
    max_steps: int
    max_lr: float
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of ``distributed_fused_adam_with_cosine_annealing``."""
    optimizer_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Megatron-Core's ``OptimizerConfig`` that the factory does not set."""
    trainer_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Trainer arguments that differ from `TRAINER_SETTINGS`."""
    checkpoint: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """``ModelCheckpoint`` arguments that differ from those of ``default_log``."""
    callbacks: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Further callbacks beside ``TimingCallback``: their classes, and the arguments of each."""
    timed: bool = False
    """Whether `trainer` alone adds `callbacks` and ``TimingCallback``, as some of NeMo 2.0's recipes do."""
    performance: Optional[Callable[[Any], Any]] = None
    """The function that edits the built recipe for ``performance_mode=True``. None: there is no such mode."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_stated_at", caller())
        sizes = ("seq_length", "global_batch_size", "micro_batch_size", "nodes", "gpus_per_node")
        require_counts(self.name, **{size: getattr(self, size) for size in sizes})
        for fact, kind, words in (
            ("layout", Layout, "a Layout, such as Layout(tp=2)"),
            ("max_lr", int | float, "a number"),
        ):
            if not isinstance(value := getattr(self, fact), kind):
                raise ConfigError(f"{self.name}.{fact}={value!r}: must be {words}.")
        refuse_what_does_not_divide(
            self.name,
            layout=self.layout,
            world=self.nodes * self.gpus_per_node,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            seq_length=self.seq_length,
        )

    def but(self, **changes: Any) -> Self:
        """This recipe with some facts replaced. A mapping is replaced as a whole.

        Raises:
            ConfigError: an unknown fact, or facts that contradict each other.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"A recipe has no fact {name!r}{did_you_mean(name, known)}")
        return dataclasses.replace(self, **changes)

    @configurable
    def model(self, seq_length: Optional[int] = None) -> Any:
        """The model as a config. With a ``seq_length`` of None the field stays unset and follows the data's."""
        from nemo2.config import Config

        with self._as_stated():
            config = Config(load(self.config_class, beside=self.model_class), **copy.deepcopy(dict(self.config)))
            if seq_length is not None:
                config.seq_length = seq_length
            return Config(load(self.model_class), config=config)

    @configurable
    def trainer(
        self,
        tensor_parallelism: int = AS_STATED,
        pipeline_parallelism: int = AS_STATED,
        pipeline_parallelism_type: Optional[Any] = None,
        virtual_pipeline_parallelism: Optional[int] = AS_STATED,
        context_parallelism: int = AS_STATED,
        sequence_parallelism: bool = AS_STATED,
        expert_model_parallelism: int = AS_STATED,
        expert_tensor_parallelism: Optional[int] = AS_STATED,
        account_for_embedding_in_pipeline_split: bool = AS_STATED,
        account_for_loss_in_pipeline_split: bool = AS_STATED,
        num_nodes: int = AS_STATED,
        num_gpus_per_node: int = AS_STATED,
        max_steps: int = AS_STATED,
        accumulate_grad_batches: int = AS_STATED,
        limit_test_batches: int = AS_STATED,
        limit_val_batches: int = AS_STATED,
        log_every_n_steps: int = AS_STATED,
        val_check_interval: int = AS_STATED,
        callbacks: Optional[list[Any]] = None,
        expert_parallelism: int = AS_STATED,
        precision: str = AS_STATED,
        dir: Optional[str] = None,
        save_top_k: int = AS_STATED,
        ckpt_async_save: bool = AS_STATED,
    ) -> "_typed.Trainer":
        """The trainer with its strategy as a config, under NeMo 2.0's argument names.

        ``AS_STATED`` selects the recipe's fact. ``pipeline_parallelism_type`` is the dtype between pipeline stages;
        None selects the precision's. ``expert_parallelism`` is the name in some of NeMo's recipes for
        ``expert_model_parallelism``. ``precision`` is ``"bf16-mixed"``, ``"16-mixed"`` or ``"32"``. With ``dir`` or
        ``save_top_k`` the trainer has a checkpoint callback, which saves there at each validation. Otherwise the log's
        callback saves. The sizes are returned as given; ``check`` judges the layout.

        Raises:
            ConfigError: another precision, or both names of the expert-parallel size.
        """
        arguments = arguments_of(locals())
        from nemo2 import MegatronStrategy, Trainer
        from nemo2.config import Config

        layout = self.layout
        if expert_parallelism is not AS_STATED:
            if expert_model_parallelism is not AS_STATED:
                raise ConfigError(
                    "expert_parallelism and expert_model_parallelism are two names of the same size. Keep one of them."
                )
            expert_model_parallelism = expert_parallelism
        with self._as_stated():
            strategy = Config(
                MegatronStrategy,
                tensor_model_parallel_size=_or(tensor_parallelism, layout.tp),
                pipeline_model_parallel_size=_or(pipeline_parallelism, layout.pp),
                pipeline_dtype=pipeline_parallelism_type,
                virtual_pipeline_model_parallel_size=_or(virtual_pipeline_parallelism, layout.vp),
                context_parallel_size=_or(context_parallelism, layout.cp),
                sequence_parallel=_or(sequence_parallelism, layout.sp),
            )
            experts = _or(expert_model_parallelism, layout.ep), _or(expert_tensor_parallelism, layout.etp)
            if experts != (1, None):
                strategy.expert_model_parallel_size, strategy.expert_tensor_parallel_size = experts
            set_fields(strategy, self.strategy)
            _set_arguments(
                strategy,
                account_for_embedding_in_pipeline_split=account_for_embedding_in_pipeline_split,
                account_for_loss_in_pipeline_split=account_for_loss_in_pipeline_split,
            )
            if self.ddp is not None:
                from megatron.core.distributed import DistributedDataParallelConfig

                strategy.ddp = Config(DistributedDataParallelConfig, **self.ddp)
            trainer: Any = Config(
                Trainer,
                devices=_or(num_gpus_per_node, self.gpus_per_node),
                num_nodes=_or(num_nodes, self.nodes),
                max_steps=_or(max_steps, self.max_steps),
                strategy=strategy,
                **self.trainer_settings,
            )
        set_fields(strategy, {k: v for k, v in STRATEGY_SETTINGS.items() if k not in self.strategy})
        set_fields(trainer, {k: v for k, v in TRAINER_SETTINGS.items() if k not in self.trainer_settings})
        _set_arguments(strategy, ckpt_async_save=ckpt_async_save)
        _set_arguments(trainer, **{name: arguments[name] for name in TRAINER_SETTINGS if name in arguments})
        trainer.plugins = load(self.precision if precision is AS_STATED else _factory_of(precision))()
        if callbacks is None and self.timed:
            callbacks = self._own_callbacks()
        trainer.callbacks = callbacks
        if dir is not None or save_top_k is not AS_STATED:
            trainer.callbacks = [
                *(callbacks or []),
                self._checkpoints(dir, save_top_k, every=trainer.val_check_interval),
            ]
        return trainer

    def _own_callbacks(self) -> "list[Config[Any]]":
        from nemo2.callbacks.timing import TimingCallback
        from nemo2.config import Config

        with self._as_stated():
            own = [Config(load(path), **arguments) for path, arguments in self.callbacks.items()]
            return [Config(TimingCallback), *own]

    def _checkpoints(self, dir: Optional[str], save_top_k: int, *, every: int) -> "Config[Any]":
        from nemo2 import ModelCheckpoint
        from nemo2.config import Config

        with self._as_stated():
            saves = Config(ModelCheckpoint, dirpath=dir, save_optim_on_train_end=True, **self.checkpoint)
        _set_arguments(saves, every_n_train_steps=every, save_top_k=save_top_k)
        return saves

    @configurable
    def pretrain_recipe(
        self,
        dir: Optional[str] = None,
        name: str = "default",
        num_nodes: int = AS_STATED,
        num_gpus_per_node: int = AS_STATED,
        performance_mode: bool = False,
        fn: Optional[Callable[..., Any]] = None,
    ) -> "_typed.Pretraining[Any, Any]":
        """The whole run as an editable tree: ``model, data, trainer, log, optim, resume`` of ``llm.pretrain``.

        Runs are stored under ``dir`` (None: the logger's default) in a folder ``name``. ``fn`` replaces
        ``llm.pretrain`` by a function with the same parameters.

        Raises:
            ConfigError: ``performance_mode`` of a recipe that has none.
        """
        return self._assemble(**arguments_of(locals()))

    @configurable
    def pretrain_recipe_performance(
        self,
        dir: Optional[str] = None,
        name: str = "default",
        num_nodes: int = AS_STATED,
        num_gpus_per_node: int = AS_STATED,
        fn: Optional[Callable[..., Any]] = None,
    ) -> "_typed.Pretraining[Any, Any]":
        """`pretrain_recipe` in performance mode, under the name of some of NeMo 2.0's recipes."""
        return self._assemble(**arguments_of(locals()), performance_mode=True)

    def _assemble(
        self,
        *,
        dir: Optional[str],
        name: str,
        performance_mode: bool,
        fn: Optional[Callable[..., Any]],
        **arguments: Any,
    ) -> "_typed.Pretraining[Any, Any]":
        """The recipe. ``arguments`` are the caller's for the data module, the optimizer's factory and ``ModelCheckpoint``, under
        the names of `_DATA`, `_OPTIMIZER` and `_CHECKPOINT`. All others are `trainer`'s."""
        from nemo2.config import Config, Partial
        from nemo2.llm.api import pretrain
        from nemo2.recipes.log.default import default_log, default_resume, tensorboard_logger
        from nemo2.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing

        data, optimizer, checkpoint = (_take(arguments, names) for names in (_DATA, _OPTIMIZER, _CHECKPOINT))
        log = default_log(dir=dir, name=name, tensorboard_logger=tensorboard_logger(name=name))
        with self._as_stated():
            set_fields(log.ckpt, {**self.checkpoint, **checkpoint})
            sizes = {
                "seq_length": self.seq_length,
                "global_batch_size": self.global_batch_size,
                "micro_batch_size": self.micro_batch_size,
            }
            module = Config(load(self.data_class), **{**sizes, **copy.deepcopy(dict(self.data)), **data})
            schedule = {"max_lr": self.max_lr, **self.optimizer, **optimizer}
            optim = distributed_fused_adam_with_cosine_annealing(**schedule)
            set_fields(optim.config, self.optimizer_config)
        recipe: Any = Partial(
            fn or pretrain,
            model=self.model(),
            trainer=self.trainer(**arguments, callbacks=self._own_callbacks()),
            data=module,
            log=log,
            optim=optim,
            resume=default_resume(),
        )
        if performance_mode:
            if self.performance is None:
                raise ConfigError(
                    f"{self.name} has no performance mode (--performance, performance_mode=True): leave it out, and add "
                    "callbacks such as MegatronCommOverlapCallback to recipe.trainer.callbacks."
                )
            recipe = self.performance(recipe)
        return recipe

    def _as_stated(self) -> AbstractContextManager[None]:
        return as_stated(self._stated_at, self.name)  # pyright: ignore[reportAttributeAccessIssue]


PRECISIONS = {"bf16-mixed": "bf16_mixed", "16-mixed": "fp16_mixed", "32": "fp32"}
"""Values of ``precision``, and the factory in ``nemo2.recipes.precision.mixed_precision`` for each."""


def _factory_of(precision: str) -> str:
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision={precision!r}: must be one of {', '.join(map(repr, PRECISIONS))}. For FP8, set "
            "recipe.trainer.plugins to a factory of nemo2.recipes.precision.mixed_precision."
        )
    return f"nemo2.recipes.precision.mixed_precision:{PRECISIONS[precision]}"


TRAINER_SETTINGS: Mapping[str, Any] = {
    # "auto" trains on GPUs if there are any and on the CPU elsewhere. NeMo's recipes have "gpu".
    "accelerator": "auto",
    "accumulate_grad_batches": 1,
    "limit_test_batches": 50,
    "limit_val_batches": 32,
    "log_every_n_steps": 10,
    "use_distributed_sampler": False,
    "val_check_interval": 2000,
}
"""Trainer settings of all pre-training recipes. Source: NeMo 2.0's recipes."""


STRATEGY_SETTINGS: Mapping[str, Any] = {"ckpt_async_save": True, "ckpt_parallel_load": True}
"""Strategy settings of all pre-training recipes. Source: NeMo 2.0's recipes."""


def set_fields(node: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(node, name, value)


def refuse_what_does_not_divide(
    name: str, *, layout: Layout, world: int, global_batch_size: int, micro_batch_size: int, seq_length: int
) -> None:
    """Check that the sizes of a recipe don't contradict each other.

    Raises:
        ConfigError: the layout does not divide the world, the global batch can't be split into micro-batches, or
            context parallelism can't split the sequence.
    """
    replicas = layout.data_parallel_size(world)
    if global_batch_size % (micro_batch_size * replicas):
        raise ConfigError(
            f"{name}: global_batch_size={global_batch_size} must be a multiple of micro_batch_size * data-parallel size = "
            f"{micro_batch_size} * {replicas} = {micro_batch_size * replicas}."
        )
    if layout.cp > 1 and seq_length % (2 * layout.cp):
        raise ConfigError(
            f"{name}: seq_length={seq_length} must be a multiple of 2 * context_parallel_size = {2 * layout.cp}."
        )


@contextmanager
def as_stated(stated_at: tuple[str, int], name: str) -> Iterator[None]:
    """In this context, fields are recorded as set in the file and line that state the facts of the recipe ``name``."""
    from nemo2.config.located import recorded_at

    with recorded_at(*stated_at, name):
        yield


def caller() -> tuple[str, int]:
    """The file and line that state the facts: the first frame outside this folder's machinery and dataclasses."""
    return line_of_caller(_MACHINERY)


_MACHINERY = [str(Path(__file__).with_name(name)) for name in ("_assembler.py", "_finetuning.py", "_signatures.py")]
_MACHINERY += [dataclasses.__file__, "<string>"]  # the constructors that dataclasses write


def arguments_of(local_variables: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method, from its local variables at its first line."""
    return {name: value for name, value in local_variables.items() if name != "self"}


def _or(argument: Any, stated: Any) -> Any:
    return stated if argument is AS_STATED else argument


def _set_arguments(node: Any, **arguments: Any) -> None:
    set_fields(node, {name: value for name, value in arguments.items() if value is not AS_STATED})


_DATA = {name: name for name in ("seq_length", "global_batch_size", "micro_batch_size", "tokenizer")}
_DATA |= {"gbs": "global_batch_size", "mbs": "micro_batch_size"}
_OPTIMIZER = {name: name for name in ("warmup_steps", "constant_steps", "min_lr", "max_lr")}
_OPTIMIZER |= {"gradient_clip_val": "clip_grad"}
_CHECKPOINT = {"save_top_k": "save_top_k"}
"""Arguments of factories, each with the field or parameter that it sets."""


def _take(arguments: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Remove these arguments, and return those that aren't ``AS_STATED`` under the names of what they set."""
    taken = {names[name]: arguments.pop(name) for name in names if name in arguments}
    return {name: value for name, value in taken.items() if value is not AS_STATED}


def load(path: str, beside: str = "") -> Any:
    """The object that ``"module:name"`` names. A name without a module belongs to the module of ``beside``."""
    module, _, name = path.rpartition(":")
    return getattr(import_module(module or beside.partition(":")[0]), name)
