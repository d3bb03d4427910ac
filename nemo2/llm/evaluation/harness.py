# SPDX-License-Identifier: Apache-2.0
"""Runs EleutherAI's lm-eval on a nemo2 model. Tasks, prompts and metrics are lm-eval's, and nemo2 computes
log-probabilities and texts.

Every rank must call `evaluate_tasks` with the same arguments. Data-parallel replicas share the requests
(`nemo2.llm.evaluation.answers`).
"""

import importlib.util
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from megatron.core import parallel_state

from nemo2.base import ranks
from nemo2.base.advice import advice
from nemo2.base.backend.extras import install
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.notices import warn_once
from nemo2.llm.evaluation import task_files
from nemo2.llm.evaluation.answers import Answers
from nemo2.models.generate import generate
from nemo2.models.scoring import score

_log = logging.getLogger(__name__)
_MOST_NEW_TOKENS = 256
"""lm-eval's own limit for a task without a limit."""
_GENERATION = {"max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "until"}
"""The names of a task's ``generation_kwargs`` that nemo2 reads."""


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    max_sequence_length: int,
    task_folder: Optional[Path] = None,
    num_fewshot: Optional[int] = None,
    limit: Optional[int] = None,
    max_batch_size: int = 8,
    seed: int = 1234,
    trust_tasks: bool = False,
    answers_file: Optional[Path] = None,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Evaluate a model on tasks. Returns lm-eval's results, ``{"results": {task: {metric: value}}, ...}``, on every rank.

    Args:
        model, tokenizer, max_sequence_length, max_batch_size: As in `nemo2.models.scoring.score`.
        tasks: Names of lm-eval's tasks, or of tasks in ``task_folder``.
        task_folder: A folder with your own tasks, as YAML files in lm-eval's format. It may also contain their data.
        num_fewshot: The number of solved examples before each question. None: the task's number.
        limit: The number of questions per task. None: all.
        seed: The seed for the choice of solved examples.
        trust_tasks: Run the functions that files of ``task_folder`` name, and render their prompts without a sandbox.
        answers_file: The file that stores the model's answers, which the caller deletes. Answers from an interrupted
            evaluation are reused. None: no file.
        on_progress: Called regularly, on every rank.

    Raises:
        ConfigError: lm-eval isn't installed, a task is unknown, or a number is out of range.
        SecurityError: a file of ``task_folder`` would run code.
    """
    refuse_counts(limit=limit, num_fewshot=num_fewshot)
    task_manager = refuse_unknown(tasks, task_folder, trust_tasks=trust_tasks)
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]

    replicas = parallel_state.get_data_parallel_world_size()
    answers = Answers(answers_file, replicas=replicas, on_progress=on_progress)
    with random_numbers_as_before():
        results = simple_evaluate(
            model=_language_model(model, tokenizer, max_sequence_length, max_batch_size, answers),
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=task_manager,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            log_samples=False,
        )
    names = ("results", "versions", "n-shot", "n-samples")
    # lm-eval 0.4.13 and later return results on one rank per machine.
    kept = ranks.broadcast({name: results[name] for name in names if name in results} if results else None)
    assert kept is not None, "rank 0 has lm-eval's results"
    return kept


def require_lm_eval() -> None:
    """Raise ConfigError if lm-eval isn't installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"Tasks need lm-eval, which is not installed: {install('evaluate')}. Text files (--text) don't need it."
        )


def refuse_counts(*, limit: Optional[int], num_fewshot: Optional[int]) -> None:
    """Check the numbers that lm-eval takes in another sense: a limit of 0 or a share of the questions, no solved examples
    for a negative number.

    Raises:
        ConfigError: a number isn't a whole number in its range.
    """
    require_counts("", others=(None,), limit=limit)
    require_counts("", least=0, others=(None,), num_fewshot=num_fewshot)


def refuse_unknown(tasks: Sequence[str], task_folder: Optional[Path], *, trust_tasks: bool = False) -> Any:
    """Check that lm-eval has all of ``tasks``, and return its task manager. If ``task_folder`` isn't trusted, lm-eval
    renders prompts in a sandbox from here on.

    Raises:
        ConfigError: lm-eval isn't installed, a task is unknown, the folder doesn't exist, or ``tasks`` is empty.
        SecurityError: a file of ``task_folder`` would run code.
    """
    if not tasks:
        raise ConfigError("tasks is empty: name at least one task, such as arc_easy.")
    if task_folder is not None and not task_folder.is_dir():
        raise ConfigError(f"{advice('--include ', 'task_folder=')}{str(task_folder)!r}: the folder doesn't exist.")
    require_lm_eval()
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    if task_folder is not None and not trust_tasks:
        from lm_eval.api.registry import METRIC_REGISTRY  # pyright: ignore[reportMissingImports]

        task_files.refuse_code(task_folder, metrics=set(METRIC_REGISTRY))
        task_files.sandbox_prompts()
    task_manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    for name in tasks:
        if not task_manager.match_tasks([name]):
            hint = did_you_mean(name, task_manager.all_tasks)
            raise ConfigError(
                f"lm-eval has no task {name!r}{hint} `lm-eval ls tasks` lists the tasks, and "
                f"{advice('--include FOLDER', 'task_folder=')} adds your own."
            )
    return task_manager


def temperature_of(settings: Mapping[str, Any]) -> float:
    """The temperature of a task's ``generation_kwargs``. 0: the likeliest token, which ``do_sample: false`` asks for
    whatever the temperature is, as in lm-eval's own models."""
    do_sample, temperature = settings.get("do_sample"), settings.get("temperature")
    if do_sample is False:
        return 0.0
    return float(temperature) if temperature is not None else 1.0 if do_sample else 0.0


def _language_model(model: Any, tokenizer: Any, most: int, max_batch_size: int, answers: Answers) -> Any:
    """The nemo2 model behind lm-eval's interface. `TemplateLM` tokenizes texts as it does for transformers' models."""
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import handle_stop_sequences  # pyright: ignore[reportMissingImports]

    class Ours(TemplateLM):
        warned = False

        def _warn_of_truncation(self, lengths: Sequence[int]) -> None:
            """Warn once about a question that is too long for the model. As in lm-eval, its beginning is cut off."""
            if not self.warned and max(lengths, default=0) > most:
                self.warned = True
                _log.warning(
                    "A question of a task has %d tokens with its answer, and the model reads at most %d. nemo2 cuts off the "
                    "beginning of every question that is too long.",
                    max(lengths),
                    most,
                )

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id

        @property
        def max_length(self) -> int:
            return most

        def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **_: Any) -> list[int]:
            del add_special_tokens
            return list(tokenizer.text_to_ids(string))

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            self._warn_of_truncation([len(context) + len(continuation) - 1 for context, continuation in pairs])
            settings = {
                "vocab_size": tokenizer.vocab_size,
                "max_sequence_length": most,
                "max_batch_size": max_batch_size,
            }

            def scored(mine: Sequence[Any]) -> list[tuple[float, bool]]:
                return [(one.log_prob, one.greedy) for one in score(model, mine, **settings)]

            return [(log_prob, greedy) for log_prob, greedy in answers.to("scores", pairs, scored)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            from nemo2.llm.evaluation.perplexity import perplexity_of

            del disable_tqdm
            texts = [text for (text,) in (request.args for request in requests)]

            def read(mine: Sequence[str]) -> list[float]:
                perplexities = perplexity_of(
                    model, tokenizer, mine, max_sequence_length=most, max_batch_size=max_batch_size
                )
                return [-perplexity.nats for perplexity in perplexities]

            return answers.to("texts", texts, read)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            return answers.to("answers", [request.args for request in requests], self._texts)

        def _texts(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
            return [self._text(context, dict(settings)) for context, settings in requests]

        def _text(self, context: str, settings: dict[str, Any]) -> str:
            new = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or _MOST_NEW_TOKENS)
            if new >= most:
                raise ConfigError(
                    f"A task asks for max_gen_toks={new} new tokens, but the model reads at most {most} tokens, question "
                    f"included. Set max_gen_toks to at most {most - 1} in the task."
                )
            ids = tokenizer.text_to_ids(context) or [self.prefix_token_id]
            self._warn_of_truncation([len(ids) + new])
            for name in settings.keys() - _GENERATION:
                warn_once(f"A task sets generation_kwargs.{name}={settings[name]!r}, which nemo2 does not read.")
            [answer] = generate(
                model,
                tokenizer,
                [ids[new - most :]],
                max_new_tokens=new,
                temperature=temperature_of(settings),
                top_k=int(settings.get("top_k", 0)),
                top_p=float(settings.get("top_p", 1.0)),
                min_p=float(settings.get("min_p", 0.0)),
                stop=handle_stop_sequences(settings.get("until"), eos=None),
                max_sequence_length=most,
            )
            return answer.text

    return Ours()


@contextmanager
def random_numbers_as_before() -> Iterator[None]:
    """A context that restores the state of all random generators at its end. lm-eval seeds them, and training may
    continue after an evaluation."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
