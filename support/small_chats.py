# SPDX-License-Identifier: Apache-2.0
"""Tokenizers with chat templates, and conversations, made on the spot."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_id_0>", "<extra_id_1>", "<|pad|>")
TEXT = [
    "What does the function return for an empty list of numbers?",
    "It returns zero, the neutral element of a sum, and raises nothing.",
    "You are a helpful assistant. user assistant system tool call think weather in Paris is mild",
    "Name three colours of the sky: blue in the day, red in the evening, black at night.",
]
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
WITH_TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}" + CHATML
)
MARKED = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content -}}{%- endgeneration -%}"
    "{%- else -%}{{- message.content -}}{%- endif -%}{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
)
"""ChatML whose blocks leave the end of the turn out."""
REASONING = (
    "{%- for message in messages -%}"
    "{%- set said = message.content if loop.last else message.content.split('</think>')[-1] -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + said + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Drops earlier reasoning, as templates of reasoning models do."""
STRICT = "{%- if messages[0].role != 'user' -%}{{ raise_exception('begin with the user') }}{%- endif -%}" + CHATML


def make_tokenizer(folder: Path, chat_template: str | None = CHATML, vocab_size: int = 320) -> Any:
    """A byte-level BPE tokenizer of transformers, saved in ``folder``, as nemo2 takes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from nemo2.data.tokenizer import AutoTokenizer

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer=trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    made.chat_template = chat_template
    made.save_pretrained(str(folder))
    return AutoTokenizer(str(folder), local_files_only=True)


def say(*turns: tuple[str, str], **record: Any) -> dict[str, Any]:
    """A conversation of (role, content)."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], **record}


def write_lines(file: Path, records: Iterable[Any]) -> Path:
    """Each record as a line of JSON; text as it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file
