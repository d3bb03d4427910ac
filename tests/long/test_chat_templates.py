# SPDX-License-Identifier: Apache-2.0
"""The table of chat templates, on templates of our own."""

from support import small_chats
from tests.long import chat_templates

MARKED = small_chats.MARKED.replace("{%- endgeneration -%}", "{{- '<|im_end|>' -}}{%- endgeneration -%}").replace(
    "{{- '<|im_end|>\\n' -}}", "{%- if message.role != 'assistant' -%}{{- '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}"
)


def test_a_template_and_its_training_template_are_compared(tmp_path):
    (tmp_path / "chatml.jinja").write_text(small_chats.WITH_TOOLS)
    (tmp_path / "chatml_training.jinja").write_text(MARKED)
    (row, marked) = list(chat_templates.rows(tmp_path.glob("*.jinja")))
    assert [row[0], marked[0]] == ["chatml", "chatml_training"]
    found = row[2]
    assert found["turns"].trained == "Well met.<|im_end|>Bye now.<|im_end|>"
    assert found["turns"].mask == found["system"].mask == "equal" and found["turns"].same_ids
    assert "find_weather" in (found["tools"].trained or "") and found["tools"].mask == "of another rendering"
    assert found["reasoning"].trained is None and "reasoning" in found["reasoning"].reason
    assert all(not one.mask for one in marked[2].values()), "a training template has none of its own"
    text = chat_templates.page([row, marked], "of our own")
    assert "1 of 2" not in text and "over 2 templates" in text and text.count("\n| chatml") == 2
