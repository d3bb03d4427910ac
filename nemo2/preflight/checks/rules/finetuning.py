# SPDX-License-Identifier: Apache-2.0
"""Rules of fine-tuning: packed rows, the files of the data, the initial weights, and the layers that a PEFT method
adapts."""

from collections.abc import Iterator

from nemo2.base.advice import advice
from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.config.walk import model_transforms
from nemo2.mcore.parallel.cuda_graphs import kind_of
from nemo2.mcore.parallel.transform import refuse_reading_weights, refuse_two_transforms
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic
from nemo2.preflight.checks.tokenizers import Unknown, known_tokenizer

FINETUNING = Topic("Fine-tuning data", needs_sizes=False)
PEFT = Topic("Fine-tuning", needs_sizes=False)


@FINETUNING.settled("packs-one-by-one")
def _packs_one_by_one() -> None:
    """With packed samples, the micro-batch size must be 1.

    Otherwise: The data module raises an error on every rank.
    """


@FINETUNING.settled("packs-are-as-long-as-sequences")
def _packs_are_as_long_as_sequences() -> None:
    """The length of a packed row must equal the sequence length of the model.

    Otherwise: The data module raises an error on every rank, because pipeline stages would exchange buffers of a
    different length.
    """


@FINETUNING.rule("packs-count-tokens")
def _count_tokens(facts: Facts) -> Iterator[str]:
    """Packed samples require `calculate_per_token_loss`.

    Otherwise: Every row has the same weight, whether it holds one long sample or twenty short samples. The loss differs
    from training without packing.
    """
    is_set = "calculate_per_token_loss" in getattr(facts.model, "__arguments__", {})
    if facts.packed and is_set and not facts.of_model("calculate_per_token_loss"):
        yield (
            "model.config.calculate_per_token_loss=False with packed samples: the loss would be a mean over rows that "
            "hold different numbers of samples. Leave calculate_per_token_loss unset, and the data module sets it to "
            "True."
        )


@FINETUNING.rule("packs-are-not-captured")
def _not_captured(facts: Facts) -> Iterator[str]:
    """CUDA graphs cannot be used with packed samples.

    Otherwise: The first step raises an error, because the sample boundaries change from row to row and a captured
    kernel cannot change.
    """
    kind = kind_of(facts.written_config)
    if facts.packed and kind != "none":
        yield (
            f"model.config.cuda_graph_impl={kind!r} with packed samples: the sample boundaries change from row to row, "
            "and a captured graph cannot change. Set cuda_graph_impl='none', or data.packed_sequence_specs=None."
        )


@FINETUNING.rule("packs-reset-the-state", local=True)
def _reset(facts: Facts) -> Iterator[str]:
    """Packed samples with Mamba layers require the Mamba kernels (mamba-ssm, causal-conv1d).

    Otherwise: The first step raises an error, because the state of one sample would leak into the next sample.
    """
    if not facts.packed or not facts.is_hybrid:
        return
    if not facts.has_mamba_kernels:
        yield (
            "data.packed_sequence_specs: without mamba-ssm, Mamba layers carry their state from one sample into the "
            "next. Set packed_sequence_specs=None, or train on a GPU with mamba-ssm and causal-conv1d."
        )


@FINETUNING.rule("packs-reset-linear-attention")
def _reset_linear(facts: Facts) -> Iterator[str]:
    """Models with gated DeltaNet layers (Qwen3-Next, Qwen 3.5) cannot train on packed samples.

    Otherwise: The first step raises an error, because the state of one sample would leak into the next sample.
    """
    if facts.packed and facts.of_model("experimental_attention_variant") == "gated_delta_net":
        yield (
            "data.packed_sequence_specs: gated DeltaNet layers carry their state from one sample into the next. Set "
            "packed_sequence_specs=None."
        )


@FINETUNING.rule("training-samples-are-there", local=True)
def _there(facts: Facts) -> Iterator[str]:
    """The training samples must be readable and fill a global batch. A data set that the run downloads requires the
    package datasets.

    Otherwise: The data module raises an error on every rank.
    """
    data = facts.parts.get("data")
    if not hasattr(data, "check_records"):
        return
    try:
        tokenizer = known_tokenizer(facts, "data")
        if tokenizer is None and data.reads_text():
            tokenizer = Unknown()  # another rule reports it
        data.check_records(
            tokenizer,
            encodes=not (isinstance(tokenizer, Unknown) or tokenizer is None),
            validates=facts.validates,
            align=2 * facts.layout.cp if facts.layout.cp > 1 else 1,
        )
    except Nemo2Error as error:
        yield str(error)


@PEFT.rule("fine-tuning-begins-with-weights", local=True)
def _weights(facts: Facts) -> Iterator[str]:
    """A run of `llm.finetune` must name the weights to start from.

    Otherwise: The run would train adapters on random weights, or train the whole model from random weights.
    """
    if facts.lacks_weights:
        yield (
            "resume.restore_config=None: llm.finetune starts from existing weights, but the recipe names none. "
            f"{advice('Add --from with', 'Set resume.restore_config.path to')} a checkpoint, an imported model "
            "(nemo://organisation/name) or a Hugging Face release (hf:///folder, hf://organisation/name)."
        )


@PEFT.settled("peft-settings-are-in-range")
def _peft_settings_are_in_range() -> None:
    """The rank, scale and dropout of a PEFT method must be in range.

    Otherwise: The PEFT method raises an error on every rank.
    """


@PEFT.rule("peft-fits-the-layers")
def _targets(facts: Facts) -> Iterator[str]:
    """The layers that a PEFT method targets must exist and must be at least as wide as its rank.

    Otherwise: The run stops on every rank before it builds the model.
    """
    method = facts.parts.get("peft")
    if method is None or facts.config is None:
        return
    from nemo2.models.conversion.families import modules_with_weights
    from nemo2.models.walker import linear_layers

    for refuse, there in (
        (method.refuse_unknown_targets, linear_layers),
        (method.refuse_unknown_modules, modules_with_weights),
    ):
        try:
            refuse(there(facts.config))
        except ConfigError as error:
            yield str(error)


@PEFT.rule("one-model-transform")
def _one_transform(facts: Facts) -> Iterator[str]:
    """`peft`, `model_transform`, the model's `model_transform` and those of callbacks must be one transform.

    Otherwise: The run stops on every rank before it transforms the model.
    """
    try:
        refuse_two_transforms(dict(model_transforms(facts.recipe)))
    except ConfigError as error:
        yield str(error)


@PEFT.rule("adapters-read-whole-weights")
def _whole_weights(facts: Facts) -> Iterator[str]:
    """`DoRA` and `CanonicalDoRA`, which read the weights of their layers, require a strategy that gathers these:
    `MegatronStrategy` without `fsdp="megatron"`, or `FSDP2Strategy`.

    Otherwise: The run stops on every rank after it has built the model.
    """
    if (method := facts.parts.get("peft")) is None:
        return
    from nemo2.training.strategies.fsdp import FSDPStrategy  # whose parts other ranks have no use for

    under = {
        "strategy.fsdp='megatron'": facts.of_strategy("fsdp") == "megatron",
        "FSDPStrategy": isinstance(facts.parts.get("trainer.strategy"), FSDPStrategy),
    }
    for name in (name for name, shards in under.items() if shards):
        try:
            refuse_reading_weights(method, under=name)
        except ConfigError as error:
            yield str(error)


@PEFT.rule("adapters-have-the-models-dtype")
def _dtype(facts: Facts) -> Iterator[str]:
    """Under `MegatronStrategy`, `lora_dtype` must be None or the dtype of the model's parameters.

    Otherwise: With 16-bit precision it has no effect, because the precision casts all parameters. In fp32 Megatron-Core's
    optimizer ends in its first step.
    """
    from nemo2.training.strategy import MegatronStrategy

    requested = getattr(facts.parts.get("peft"), "lora_dtype", None)
    dtype = getattr(facts.precision, "params_dtype", None)
    strategy = facts.parts.get("trainer.strategy")
    if requested is not None and dtype not in (None, requested) and isinstance(strategy, MegatronStrategy):
        yield (
            f"{facts.parts.peft_at}.lora_dtype={requested}: the precision makes all parameters {dtype}. Leave lora_dtype "
            "unset, or choose another precision in trainer.plugins."
        )
