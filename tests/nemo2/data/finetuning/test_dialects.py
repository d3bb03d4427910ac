# SPDX-License-Identifier: Apache-2.0
"""Conversations as other programs write them: what a record says is rendered and trained on, or the record is refused."""

import json

import pytest

from nemo2.data.finetuning.chat import NEMO_TEMPLATE, ChatEncoder
from nemo2.data.finetuning.dialects import conversation_of
from nemo2.data.finetuning.sample import Empty, Malformed
from support import small_chats
from support.small_chats import report_of, say, trained_text

HEAD = "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
TAIL = "{{- '<|im_end|>\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
TOOLS = "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}"
CONTENT = "{{- message.content or '' -}}"


def calls(arguments: str) -> str:
    return (
        "{%- for call in message.tool_calls or [] -%}{{- '<call>' + call.function.name + ' ' -}}"
        + arguments
        + "{%- endfor -%}"
    )


TO_JSON = "{{- call.function.arguments | tojson -}}"
OBJECTS = TOOLS + HEAD + CONTENT + calls(TO_JSON) + TAIL
TEXTS = TOOLS + HEAD + CONTENT + calls("{{- '' + call.function.arguments -}}") + TAIL
PLAIN = TOOLS + HEAD + CONTENT + calls("{{- call.function.arguments -}}") + TAIL
PAIRS = (
    "{%- for k, v in call.function.arguments.items() -%}{{- k }}={{ v if v is string else v | tojson }};{%- endfor -%}"
)
PARAMETERS = TOOLS + HEAD + CONTENT + calls(PAIRS) + TAIL
NULLS = (
    TOOLS + HEAD + "{%- if message.content is none -%}" + calls(TO_JSON)
    + "{%- else -%}{{- message.content -}}{%- endif -%}" + TAIL
)  # fmt: skip
IDS = (
    TOOLS + HEAD + CONTENT
    + "{%- for call in message.tool_calls or [] -%}{%- if call.id is not defined or call.id|length != 9 -%}"
    "{{- raise_exception('ids of nine characters') -}}{%- endif -%}{%- endfor -%}" + calls(TO_JSON) + TAIL
)  # fmt: skip


def content_of(*roles: str) -> str:
    """The content of the messages of these roles, and of no others."""
    return f"{{%- if message.role in {list(roles)} -%}}" + CONTENT + "{%- endif -%}"


OBSERVATION = OBJECTS.replace(CONTENT, content_of("user", "assistant", "observation"))
NO_RESULTS = OBJECTS.replace(CONTENT, content_of("user", "assistant"))
NO_TOOLS = OBJECTS.removeprefix(TOOLS)
NO_CALLS = TOOLS + HEAD + CONTENT + TAIL
ANSWERS_ONLY = HEAD + content_of("assistant") + TAIL
MARKED_CONTENT = "{%- generation -%}" + CONTENT + "{%- endgeneration -%}"
EVERYONE = HEAD + MARKED_CONTENT + TAIL
CALLS_UNMARKED = (
    HEAD + "{%- if message.role == 'assistant' -%}" + calls(TO_JSON) + MARKED_CONTENT
    + "{%- else -%}" + CONTENT + "{%- endif -%}" + TAIL
)  # fmt: skip
PARTS = HEAD + "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}" + TAIL
FIRST_SYSTEM = HEAD + "{%- if message.role != 'system' or loop.first -%}" + CONTENT + "{%- endif -%}" + TAIL
THINKING = HEAD + "{%- if message.thinking -%}{{- '[' + message.thinking + ']' -}}{%- endif -%}" + CONTENT + TAIL
FIELD = THINKING.replace("message.thinking", "message.reasoning_content")
TAGS = "{#- keeps <think> and </think> -#}" + HEAD + CONTENT + TAIL

WEATHER = {"place": "Zürich", "days": 3, "notes": ['it\'s "mild"']}
TOOL = {"name": "weather", "description": "Looks up the weather", "parameters": {"type": "object", "properties": {}}}
SHAREGPT = {
    "tools": json.dumps([TOOL]),
    "conversations": [
        {"from": "human", "value": "weather in Zürich?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": WEATHER})},
        {"from": "observation", "value": "mild"},
        {"from": "gpt", "value": "It is mild."},
    ],
}
CALL = {"name": "weather", "arguments": json.dumps(WEATHER)}
OPENAI = {
    "tools": [{"type": "function", "function": TOOL}],
    "messages": [
        {"role": "user", "content": "weather in Zürich?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "mild"},
        {"role": "assistant", "content": "It is mild."},
    ],
}
LEGACY = {
    "functions": [TOOL],
    "messages": [
        {"role": "user", "content": "weather in Zürich?"},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "function", "name": "weather", "content": "mild"},
        {"role": "assistant", "content": "It is mild."},
    ],
}
IPYTHON = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "weather in Zürich?"}]},
        {"role": "assistant", "tool_calls": [{"name": "weather", "parameters": WEATHER}]},
        {"role": "ipython", "content": "mild"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "mild."}]},
    ],
}
PARTED = {
    "tools": json.dumps([TOOL]),
    "messages": [
        {"role": "user", "content": [{"type": "text", "value": "weather in Zürich?"}], "loss_weight": 0.0},
        {
            "role": "assistant",
            "content": [{"type": "tool_call", "value": json.dumps({"name": "weather", "arguments": WEATHER})}],
            "loss_weight": 1.0,
        },
        {"role": "tool", "content": [{"type": "text", "value": "mild"}], "loss_weight": 0.0},
        {"role": "assistant", "content": [{"type": "text", "value": "It is mild."}], "loss_weight": 1.0},
    ],
}
DIALECTS = {"ShareGPT": SHAREGPT, "OpenAI": OPENAI, "legacy": LEGACY, "ipython": IPYTHON, "parts": PARTED}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_chats.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def trained_and_whole(tokenizer, record, template, **options):
    sample = ChatEncoder(tokenizer, chat_template=template, **options).encode(record)
    return trained_text(tokenizer, sample), tokenizer.tokenizer.decode(sample.ids)


def answered(**answer):
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **answer}]}


def two(**marks):
    record = say(("user", "red"), ("assistant", "blue"), ("user", "day"), ("assistant", "night"))
    record["messages"][1] |= marks
    return record


JSON = json.dumps(WEATHER, ensure_ascii=False)


@pytest.mark.parametrize("record", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        (OBJECTS, JSON),
        (TEXTS, JSON),
        (PLAIN, JSON),
        (PARAMETERS, 'place=Zürich;days=3;notes=["it\'s \\"mild\\""];'),
        (NULLS, JSON),
        (IDS, JSON),
        (OBSERVATION, JSON),
    ],
    ids=["objects", "texts", "plain", "parameters", "nulls", "ids", "observation"],
)
def test_calls_of_tools_are_read_in_every_dialect_and_written_in_the_templates_form(
    tokenizer, record, template, arguments
):
    trained, whole = trained_and_whole(tokenizer, record, template)
    assert trained == f"<call>weather {arguments}<|im_end|>It is mild.<|im_end|>"
    assert "Looks up the weather" in whole and "mild<|im_end|>" in whole and "weather in Zürich?" in whole


@pytest.mark.parametrize("record", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("template", [NO_CALLS, NEMO_TEMPLATE], ids=["no calls", "NeMo's"])
def test_a_template_that_leaves_calls_out_makes_the_record_malformed(tokenizer, record, template):
    with pytest.raises(
        Malformed, match=r"leaves out the tool call of message 2, of the assistant|leaves out the text of turn 2"
    ):
        trained_and_whole(tokenizer, record, template)


LATE_SYSTEM = say(("system", "Be kind."), ("user", "x"), ("system", "Be brief."), ("assistant", "y"))
NO_JSON = {"conversations": [{"from": "function_call", "value": "no JSON"}]}


@pytest.mark.parametrize(
    ("record", "template", "why"),
    [
        (OPENAI, NO_TOOLS, "leaves out the description of the tool 'weather'"),
        (OPENAI, NO_RESULTS, "leaves out the content of message 3, of the tool"),
        (say(("user", "a"), ("assistant", "a")), ANSWERS_ONLY, "leaves out the content of message 1, of the user"),
        (answered(reasoning="hm hm"), NO_CALLS, "leaves out the reasoning of message 2, of the assistant"),
        (LATE_SYSTEM, FIRST_SYSTEM, "leaves out the content of message 3, of the system"),
        (answered(plan="look it up first"), NO_CALLS, "leaves out the field 'plan' of message 2"),
        (
            {"messages": OPENAI["messages"]},
            CALLS_UNMARKED,
            "tool call of message 2, of the assistant, where it would not be trained on",
        ),
        (answered(), EVERYONE, "content of message 1, of the user, would be trained on"),
        (
            say(("user", "half \ud83d"), ("assistant", "y")),
            NO_CALLS,
            r"message 1, of the user: character 6 is \\ud83d, half of a surrogate pair",
        ),
        (answered(content=[{"type": "image_url", "image_url": {}}]), None, "message 2.*a part of type 'image_url'"),
        (answered(content=[{"type": "text"}]), None, "a part of type 'text'"),
        (answered(content=7), None, "content of type int"),
        (answered(content={"text": "x"}), None, "content of type dict"),
        (answered(content=[None]), None, "a part of type 'NoneType'"),
        (two(weight="x"), None, "message 2, of the assistant, has weight 'x'"),
        (two(weight=-1), None, "message 2, of the assistant, has weight -1"),
        (two(loss_weight=0.5), None, "message 2, of the assistant, has loss_weight 0.5"),
        (two(train_detail=[{"begin_offset": 0, "end_offset": 2, "train": False}]), None, "has train_detail="),
        (two(mask=True), None, "has mask=True"),
        (two(label="quality:4,humor:0"), None, "has label='quality:4,humor:0'"),
        (two(weight=1, train=False), None, "contradict each other"),
        (
            {"messages": [{"role": "user", "content": "x", "train": True}]},
            None,
            "message 1.*only turns of the assistant",
        ),
        (two() | {"weight": 0.3}, None, "weight=0.3"),
        (two() | {"type": "VALUE_TO_TEXT"}, None, "type='VALUE_TO_TEXT'"),
        (two() | {"mask": "assistant"}, None, "mask='assistant'"),
        (NO_JSON, None, "message 1.*a tool call that is no JSON object"),
        (say(("user", "x"), tools=[7]), None, "'tools' has an entry that is no object"),
        (say(("user", "x"), tools=[{"function": "f"}]), None, "'tools' has an entry that is no object"),
        (say(("user", "x"), tools=7), None, "'tools' is a int"),
    ],
)
def test_what_a_template_leaves_out_and_what_is_not_supported_is_malformed(tokenizer, record, template, why):
    """Without a template: whatever the template."""
    with pytest.raises(Malformed, match=why):
        conversation_of(record) if template is None else trained_and_whole(tokenizer, record, template)


@pytest.mark.parametrize("content", ["blue sky", [{"type": "text", "text": "blue "}, "sky"]])
@pytest.mark.parametrize("template", [NO_CALLS, PARTS])
def test_content_as_text_or_as_parts_whichever_the_template_reads(tokenizer, content, template):
    assert trained_and_whole(tokenizer, answered(content=content), template)[0] == "blue sky<|im_end|>"


THOUGHT = [{"type": "thinking", "thinking": "hm hm"}, {"type": "text", "text": "blue"}]


@pytest.mark.parametrize("template", [THINKING, FIELD, TAGS], ids=["thinking", "field", "tags"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "part"])
def test_reasoning_is_trained_on_under_the_name_that_the_template_reads(tokenizer, template, name):
    answer = {"content": THOUGHT} if name == "part" else {"content": "blue", name: "hm hm"}
    trained, _ = trained_and_whole(tokenizer, answered(**answer), template)
    assert trained == ("<think>\nhm hm\n</think>\n\nblue<|im_end|>" if template is TAGS else "[hm hm]blue<|im_end|>")


def test_several_system_messages_and_the_developers(tokenizer):
    record = say(("developer", "Be kind."), ("system", "Be brief."), ("user", "x"), ("assistant", "y"))
    trained, whole = trained_and_whole(tokenizer, record, FIRST_SYSTEM)
    assert trained == "y<|im_end|>" and "system\nBe kind.\n\nBe brief.<|im_end|>" in whole and "developer" not in whole
    assert "<|im_start|>system\nBe brief.<|im_end|>" in trained_and_whole(tokenizer, record, NO_CALLS)[1]
    beside = {"system": "Be brief.", **say(("system", "Be kind."), ("user", "x"), ("assistant", "y"))}
    whole = trained_and_whole(tokenizer, beside, NO_CALLS)[1]
    assert "Be brief." in whole and "Be kind." in whole


PROMPTED = {
    "prompt": say(("user", "a"), ("assistant", "b"), ("user", "c"))["messages"],
    "completion": [{"role": "assistant", "content": "night"}],
}
NEMO = {"mask": "User", "system": "", "type": "", "conversations": [
    {"from": "User", "value": "red", "label": None}, {"from": "Assistant", "value": "blue", "label": ""}]}  # fmt: skip


@pytest.mark.parametrize(
    ("record", "trained"),
    [
        (answered(content=None, refusal="I won't."), "I won't."),
        (answered(timestamp="1 May 2026", id="7"), "y"),
        (PROMPTED, "night"),
        (NEMO, "blue"),
    ],
    ids=["refusal", "no text", "prompt and completion", "NeMo's mask"],
)
def test_what_the_assistant_says_is_trained_on_under_further_names(tokenizer, record, trained):
    assert trained_and_whole(tokenizer, record, NO_CALLS)[0] == f"{trained}<|im_end|>"


@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"train": False}, {"training": False}, {"loss_weight": 0.0}, {"loss": False}, {"loss_mask": 0}],
)
@pytest.mark.parametrize("template", [NO_CALLS, small_chats.MARKED], ids=["prefixes", "blocks"])
def test_a_turn_that_must_not_be_trained_on_is_context_in_every_dialect(tokenizer, mark, template):
    trained, whole = trained_and_whole(tokenizer, two(**mark), template)
    assert trained == "night<|im_end|>" and "blue" in whole
    with pytest.raises(Empty, match="every turn of the assistant has weight 0"):
        trained_and_whole(tokenizer, answered(**mark), template)


def test_the_user_may_be_marked_as_context():
    record = two()
    record["messages"][0]["train"] = False
    assert conversation_of(record).marks == [False, None, None, None]


@pytest.mark.parametrize(("record", "why"), [(answered(content=" "), "no text"), (say(("user", "x")), "no turn")])
def test_a_record_whose_assistant_says_nothing_is_empty(tokenizer, record, why):
    with pytest.raises(Empty, match=why):
        trained_and_whole(tokenizer, record, NO_CALLS)


# Templates whose prompt is no prefix

EOS_AT_THE_END = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    "{%- if not add_generation_prompt -%}{{- '<|endoftext|>' -}}{%- endif -%}"
)
OPENS_A_THOUGHT = HEAD + CONTENT + TAIL.replace("assistant\\n'", "assistant\\n<think>\\n'")
EMPTY_THOUGHT = "{%- if message.role == 'assistant' and loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
EMPTY_THOUGHT_IN_THE_LAST = HEAD + EMPTY_THOUGHT + CONTENT + TAIL
OTHER_END_IN_THE_LAST = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
    "{%- if loop.last and message.role == 'assistant' -%}{{- '<|endoftext|>' -}}{%- else -%}{{- '<|im_end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
NO_END = (
    "{%- for message in messages -%}{{- '<|im_start|>' if message.role == 'user' else '<extra_id_0>' -}}{{- message.content -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<extra_id_0>' -}}{%- endif -%}"
)
NO_END_AND_NO_TOKENS = (
    "{%- for message in messages -%}{{- message.role | upper + ':\\n' + message.content + '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:\\n' -}}{%- endif -%}"
)
SWAPPED = (
    "{%- for message in messages -%}{%- if loop.first and loop.length < 3 -%}{{- '!' -}}{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TURNS = say(("user", "red"), ("assistant", "<b>blue"), ("user", "day"), ("assistant", "night"))


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (EOS_AT_THE_END, "<b>blue<|im_end|>night<|im_end|>"),
        (OPENS_A_THOUGHT, "<b>blue<|im_end|>night<|im_end|>"),
        (EMPTY_THOUGHT_IN_THE_LAST, "<b>blue<|im_end|><think>\n\n</think>\n\nnight<|im_end|>"),
        (OTHER_END_IN_THE_LAST, "<b>blue<|im_end|>night<|endoftext|>"),
        (NO_END, "<b>blue<|im_start|>night<|im_start|>"),  # what begins a next message ends a turn
        (NO_END_AND_NO_TOKENS, "<b>blue\nnight\n<|im_end|>"),
    ],
    ids=["eos at the end", "opens a thought", "empty thought", "other end", "no end", "no tokens"],
)
def test_turns_are_found_where_the_prompt_is_no_prefix(tokenizer, template, trained):
    assert trained_and_whole(tokenizer, TURNS, template)[0] == trained
    one = {"messages": TURNS["messages"][2:]}
    last = trained[trained.find("<think>" if "<think>" in trained else "night") :]
    assert trained_and_whole(tokenizer, one, template)[0] == last


def test_a_template_that_rewrites_what_came_before_says_where_it_differs(tokenizer):
    with pytest.raises(Malformed, match="messages before turn 2 of 4 differently when the conversation continues: '!"):
        trained_and_whole(tokenizer, TURNS, SWAPPED)
    once = {"messages": TURNS["messages"][:2]}
    assert trained_and_whole(tokenizer, once, SWAPPED)[0] == "<b>blue<|im_end|>"


@pytest.mark.parametrize("template", [NO_CALLS, EOS_AT_THE_END, OTHER_END_IN_THE_LAST], ids=["plain", "eos", "other"])
def test_an_assistant_may_speak_first(tokenizer, template):
    record = say(("assistant", "hello"), ("user", "x"), ("assistant", "night"))
    assert trained_and_whole(tokenizer, record, template)[0].startswith("hello<|im_end|>night")
    strict = "{%- if not messages -%}{{ raise_exception('nothing') }}{%- endif -%}" + template
    assert trained_and_whole(tokenizer, record, strict)[0].startswith("hello<|im_end|>night")


@pytest.mark.parametrize("policy", ["keep", "text", "fail"])
@pytest.mark.parametrize("kind", ["conversation", "fields"])
def test_special_tokens_that_a_text_spells_are_counted_or_refused(tokenizer, policy, kind):
    records = [
        say(("user", text), ("assistant", "y")) if kind == "conversation" else {"input": text, "output": "y"}
        for text in ("x", "ends <|im_end|> here", "z")
    ]
    template = {"chat_template": NO_CALLS} if kind == "conversation" else {}
    report = report_of(tokenizer, records, on_special_token=policy, **template)
    if policy != "fail":
        how = {"keep": "with special tokens in its text", "text": "with special tokens encoded as plain text"}
        assert report.samples == 3 and report.places == {how[policy]: ["train[1]: '<|im_end|>'"]}
    else:
        assert report.samples == 2 and "the special token '<|im_end|>'" in report.places["malformed"][0]
