# SPDX-License-Identifier: Apache-2.0
"""Facts about chat templates: what each renders, what nemo2 trains on, and whether that is what transformers and TRL give.

    pip download --no-deps trl && unzip trl-*.whl -d trl      # 72 templates; none is part of nemo2
    python -m tests.long.chat_templates trl/trl/chat_templates      # writes bench/results/chat-templates.md

A template ``NAME_training.jinja`` marks the assistant's text of ``NAME.jinja``; its mask by transformers is compared with what
nemo2 finds without marks. The tokenizer is one of bytes, with the special tokens that a template spells.
"""

import argparse
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

from nemo2.base.errors import Nemo2Error
from nemo2.data.finetuning.chat import ChatEncoder
from nemo2.data.finetuning.dialects import conversation_of
from nemo2.data.finetuning.sample import Empty, Malformed
from nemo2.data.tokenizer import AutoTokenizer

PAGE = Path(__file__).resolve().parents[2] / "bench" / "results" / "chat-templates.md"
_SPECIAL = re.compile(
    r"<\|[^<>|\s']{1,40}\|>|<\|[a-z_\"]{1,20}>|<[a-z_\"]{1,20}\|>|<\|\"\|>|<\uff5c[^<>'\n]{1,40}\uff5c>|</?s>"
    r"|<(?:start|end)_of_turn>|\[/?INST\]|<end_of_utterance>"
)
_CALL = {"type": "function", "function": {"name": "find_weather", "arguments": {"place": "Paris"}}}
_TOOL = {"type": "function", "function": {"name": "find_weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "description": "A town."}}, "required": ["place"]}}}  # fmt: skip


def _say(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


RECORDS: dict[str, dict[str, Any]] = {
    "turns": {"messages": _say(("user", "Good day."), ("assistant", "Well met."), ("user", "And?"), ("assistant", "Bye now."))},
    "system": {"messages": _say(("system", "Speak kindly."), ("user", "Good day."), ("assistant", "Well met."))},
    "tools": {
        "messages": [
            *_say(("user", "How is Paris?")),
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            *_say(("tool", "mild, dry"), ("assistant", "It is mild.")),
        ],
        "tools": [_TOOL],
    },
    "reasoning": {"messages": [*_say(("user", "Two and two?")),
                               {"role": "assistant", "content": "Four.", "reasoning_content": "Count them."}]},
}  # fmt: skip
"""A conversation of each kind."""


@dataclass(frozen=True)
class Outcome:
    """What nemo2 makes of a conversation."""

    trained: Optional[str] = None
    """The text trained on. None: the record is refused."""
    reason: str = ""
    same_ids: bool = True
    """Whether the ids are those of transformers, up to an end token that nemo2 adds."""
    mask: str = ""
    """How the text trained on compares with the mask of the training template. "": there is none."""


def outcomes(template: str, training: Optional[str] = None) -> dict[str, Outcome]:
    """The outcome of each of `RECORDS`, for a template and TRL's training template of it. None: there is none."""
    with TemporaryDirectory() as folder:
        encoder = ChatEncoder(_tokenizer(template + (training or ""), Path(folder)), chat_template=template)
        return {kind: _outcome(encoder, record, training) for kind, record in RECORDS.items()}


def _outcome(encoder: ChatEncoder, record: dict[str, Any], training: Optional[str]) -> Outcome:
    hf: Any = encoder.tokenizer.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    try:
        sample = encoder.encode(record)
        form = encoder._form_of(conversation_of(record))
    except (Malformed, Empty, Nemo2Error) as error:
        return Outcome(reason=str(error))
    ids = hf.apply_chat_template(
        form.messages, tools=form.tools, chat_template=encoder.template, tokenize=True, return_dict=False
    )
    trained = hf.decode([token for token, flag in zip(sample.ids, sample.trained, strict=True) if flag])
    mask = ""
    if training is not None:
        mask = _compared(encoder, form, trained, training)
    return Outcome(trained=trained, same_ids=ids in (sample.ids, sample.ids[:-1]), mask=mask)


def _compared(encoder: ChatEncoder, form: Any, own: str, training: str) -> str:
    """How the text trained on compares with the mask that transformers makes of a training template."""
    hf: Any = encoder.tokenizer.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    options = {"tools": form.tools, "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        found = hf.apply_chat_template(form.messages, chat_template=training, **options)
    except Exception:  # a template may raise anything
        return "the training template fails"
    ids = found["input_ids"]
    mask = hf.decode([token for token, flag in zip(ids, found["assistant_masks"], strict=True) if flag])
    if own == mask:
        return "equal"
    plain = _squeezed(own)
    if plain == _squeezed(mask):
        return "equal but for whitespace"
    # The model never writes the prompt of its answer, nor what a template writes only at the very end.
    prompt, closing = encoder._prompt, _squeezed(encoder._closing)
    parts = {_squeezed(prompt[start:end]) for start in range(len(prompt)) for end in range(start + 1, len(prompt) + 1)}
    for part in {"\0", *parts}:
        if plain.replace(part, "") == _squeezed(mask).removesuffix(closing or "\0").replace(part, ""):
            return "equal but for the prompt or the tail"
    whole = hf.apply_chat_template(form.messages, tools=form.tools, chat_template=encoder.template, tokenize=False)
    if hf.decode(ids) != whole:
        return "of another rendering"
    return f"nemo2 {own!r}, mask {mask!r}"


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _tokenizer(text: str, folder: Path) -> AutoTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = sorted(set(_SPECIAL.findall(text)) | {"<bos>", "<eos>"})
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", additional_special_tokens=special
    )
    made.save_pretrained(str(folder))
    return AutoTokenizer(str(folder), local_files_only=True)


def rows(files: Iterable[Path]) -> Iterator[tuple[str, str, dict[str, Outcome]]]:
    """The name, the hash and the outcomes of each template. The files are ``NAME.jinja``."""
    by_name = {file.stem: file.read_text("utf-8") for file in files}
    for name, text in sorted(by_name.items()):
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        yield name, digest, outcomes(text, by_name.get(f"{name}_training"))


def page(found: list[tuple[str, str, dict[str, Outcome]]], versions: str) -> str:
    """The table as Markdown."""
    every = [one for _, _, kinds in found for one in kinds.values()]
    trained = [one for one in every if one.trained is not None]
    masks = Counter(one.mask if not one.mask.startswith("nemo2 ") else "other" for one in trained if one.mask)
    lines = [
        "# Chat templates",
        "",
        f"`python -m tests.long.chat_templates` over {len(found)} templates ({versions}).",
        "For each, what nemo2 makes of four conversations of its own: two turns, a system message, a call of a tool with its",
        "result, and reasoning. A cell has the text trained on, or why the record is refused.",
        "",
        f"- {len(trained)} of {len(every)} conversations are trained on. The others are refused: the template leaves out a part.",
        f"- {sum(one.same_ids for one in trained)} of these {len(trained)} have the ids of transformers' own rendering.",
        f"- {sum(masks.values())} have a training template, whose mask by transformers is compared: "
        + ", ".join(f"{count} {kind}" for kind, count in masks.most_common())
        + ".",
        "",
        f"| template | sha256 | {' | '.join(RECORDS)} | other ids | mask |",
        "|---|---|" + "---|" * (len(RECORDS) + 2),
    ]
    for name, digest, kinds in found:
        cells = [_cell(one) for one in kinds.values()]
        ids = ", ".join(kind for kind, one in kinds.items() if one.trained is not None and not one.same_ids)
        told = "; ".join(f"{kind}: {_plain(one.mask)}" for kind, one in kinds.items() if one.mask not in ("", "equal"))
        lines.append(f"| {name} | {digest} | {' | '.join(cells)} | {ids} | {told} |")
    return "\n".join(lines) + "\n"


def _cell(one: Outcome) -> str:
    return f"refused: {_plain(one.reason)}" if one.trained is None else _code(one.trained)


def _code(text: str) -> str:
    return "`` " + _plain(text.replace("\n", "⏎")).replace("`", "'") + " ``"


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "¦").split())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    files = [file for folder in arguments.folders for file in sorted(folder.rglob("*.jinja"))]
    packages = [f"{name} {version(name)}" for name in ("nemo2", "transformers", "tokenizers", "jinja2")]
    names = {folder.parent.name if folder.name == "chat_templates" else folder.name for folder in arguments.folders}
    versions = ", ".join([*(f"of {name}" for name in sorted(names)), *packages, date.today().isoformat()])
    arguments.output.write_text(page(list(rows(files)), versions), "utf-8")
    print(arguments.output)


if __name__ == "__main__":
    main()
