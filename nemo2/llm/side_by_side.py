# SPDX-License-Identifier: Apache-2.0
"""Several checkpoints' completions of the same prompts, beside each other on a page of HTML."""

from collections.abc import Mapping, Sequence

from nemo2.models.generate import Generation
from nemo2.report.pictures.page import page, passages, section


def side_by_side(answers: Mapping[str, Sequence[Generation]], *, subtitle: str = "") -> str:
    """The page as text.

    Args:
        answers: For each checkpoint's name, its completions of the prompts, in the order of the prompts.
        subtitle: Such as how the tokens were drawn.
    """
    prompts = [answer.prompt for answer in next(iter(answers.values()))]
    sections = []
    for place, prompt in enumerate(prompts):
        texts: dict[str, str] = {}
        columns = []
        for name, completions in answers.items():
            answer = completions[place]
            same = next((other for other, text in texts.items() if text == answer.text), None)
            texts[name] = answer.text
            columns.append((name, prompt, answer.text, _facts(answer, same)))
        sections.append(section(f"Prompt {place + 1}", passages(columns)))
    return page("Side by side", *sections, subtitle=subtitle)


def _facts(answer: Generation, same: str | None) -> str:
    tokens = len(answer.token_ids)
    mean = f", log-probability {sum(answer.log_probs) / tokens:.2f} each" if tokens else ""
    end = "" if answer.finished else ", cut off"
    return f"{tokens} tokens{mean}{end}" + (f"; the same as {same}" if same else "")
