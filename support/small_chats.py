# SPDX-License-Identifier: Apache-2.0
"""Tokenizers with chat templates, and records for fine-tuning, made on the spot; what is trained on of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemo2.data.tokenizer import AutoTokenizer, ByteTokenizer

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


class StrictTokenizer(ByteTokenizer):
    """Fails on half a character, and on the word poison."""

    def text_to_ids(self, text: str) -> list[int]:
        if "\ud83d" in text:
            raise TypeError("TextEncodeInput must be a text")
        if "poison" in text:
            raise RuntimeError("panic")
        return super().text_to_ids(text)


def say(*turns: tuple[str, str], **record: Any) -> dict[str, Any]:
    """A conversation of (role, content)."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], **record}


def write_lines(file: Path, records: Iterable[Any]) -> Path:
    """Each record as a line of JSON; text as it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def trained_text(tokenizer: Any, sample: Any) -> str:
    """The text of a sample's tokens that are trained on."""
    trained = [token for token, flag in zip(sample.ids, sample.trained, strict=True) if flag]
    return tokenizer.tokenizer.decode(trained)


def questions(count: int) -> list[dict[str, str]]:
    """Records of fields, each of another length."""
    return [{"input": f"ask {i:03}" + "?" * (i % 9), "output": "answer " * (1 + i % 4)} for i in range(count)]


def texts_of(batches: Iterable[Any]) -> list[str]:
    """The text of each row of bytes."""
    return [bytes(i for i in row if 0 < i < 256).decode() for batch in batches for row in batch["tokens"].tolist()]


def trained_batches(data: Any, count: int) -> list[Any]:
    """The batches of a data module's next ``count`` steps, over as many passes as that takes."""
    trainer = SimpleNamespace(global_step=data.data_sampler.init_global_step)
    data.setup("fit")
    data.data_sampler.connect(trainer)
    loader = data.data_sampler.transform_dataloader(data.train_dataloader())
    batches: list[Any] = []
    while len(batches) < count:
        for batch in loader:
            batches.append(batch)
            trainer.global_step += 1
            if len(batches) == count:
                break
    return batches


def report_of(tokenizer: Any, records: list[Any], **settings: Any) -> Any:
    """What is said of records that are all encoded, and skipped where they are malformed."""
    from nemo2.data.finetuning.encode import BadRecords, encode_all
    from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule

    settings = {"on_bad_line": "skip", **settings}
    data = HFDatasetDataModule(records, split="train", tokenizer=tokenizer, seq_length=256, dataset_kwargs=settings)
    bad, source = BadRecords(data.settings.limits(data.seq_length + 1)), data.source("train")
    assert source is not None
    list(encode_all(source.records(bad), data.encoder(), bad))
    bad.refuse_idle()
    return bad.into
