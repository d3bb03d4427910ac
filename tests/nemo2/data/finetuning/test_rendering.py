# SPDX-License-Identifier: Apache-2.0
"""Chat templates of strangers: what they render equals transformers' own rendering, and what they may not do."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo2.base.errors import SecurityError
from nemo2.data.finetuning import rendering
from nemo2.data.finetuning.chat import NEMO_TEMPLATE, ChatEncoder
from nemo2.data.finetuning.rendering import RENDERER, Prefix, Renderer
from nemo2.data.finetuning.sample import Malformed
from support import small_chats
from support.nightly import each_case
from support.small_chats import say

LONG = say(("system", "You are helpful."), ("user", "What <|x|> ü?"), ("assistant", "Zero."), ("user", "😀 b"))


def rendered(template, messages, *prefixes, renderer=RENDERER, **variables):
    return renderer.render(messages, prefixes or [Prefix()], template=template, source="this test", variables=variables)


@pytest.fixture
def small():
    """A renderer with low limits."""
    renderer = Renderer(seconds=1.0, memory_bytes=64 << 20, output_characters=10_000)
    yield renderer
    renderer.close()


@pytest.mark.parametrize(
    "template",
    [
        small_chats.CHATML,
        small_chats.WITH_TOOLS,
        small_chats.MARKED,
        NEMO_TEMPLATE,
        "{% for m in messages %}\n  {% if m.role == 'user' %}{{ m | tojson(indent=2) }}{% continue %}{% endif %}\nx{% endfor %}",
        "{{ strftime_now('%Y') }}{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}{{ dict(a=1) | tojson }}{{ bos_token }}",
        "{{ 'ä<&' | tojson }}{{ documents is none }}{{ tools is defined }}{{ messages[9] is defined }}",
    ],
)
def test_templates_render_as_in_transformers(template, tmp_path):
    tokenizer = small_chats.make_tokenizer(tmp_path).tokenizer
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for prompt in (False, True):
        theirs = tokenizer.apply_chat_template(
            LONG["messages"], tools=tools, chat_template=template, add_generation_prompt=prompt, tokenize=False
        )
        variables = {**tokenizer.special_tokens_map, "tools": tools, "documents": None}
        [ours] = rendered(template, LONG["messages"], Prefix(prompt=prompt), **variables)
        assert ours.text == theirs


def test_spans_are_those_of_transformers_masks(tmp_path):
    tokenizer = small_chats.make_tokenizer(tmp_path).tokenizer
    theirs = tokenizer.apply_chat_template(
        LONG["messages"], chat_template=small_chats.MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    [ours] = rendered(small_chats.MARKED, LONG["messages"])
    masked = [i for i, flag in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if flag]
    assert [ours.text[start:end] for start, end in ours.spans] == ["Zero."] == [tokenizer.decode(masked)]


def test_one_process_serves_all_renderings_and_each_fault_is_of_its_own_rendering():
    template = "{% if not messages %}{{ raise_exception('nothing') }}{% endif %}{{ messages | length }}"
    messages = LONG["messages"]
    one, two, three = rendered(template, messages, Prefix(), Prefix(0), Prefix(2))
    assert (one.text, three.text) == ("4", "2") and isinstance(two, Malformed) and "nothing" in str(two)
    process = RENDERER._process
    rendered("{{ 1 }}", messages)
    assert RENDERER._process is process
    [broken] = rendered("{% if %}", messages)
    assert isinstance(broken, Malformed) and "TemplateSyntaxError" in str(broken)


def test_threads_share_the_process_and_get_their_own_replies():
    def ask(number):
        texts = [f"{number} {turn}" for turn in range(50)]
        return [rendered("{{ messages[0].content }}", [{"content": text}])[0].text for text in texts] == texts

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(ask, range(4)))


def test_a_forked_process_has_a_renderer_of_its_own():
    rendered("{{ 1 }}", [])
    child = os.fork()
    if child == 0:
        try:
            [reply] = rendered("{{ messages[0] }}", ["forked"])
            os._exit(0 if reply.text == "forked" else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    [reply] = rendered("{{ messages[0] }}", ["here"])
    assert reply.text == "here"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL]
)
def test_a_signal_to_all_processes_of_a_rank_does_not_end_it_and_one_that_ended_is_replaced(number):
    rendered("{{ 1 }}", [])
    process = RENDERER._process
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        process.wait()
    [reply] = rendered("{{ 2 }}", [])
    assert reply.text == "2" and (RENDERER._process is process) == (number != signal.SIGKILL)


LOOPS = "{%- for number in range(9999) -%}" * 6 + "{%- endfor -%}" * 6


ENDLESS = [
    "{{ '%400000000d' % 1 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'a' | center(400000000) }}",
    "{{ 'a' * 10000000000 }}",
    "{{ 'a'.ljust(400000000) }}",
    "{{ '{:>400000000}'.format(1) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ ('b' * 99999).join('a' * 99999) }}",
    "{{ ['b' * 99999] * 99999 | int }}",
    "{{ (['b' * 9999] * 99999) | join }}",
    "{{ (range(99999) | list * 9999) | tojson }}",
    "{{ 9 ** 9999999999 }}",
    "{{ (9 ** 999) ** (9 ** 9) }}",
    "{{ 'a' | indent(400000000) }}",
    "{{ 'ab' | wordwrap(1, wrapstring='a' * 400000000) }}",
    "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% for i in range(9999) %}{% for i in range(9999) %}aaaaaaaa{% endfor %}{% endfor %}",
    "{%- for i in range(10**9) -%}{%- endfor -%}",
    "{%- macro m() -%}{{ m() }}{%- endmacro -%}{{ m() }}",
    LOOPS,
]


@pytest.mark.parametrize("text", each_case(ENDLESS, ENDLESS[::3]))
def test_the_process_is_limited_whatever_the_template_uses(small, text):
    with pytest.raises(SecurityError, match="chat template of this test was stopped") as caught:
        rendered(text, [], renderer=small)
    assert "'chat_template'" in str(caught.value)
    [reply] = rendered("{{ 1 }}", [], renderer=small)
    assert reply.text == "1"


def test_long_conversations_have_room(small):
    text = "the long text of a book " * 400_000
    [reply] = rendered("{{ messages[0].content }}" * 3, [{"content": text}], renderer=small)
    assert reply.text == text * 3


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "by attr": "{{ (messages|attr('append')) and ''|attr('__class__')|attr('__base__') }}",
    "by format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "by map": "{{ ['x']|map(attribute='__class__.__mro__')|list }}",
    "a macro's": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "by format_map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "a namespace's": "{% set n = namespace() %}{{ n.__init__.__globals__['os'] }}",
    "the messages": "{{ messages.clear() }}",
}


@pytest.mark.parametrize("way", ESCAPES)
def test_a_template_that_reaches_for_python_runs_nothing_and_its_origin_is_named(tmp_path, way):
    mark = tmp_path / "mark"
    try:
        [reply] = rendered(ESCAPES[way].replace("MARK", str(mark)) + "{{ 'shown' }}", LONG["messages"])
    except SecurityError as error:
        assert "this test" in str(error)
    else:
        shown = str(reply) if isinstance(reply, Malformed) else reply.text
        assert "<class" not in shown and "module" not in shown
    assert not mark.exists()
    assert len(LONG["messages"]) == 4


def test_the_process_may_write_no_file(tmp_path):
    """Its limits hold even where the sandbox has a hole."""
    settings = {"seconds": 1, "memory_bytes": 1 << 26, "output_characters": 9}
    settings |= {"folders": rendering._folders_of_jinja(), "ignored_signals": []}
    program = (
        "import io, runpy, sys\n"
        "sys.stdin = io.TextIOWrapper(io.BytesIO())\n"
        f"runpy.run_path({str(rendering._SCRIPT)!r}, run_name='__main__')\n"
        f"with open({str(tmp_path / 'mark')!r}, 'w') as file:\n    file.write('x')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, json.dumps(settings)], capture_output=True, text=True)
    assert "File too large" in ended.stderr and (tmp_path / "mark").read_text() == ""


@pytest.mark.parametrize("way", ["classes", "globals", "by format", "the messages"])
def test_such_a_template_is_no_fault_of_a_record_that_may_be_skipped(tmp_path, way):
    tokenizer = small_chats.make_tokenizer(tmp_path)
    with pytest.raises(SecurityError, match="chat template of these settings was stopped"):
        ChatEncoder(tokenizer, chat_template=ESCAPES[way] + small_chats.CHATML).encode(
            say(("user", "a"), ("assistant", "b"))
        )
