# SPDX-License-Identifier: Apache-2.0
"""A released folder of sizes that no recipe has, with a tokenizer of bytes and a chat template."""

from pathlib import Path
from typing import Any

from support import released_models

SIZES = {"vocab_size": 331, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "eos_token_id": [2, 8]}


def write(folder: Path, **settings: Any) -> None:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    released_models.write("llama", folder, **(SIZES | settings))
    alphabet = ["<pad>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder)
