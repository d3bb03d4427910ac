# SPDX-License-Identifier: Apache-2.0
"""Conversations: the tokens trained on are those that the assistant writes, and nothing else."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.data.finetuning.chat import NEMO_TEMPLATE, ChatEncoder
from nemo2.data.finetuning.dialects import conversation_of
from nemo2.data.finetuning.sample import Empty, Malformed
from nemo2.data.tokenizer import BPETokenizer, ByteTokenizer
from support import family_chats, small_chats
from support.family_chats import CHATS, CONVERSATIONS
from support.small_chats import say, trained_text

LONG = say(
    ("system", "You are helpful."),
    ("user", "What does the function return?"),
    ("assistant", "Zero."),
    ("user", "For an empty list?"),
    ("assistant", "Zero, the sum of nothing."),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_chats.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(tokenizer: Any, record: Any, template: str | None = None, **options: Any):
    return ChatEncoder(tokenizer, chat_template=template, **options).encode(record)


def by_hand(tokenizer: Any, record: Any) -> tuple[list[int], list[bool]]:
    """ChatML put together piece by piece: the mask is known because nobody has to look for it."""
    ids: list[int] = []
    trained: list[bool] = []
    for message in record["messages"]:
        for text, counts in (
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", message["role"] == "assistant"),
            ("\n", False),
        ):
            piece = tokenizer.text_to_ids(text)
            ids += piece
            trained += [counts] * len(piece)
    return ids, trained


@pytest.mark.parametrize("template", [small_chats.CHATML, small_chats.MARKED], ids=["prefixes", "blocks"])
def test_each_turn_of_the_assistant_or_the_last_is_trained_on_with_the_token_that_ends_it(tokenizer, template):
    sample = encode(tokenizer, LONG, template)
    assert (sample.ids, sample.trained) == by_hand(tokenizer, LONG)
    last = encode(tokenizer, LONG, template, turns="last")
    assert last.ids == sample.ids and trained_text(tokenizer, last) == "Zero, the sum of nothing.<|im_end|>"


def test_blocks_that_are_not_one_per_turn_pick_no_turns(tokenizer):
    twice = small_chats.MARKED.replace(
        "{%- endgeneration -%}",
        "{%- endgeneration -%}{{- '|' -}}" + "{%- generation -%}{{- 'x' -}}{%- endgeneration -%}",
    )
    assert any(encode(tokenizer, LONG, twice).trained)
    with pytest.raises(Malformed, match="blocks mark 4 pieces for 2 turns"):
        encode(tokenizer, LONG, twice, turns="last")


def test_blanks_around_a_role_are_none_of_it(tokenizer):
    record = say(("User ", "red"), (" assistant", "blue"), chat_template_kwargs={"enable_thinking": None})
    assert trained_text(tokenizer, encode(tokenizer, record)) == "blue<|im_end|>"


def test_what_the_user_says_in_the_assistants_words_is_not_trained_on(tokenizer):
    """A search for strings would find it twice."""
    record = say(("user", "Say Zero."), ("assistant", "Zero."), ("user", "Zero."))
    assert encode(tokenizer, record).trained == by_hand(tokenizer, record)[1]


def test_a_template_that_rewrites_earlier_turns_is_refused_and_may_train_on_the_last(tokenizer):
    record = say(
        ("user", "red"),
        ("assistant", "<think>hm</think>blue"),
        ("user", "day"),
        ("assistant", "<think>oh</think>night"),
    )
    with pytest.raises(Malformed, match=r"leaves out the reasoning of message 2.*'turns': 'last'"):
        encode(tokenizer, record, small_chats.REASONING)
    sample = encode(tokenizer, record, small_chats.REASONING, turns="last")
    assert trained_text(tokenizer, sample) == "<think>oh</think>night<|im_end|>"


def test_an_earlier_answer_without_text_is_its_end_where_a_template_closes_the_conversation(tokenizer):
    """As in Phi-3's template, so that no beginning of the conversation is that of the whole."""
    closing = small_chats.CHATML.replace("{%- endif -%}", "{%- else -%}{{- '<|endoftext|>' -}}{%- endif -%}")
    record = say(("user", "red"), ("assistant", ""), ("user", "day"), ("assistant", "night"))
    sample = encode(tokenizer, record, closing)
    assert trained_text(tokenizer, sample) == "<|im_end|>night<|im_end|>"


def test_nemos_own_format(tokenizer):
    sample = encode(tokenizer, LONG, NEMO_TEMPLATE)
    assert tokenizer.tokenizer.decode(sample.ids) == (
        "<extra_id_0>System\nYou are helpful.\n<extra_id_1>User\nWhat does the function return?\n<extra_id_1>Assistant\nZero.\n"
        "<extra_id_1>User\nFor an empty list?\n<extra_id_1>Assistant\nZero, the sum of nothing.\n<extra_id_1>"
    )
    assert trained_text(tokenizer, sample) == "Zero.\n<extra_id_1>Zero, the sum of nothing.\n<extra_id_1>"


def test_the_plain_template_needs_no_token_but_the_end_of_a_text(tmp_path):
    base = small_chats.make_tokenizer(tmp_path, None)
    end = base.tokenizer.eos_token
    record = say(
        ("system", "Be brief."), ("user", "One?"), ("assistant", "Two."), ("user", "On?"), ("assistant", "Yes.")
    )
    sample = encode(base, record, "plain")
    turns = f"System:\nBe brief.\nUser:\nOne?\nAssistant:\nTwo.{end}\nUser:\nOn?\nAssistant:\nYes.{end}\n"
    assert base.tokenizer.decode(sample.ids) == turns
    assert trained_text(base, sample) == f"Two.{end}Yes.{end}"


def test_a_slow_tokenizer_finds_the_same_tokens(tokenizer):
    encoder = ChatEncoder(tokenizer)

    class Slow:
        """What transformers' tokenizers in Python offer: ids, but not where they come from."""

        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer.tokenizer, name)

        def __call__(self, text, **options):
            assert "return_offsets_mapping" not in options
            return {"input_ids": tokenizer.tokenizer(text, **options)["input_ids"]}

    encoder.__dict__["_hf"] = Slow()
    assert encoder.encode(LONG) == ChatEncoder(tokenizer).encode(LONG)


def test_a_tokenizer_file_will_do_with_a_template(tokenizer, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(small_chats.CHATML)
    plain = BPETokenizer(tokenizer.pretrained_model_name, eos_token="<|im_end|>", pad_token="<|pad|>")
    for template in (small_chats.CHATML, str(file)):
        assert encode(plain, LONG, template) == encode(tokenizer, LONG)


@pytest.mark.parametrize(
    "record, error, why",
    [
        ([], Malformed, "a list, not a record with messages"),
        ({"text": "x"}, Malformed, "no list under any of 'messages'.*its fields are: text"),
        ({"messages": [{"role": "Asistant", "content": "x"}]}, Malformed, "the role 'asistant'.*mean 'assistant'"),
        (
            {"messages": [{"role": "usr", "content": "x"}]},
            Malformed,
            r"message 1 has the role 'usr' \(did you mean 'user'",
        ),
        ({"messages": [{"role": "sytem", "content": "x"}]}, Malformed, "'sytem'.*mean 'system'"),
        ({"messages": [{"content": "x"}]}, Malformed, "message 1 has no role.*its fields are: content"),
        ({"messages": [{"role": "user"}]}, Malformed, "message 1, of the user, has neither content"),
        ({"messages": ["hello"]}, Malformed, "message 1 is a str"),
        (say(("user", "x"), tools="{"), Malformed, "'tools' is text that is not JSON"),
        (
            say(("user", "x"), ("assistant", "y"), chat_template_kwargs={"z": 1}),
            Malformed,
            "its own chat_template_kwargs=",
        ),
        (say(("user", "x")), Empty, "no turn of the assistant"),
        (say(("assistant", "x")), Malformed, "the chat template fails: TemplateError: begin with the user"),
    ],
)
def test_records_that_are_no_conversations(tokenizer, record, error, why):
    with pytest.raises(error, match=why):
        encode(tokenizer, record, small_chats.STRICT)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"template": "no/such/file.jinja"}, "neither a template nor an existing file"),
        ({"tokenizer": ByteTokenizer(), "template": small_chats.CHATML}, "require a Hugging Face tokenizer"),
        ({"turns": "first"}, "turns='first': must be 'all' or 'last'"),
        ({"chat_template_kwargs": {"tools": []}}, "'tools', which nemo2 sets"),
        ({"chat_template_kwargs": {"enable_thinkin": True}}, "'enable_thinkin', which the chat template does not read"),
        ({"chat_template_kwargs": {"x": object()}}, "plain data"),
        ({"chat_template_kwargs": ["x"]}, "plain data"),
    ],
)
def test_settings_that_cannot_work(tokenizer, options, why):
    with pytest.raises(ConfigError, match=why):
        encode(**{"tokenizer": tokenizer, "record": LONG, **options})


@pytest.mark.parametrize(
    ("chat_template", "why"), [(None, "has no chat template, as .* 'plain'"), ({"rag": small_chats.CHATML}, "'rag'")]
)
def test_a_tokenizer_without_a_default_template_names_those_that_will_do(tmp_path, chat_template, why):
    with pytest.raises(ConfigError, match=why):
        encode(small_chats.make_tokenizer(tmp_path, chat_template), LONG)


def test_nemos_format_needs_its_tokens(tokenizer):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    class Bare:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"x": 0, "y": 1}, unk_token="x"))
        )

        def __repr__(self):
            return "Bare()"

    with pytest.raises(
        ConfigError, match="no token <extra_id_0> and no token <extra_id_1>.*use_hf_tokenizer_chat_template"
    ):
        encode(Bare(), LONG, NEMO_TEMPLATE)


def test_a_template_named_tool_use_renders_conversations_with_tools(tmp_path):
    """As transformers chooses: the default one for others, and a name that is asked for always."""
    named: Any = {
        "default": small_chats.CHATML,
        "tool_use": "TOOLS {{ tools | tojson }} " + small_chats.CHATML,
        "rag": "RAG " + small_chats.CHATML,
    }
    tokenizer = small_chats.make_tokenizer(tmp_path, named)
    plain = say(("user", "a"), ("assistant", "b"))
    for tools in (None, CONVERSATIONS["tools"]["tools"]):
        rendered = tokenizer.tokenizer.apply_chat_template(plain["messages"], tools=tools, tokenize=False)
        assert encode(tokenizer, {**plain, "tools": tools}).ids == tokenizer.text_to_ids(rendered)
    asked = ChatEncoder(tokenizer, chat_template="rag")
    assert asked.template == named["rag"] and asked.identity != ChatEncoder(tokenizer).identity
    with pytest.raises(ConfigError, match="'default', 'tool_use', 'rag'"):
        encode(tokenizer, plain, "other")


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    """A family's chat and its tokenizer."""
    chat = CHATS[request.param]
    return chat, family_chats.make_tokenizer(chat, tmp_path_factory.mktemp("family") / "tokenizer")


def turns_of(sample: Any, hf: Any) -> list[str]:
    """The text of each run of tokens that are trained on."""
    pairs = groupby(zip(sample.ids, sample.trained, strict=True), key=lambda pair: pair[1])
    return [hf.decode([token for token, _ in run]) for trained, run in pairs if trained]


@pytest.mark.parametrize("family", CHATS, indirect=True)
def test_a_familys_template_is_tokenized_as_in_transformers_and_its_answers_are_trained_on(family):
    chat, tokenizer = family
    encoder, hf = ChatEncoder(tokenizer), tokenizer.tokenizer
    trained: dict[str, list[str]] = {}
    for kind, record in CONVERSATIONS.items():
        try:
            sample, form = encoder.encode(record), encoder._form_of(conversation_of(record))
        except Malformed:
            continue
        trained[kind] = turns_of(sample, hf)
        options: Any = {"tools": form.tools, "return_dict": False}
        # The token that ends a last turn may be nemo2's own.
        assert hf.apply_chat_template(form.messages, **options) in (sample.ids, sample.ids[:-1]), kind
        prompt = hf.apply_chat_template(form.messages[:-1], add_generation_prompt=True, **options)
        assert (sample.ids[: len(prompt)] == prompt) == (kind not in chat.unlike_served), kind
    assert trained == chat.texts


@pytest.mark.parametrize("family", ["Nemotron 3 Nano", "GLM-4.5", "Qwen3-Next, Qwen 3.5", "SmolLM 3"], indirect=True)
def test_a_familys_variables_reach_its_template_as_in_transformers(family):
    hf, variables, record = family[1].tokenizer, {"enable_thinking": False}, CONVERSATIONS["turns"]
    without, encoder = ChatEncoder(family[1]), ChatEncoder(family[1], chat_template_kwargs=variables)
    messages, sample = record["messages"], encoder.encode(record)
    prompt = hf.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False, **variables)
    assert encoder.question(messages[:-1]) == prompt != without.question(messages[:-1])
    assert hf.apply_chat_template(messages, return_dict=False, **variables) in (sample.ids, sample.ids[:-1])
    assert sample.ids[: len(prompt)] == prompt and any(sample.trained)
    assert encoder.identity != without.identity


def test_the_page_has_the_families():
    page = Path(__file__).parents[4] / "docs" / "finetuning_data.md"
    lines = page.read_text("utf-8").splitlines()
    assert [name for name, chat in CHATS.items() if family_chats.table_row(name, chat) not in lines] == []


@pytest.mark.parametrize("family", ["Qwen3-Next, Qwen 3.5", "GLM-4.5", "MiniMax M2"], indirect=True)
def test_earlier_reasoning_that_a_template_drops_is_no_obstacle_for_the_last_turn(family):
    chat, tokenizer = family
    record = CONVERSATIONS["two reasonings"]
    with pytest.raises(Malformed, match="the reasoning of message 2"):
        encode(tokenizer, record)
    last = turns_of(encode(tokenizer, record, turns="last"), tokenizer.tokenizer)
    assert last == [chat.texts["reasoning"][-1]]


@pytest.mark.parametrize("family", ["SmolLM 3"], indirect=True)
def test_a_familys_marks_are_those_of_transformers_mask(family):
    _, tokenizer = family
    sample = encode(tokenizer, CONVERSATIONS["turns"])
    theirs = tokenizer.tokenizer.apply_chat_template(
        CONVERSATIONS["turns"]["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    behind = tokenizer.text_to_ids("\n")[0]  # the model never writes the line between two turns
    masked = [
        flag and token != behind for flag, token in zip(theirs["assistant_masks"], theirs["input_ids"], strict=True)
    ]
    assert sample.ids == theirs["input_ids"]
    at = [place for place, flag in enumerate(sample.trained) if flag and sample.ids[place] != behind]
    assert at == [place for place, flag in enumerate(masked) if flag]


def test_a_tag_that_begins_as_that_of_the_prompt_is_trained_on_whole(tokenizer):
    """The tokenizer has neither of the two as one token."""
    prompted = small_chats.WITH_TOOLS.replace("<call>", "<tool>").replace("assistant\\n'", "assistant\\n<think>\\n'")
    record = {"messages": CONVERSATIONS["tools"]["messages"], "tools": CONVERSATIONS["tools"]["tools"]}
    first = turns_of(encode(tokenizer, record, prompted), tokenizer.tokenizer)[0]
    assert first.startswith("<tool>weather{")


@pytest.mark.parametrize("own", [False, True], ids=["other ids", "its own ids"])
def test_kimis_ids_name_the_tools_that_are_called(own, tmp_path):
    tokenizer = family_chats.make_tokenizer(CHATS["Kimi K2"], tmp_path)
    messages = [dict(message) for message in CONVERSATIONS["tools"]["messages"]]
    name = "functions.weather:0" if own else "call_7"
    messages[1]["tool_calls"] = [{**messages[1]["tool_calls"][0], "id": name}]
    messages[2]["tool_call_id"] = name
    sample = encode(tokenizer, {"messages": messages, "tools": CONVERSATIONS["tools"]["tools"]})
    assert turns_of(sample, tokenizer.tokenizer) == CHATS["Kimi K2"].texts["tools"]
    assert "## Return of functions.weather:0" in tokenizer.tokenizer.decode(sample.ids)
