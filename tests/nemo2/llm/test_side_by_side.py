# SPDX-License-Identifier: Apache-2.0
"""The page that shows several checkpoints' texts: every text, escaped, and which of them are the same."""

from pathlib import Path
from typing import Any

from nemo2.llm.side_by_side import side_by_side
from nemo2.models.generate import Generation
from support import answering_runs

PROMPTS = ["<b>def</b>", "It returns"]


def answer(prompt: str, text: str, *, finished: bool = True) -> Generation:
    return Generation(prompt=prompt, text=text, token_ids=[1, 2], finished=finished, log_probs=[-1.0, -3.0])


def test_each_text_stands_under_its_checkpoint_and_markup_in_it_is_text():
    answers = {
        "first": [answer("<b>", "one & two"), answer("p", "same")],
        "second": [answer("<b>", "<script>"), answer("p", "same", finished=False)],
    }
    text = side_by_side(answers, subtitle="temperature 0")
    for words in (
        "&lt;b&gt;",
        "one &amp; two",
        "&lt;script&gt;",
        "2 tokens, log-probability -2.00 each, cut off; the same as first",
    ):
        assert words in text
    assert "<script>" not in text and text.count("<article>") == 4 and "temperature 0" in text


def written(directory: str) -> dict[str, Any]:
    from nemo2 import llm
    from nemo2.cli import main

    runs = [
        answering_runs.save(f"{directory}/{name}", config={"num_layers": layers})
        for name, layers in (("a", 1), ("b", 2))
    ]
    asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    code = main(["generate", *runs, *asked, "--max-new-tokens", "4", "--html", f"{directory}/page.html"])
    refused = main(["generate", *runs, *asked])
    texts = [llm.generate(run, prompts=PROMPTS, max_new_tokens=4, temperature=0.0, text_only=True) for run in runs]
    return {"codes": (code, refused), "texts": texts, "page": Path(f"{directory}/page.html").read_text()}


def test_the_command_asks_each_checkpoint(run_on_ranks, tmp_path):
    from html import escape

    [found] = run_on_ranks(written, 1, str(tmp_path), timeout=180)
    assert found["codes"] == (0, 2)
    assert found["texts"][0] != found["texts"][1]
    for texts in found["texts"]:
        for prompt, text in zip(PROMPTS, texts, strict=True):
            assert f"<i>{escape(prompt)}</i>{escape(text)}</p>" in found["page"]
    assert "<b>def" not in found["page"]
