# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer and a small chat template for each family: the kinds of splitting, of special tokens and of Jinja that their
releases use, in templates of our own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizer

from support.small_chats import TEXT, say

TEMPLATES = Path(__file__).with_name("chat_templates")
"""Jinja files, each of which says where the release's form is published."""
Kind = Literal["qwen", "cl100k", "o200k", "deepseek", "gpt2", "digits", "gemma", "llama", "tiktoken"]

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: dict[str, list[str]] = {
    "qwen": [rf"{_ENGLISH}|\p{{N}}|{_SPACES}"],
    "cl100k": [rf"{_ENGLISH}|\p{{N}}{{1,3}}|{_SPACES}"],
    "o200k": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-~]?[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|" + _SPACES,
    ],
}
"""The patterns that cut a text before byte-level BPE, in the form of each release's tokenizer.json."""


class Tiktoken(PreTrainedTokenizer):
    """A tokenizer in Python, as those of Kimi K2, Moonlight and Hunyuan's models of experts, whose ranks are a file of tiktoken.
    It doesn't report the characters of its tokens."""

    def __init__(self, vocab_file: str, **options: Any):
        self.ranks: dict[str, int] = json.loads(Path(vocab_file).read_text())
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(self.ranks)

    def get_vocab(self) -> dict[str, int]:
        return {**self.ranks, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        """Merges the pair of the lowest rank, as long as there is one."""
        parts = [chr(byte) for byte in text.encode()]
        while True:
            pairs = [(self.ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in self.ranks]
            if not pairs:
                return parts
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def _convert_token_to_id(self, token: str) -> int:
        return self.ranks[token]

    def _convert_id_to_token(self, index: int) -> str:
        return next(token for token, rank in self.ranks.items() if rank == index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(ord(byte) for token in tokens for byte in token).decode(errors="replace")

    def save_vocabulary(self, *arguments: Any, **options: Any) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A family's tokenizer and template.

    Attributes:
        template: The name of a file in `TEMPLATES`.
        special: The special tokens, beside those that are named.
        named: The tokenizer's named tokens: ``bos_token``, ``eos_token`` and others.
        end: The text of the token that ends a turn.
        trained: For each of `CONVERSATIONS`, the text of each of the assistant's turns that is trained on, without ``end``. A
            conversation that isn't there is refused, because the template leaves out a part.
        words: Added tokens that are not special, such as ``<think>``.
        unlike_served: The conversations before whose last answer other ids stand than in the prompt of a served model.
    """

    kind: Kind
    template: str
    named: Mapping[str, str]
    end: str
    trained: Mapping[str, list[str]]
    special: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    unlike_served: tuple[str, ...] = ()

    @property
    def texts(self) -> dict[str, list[str]]:
        """``trained``, with the token that ends each turn: ``end``, unless one is there."""
        return {
            kind: [turn if turn.endswith(("<|observation|>", "<|im_end|>")) else turn + self.end for turn in turns]
            for kind, turns in self.trained.items()
        }


_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Paris", "days": 2}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "description": "A town."}}, "required": ["place"]}}}  # fmt: skip
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "turns": say(("system", "Speak kindly."), ("user", "Good day."), ("assistant", "Well met."), ("user", "And?"),
                 ("assistant", "Bye now.")),
    "tools": {
        "messages": [
            {"role": "user", "content": "How is Paris?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "mild, dry"},
            {"role": "assistant", "content": "It is mild."},
        ],
        "tools": [TOOL],
    },
    "reasoning": {
        "messages": [
            *say(("user", "Good day."), ("assistant", "Well met."), ("user", "Two and two?"))["messages"],
            {"role": "assistant", "content": "Four.", "reasoning_content": "Count them."},
        ]
    },
    "two reasonings": {
        "messages": [
            {"role": "user", "content": "One and one?"},
            {"role": "assistant", "content": "Two.", "reasoning_content": "By heart."},
            {"role": "user", "content": "Two and two?"},
            {"role": "assistant", "content": "Four.", "reasoning_content": "Count them."},
        ]
    },
}  # fmt: skip
"""Two turns behind a system message, a call of a tool, reasoning in the last answer, and in all."""

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CHATML = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}

_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_QWEN: Any = {"kind": "qwen", "special": _IM, "named": _CHATML, "words": _THINK, "end": "<|im_end|>"}
_PLAIN = {"turns": ["Well met.", "Bye now."]}
_ANSWERED = "It is mild."
_KIMI_TOKENS = (
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
_KIMI: Any = {
    "kind": "tiktoken", "special": _KIMI_TOKENS, "end": "<|im_end|>", "named": {"bos_token": "[BOS]", "eos_token": "<|im_end|>"},
}  # fmt: skip
_TURN = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
_TURN_ENDS = {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"}
_PARAMETERS = "<parameter=place>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
_JSON = '{"place": "Paris", "days": 2}'
CHATS: dict[str, Chat] = {
    "Qwen 2 MoE": Chat(**{**_QWEN, "words": ()}, template="qwen2_moe", trained=_PLAIN),
    "Qwen3-Next, Qwen 3.5": Chat(**_QWEN, template="qwen35", trained={
        "turns": ["Well met.", "\n</think>\n\nBye now."],
        "tools": [f"\n</think>\n\n<tool_call>\n<function=weather>\n{_PARAMETERS}</function>\n</tool_call>",
                  "\n</think>\n\nIt is mild."],
        "reasoning": ["Well met.", "Count them.\n</think>\n\nFour."],
    }),
    "GLM-4.5": Chat(
        kind="cl100k", template="glm45", words=(*_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), end="<|user|>",
        named={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, trained={
            "turns": ["\n<think></think>\nWell met.", "\n<think></think>\nBye now."],
            "tools": ["\n<think></think>\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Paris</arg_value>\n"
                      "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>",
                      "\n<think></think>\nIt is mild."],
            "reasoning": ["\n<think></think>\nWell met.", "\n<think>Count them.</think>\nFour."],
        },
    ),
    "Kimi K2": Chat(**_KIMI, template="kimi_k2", trained={  # the template writes no reasoning of a last answer
        "turns": ["<think></think>Well met.", "<think></think>Bye now."],
        "tools": ["<think></think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
                  f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_calls_section_end|>",
                  "<think></think>It is mild."],
    }),
    "Moonlight": Chat(**_KIMI, template="moonlight", trained=_PLAIN),
    "DeepSeek V3.1": Chat(
        kind="deepseek", template="deepseek", words=("<think>", "</think>"), end="<｜end▁of▁sentence｜>",
        special=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
                 "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        named={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}, trained={
            **_PLAIN,
            "tools": [f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>"
                      "<｜tool▁calls▁end｜>", _ANSWERED],
        },
    ),
    "MiniMax M2": Chat(
        kind="o200k", template="minimax_m2", special=("]~!b[", "]~b]"), named={"eos_token": "[e~["}, end="[e~[",
        words=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"), trained={
            **_PLAIN,
            "tools": ["\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"place\">Paris</parameter>\n"
                      "<parameter name=\"days\">2</parameter>\n</invoke>\n</minimax:tool_call>", _ANSWERED],
            "reasoning": ["Well met.", "Count them.\n</think>\n\nFour."],
        }, unlike_served=("turns", "tools"),  # a served model always reasons
    ),
    "Ministral 3": Chat(
        kind="o200k", template="ministral3", named={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}, end="</s>",
        special=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                 "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"), trained={
            **_PLAIN,
            "tools": [f"[TOOL_CALLS]weather[ARGS]{_JSON}", _ANSWERED],
            "reasoning": ["Well met.", "[THINK]Count them.[/THINK]Four."],
            "two reasonings": ["[THINK]By heart.[/THINK]Two.", "[THINK]Count them.[/THINK]Four."],
        },
    ),
    "OLMo 2": Chat(
        kind="cl100k", template="olmo2", named={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, end="<|endoftext|>",
        trained=_PLAIN,
    ),
    "OLMo 3": Chat(
        kind="cl100k", template="olmo3", special=_IM, named={"eos_token": "<|endoftext|>"}, end="<|endoftext|>", trained={
            "turns": ["Well met.<|im_end|>", "Bye now."],
            "tools": ["<function_calls>weather(place='Paris', days=2)</function_calls><|im_end|>", _ANSWERED],
        },
    ),
    "OLMoE": Chat(
        kind="gpt2", template="olmo2", named={"bos_token": "|||IP_ADDRESS|||", "eos_token": "<|endoftext|>"}, end="<|endoftext|>",
        trained=_PLAIN,
    ),
    "Gemma 3": Chat(
        kind="gemma", template="gemma3", special=("<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>", trained=_PLAIN,
        named={"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    ),
    "SmolLM 3": Chat(**{**_QWEN, "kind": "cl100k"}, template="smollm3", trained={
        "turns": ["<|im_start|>assistant\nWell met.", "<|im_start|>assistant\nBye now."],
        "reasoning": ["<|im_start|>assistant\nWell met.", "<|im_start|>assistant\n<think>\nCount them.\n</think>\n\nFour."],
        "two reasonings": ["<|im_start|>assistant\n<think>\nBy heart.\n</think>\n\nTwo.",
                           "<|im_start|>assistant\n<think>\nCount them.\n</think>\n\nFour."],
    }),
    "Phi-4": Chat(
        kind="cl100k", template="phi4", special=(*_IM, "<|im_sep|>"), named=_CHATML, end="<|im_end|>", trained=_PLAIN
    ),
    "Phi-4 mini": Chat(
        kind="o200k", template="phi4_mini", named={"eos_token": "<|endoftext|>"}, end="<|end|>",
        special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>",
                 "<|tool_response|>"), trained={
            **_PLAIN,
            "tools": [f'<|tool_call|>{{"name": "weather", "arguments": {_JSON}}}<|/tool_call|>', _ANSWERED],
        },
    ),
    "Granite 3": Chat(
        kind="gpt2", template="granite3", special=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        end="<|end_of_text|>",
        named={"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>"}, trained={
            **_PLAIN, "tools": [f'<|tool_call|>{{"name": "weather", "arguments": {_JSON}}}', _ANSWERED],
        },
    ),
    "Nemotron 3 Nano": Chat(**{**_QWEN, "kind": "o200k", "words": ("<think>", "</think>")}, template="nemotron3_nano", trained={
        "turns": ["</think>Well met.", "</think>Bye now."],
        "tools": [f"</think>\n<tool_call>\n<function=weather>\n{_PARAMETERS}</function>\n</tool_call>\n", "</think>It is mild."],
        "reasoning": ["</think>Well met.", "Count them.\n</think>\nFour."],
        "two reasonings": ["By heart.\n</think>\nTwo.", "Count them.\n</think>\nFour."],
    }, unlike_served=("turns", "tools")),  # a served model reasons, except if `enable_thinking` is false
    "ERNIE 4.5": Chat(
        kind="llama", template="ernie45", end="<|end_of_sentence|>",
        named={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "cls_token": "<|begin_of_sentence|>",
               "sep_token": "<|end_of_sentence|>"},
        trained={"turns": [" Well met.", " Bye now."]}, unlike_served=("turns",),  # the blank joins the first word
    ),
    "Hunyuan": Chat(
        kind="cl100k", template="hunyuan", named={"eos_token": "<｜hy_place▁holder▁no▁2｜>"}, end="<｜hy_place▁holder▁no▁2｜>",
        special=("<｜hy_begin▁of▁sentence｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁3｜>"),
        trained=_PLAIN,
    ),
    "Hunyuan MoE": Chat(
        kind="tiktoken", template="hunyuan_moe", special=("<|extra_0|>", "<|extra_4|>"), end="<|eos|>", trained=_PLAIN,
        named={"eos_token": "<|eos|>", "bos_token": "<|startoftext|>"},
    ),
    "Seed-OSS": Chat(
        kind="cl100k", template="seed_oss", end="<seed:eos>",
        special=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        named={"bos_token": "<seed:bos>", "eos_token": "<seed:eos>", "pad_token": "<seed:pad>"}, trained={
            **_PLAIN,
            "tools": ["<seed:tool_call>\n<function=weather>\n<parameter=place>Paris</parameter>\n<parameter=days>2</parameter>\n"
                      "</function>\n</seed:tool_call>", _ANSWERED],
            "reasoning": ["Well met.", "<seed:think>Count them.</seed:think>\nFour."],
            "two reasonings": ["<seed:think>By heart.</seed:think>\nTwo.", "<seed:think>Count them.</seed:think>\nFour."],
        },
    ),
    "Command R, Aya": Chat(
        kind="digits", template="cohere", special=_TURN, named=_TURN_ENDS, end="<|END_OF_TURN_TOKEN|>", trained=_PLAIN
    ),
    "Command R7B, Command A": Chat(
        kind="digits", template="cohere2", named=_TURN_ENDS, end="<|END_OF_TURN_TOKEN|>",
        special=(*_TURN, "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>",
                 "<|END_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"), trained={
            "turns": ["<|START_RESPONSE|>Well met.<|END_RESPONSE|>", "<|START_RESPONSE|>Bye now.<|END_RESPONSE|>"],
            "tools": ["<|START_THINKING|><|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", "
                      f"\"tool_name\": \"weather\", \"parameters\": {_JSON}}}\n]<|END_ACTION|>",
                      "<|START_RESPONSE|>It is mild.<|END_RESPONSE|>"],
        },
    ),
}  # fmt: skip


_ANSWERS = [
    "Well met. Bye now. It is mild. Two. Four. Good day.",
    "User: And? Assistant: Well met. Assistant: Bye now.",
] * 3


def make_tokenizer(chat: Chat, folder: Path) -> Any:
    """A tokenizer of a chat's kind, trained on a few lines, as nemo2 takes it."""
    from nemo2.data.tokenizer import AutoTokenizer

    tokenizer: Any = AutoTokenizer(str(folder), local_files_only=True)
    if chat.kind == "tiktoken":
        folder.mkdir(exist_ok=True)
        words = sorted(
            {word[:end] for text in TEXT for word in text.split() for end in range(2, len(word) + 1)}, key=len
        )
        ranks = {chr(byte): byte for byte in range(256)}
        ranks |= {word: 256 + number for number, word in enumerate(words)}
        (folder / "ranks.json").write_text(json.dumps(ranks))
        made: Any = Tiktoken(str(folder / "ranks.json"), additional_special_tokens=list(chat.special), **chat.named)
        tokenizer.__dict__["tokenizer"] = made  # as `trust_remote_code` would load it
    else:
        made = _fast(chat)
    made.add_tokens(list(chat.words))
    made.chat_template = (TEMPLATES / f"{chat.template}.jinja").read_text("utf-8")
    if chat.kind != "tiktoken":
        made.save_pretrained(str(folder))
    return tokenizer


def _fast(chat: Chat) -> Any:
    """A tokenizer of the ``tokenizers`` package."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys([*chat.named.values(), *chat.special]))
    if chat.kind in ("gemma", "llama"):
        backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        if chat.kind == "gemma":
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*special, *alphabet], show_progress=False)
    else:
        backend = Tokenizer(models.BPE())
        splits: list[Any] = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS.get(chat.kind, ())]
        if chat.kind == "digits":
            splits = [pre_tokenizers.Digits(individual_digits=True)]
        use_regex = chat.kind not in SPLITS
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
        )
        if chat.kind in ("qwen", "digits"):
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    backend.train_from_iterator([*TEXT, *_ANSWERS], trainer=trainer)
    if chat.kind in ("gemma", "llama"):  # bytes are no special tokens in the releases
        saved = json.loads(backend.to_str())
        saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in alphabet]
        backend = Tokenizer.from_str(json.dumps(saved))
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=list(chat.special), **chat.named)


def table_row(name: str, chat: Chat) -> str:
    """A chat's row of the table in docs/finetuning_data.md."""
    kinds = {"gemma": "SentencePiece", "llama": "SentencePiece", "tiktoken": "tiktoken, in Python"}
    reasoning = (
        "in every answer"
        if "two reasonings" in chat.trained
        else "in the last answer"
        if "reasoning" in chat.trained
        else "–"
    )
    tools = "yes" if "tools" in chat.trained else "–"
    return f"| {name} | {kinds.get(chat.kind, 'byte-level BPE')} | `{chat.end}` | {tools} | {reasoning} |".replace(
        "|>`", "\\|>`"
    ).replace("`<|", "`<\\|")
