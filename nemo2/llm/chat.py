# SPDX-License-Identifier: Apache-2.0
"""A conversation with the model of a checkpoint: its turns, and the tokens that the model is given of them.

The template is the one that the run was trained with: that of its chat data, or the tokenizer's own.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

from nemo2.checkpoint.context import load_context
from nemo2.data.finetuning.chat import NEMO_TEMPLATE, ChatEncoder
from nemo2.data.finetuning.module import ChatDataModule
from nemo2.data.finetuning.settings import DatasetSettings
from nemo2.errors import CheckpointError, ConfigError
from nemo2.llm.inference import HowToGenerate, find_checkpoint, loaded
from nemo2.models.generate import generate

_LEAST_ROOM = 4
"""A history is cut where it leaves less than one part in so many of the model's length for the answer."""


@dataclass
class Conversation:
    """Turns of a user and of the assistant; `answer` adds one of each.

    Args:
        model: A Megatron-Core model or a LightningModule around it.
        encoder: Its template and tokenizer.
        max_sequence_length: Tokens of history and answer together.
        how: How answers are drawn.
        seed: Of the first answer; each further answer has the next one.
        system: What stands before the first turn. None: nothing.
    """

    model: Any
    encoder: ChatEncoder
    max_sequence_length: int
    how: HowToGenerate
    seed: int = 1234
    system: Optional[str] = None
    turns: list[dict[str, str]] = field(default_factory=list)
    """Whole, with those that the model no longer reads."""
    _first: int = 0
    """The first of ``turns`` that it reads."""

    def reset(self) -> None:
        """Forget the turns; the system's words stay."""
        self.turns, self._first = [], 0

    def answer(self, question: str, on_text: Callable[[str], None]) -> None:
        """Ask, and add question and answer to the turns. Pieces of the answer are told as they come; an answer that is
        interrupted (KeyboardInterrupt) is kept as far as it came.

        Raises:
            ConfigError: the question alone is too long for the model, or the template can't show it. No turn is added.
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
        """Turns at the beginning that the model no longer reads."""
        return self._first

    def record(self) -> dict[str, Any]:
        """The conversation as `ChatDataModule` reads one."""
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


@contextmanager
def conversation(
    path: str,
    how: HowToGenerate,
    *,
    seed: int = 1234,
    system: Optional[str] = None,
    chat_template: Optional[str] = None,
    trust_remote_code: bool = False,
) -> Iterator[Conversation]:
    """A conversation with the model of the checkpoint at ``path``, in this process.

    Args:
        path: A checkpoint directory, or a run's.
        chat_template: Jinja text, or a file with it. None: the run's, or its tokenizer's.
        how, seed, system: As for `Conversation`.
        trust_remote_code: As for `nemo2.llm.generate`.

    Raises:
        CheckpointError: no checkpoint there, or it doesn't describe its model.
        ConfigError: there is no template.
    """
    template = chat_template or _template_of_data(find_checkpoint(Path(path)))

    def encoder_of(model: Any) -> ChatEncoder:
        encoder = ChatEncoder(model.tokenizer, chat_template=template)
        try:
            encoder.template  # noqa: B018  # there is one, or there is no conversation
            encoder.end_of_turn  # noqa: B018
        except ConfigError as error:
            raise ConfigError(
                f"{path} cannot be used for chat: {error} Give the template that the model was trained with "
                "(--template FILE, Jinja), train on conversations with a template (ChatDataModule), or complete "
                "texts with nemo2 generate."
            ) from None
        return encoder

    with loaded(path, trust_remote_code=trust_remote_code, before=encoder_of) as model:
        yield Conversation(model, encoder_of(model), model.config.seq_length, how, seed=seed, system=system)


def _template_of_data(checkpoint: Path) -> Optional[str]:
    """The template of the conversations that a run was trained on; None where it was trained on others, or by the tokenizer's."""
    try:
        data = load_context(checkpoint, "data", build=False)
    except CheckpointError:
        return None
    if getattr(data, "__fn_or_cls__", None) is not ChatDataModule:
        return None
    given = DatasetSettings.of(data.dataset_kwargs).chat_template
    return given or (None if data.use_hf_tokenizer_chat_template else NEMO_TEMPLATE)


def save(conversation: Conversation, file: Path) -> None:
    """Add the conversation to a file of JSON lines, as `ChatDataModule` reads them."""
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(conversation.record(), ensure_ascii=False) + "\n")
