# SPDX-License-Identifier: Apache-2.0
"""A conversation with the model of a checkpoint: its turns, and the tokens of the turns that the model receives.

The template is the one that the checkpoint's tokenizer has, which a run on conversations has set.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

from nemo2.base.advice import advice
from nemo2.base.errors import ConfigError
from nemo2.base.files import append
from nemo2.config.capture import check_arguments
from nemo2.data.finetuning.chat import ChatEncoder
from nemo2.llm.inference import GenerationOptions, loaded
from nemo2.models.generate import generate

_LEAST_ROOM = 4
"""A history is shortened if it leaves less than this fraction (one in so many) of the model's length for the answer."""


@dataclass
class Conversation:
    """Turns of a user and of the assistant. `answer` adds one of each.

    Args:
        model: A Megatron-Core model or a LightningModule around it.
        encoder: The chat template and the tokenizer.
        max_sequence_length: Tokens of history and answer together.
        how: The options of generation.
        seed: The seed of the first answer. Each further answer uses the next number.
        system: The system prompt. None: none.
    """

    model: Any
    encoder: ChatEncoder
    max_sequence_length: int
    how: GenerationOptions
    seed: int = 1234
    system: Optional[str] = None
    turns: list[dict[str, str]] = field(default_factory=list)
    """All turns, including those that the model no longer reads."""
    _first: int = 0
    """The first of ``turns`` that the model reads."""

    def reset(self) -> None:
        """Forget the turns. The system prompt stays."""
        self.turns, self._first = [], 0

    def answer(self, question: str, on_text: Callable[[str], None]) -> None:
        """Ask, and add the question and the answer to the turns. ``on_text`` receives pieces of the answer as they
        come.

        An answer that is interrupted (KeyboardInterrupt) is kept up to that point.

        Raises:
            ConfigError: the question alone is too long for the model, or the template can't render it. No turn is
                added.
        """
        ids = self._fitting([*self.turns, {"role": "user", "content": question}])
        pieces: list[str] = []

        def tell(place: int, piece: str) -> None:
            del place
            pieces.append(piece)
            on_text(piece)

        try:
            generate(
                self.model,
                self.encoder.tokenizer,
                [ids],
                **asdict(self.how),
                seed=self.seed + len(self.turns),
                end_ids=[self.encoder.end_of_turn],
                max_sequence_length=self.max_sequence_length,
                on_text=tell,
            )
        finally:
            self.turns += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "".join(pieces)},
            ]

    @property
    def unread(self) -> int:
        """The number of first turns that the model no longer reads."""
        return self._first

    def record(self) -> dict[str, Any]:
        """The conversation in the form that `ChatDataModule` reads."""
        return {"messages": [*self._system(), *self.turns]}

    def _fitting(self, turns: list[dict[str, str]]) -> list[int]:
        """The tokens of as many of the last turns as leave room for an answer."""
        room = min(self.how.max_new_tokens, self.max_sequence_length // _LEAST_ROOM)
        questions = [place for place in range(self._first, len(turns)) if turns[place]["role"] == "user"]
        ids: list[int] = []
        for first in questions:
            ids = self.encoder.question([*self._system(), *turns[first:]])
            if len(ids) + room <= self.max_sequence_length:
                self._first = first
                return ids
        if len(ids) < self.max_sequence_length:
            self._first = questions[-1]
            return ids
        raise ConfigError(
            f"This message has {len(ids)} tokens with its template, but the model reads only "
            f"{self.max_sequence_length}. Shorten the message."
        )

    def _system(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []


@check_arguments
@contextmanager
def conversation(
    path: str,
    how: GenerationOptions,
    *,
    seed: int = 1234,
    system: Optional[str] = None,
    chat_template: Optional[str] = None,
    chat_template_kwargs: Optional[Mapping[str, Any]] = None,
    trust_remote_code: bool = False,
) -> Iterator[Conversation]:
    """A conversation with the model of the checkpoint at ``path``, in this process.

    Args:
        path: A checkpoint directory, a run's, or released weights (``hf://organisation/name``, or their folder).
        chat_template: Jinja text, a file with it, or "plain". None: the one that the model was trained with.
        chat_template_kwargs: Variables that the template reads, as in `ChatEncoder`. None: none.
        how, seed, system: As in `Conversation`.
        trust_remote_code: As in `nemo2.llm.generate`.

    Raises:
        CheckpointError: ``path`` holds no checkpoint, or the checkpoint doesn't describe its model.
        ConfigError: there is no template, or it can't render a question.
    """

    def encoder_of(model: Any) -> ChatEncoder:
        encoder = ChatEncoder(model.tokenizer, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs)
        give = advice("--template plain, or --template FILE", "chat_template='plain', or a file")
        if not encoder.has_template:
            raise ConfigError(
                f"{path} cannot be used for chat: {model.tokenizer!r} has no chat template, as the tokenizers of base models. "
                f"Give the one that the model was trained with ({give}), "
                "or complete texts with nemo2 generate --prompt."
            )
        try:
            encoder.template  # noqa: B018  # there is one, or there is no conversation
            encoder.end_of_turn  # noqa: B018
            encoder.question([{"role": "user", "content": "?"}])  # a template that can't render fails here
        except ConfigError as error:
            raise ConfigError(
                f"{path} cannot be used for chat: {error} Give the template that the model was trained with "
                f"({give}), train on "
                "conversations with a template (ChatDataModule), or complete "
                "texts with nemo2 generate."
            ) from None
        return encoder

    with loaded(path, trust_remote_code=trust_remote_code, before=encoder_of) as model:
        yield Conversation(model, encoder_of(model), model.config.seq_length, how, seed=seed, system=system)


def save(conversation: Conversation, file: Path) -> None:
    """Append the conversation to a file of JSON lines, as `ChatDataModule` reads it."""
    append(file, json.dumps(conversation.record(), ensure_ascii=False) + "\n", opener=None)
