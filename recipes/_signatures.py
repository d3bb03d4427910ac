# SPDX-License-Identifier: Apache-2.0
"""NeMo 2.0's other signatures of ``pretrain_recipe`` and ``finetune_recipe``. A family's table selects its signature.

Most families take ``num_nodes, num_gpus_per_node, performance_mode`` (`PretrainRecipe`). Qwen, Gemma 2, Nemotron and
StarCoder take every size as a keyword. Mamba and Nemotron-H abbreviate the sizes. All build the same recipe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.recipes._assembler import AS_STATED, PretrainRecipe, arguments_of
from nemo2.recipes._finetuning import FinetuneRecipe, On, known_scheme

if TYPE_CHECKING:
    import nemo2.recipes._typed as _typed
    from nemo2.config import Config


@dataclass(frozen=True, kw_only=True)
class KeywordRecipe(PretrainRecipe):
    """A recipe whose layout, batch and schedule are arguments of ``pretrain_recipe``."""

    def pretrain_recipe(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        dir: Optional[str] = None,
        name: str = "default",
        tensor_parallelism: int = AS_STATED,
        pipeline_parallelism: int = AS_STATED,
        pipeline_parallelism_type: Optional[Any] = None,
        virtual_pipeline_parallelism: Optional[int] = AS_STATED,
        context_parallelism: int = AS_STATED,
        sequence_parallelism: bool = AS_STATED,
        expert_parallelism: int = AS_STATED,
        num_nodes: int = AS_STATED,
        num_gpus_per_node: int = AS_STATED,
        max_steps: int = AS_STATED,
        precision: str = AS_STATED,
        accumulate_grad_batches: int = AS_STATED,
        gradient_clip_val: float = AS_STATED,
        limit_test_batches: int = AS_STATED,
        limit_val_batches: int = AS_STATED,
        log_every_n_steps: int = AS_STATED,
        val_check_interval: int = AS_STATED,
        global_batch_size: int = AS_STATED,
        micro_batch_size: int = AS_STATED,
        seq_length: int = AS_STATED,
        warmup_steps: int = AS_STATED,
        constant_steps: int = AS_STATED,
        min_lr: Optional[float] = AS_STATED,
        max_lr: float = AS_STATED,
        performance_mode: bool = False,
        fn: Optional[Callable[..., Any]] = None,
    ) -> "_typed.Pretraining[Any, Any]":
        """The whole run as an editable tree. The arguments are those of `PretrainRecipe.pretrain_recipe`; ``AS_STATED``
        selects the recipe's fact.

        Batch sizes are in samples, and ``seq_length`` is in tokens. ``min_lr=None`` is a tenth of ``max_lr``.
        ``precision`` is ``"bf16-mixed"``, ``"16-mixed"`` or ``"32"``.

        Raises:
            ConfigError: another precision, or ``performance_mode`` of a recipe that has none.
        """
        return self._assemble(**arguments_of(locals()))


@dataclass(frozen=True, kw_only=True)
class HybridRecipe(PretrainRecipe):
    """A recipe of a Mamba or hybrid model, which accepts the file or the name of a tokenizer."""

    tokenizer_name: Optional[str] = None
    """The released model's tokenizer on Hugging Face. None: the tokenizer is a file of NVIDIA's."""

    def tokenizer(self, tokenizer_model: Optional[str] = None, vocab_file: Optional[str] = None) -> "Config[Any]":
        """A tokenizer as a config, from a folder or a name on Hugging Face. None: the released model's.

        Raises:
            ConfigError: both names are given; or neither is, and the released model's tokenizer has no name on the hub.
        """
        from nemo2.config import Config
        from nemo2.data.tokenizer import AutoTokenizer

        if tokenizer_model is not None and vocab_file is not None:
            raise ConfigError("tokenizer_model and vocab_file are two names of the same argument. Keep one of them.")
        name = tokenizer_model or vocab_file or self.tokenizer_name
        if name is None:
            raise ConfigError(f"{self.name}: its tokenizer is not published under a name. Set tokenizer_model.")
        return Config(AutoTokenizer, pretrained_model_name=name)

    def model(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokenizer_model: Optional[str] = None, vocab_file: Optional[str] = None
    ) -> "Config[Any]":
        """`PretrainRecipe.model` with the tokenizer if the facts name one."""
        model = super().model()
        if tokenizer_model is not None or vocab_file is not None:
            model.tokenizer = self.tokenizer(tokenizer_model, vocab_file)
        return model

    def pretrain_recipe(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        dir: Optional[str] = None,
        name: str = "default",
        tokenizer_model: Optional[str] = None,
        vocab_file: Optional[str] = None,
        num_nodes: int = AS_STATED,
        num_gpus_per_node: int = AS_STATED,
        tensor_parallelism: int = AS_STATED,
        sequence_parallelism: bool = AS_STATED,
        pipeline_parallelism: int = AS_STATED,
        max_steps: int = AS_STATED,
        val_check_interval: int = AS_STATED,
        limit_test_batches: int = AS_STATED,
        limit_val_batches: int = AS_STATED,
        log_every_n_steps: int = AS_STATED,
        save_top_k: int = AS_STATED,
        ckpt_async_save: bool = AS_STATED,
        seq_length: int = AS_STATED,
        gbs: int = AS_STATED,
        mbs: int = AS_STATED,
        performance_mode: bool = False,
        fn: Optional[Callable[..., Any]] = None,
    ) -> "_typed.Pretraining[Any, Any]":
        """`PretrainRecipe.pretrain_recipe` with the global and the micro-batch size (``gbs``, ``mbs``, in samples).

        Without ``tokenizer_model`` or ``vocab_file`` the mock data keep their own vocabulary, and nothing is downloaded.

        Raises:
            ConfigError: both tokenizers are given, or ``performance_mode`` of a recipe that has none.
        """
        arguments = arguments_of(locals())
        tokenizer = arguments.pop("tokenizer_model"), arguments.pop("vocab_file")
        if tokenizer != (None, None):
            arguments["tokenizer"] = self.tokenizer(*tokenizer)
        return self._assemble(**arguments)


@dataclass(frozen=True, kw_only=True)
class HybridFinetune(FinetuneRecipe):
    """Fine-tuning of a Mamba or hybrid model: machines, layout, batch and trainer are those of its pre-training."""

    of: HybridRecipe

    def __post_init__(self) -> None:
        run = self.of
        of_pretraining = {
            "lora": On(
                **vars(run.layout),
                nodes=run.nodes,
                gpus_per_node=run.gpus_per_node,
                packed_batch_size=run.global_batch_size,
            ),
            "global_batch_size": run.global_batch_size,
            "seq_length": run.seq_length,
            "packed_length": run.seq_length,
            # Mixers, attention and feed-forward layers, of which not every model has all.
            "peft": {"target_modules": ["*.layers.*"]},
        }
        for fact, value in of_pretraining.items():
            object.__setattr__(self, fact, value)
        super().__post_init__()

    @property
    def schemes(self) -> tuple[str, ...]:
        return ("none", "lora", "dora")

    @property
    def precision(self) -> str:
        return self.of.precision

    def finetune_recipe(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        dir: Optional[str] = None,
        name: str = "default",
        resume_path: Optional[str] = None,
        tokenizer_model: Optional[str] = None,
        vocab_file: Optional[str] = None,
        num_nodes: int = AS_STATED,
        num_gpus_per_node: int = AS_STATED,
        tensor_parallelism: int = AS_STATED,
        sequence_parallelism: bool = AS_STATED,
        pipeline_parallelism: int = AS_STATED,
        seq_length: int = AS_STATED,
        max_steps: int = AS_STATED,
        val_check_interval: int = AS_STATED,
        limit_test_batches: int = AS_STATED,
        limit_val_batches: int = AS_STATED,
        log_every_n_steps: int = AS_STATED,
        save_top_k: int = AS_STATED,
        ckpt_async_save: bool = AS_STATED,
        gbs: int = AS_STATED,
        mbs: int = AS_STATED,
        tensor_model_parallel_size: int = AS_STATED,
        pipeline_model_parallel_size: int = AS_STATED,
        performance_mode: bool = False,
        peft_scheme: Optional[str] = "none",
        fn: Optional[Callable[..., Any]] = None,
        packed_sequence: bool = False,
    ) -> "_typed.Finetuning[Any, Any]":
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
        arguments = arguments_of(locals())
        from nemo2.config import Config, Partial
        from nemo2.data.finetuning.packing import PackedSequenceSpecs
        from nemo2.data.finetuning.published import SquadDataModule
        from nemo2.llm.api import finetune
        from nemo2.recipes.finetune_default import nemo_resume
        from nemo2.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing

        scheme = known_scheme(arguments.pop("peft_scheme"), self.schemes)
        del arguments["resume_path"], arguments["fn"], arguments["packed_sequence"]
        for first, second in _SECOND_NAMES.items():
            value = arguments.pop(second)
            if value is AS_STATED:
                continue
            if arguments[first] is not AS_STATED and arguments[first] != value:
                raise ConfigError(
                    f"{first}={arguments[first]} and {second}={value} set the same size: leave one of them out."
                )
            arguments[first] = value
        parts: Any = self.of.pretrain_recipe(**arguments)
        model: Any = self.model()
        if tokenizer_model is not None or vocab_file is not None:
            model.tokenizer = self.of.tokenizer(tokenizer_model, vocab_file)
        sizes: Any = {
            name: getattr(parts.data, name) for name in ("seq_length", "global_batch_size", "micro_batch_size")
        }
        if packed_sequence:  # a packed row is a micro-batch
            specs = Config(PackedSequenceSpecs, packed_sequence_size=sizes["seq_length"])
            sizes.update(micro_batch_size=1, packed_sequence_specs=specs)
        recipe: Any = Partial(
            fn or finetune,
            model=model,
            trainer=parts.trainer,
            data=Config(SquadDataModule, **sizes),
            log=parts.log,
            optim=distributed_fused_adam_with_cosine_annealing(max_lr=1e-4, min_lr=0, warmup_steps=50),
            resume=nemo_resume(resume_path or self.weights),
            tokenizer="model",
        )
        with self._as_stated():
            self._set_method(recipe, scheme)
        return recipe


_SECOND_NAMES = {
    "tensor_parallelism": "tensor_model_parallel_size",
    "pipeline_parallelism": "pipeline_model_parallel_size",
}
