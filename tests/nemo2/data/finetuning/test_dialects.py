# SPDX-License-Identifier: Apache-2.0
"""Conversations as other programs write them: what a record says is rendered and trained on, or the record is refused."""

import json

import pytest

from nemo2.data.finetuning.chat import NEMO_TEMPLATE, ChatEncoder
from nemo2.data.finetuning.dialects import conversation_of
from nemo2.data.finetuning.encode import BadRecords, Report, encode_all
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
from nemo2.data.finetuning.sample import Empty, Malformed
from support import small_chats
from support.small_chats import say

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


OBJECTS = TOOLS + HEAD + CONTENT + calls("{{- call.function.arguments | tojson -}}") + TAIL
TEXTS = TOOLS + HEAD + CONTENT + calls("{{- '' + call.function.arguments -}}") + TAIL
PLAIN = TOOLS + HEAD + CONTENT + calls("{{- call.function.arguments -}}") + TAIL
PARAMETERS = (
    TOOLS
    + HEAD
    + CONTENT
    + calls(
        "{%- for k, v in call.function.arguments.items() -%}{{- k }}={{ v if v is string else v | tojson }};{%- endfor -%}"
    )
    + TAIL
)
NULLS = (
    TOOLS + HEAD + "{%- if message.content is none -%}" + calls("{{- call.function.arguments | tojson -}}")
    + "{%- else -%}{{- message.content -}}{%- endif -%}" + TAIL
)  # fmt: skip
IDS = (
    TOOLS + HEAD + CONTENT
    + "{%- for call in message.tool_calls or [] -%}{%- if call.id is not defined or call.id|length != 9 -%}"
    "{{- raise_exception('ids of nine characters') -}}{%- endif -%}{%- endfor -%}"
    + calls("{{- call.function.arguments | tojson -}}") + TAIL
)  # fmt: skip
OBSERVATION = OBJECTS.replace(
    CONTENT, "{%- if message.role in ['user', 'assistant', 'observation'] -%}" + CONTENT + "{%- endif -%}"
)
NO_CALLS = TOOLS + HEAD + CONTENT + TAIL
PARTS = HEAD + "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}" + TAIL
FIRST_SYSTEM = HEAD + "{%- if message.role != 'system' or loop.first -%}" + CONTENT + "{%- endif -%}" + TAIL
THINKING = HEAD + "{%- if message.thinking -%}{{- '[' + message.thinking + ']' -}}{%- endif -%}" + CONTENT + TAIL
FIELD = (
    HEAD
    + "{%- if message.reasoning_content -%}{{- '[' + message.reasoning_content + ']' -}}{%- endif -%}"
    + CONTENT
    + TAIL
)
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
OPENAI = {
    "tools": [{"type": "function", "function": TOOL}],
    "messages": [
        {"role": "user", "content": "weather in Zürich?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(WEATHER)}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "mild"},
        {"role": "assistant", "content": "It is mild."},
    ],
}
LEGACY = {
    "functions": [TOOL],
    "messages": [
        {"role": "user", "content": "weather in Zürich?"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": json.dumps(WEATHER)}},
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
    trained = [token for token, flag in zip(sample.ids, sample.trained, strict=True) if flag]
    return tokenizer.tokenizer.decode(trained), tokenizer.tokenizer.decode(sample.ids)


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


def test_a_template_that_leaves_tools_or_their_results_out_makes_the_record_malformed(tokenizer):
    with pytest.raises(Malformed, match="leaves out the description of the tool 'weather'"):
        trained_and_whole(tokenizer, OPENAI, OBJECTS.removeprefix(TOOLS))
    without_results = OBJECTS.replace(
        CONTENT, "{%- if message.role in ['user', 'assistant'] -%}" + CONTENT + "{%- endif -%}"
    )
    with pytest.raises(Malformed, match="leaves out the content of message 3, of the tool"):
        trained_and_whole(tokenizer, OPENAI, without_results)


def test_short_texts_that_occur_elsewhere_are_not_mistaken_for_the_messages(tokenizer):
    dropped = HEAD + "{%- if message.role == 'assistant' -%}" + CONTENT + "{%- endif -%}" + TAIL
    with pytest.raises(Malformed, match="leaves out the content of message 1, of the user"):
        trained_and_whole(tokenizer, say(("user", "a"), ("assistant", "a")), dropped)


def test_what_is_shown_and_not_trained_on_is_malformed_and_so_is_what_others_say(tokenizer):
    marked = (
        HEAD + "{%- if message.role == 'assistant' -%}" + calls("{{- call.function.arguments | tojson -}}")
        + "{%- generation -%}" + CONTENT + "{%- endgeneration -%}{%- else -%}" + CONTENT + "{%- endif -%}" + TAIL
    )  # fmt: skip
    record = {"messages": OPENAI["messages"]}
    with pytest.raises(Malformed, match="tool call of message 2, of the assistant, where it would not be trained on"):
        trained_and_whole(tokenizer, record, marked)
    everyone = HEAD + "{%- generation -%}" + CONTENT + "{%- endgeneration -%}" + TAIL
    with pytest.raises(Malformed, match="content of message 1, of the user, would be trained on"):
        trained_and_whole(tokenizer, say(("user", "x"), ("assistant", "y")), everyone)


@pytest.mark.parametrize("content", ["blue sky", [{"type": "text", "text": "blue "}, "sky"]])
@pytest.mark.parametrize("template", [NO_CALLS, PARTS])
def test_content_as_text_or_as_parts_whichever_the_template_reads(tokenizer, content, template):
    record = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]}
    assert trained_and_whole(tokenizer, record, template)[0] == "blue sky<|im_end|>"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "message 2.*a part of type 'image_url'"),
        ([{"type": "text"}], "a part of type 'text'"),
        (7, "content of type int"),
        ({"text": "x"}, "content of type dict"),
        ([None], "a part of type 'NoneType'"),
    ],
)
def test_other_types_of_content_are_refused(content, why):
    with pytest.raises(Malformed, match=why):
        conversation_of({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]})


@pytest.mark.parametrize("template", [THINKING, FIELD, TAGS], ids=["thinking", "field", "tags"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "part"])
def test_reasoning_is_trained_on_under_the_name_that_the_template_reads(tokenizer, template, name):
    answer = {"role": "assistant", "content": "blue", name: "hm hm"}
    if name == "part":
        answer = {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm hm"}, {"type": "text", "text": "blue"}],
        }
    trained, _ = trained_and_whole(tokenizer, {"messages": [{"role": "user", "content": "x"}, answer]}, template)
    assert trained == ("<think>\nhm hm\n</think>\n\nblue<|im_end|>" if template is TAGS else "[hm hm]blue<|im_end|>")


def test_reasoning_that_the_template_has_no_place_for_is_malformed(tokenizer):
    record = {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "reasoning": "hm hm"}]
    }
    with pytest.raises(Malformed, match="leaves out the reasoning of message 2, of the assistant"):
        trained_and_whole(tokenizer, record, NO_CALLS)


def test_several_system_messages_and_the_developers(tokenizer):
    record = say(("developer", "Be kind."), ("system", "Be brief."), ("user", "x"), ("assistant", "y"))
    trained, whole = trained_and_whole(tokenizer, record, FIRST_SYSTEM)
    assert trained == "y<|im_end|>" and "system\nBe kind.\n\nBe brief.<|im_end|>" in whole and "developer" not in whole
    assert "<|im_start|>system\nBe brief.<|im_end|>" in trained_and_whole(tokenizer, record, NO_CALLS)[1]
    late = say(("system", "Be kind."), ("user", "x"), ("system", "Be brief."), ("assistant", "y"))
    with pytest.raises(Malformed, match="leaves out the content of message 3, of the system"):
        trained_and_whole(tokenizer, late, FIRST_SYSTEM)
    beside = {"system": "Be brief.", **say(("system", "Be kind."), ("user", "x"), ("assistant", "y"))}
    whole = trained_and_whole(tokenizer, beside, NO_CALLS)[1]
    assert "Be brief." in whole and "Be kind." in whole


def test_a_refusal_is_what_the_assistant_says_and_unknown_texts_are_not_lost(tokenizer):
    refused = {"role": "assistant", "content": None, "refusal": "I won't."}
    record = {"messages": [{"role": "user", "content": "x"}, refused]}
    assert trained_and_whole(tokenizer, record, NO_CALLS)[0] == "I won't.<|im_end|>"
    record["messages"][1] = {"role": "assistant", "content": "y", "plan": "look it up first"}
    with pytest.raises(Malformed, match="leaves out the field 'plan' of message 2"):
        trained_and_whole(tokenizer, record, NO_CALLS)
    record["messages"][1] = {"role": "assistant", "content": "y", "timestamp": "1 May 2026", "id": "7"}
    assert trained_and_whole(tokenizer, record, NO_CALLS)[0] == "y<|im_end|>"


def test_prompts_and_completions_as_messages_train_on_the_completion(tokenizer):
    prompt = say(("user", "a"), ("assistant", "b"), ("user", "c"))["messages"]
    record = {"prompt": prompt, "completion": [{"role": "assistant", "content": "night"}]}
    assert trained_and_whole(tokenizer, record, NO_CALLS)[0] == "night<|im_end|>"


# Don't train on this


def two(**marks):
    record = say(("user", "red"), ("assistant", "blue"), ("user", "day"), ("assistant", "night"))
    record["messages"][1] |= marks
    return record


@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"train": False}, {"training": False}, {"loss_weight": 0.0}, {"loss": False}, {"loss_mask": 0}],
)
@pytest.mark.parametrize("template", [NO_CALLS, small_chats.MARKED], ids=["prefixes", "blocks"])
def test_a_turn_that_must_not_be_trained_on_is_context_in_every_dialect(tokenizer, mark, template):
    trained, whole = trained_and_whole(tokenizer, two(**mark), template)
    assert trained == "night<|im_end|>" and "blue" in whole


@pytest.mark.parametrize(
    ("marks", "why"),
    [
        ({"loss_weight": 0.5}, "message 2, of the assistant, has loss_weight 0.5"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}, "has train_detail="),
        ({"mask": True}, "has mask=True"),
        ({"label": "quality:4,humor:0"}, "has label='quality:4,humor:0'"),
        ({"weight": 1, "train": False}, "contradict each other"),
    ],
)
def test_marks_that_are_not_supported_are_refused_by_name(marks, why):
    with pytest.raises(Malformed, match=why):
        conversation_of(two(**marks))


def test_marks_of_the_user_and_of_whole_records(tokenizer):
    record = two()
    record["messages"][0]["train"] = True
    with pytest.raises(Malformed, match="message 1, of the user, has train True, but only turns of the assistant"):
        conversation_of(record)
    record["messages"][0]["train"] = False
    assert conversation_of(record).marks == [False, None, None, None]
    for more, why in (
        ({"weight": 0.3}, "weight=0.3"),
        ({"type": "VALUE_TO_TEXT"}, "type='VALUE_TO_TEXT'"),
        ({"mask": "assistant"}, "mask='assistant'"),
    ):
        with pytest.raises(Malformed, match=why):
            conversation_of(two() | more)
    nemo = {"mask": "User", "system": "", "type": "", "conversations": [
        {"from": "User", "value": "red", "label": None}, {"from": "Assistant", "value": "blue", "label": ""}]}  # fmt: skip
    assert trained_and_whole(tokenizer, nemo, NO_CALLS)[0] == "blue<|im_end|>"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (
            {"conversations": [{"from": "function_call", "value": "no JSON"}]},
            "message 1.*a tool call that is no JSON object",
        ),
        ({**say(("user", "x")), "tools": [7]}, "'tools' has an entry that is no object"),
        ({**say(("user", "x")), "tools": [{"function": "f"}]}, "'tools' has an entry that is no object"),
        ({**say(("user", "x")), "tools": 7}, "'tools' is a int"),
    ],
)
def test_calls_and_tools_that_are_none_are_malformed(record, why):
    with pytest.raises(Malformed, match=why):
        conversation_of(record)


def test_half_a_character_is_named_with_its_message(tokenizer):
    with pytest.raises(Malformed, match=r"message 1, of the user: character 6 is \\ud83d, half of a surrogate pair"):
        trained_and_whole(tokenizer, say(("user", "half \ud83d"), ("assistant", "y")), NO_CALLS)


def test_a_record_whose_turns_are_all_context_is_empty(tokenizer):
    with pytest.raises(Empty, match="no text"):
        trained_and_whole(tokenizer, say(("user", "x"), ("assistant", " ")), NO_CALLS)
    with pytest.raises(Empty):
        trained_and_whole(tokenizer, say(("user", "x")), NO_CALLS)
    record = say(("user", "x"), ("assistant", "y"))
    record["messages"][1]["train"] = False
    with pytest.raises(Empty):
        trained_and_whole(tokenizer, record, NO_CALLS)


# Templates whose prompt is no prefix

EOS_AT_THE_END = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    "{%- if not add_generation_prompt -%}{{- '<|endoftext|>' -}}{%- endif -%}"
)
OPENS_A_THOUGHT = HEAD + CONTENT + TAIL.replace("assistant\\n'", "assistant\\n<think>\\n'")
EMPTY_THOUGHT_IN_THE_LAST = (
    HEAD
    + "{%- if message.role == 'assistant' and loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    + CONTENT
    + TAIL
)
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


def test_an_interrupted_turn_keeps_reasoning_of_context_out(tokenizer):
    """Templates drop the reasoning of earlier turns, as they do when the model is served."""
    dropping = (
        HEAD + "{%- if message.reasoning_content and loop.last -%}{{- '[' + message.reasoning_content + ']' -}}{%- endif -%}"
        + CONTENT + TAIL
    )  # fmt: skip
    record = say(("user", "red"), ("assistant", "blue"), ("user", "day"), ("assistant", "night"))
    record["messages"][1]["reasoning_content"] = record["messages"][3]["reasoning_content"] = "hm hm"
    with pytest.raises(Malformed, match="leaves out the reasoning of message 2.*'turns': 'last'"):
        trained_and_whole(tokenizer, record, dropping)
    trained, whole = trained_and_whole(tokenizer, record, dropping, turns="last")
    assert trained == "[hm hm]night<|im_end|>" and whole.count("hm hm") == 1


@pytest.mark.parametrize("policy", ["keep", "text", "fail"])
@pytest.mark.parametrize("kind", ["conversation", "fields"])
def test_special_tokens_that_a_text_spells_are_counted_or_refused(tokenizer, tmp_path, policy, kind):
    texts = ["x", "ends <|im_end|> here", "z"]
    records = [
        say(("user", text), ("assistant", "y")) if kind == "conversation" else {"input": text, "output": "y"}
        for text in texts
    ]
    settings = {"on_special_token": policy, "on_bad_line": "skip", "chat_template": NO_CALLS}
    data = HFDatasetDataModule(records, split="train", tokenizer=tokenizer, seq_length=64, dataset_kwargs=settings)
    report = read_all(data)
    if policy != "fail":
        how = {"keep": "with special tokens in its text", "text": "with special tokens encoded as plain text"}
        assert report.samples == 3 and report.places == {how[policy]: ["train[1]: '<|im_end|>'"]}
    else:
        assert report.samples == 2 and "the special token '<|im_end|>'" in report.places["malformed"][0]


def read_all(data):
    report = Report()
    limits = data.settings.limits(data.seq_length + 1)
    bad = BadRecords(limits, report)
    list(encode_all(data.source("train").records(bad), data.encoder(), limits=limits, bad=bad))
    return report
