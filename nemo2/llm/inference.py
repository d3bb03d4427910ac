# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's model, loaded into a layout and asked to complete prompts."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Optional, Self

import lightning.pytorch as pl
import torch

from nemo2.base.advice import typed_as
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError, DataError, Nemo2Error
from nemo2.base.files import text_of, write_file
from nemo2.base.names import listed
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.config.notices import warn_once
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.models.generate import Generation
from nemo2.models.sampling import Sampling
from nemo2.training.strategies.set_up import set_up
from nemo2.training.strategy import MegatronStrategy
from nemo2.training.trainer import Trainer

_log = logging.getLogger(__name__)
STANDARD = "-"
"""Standard input or output, in place of a file's path."""
_READ = {
    "num_tokens_to_generate": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "stop_words": "stop",
}
"""Megatron-Core's names of the options of generation, and ours."""
_WITHOUT_EFFECT = ("return_log_probs", "skip_prompt_log_probs")
"""Megatron-Core's options whose results are there in any case."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Sampling):
    """The options of generation: how the next token is drawn, the number of tokens, and what ends them. Values out of
    range are refused before a model is loaded."""

    max_new_tokens: int = 64
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts("", max_new_tokens=self.max_new_tokens)
        if isinstance(self.stop, str):
            raise ConfigError(f"stop={self.stop!r}: must be a list of texts, or each of its letters would end a text.")
        if not all(self.stop):
            raise ConfigError("stop='': every text contains it, so that no text would be left. Leave it out.")
        # The likeliest token passes each filter.
        filters = {"top_k": self.top_k > 1, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        if self.temperature == 0 and (idle := [name for name, narrows in filters.items() if narrows]):
            raise ConfigError(
                f"{' and '.join(typed_as(name, getattr(self, name)) for name in idle)} would not take effect: "
                f"{typed_as('temperature', self.temperature)} always picks the likeliest token. Set a temperature above 0, or "
                "leave the others out."
            )

    @classmethod
    def of(cls, inference_params: Any, **options: Any) -> Self:
        """The settings from Megatron-Core's parameters, or from the values of ``options`` that aren't None.

        Raises:
            ConfigError: both were given, or Megatron-Core's ask for what there isn't.
        """
        values = {name: value for name, value in options.items() if value is not None}
        if inference_params is None:
            return cls(**values)
        if values:
            raise ConfigError(f"inference_params and {', '.join(values)} set the same thing. Keep one of them.")
        for name, value in vars(inference_params).items():
            if value and name not in (*_READ, *_WITHOUT_EFFECT):
                raise ConfigError(
                    f"inference_params.{name}={value!r}: nemo2 reads {listed(_READ)}, and returns the log-probability of each "
                    "generated token (log_probs). Leave it unset. A begin-of-sequence token is set by add_BOS of llm.generate."
                )
        values = {own: getattr(inference_params, theirs, None) for theirs, own in _READ.items()}
        return cls(
            **{name: value for name, value in values.items() if value is not None and (name, value) != ("top_p", 0)}
        )


def prompts_of(prompts: Optional[Sequence[str]], input_dataset: Any) -> list[dict[str, Any]]:
    """A record per prompt with its text as ``input``, and what else a line of ``input_dataset`` has.

    Raises:
        ConfigError: neither or both are given.
        DataError: the file can't be read as text, is empty, or a line isn't a JSON object with ``input``.
    """
    if (prompts is None) == (input_dataset is None):
        raise ConfigError("generate needs prompts, or input_dataset: one of them.")
    if prompts is not None:
        if isinstance(prompts, str):
            raise ConfigError("prompts must be a list of at least one text.")
        return [{"input": prompt} for prompt in prompts]
    file = prompts_file(input_dataset)
    records = []
    # A text's splitlines() also splits at U+2028, which JSON may hold.
    lines = StringIO(text_of(0 if str(file) == STANDARD else file))
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["input"], str):
                raise TypeError(f'"input" is {json.dumps(record["input"])}')
            records.append(record)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f'{file}, line {number}: must be a JSON object with a text in the field "input" ({error}).'
            ) from None
    return records


def prompts_file(input_dataset: Any) -> Path:
    """The file of ``input_dataset``: a path, or a data module with a ``test_path``."""
    return Path(input_dataset if isinstance(input_dataset, str | Path) else input_dataset.test_path)


def warn_of_short_answers(ids: Sequence[Sequence[int]], *, max_new_tokens: int, max_sequence_length: int) -> None:
    """Warn that prompts leave less room in the model's sequences than the new tokens that they may have."""
    rooms = [max_sequence_length - len(one) for one in ids]
    if short := sum(room < max_new_tokens for room in rooms):
        warn_once(
            f"{typed_as('max_new_tokens', max_new_tokens)}: the model's sequences end at {max_sequence_length} tokens, the "
            f"prompt's included, so {short} of {len(ids)} prompts can get fewer: {min(rooms)} after the longest."
        )


@contextmanager
def loaded(
    path: str,
    trainer: Optional[pl.Trainer] = None,
    *,
    trust_remote_code: bool = False,
    before: Callable[[Any], Any] = lambda model: None,
) -> Iterator[Any]:
    """The model of the weights at ``path``, set up without a loop in ``trainer``'s layout. None: in this process, in fp32.

    ``before`` is given the model as it is described, and may refuse it before anything is built.
    """
    checkpoint = Checkpoint.open(path)
    model = checkpoint.model(trust_remote_code=trust_remote_code)
    before(model)
    trainer = trainer or single_process_trainer()
    strategy: Any = trainer.strategy
    # Single tokens can't be split: a model is built without, and so without the buffers in which its communication
    # would be overlapped. Experts' dispatchers need it; it is switched off in them while tokens are written.
    if getattr(strategy, "sequence_parallel", False) and model.config.num_moe_experts is None:
        strategy.sequence_parallel = False
        _log.info(
            "Generation produces one token at a time, which strategy.sequence_parallel=True cannot split. Sequence "
            "parallelism is off here."
        )
    restore = getattr(strategy, "restore_config", None)
    if not checkpoint.is_nemo2:
        strategy.restore_config = RestoreConfig(path=checkpoint.source)
    try:
        with set_up(trainer, model, checkpoint=checkpoint.path if checkpoint.is_nemo2 else None):
            yield model
    finally:
        strategy.restore_config = restore


def write_completions(path: str, records: Sequence[dict[str, Any]], results: Sequence[Generation]) -> None:
    """Write NeMo 2.0's fields and ours of each completion, a line of JSON for each. ``path``: "-" is standard output."""
    lines = []
    for record, result in zip(records, results, strict=True):
        label = {"label": record["output"]} if "output" in record else {}
        rest = {name: value for name, value in record.items() if name != "output"}
        lines.append(json.dumps({**rest, **label, "prediction": result.text, **asdict(result)}) + "\n")
    if path == STANDARD:  # /dev/stdout would be opened anew, which empties a file that the shell appends to
        print(*lines, sep="", end="", flush=True)
        return
    try:
        write_file(path, "".join(lines))
    except Nemo2Error:  # as by a disk that is full by now: they took long to compute
        write_completions(STANDARD, records, results)
        raise


def single_process_trainer(params_dtype: Optional[torch.dtype] = None) -> Trainer:
    """A trainer without a loop, for parameters of this dtype. None: fp32."""
    precision = {None: None, torch.float32: "32", torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}
    if params_dtype not in precision:
        raise ConfigError(
            f"params_dtype={params_dtype!r}: must be torch.float32, torch.bfloat16, torch.float16 or None."
        )
    return Trainer(
        strategy=MegatronStrategy(ckpt_async_save=False),
        devices=1,
        logger=False,
        enable_progress_bar=False,
        precision=precision[params_dtype],
    )


def refuse_another_dtype(trainer: pl.Trainer, params_dtype: Optional[torch.dtype]) -> None:
    own = getattr(getattr(trainer.strategy.precision_plugin, "dtype_config", None), "params_dtype", torch.float32)
    if params_dtype is not None and params_dtype is not own:
        raise ConfigError(
            f"params_dtype={params_dtype} contradicts the trainer's precision, which makes parameters {own}. Set the "
            "precision on the trainer, and remove params_dtype."
        )
